"""report.html: everything of a release on one page that needs nothing else."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from converter.console import amount
from release.facts import Facts, FileFacts, draft_words, machine
from release.make import HEADS
from release.plots import Plot
from verify.html import badge, document, table, text
from verify.html import plots as side_by_side

_FIGURES = ("kind", "type", "head", "size, MB", "bits per weight", "KL divergence", "99.9 %", "top-1, %", "perplexity",
            "accepted at draft 1, 2, …", "verdict", "drafts")  # fmt: skip


def page(facts: Facts, plots: Sequence[Plot]) -> str:
    """The whole page."""
    parts = [
        f"<h1>{text(facts.names.base)} with MTP</h1>", _head(facts), f"<h2>Files</h2>{_files(facts)}",
        side_by_side(*(p.svg() for p in plots)), _refused(facts), "<h2>Verification</h2>",
        *(_verification(f) for f in facts.files), _measured(facts), _provenance(facts),
    ]  # fmt: skip
    return document(f"{facts.names.base}: release", "".join(parts))


def _head(facts: Facts) -> str:
    origin = facts.origin
    revision = f" at {origin.revision}" if origin.revision else ""
    words = f"from {origin.name}{revision}; {facts.program}; {facts.engine}; {machine()}"
    count = f"{len(facts.published)} of {len(facts.files)} files passed"
    notes = "".join(f"<li>{text(n)}" for n in facts.notes)
    return f"<p>{text(count)}</p><p class=quiet>{text(words)}</p>" + (f"<ul>{notes}</ul>" if notes else "")


def _files(facts: Facts) -> str:
    rows = []
    for f in facts.files:
        d = f.level("logits")
        figures = (d["kld_mean"], d["kld_999"], round(100 * d["top1"], 2), d["perplexity"]) if d else ("", "", "", "")
        rows.append((
            f.file.kind, f.file.type, f.file.head or "", round(f.file.size / 1e6, 2), round(f.file.bits_per_weight, 2),
            *figures, f.accepted, f.verdict, "" if f.file.kind in HEADS else draft_words(f.draft),
        ))  # fmt: skip
    return table(_FIGURES, rows)


def _refused(facts: Facts) -> str:
    if not facts.refused:
        return ""
    items = "".join(
        f"<li><b>{text(f.file.name)}</b><ul>{''.join(f'<li>{text(r)}' for r in f.assessment.reasons())}</ul>"
        for f in facts.refused
    )
    return f"<h2>Not published</h2><ul>{items}</ul>"


def _verification(facts: FileFacts) -> str:
    rows = "".join(_level(of, level) for of, r in facts.assessment.reports.items() for level in r["levels"])
    untried = f"<p>{text(facts.assessment.untried)}</p>" if facts.assessment.untried else ""
    sums = "".join(f"<p class=quiet><code>{text(s)} {text(name)}</code></p>" for name, s in facts.sha256.items())
    return (
        f"<h3>{text(facts.file.stem)} {badge(facts.verdict)} <span class=quiet>{amount(facts.file.size)}</span></h3>{untried}"
        f"<div class=wide><table><tr><th>level<th>verdict<th>result</tr>{rows}</table></div>{sums}"
    )


def _level(of: str, level: Mapping[str, Any]) -> str:
    partner = of.partition(" with ")[2]
    where = f"<br><span class=quiet>with {text(partner)}</span>" if partner else ""
    findings = "".join(f"<li>{text(f['where'])} {text(f['what'])} {text(f['found'])}" for f in level["findings"])
    more = f"<ul>{findings}</ul>" if findings else ""
    return f"<tr><td><b>{text(level['level'])}</b>{where}<td>{badge(level['verdict'])}<td>{text(level['summary'])}{more}</tr>"


def _measured(facts: Facts) -> str:
    if facts.measured is None:
        return "<h2>What drafts are worth</h2><p>Not measured.</p>"
    return f"<h1>What drafts are worth</h1>{facts.measured.report.sections()}"


def _provenance(facts: Facts) -> str:
    rows = [(name, f"{origin.name}", digest) for origin in (facts.origin, facts.drafter) if origin
            for name, digest in origin.files.items()]  # fmt: skip
    return f"<h2>Source files</h2>{table(('file', 'of', 'SHA-256'), rows)}"
