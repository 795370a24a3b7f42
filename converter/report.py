"""The closing summary of a conversion: what was (or would be) written, as text and as data."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from converter.console import amount
from converter.plan import DRAFTER, Plan, PlannedFile
from converter.rules import Role

SCHEMA = 1


@dataclass
class ConversionReport:
    """What a run did. seconds and source_bytes are 0 for a dry run, resumed_bytes is what an earlier run had done."""

    plan: Plan
    dry_run: bool
    seconds: float = 0.0
    source_bytes: int = 0
    resumed_bytes: int = 0
    notes: list[str] = field(default_factory=list)

    def as_json(self) -> dict[str, Any]:
        plan = self.plan.as_json()
        return {
            "schema": SCHEMA,
            "dry_run": self.dry_run,
            "plan_sha256": self.plan.digest(),
            **plan,
            "notes": self.notes,
            "files": [entry | _summary(file) for entry, file in zip(plan["files"], self.plan.files, strict=True)],
            "seconds": round(self.seconds, 3),
            "source_bytes": self.source_bytes,
            "resumed_bytes": self.resumed_bytes,
            "rate_gbps": round(self.rate_gbps, 3),
        }

    def _wholes(self) -> list[list[PlannedFile]]:
        """The files, with the parts of split ones together."""
        wholes: dict[Path, list[PlannedFile]] = {}
        for file in self.plan.files:
            wholes.setdefault(file.whole, []).append(file)
        return list(wholes.values())

    @property
    def rate_gbps(self) -> float:
        """Source bytes a second, in 10^9."""
        return self.source_bytes / self.seconds / 1e9 if self.seconds else 0.0

    def as_text(self) -> str:
        lines = [f"note: {note}" for note in self.notes]
        for parts in self._wholes():
            lines += ["", *_file_lines(parts)]
        if self.dry_run:
            lines += ["", "dry run: nothing was written"]
        else:
            if self.resumed_bytes:
                lines += ["", f"{amount(self.resumed_bytes)} were done by an earlier run"]
            lines += ["", f"{amount(self.source_bytes)} read in {self.seconds:.1f} s, {amount(1e9 * self.rate_gbps)}/s"]
        return "\n".join(lines).lstrip("\n")


def _shares(files: Sequence[PlannedFile]) -> dict[str, dict[str, tuple[int, int, int]]]:
    """For trunk and head: by type (tensors, bytes, values). A sidecar's copies of trunk tensors count as "copies"."""
    shares: dict[str, dict[str, list[int]]] = defaultdict(lambda: defaultdict(lambda: [0, 0, 0]))
    trunk = {"sidecar": "copies of the trunk's", DRAFTER: DRAFTER}.get(files[0].kind, "trunk")
    for tensor in (t for f in files for t in f.tensors):
        part = "head" if tensor.rule.role is Role.MTP else trunk
        values = tensor.entry.nbytes // tensor.type.nbytes * tensor.type.block
        entry = shares[part][tensor.type.name]
        for i, count in enumerate((1, tensor.entry.nbytes, values)):
            entry[i] += count
    return {p: {t: (e[0], e[1], e[2]) for t, e in by_type.items()} for p, by_type in shares.items()}


def _summary(file: PlannedFile) -> dict[str, Any]:
    shares = _shares([file])
    return {
        "bits_per_weight": round(_bits_per_weight([file]), 4),
        "parts": {
            part: {t: {"tensors": n, "bytes": size} for t, (n, size, _) in by_type.items()}
            for part, by_type in shares.items()
        },
        "fallbacks": [
            {"tensor": t.entry.name, "wanted": t.wanted, "type": t.type.name} for t in file.tensors if t.wanted
        ],
    }


def _bits_per_weight(files: Sequence[PlannedFile]) -> float:
    values = sum(v for by_type in _shares(files).values() for _, _, v in by_type.values())
    return 8 * sum(f.data_bytes for f in files) / values


def _file_lines(files: Sequence[PlannedFile]) -> list[str]:
    first, tensors = files[0], [t for f in files for t in f.tensors]
    head = f" + head {first.head_mix}" if first.kind == "bundled" else ""
    name = f"{first.path} ... {files[-1].path.name}" if len(files) > 1 else str(first.path)
    lines = [
        f"{name}  ({first.kind}, {first.mix}{head})",
        f"  {amount(sum(f.size for f in files))}, {len(tensors)} tensors, {_bits_per_weight(files):.2f} bits per weight",
    ]
    if len(files) > 1:
        largest = amount(max(f.size for f in files))
        lines.append(f"  {len(files)} parts, the largest {largest}; engines are given the first")
    for part, by_type in _shares(files).items():
        total = sum(size for _, size, _ in by_type.values())
        types = ", ".join(f"{t} {n}x {amount(size)}" for t, (n, size, _) in sorted(by_type.items()))
        lines.append(f"  {part}: {amount(total)}: {types}")
    fallbacks = Counter((t.wanted, t.type.name) for t in tensors if t.wanted)
    for (wanted, got), count in sorted(fallbacks.items()):
        lines.append(f"  fallback: {count} tensors have rows that {wanted} cannot hold, stored as {got}:")
        lines += [f"    {t.entry.name}" for t in tensors if (t.wanted, t.type.name) == (wanted, got)]
    return lines
