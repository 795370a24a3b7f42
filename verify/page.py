"""The report as one HTML file that needs nothing else, and as JSON beside it."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from converter.files import os_errors
from verify.html import BLUE, ORANGE, badge, document, figure, plots, table, text
from verify.results import Finding, LevelResult, Verdict, VerificationReport

_WORST = 25
_WORDS = {
    "structure": "header, metadata, names and shapes of tensors",
    "fidelity": "every tensor against what the source makes of it",
    "logits": "next-token distributions against the source's",
    "identity": "decoding with drafts against plain decoding, token by token",
    "acceptance": "drafts that the trunk agrees with, next to the source's own head",
    "engine": "the same in llama.cpp",
}


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
    source = f"<p class=quiet>compared with <code>{text(report.source)}</code></p>" if report.source else ""
    unseen = "".join(f"<p class=quiet>Not seen: {text(words)}</p>" for words in report.unseen)
    body = (
        f"<h1>{text(report.file.name)} {badge(report.verdict.name.lower())}</h1>{source}{unseen}"
        f"<div class=wide><table><tr><th>level<th>verdict<th>result</tr>{levels}</table></div>{details}"
    )
    return document(f"{report.file.name}: {report.verdict.name.lower()}", body)


def _overview(result: LevelResult) -> str:
    return f"<tr><td><b>{result.level}</b><td>{badge(result.verdict.name.lower())}<td>{text(result.summary)}</tr>"


def _details(result: LevelResult) -> str:
    parts = [f"<h2>{result.level.capitalize()} {badge(result.verdict.name.lower())}</h2>"]
    parts.append(f"<p class=quiet>{_WORDS[result.level]}; {result.seconds:.1f} s</p><p>{text(result.summary)}</p>")
    if result.findings:
        parts.append(f"<ul>{''.join(_finding(f) for f in result.findings)}</ul>")
    show: Callable[[LevelResult], str] | None = _SHOW.get(result.level)
    if show is not None and result.data:
        parts.append(show(result))
    return "".join(parts)


def _finding(finding: Finding) -> str:
    mark = "" if finding.verdict is Verdict.FAILED else f" {badge(finding.verdict.name.lower())}"
    return f"<li>{text(finding)}{mark}"


def _fidelity(result: LevelResult) -> str:
    tensors = result.data["tensors"]
    rows = [
        (t["name"], t["type"], t["different"], t["blocks"], t["error"], t["ours"], t["worst"]) for t in tensors[:_WORST]
    ]
    more = f"<p class=quiet>and {len(tensors) - _WORST} more in report.json</p>" if len(tensors) > _WORST else ""
    header = ("tensor", "type", "blocks that differ", "of", "relative error", "of the source's own bytes", "worst at")
    return plots(_errors_by_tensor(tensors)) + table(header, rows) + more


def _logits(result: LevelResult) -> str:
    d = result.data
    return table(
        ("", "file", "source"),
        [("perplexity", d["perplexity"], d["perplexity_source"])],
    ) + table(
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
    note = f"<p class=quiet>Evaluated row by row on this machine: {text(', '.join(alone))}</p>" if alone else ""
    margins = result.data.get("margins", [])
    return (plots(_histogram(margins)) if margins else "") + (table(header, rows) if rows else "") + note


def _acceptance(result: LevelResult) -> str:
    mine, theirs = result.data["file"], result.data["source"]
    rows = [(i + 1, m[0], m[1], _share(m), *((_share(theirs[i]),) if theirs else ())) for i, m in enumerate(mine)]
    header = ("draft", "accepted", "of", "share", *(("share, source's own head",) if theirs else ()))
    return plots(_bars(mine, theirs)) + table(header, rows)


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
    return plots(_speed(result.data["plain_tokens_per_s"], runs)) + table(header, rows)


_SHOW: dict[str, Callable[[LevelResult], str]] = {
    "fidelity": _fidelity, "logits": _logits, "identity": _identity, "acceptance": _acceptance, "engine": _engine,
}  # fmt: skip


def _share(count: Sequence[int]) -> float:
    return count[0] / count[1] if count[1] else 0.0


# --- plots


def _bars(mine: Sequence[Sequence[int]], theirs: Sequence[Sequence[int]] | None) -> str:
    def draw(axes: Any) -> None:
        places = range(1, len(mine) + 1)
        width = 0.36 if theirs else 0.6
        shift = width / 2 if theirs else 0
        axes.bar([p - shift for p in places], [100 * _share(m) for m in mine], width, color=BLUE, label="this file")
        if theirs:
            axes.bar(
                [p + shift for p in places], [100 * _share(t) for t in theirs], width, color=ORANGE, label="source"
            )
            axes.legend(frameon=False)
        axes.set(xlabel="draft", ylabel="accepted, %", ylim=(0, 100), xticks=list(places))

    return figure(draw, "Acceptance by draft position")


def _histogram(margins: Sequence[float]) -> str:
    def draw(axes: Any) -> None:
        axes.hist(margins, bins=40, color=BLUE)
        axes.set(xlabel="margin between the two best logits", ylabel="tokens")

    return figure(draw, "How clear the choices were")


def _errors_by_tensor(tensors: Sequence[dict[str, Any]]) -> str:
    def draw(axes: Any) -> None:
        kinds = sorted({t["type"] for t in tensors})
        for place, kind in enumerate(kinds):
            errors = [100 * t["error"] for t in tensors if t["type"] == kind]
            spread = [place + 0.5 * ((i * 0.618) % 1 - 0.5) for i in range(len(errors))]
            axes.plot(spread, errors, "o", color=BLUE, markersize=4, alpha=0.7, markeredgewidth=0)
        axes.set(ylabel="relative error, %", xticks=range(len(kinds)), xlim=(-0.6, len(kinds) - 0.4))
        axes.set_xticklabels(kinds)
        axes.set_ylim(bottom=0)

    return figure(draw, "Error by tensor and type")


def _speed(plain: float, runs: Sequence[dict[str, Any]]) -> str:
    def draw(axes: Any) -> None:
        axes.plot(["plain", *(r["run"] for r in runs)], [plain, *(r["tokens_per_s"] for r in runs)], "o-", color=BLUE)
        axes.set(ylabel="tokens/s")
        axes.set_ylim(bottom=0)

    return figure(draw, "Speed in the engine")
