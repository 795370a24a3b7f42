"""The report as one HTML file that needs nothing else, and as JSON beside it."""

from __future__ import annotations

import html
import io
import json
import platform
from collections.abc import Callable, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from converter.errors import EnvironmentFailure
from converter.files import os_errors
from verify.results import Finding, LevelResult, Verdict, VerificationReport

_INK, _FILE, _SOURCE, _GRID = "#1d2733", "#2563a8", "#c2762b", "#d9dee5"
_WORST = 25
_WORDS = {
    "structure": "header, metadata, names and shapes of tensors",
    "fidelity": "every tensor against what the source makes of it",
    "logits": "next-token distributions against the source's",
    "identity": "decoding with drafts against plain decoding, token by token",
    "acceptance": "drafts that the trunk agrees with, next to the source's own head",
    "engine": "the same in llama.cpp",
}
_STYLE = """
:root { color-scheme: light; }
body { font: 15px/1.5 system-ui, sans-serif; color: #1d2733; background: #fff; margin: 0 auto; max-width: 62rem;
       padding: 2rem 1.5rem 4rem; }
h1 { font-size: 1.5rem; margin: 0 0 .2rem; overflow-wrap: anywhere; }
h2 { font-size: 1.15rem; margin: 2.2rem 0 .3rem; padding-top: 1rem; border-top: 1px solid #d9dee5; }
p { margin: .3rem 0; } .quiet { color: #5b6878; }
.verdict { font-weight: 600; padding: .1rem .55rem; border-radius: .3rem; white-space: nowrap; }
.passed { background: #dff1e3; color: #17602c; } .failed { background: #fbdedb; color: #99201a; }
.inconclusive { background: #fdeecb; color: #7a5200; } .skipped { background: #e8ebef; color: #4c5868; }
table { border-collapse: collapse; margin: .8rem 0; font-size: .92rem; }
th, td { text-align: left; padding: .25rem .9rem .25rem 0; border-bottom: 1px solid #e8ebef; vertical-align: top; }
th { font-weight: 600; } td.n, th.n { text-align: right; font-variant-numeric: tabular-nums; }
.wide { overflow-x: auto; } code { font-size: .92em; overflow-wrap: anywhere; }
.plots { display: flex; flex-wrap: wrap; gap: 1rem; margin: .8rem 0; } .plots svg { max-width: 100%; height: auto; }
li { margin: .2rem 0; }
"""


def write_report(report: VerificationReport, folder: Path) -> None:
    """Write report.html and report.json into a folder, which is made. Raises EnvironmentFailure."""
    with os_errors("cannot write the report", folder):
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "report.json").write_text(json.dumps(report.as_json(), indent=2))
        (folder / "report.html").write_text(page(report), encoding="utf-8")


def page(report: VerificationReport) -> str:
    """The whole page."""
    levels = "".join(_overview(r) for r in report.levels)
    details = "".join(_details(r) for r in report.levels if not r.skipped)
    source = f"<p class=quiet>compared with <code>{_text(report.source)}</code></p>" if report.source else ""
    unseen = "".join(f"<p class=quiet>Not seen: {_text(words)}</p>" for words in report.unseen)
    return (
        "<!doctype html><html lang=en><head><meta charset=utf-8>"
        "<meta name=viewport content='width=device-width, initial-scale=1'>"
        f"<title>{_text(report.file.name)}: {report.verdict.name.lower()}</title><style>{_STYLE}</style></head><body>"
        f"<h1>{_text(report.file.name)} {_badge(report.verdict)}</h1>{source}{unseen}"
        f"<div class=wide><table><tr><th>level<th>verdict<th>result</tr>{levels}</table></div>"
        f"{details}<h2>Made with</h2><p class=quiet>{_text(_environment())}</p></body></html>\n"
    )


def _text(value: object) -> str:
    return html.escape(str(value))


def _badge(verdict: Verdict) -> str:
    name = verdict.name.lower()
    return f"<span class='verdict {name}'>{name}</span>"


def _overview(result: LevelResult) -> str:
    return f"<tr><td><b>{result.level}</b><td>{_badge(result.verdict)}<td>{_text(result.summary)}</tr>"


def _details(result: LevelResult) -> str:
    parts = [f"<h2>{result.level.capitalize()} {_badge(result.verdict)}</h2>"]
    parts.append(f"<p class=quiet>{_WORDS[result.level]}; {result.seconds:.1f} s</p><p>{_text(result.summary)}</p>")
    if result.findings:
        parts.append(f"<ul>{''.join(_finding(f) for f in result.findings)}</ul>")
    show: Callable[[LevelResult], str] | None = _SHOW.get(result.level)
    if show is not None and result.data:
        parts.append(show(result))
    return "".join(parts)


def _finding(finding: Finding) -> str:
    mark = "" if finding.verdict is Verdict.FAILED else f" {_badge(finding.verdict)}"
    return f"<li>{_text(finding)}{mark}"


def _table(header: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """Numbers stand to the right."""

    def cell(value: object, tag: str) -> str:
        number = isinstance(value, int | float) and not isinstance(value, bool)
        shown = f"{value:,.4g}" if isinstance(value, float) else f"{value:,}" if number else _text(value)
        return f"<{tag}{' class=n' if number else ''}>{shown}"

    first = rows[0] if rows else header
    heads = "".join(
        f"<th{' class=n' if isinstance(v, int | float) else ''}>{_text(h)}" for h, v in zip(header, first, strict=True)
    )
    body = "".join("<tr>" + "".join(cell(v, "td") for v in row) + "</tr>" for row in rows)
    return f"<div class=wide><table><tr>{heads}</tr>{body}</table></div>"


def _fidelity(result: LevelResult) -> str:
    tensors = result.data["tensors"]
    rows = [
        (t["name"], t["type"], t["different"], t["blocks"], t["error"], t["ours"], t["worst"]) for t in tensors[:_WORST]
    ]
    more = f"<p class=quiet>and {len(tensors) - _WORST} more in report.json</p>" if len(tensors) > _WORST else ""
    header = ("tensor", "type", "blocks that differ", "of", "relative error", "of the source's own bytes", "worst at")
    return _plots(_errors_by_tensor(tensors)) + _table(header, rows) + more


def _logits(result: LevelResult) -> str:
    d = result.data
    return _table(
        ("", "file", "source"),
        [("perplexity", d["perplexity"], d["perplexity_source"])],
    ) + _table(
        ("KL divergence, nats", ""),
        [("mean", d["kld_mean"]), ("median", d["kld_median"]), ("99.9 %", d["kld_999"]), ("largest", d["kld_max"])],
    )


def _identity(result: LevelResult) -> str:
    groups: dict[tuple[object, ...], list[dict[str, Any]]] = {}
    for run in result.data["runs"]:
        groups.setdefault((run["mode"], run["drafts"], run["temperature"]), []).append(run)
    rows = [
        (
            mode, n, temperature, len(runs), sum(r["first"] is None for r in runs), max(r["difference"] for r in runs),
            sum(r["drafted"] for r in runs), sum(r["accepted"] for r in runs),
        )
        for (mode, n, temperature), runs in groups.items()
    ]  # fmt: skip
    header = ("mode", "drafts", "temperature", "runs", "identical", "largest difference", "drafted", "accepted")
    alone = result.data["evaluated_row_by_row"]
    note = f"<p class=quiet>Evaluated row by row on this machine: {_text(', '.join(alone))}</p>" if alone else ""
    margins = result.data.get("margins", [])
    return (_plots(_histogram(margins)) if margins else "") + (_table(header, rows) if rows else "") + note


def _acceptance(result: LevelResult) -> str:
    mine, theirs = result.data["file"], result.data["source"]
    rows = [(i + 1, m[0], m[1], _share(m), *((_share(theirs[i]),) if theirs else ())) for i, m in enumerate(mine)]
    header = ("draft", "accepted", "of", "share", *(("share, source's own head",) if theirs else ()))
    return _plots(_bars(mine, theirs)) + _table(header, rows)


def _engine(result: LevelResult) -> str:
    runs = result.data.get("runs", [])
    if not runs:
        return ""
    rows = [
        (
            r["run"],
            r["identical"],
            "not reported" if r["drafted"] is None else r["drafted"],
            "not reported" if r["accepted"] is None else r["accepted"],
            _share((r["accepted"], r["drafted"])) if r["drafted"] else "",
            r["tokens_per_s"],
        )
        for r in runs
    ]
    header = ("run", "identical answers", "drafted", "accepted", "share", "tokens/s")
    return _plots(_speed(result.data["plain_tokens_per_s"], runs)) + _table(header, rows)


_SHOW: dict[str, Callable[[LevelResult], str]] = {
    "fidelity": _fidelity, "logits": _logits, "identity": _identity, "acceptance": _acceptance, "engine": _engine,
}  # fmt: skip


def _share(count: Sequence[int]) -> float:
    return count[0] / count[1] if count[1] else 0.0


# --- plots


def _plots(*figures: str) -> str:
    return f"<div class=plots>{''.join(figures)}</div>"


def _figure(draw: Callable[[Any], None], title: str, width: float = 5.4, height: float = 3.1) -> str:
    """An SVG with text as text."""
    try:
        import matplotlib as mpl
    except ImportError as error:
        raise EnvironmentFailure("plots need matplotlib", hint="pip install 'convert-mtp[verify]'") from error
    from matplotlib.figure import Figure

    look: dict[Any, Any] = {
        "svg.fonttype": "none", "svg.hashsalt": "convert-mtp", "font.family": "sans-serif", "font.size": 10,
        "text.color": _INK, "axes.labelcolor": _INK, "xtick.color": _INK, "ytick.color": _INK, "axes.edgecolor": _INK,
    }  # fmt: skip
    with mpl.rc_context(look):
        figure = Figure(figsize=(width, height), layout="constrained")
        axes = figure.subplots()
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(axis="y", color=_GRID, linewidth=0.8)
        axes.set_axisbelow(True)
        axes.set_title(title, loc="left", fontsize=11)
        draw(axes)
        out = io.StringIO()
        figure.savefig(out, format="svg", metadata={"Date": None})
    svg = out.getvalue()
    return svg[svg.index("<svg") :]


def _bars(mine: Sequence[Sequence[int]], theirs: Sequence[Sequence[int]] | None) -> str:
    def draw(axes: Any) -> None:
        places = range(1, len(mine) + 1)
        width = 0.36 if theirs else 0.6
        shift = width / 2 if theirs else 0
        axes.bar([p - shift for p in places], [100 * _share(m) for m in mine], width, color=_FILE, label="this file")
        if theirs:
            axes.bar(
                [p + shift for p in places], [100 * _share(t) for t in theirs], width, color=_SOURCE, label="source"
            )
            axes.legend(frameon=False)
        axes.set(xlabel="draft", ylabel="accepted, %", ylim=(0, 100), xticks=list(places))

    return _figure(draw, "Acceptance by draft position")


def _histogram(margins: Sequence[float]) -> str:
    def draw(axes: Any) -> None:
        axes.hist(margins, bins=40, color=_FILE)
        axes.set(xlabel="margin between the two best logits", ylabel="tokens")

    return _figure(draw, "How clear the choices were")


def _errors_by_tensor(tensors: Sequence[dict[str, Any]]) -> str:
    def draw(axes: Any) -> None:
        kinds = sorted({t["type"] for t in tensors})
        for place, kind in enumerate(kinds):
            errors = [100 * t["error"] for t in tensors if t["type"] == kind]
            spread = [place + 0.5 * ((i * 0.618) % 1 - 0.5) for i in range(len(errors))]
            axes.plot(spread, errors, "o", color=_FILE, markersize=4, alpha=0.7, markeredgewidth=0)
        axes.set(ylabel="relative error, %", xticks=range(len(kinds)), xlim=(-0.6, len(kinds) - 0.4))
        axes.set_xticklabels(kinds)
        axes.set_ylim(bottom=0)

    return _figure(draw, "Error by tensor and type")


def _speed(plain: float, runs: Sequence[dict[str, Any]]) -> str:
    def draw(axes: Any) -> None:
        axes.plot(["plain", *(r["run"] for r in runs)], [plain, *(r["tokens_per_s"] for r in runs)], "o-", color=_FILE)
        axes.set(ylabel="tokens/s")
        axes.set_ylim(bottom=0)

    return _figure(draw, "Speed in the engine")


def _environment() -> str:
    found = []
    for package in ("convert-mtp", "torch", "transformers", "xllamacpp"):
        try:
            found.append(f"{package} {version(package)}")
        except PackageNotFoundError:
            continue
    return f"{', '.join(found)}; Python {platform.python_version()}, {platform.system()} {platform.machine()}"
