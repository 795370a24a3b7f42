"""What release-mtp prints: the files and what became of them, or what would be done."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from converter.console import amount
from release.facts import SCHEMA, Facts, FileFacts
from release.folder import Places
from release.make import ReleaseFile
from release.push import Pushed


@dataclass
class ReleaseReport:
    """A release that was made. exit_code: 1 where a file was refused."""

    facts: Facts
    places: Places
    pushed: Sequence[Pushed]

    @property
    def advice(self) -> list[str]:
        """What a publisher would still want."""
        known = {
            "card.license": self.facts.recipe.card.license or self.facts.origin.card.get("license"),
            "card.base_model": self.facts.base_model,
            "card.repository": self.facts.repository,
        }
        words = {
            "card.license": "the card names no license",
            "card.base_model": "the card does not link the source",
            "card.repository": "command lines and presets name files of this machine, no repository",
        }
        return [f"{words[key]}: set {key} in the recipe" for key, value in known.items() if not value]

    @property
    def exit_code(self) -> int:
        return 1 if self.facts.refused else 0

    def as_json(self) -> dict[str, Any]:
        return {
            **self.facts.as_json(), "exit_code": self.exit_code, "repository": str(self.places.repository),
            "presets": str(self.places.presets), "advice": self.advice, "pushed": [asdict(p) for p in self.pushed],
        }  # fmt: skip

    def as_text(self) -> str:
        facts = self.facts
        lines = [f"note: {note}" for note in facts.notes]
        lines += [_line(f) for f in facts.files]
        lines += [f"advice: {words}" for words in self.advice]
        for f in facts.refused:
            lines += [f"not published: {f.file.name}, in {self.places.failed}"]
            lines += [f"  {reason}" for reason in f.assessment.reasons()]
        if facts.published:
            lines += ["", f"{len(facts.published)} of {len(facts.files)} files are ready in {self.places.repository}",
                      f"draft settings are in {self.places.presets}"]  # fmt: skip
        else:
            lines += ["", "nothing passed: there is nothing to publish"]
        for p in self.pushed:
            lines.append(f"pushed {p.files} files to {p.repository}: {p.commit}")
            lines += [f"  deleted there, of an earlier release: {', '.join(p.deleted)}"] if p.deleted else []
        return "\n".join(lines)


def _line(f: FileFacts) -> str:
    d = f.level("logits")
    kld = f"KLD {d['kld_mean']:.2g}, top-1 {d['top1']:.1%}" if d else ""
    shares = f"accepted {', '.join(f'{s:.0%}' for s in f.acceptance)}" if f.acceptance else ""
    draft = (
        "" if f.draft is None else (f"n = {f.draft.drafts}, {f.draft.expected:.2f}x" if f.draft.on else "drafts off")
    )
    words = [amount(f.file.size), f"{f.file.bits_per_weight:.2f} bits", f.verdict, kld, shares, draft]
    return f"{f.file.name}: {', '.join(w for w in words if w)}"


@dataclass
class DryRun:
    """What a release would be. made: names of files that are there already."""

    repository: Path
    levels: Sequence[str]
    notes: Sequence[str]
    files: Sequence[ReleaseFile]
    made: Collection[str]

    def as_json(self) -> dict[str, Any]:
        rows = [
            {
                "file": f.name,
                "bytes": f.size,
                "bits_per_weight": round(f.bits_per_weight, 4),
                "made": f.name in self.made,
            }
            for f in self.files
        ]
        return {"schema": SCHEMA, "dry_run": True, "repository": str(self.repository), "levels": list(self.levels),
                "notes": list(self.notes), "files": rows}  # fmt: skip

    def as_text(self) -> str:
        lines = [f"note: {note}" for note in self.notes]
        lines += [
            f"{f.name}: {amount(f.size)}, {f.bits_per_weight:.2f} bits per weight, "
            + ("is there" if f.name in self.made else "to be made")
            for f in self.files
        ]
        total = sum(f.size for f in self.files if f.name not in self.made)
        lines += [f"{amount(total)} to be written; levels: {', '.join(self.levels)}; into {self.repository}"]
        return "\n".join([*lines, "dry run: nothing was made"])
