"""What verification finds: findings, by level, with a verdict each; the worst one decides the exit code."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import IntEnum
from pathlib import Path
from typing import Any

SCHEMA = 1
LEVELS = ("structure", "fidelity", "logits", "identity", "acceptance", "engine")


class Verdict(IntEnum):
    """From good to bad. SKIPPED: the inputs did not allow the level; INCONCLUSIVE: near-ties, or nothing to compare."""

    PASSED = 0
    SKIPPED = 1
    INCONCLUSIVE = 2
    FAILED = 3

    @property
    def exit_code(self) -> int:
        return {Verdict.FAILED: 1, Verdict.INCONCLUSIVE: 6}.get(self, 0)


@dataclass(frozen=True)
class Finding:
    """One thing that is not as it should be. where: a tensor, a metadata key, a position. cause: the likeliest."""

    what: str
    where: str = ""
    expected: str = ""
    found: str = ""
    cause: str = ""
    verdict: Verdict = Verdict.FAILED

    def __str__(self) -> str:
        parts = [f"{self.where}: {self.what}" if self.where else self.what]
        parts += [f"{label} {value}" for label, value in (("expected", self.expected), ("found", self.found)) if value]
        return "; ".join(parts) + (f" (likeliest cause: {self.cause})" if self.cause else "")


@dataclass
class LevelResult:
    """summary: one line. data: the evidence, JSON-able."""

    level: str
    summary: str = ""
    findings: list[Finding] = field(default_factory=list)
    data: dict[str, Any] = field(default_factory=dict)
    skipped: bool = False
    seconds: float = 0.0

    @property
    def verdict(self) -> Verdict:
        if self.skipped:
            return Verdict.SKIPPED
        return max((f.verdict for f in self.findings), default=Verdict.PASSED)

    def as_json(self) -> dict[str, Any]:
        findings = [
            {k: v.name.lower() if isinstance(v, Verdict) else v for k, v in vars(f).items()} for f in self.findings
        ]
        return {
            "level": self.level, "verdict": self.verdict.name.lower(), "summary": self.summary, "findings": findings,
            "data": self.data, "seconds": round(self.seconds, 3),
        }  # fmt: skip


@dataclass
class VerificationReport:
    """All levels of one file. unseen: faults that cannot be seen with what was given."""

    file: Path
    source: Path | None
    levels: list[LevelResult] = field(default_factory=list)
    unseen: list[str] = field(default_factory=list)

    @property
    def verdict(self) -> Verdict:
        return max((r.verdict for r in self.levels if not r.skipped), default=Verdict.INCONCLUSIVE)

    @property
    def exit_code(self) -> int:
        return self.verdict.exit_code

    def level(self, name: str) -> LevelResult:
        return next(r for r in self.levels if r.level == name)

    def as_json(self) -> dict[str, Any]:
        return {
            "schema": SCHEMA, "file": str(self.file), "source": str(self.source) if self.source else None,
            "verdict": self.verdict.name.lower(), "exit_code": self.exit_code,
            "levels": [r.as_json() for r in self.levels], "unseen": self.unseen,
        }  # fmt: skip

    def as_text(self) -> str:
        lines = [f"{self.file}: {self.verdict.name.lower()}"]
        for result in self.levels:
            lines.append(f"  {result.level:<11} {result.verdict.name.lower():<13} {result.summary}")
            lines += [f"    {finding}" for finding in result.findings[:_SHOWN]]
            if len(result.findings) > _SHOWN:
                lines.append(f"    and {len(result.findings) - _SHOWN} more")
        lines += [f"  not seen: {words}" for words in self.unseen]
        return "\n".join(lines)


_SHOWN = 8
