"""The closing summary of a conversion: what was (or would be) written, as text and as data."""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import dataclass, field
from typing import Any

from converter.console import amount
from converter.plan import Plan, PlannedFile
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

    @property
    def rate_gbps(self) -> float:
        """Source bytes a second, in 10^9."""
        return self.source_bytes / self.seconds / 1e9 if self.seconds else 0.0

    def as_text(self) -> str:
        lines = [f"note: {note}" for note in self.notes]
        for file in self.plan.files:
            lines += ["", *_file_lines(file)]
        if self.dry_run:
            lines += ["", "dry run: nothing was written"]
        else:
            lines += ["", f"{amount(self.source_bytes)} read in {self.seconds:.1f} s, {amount(1e9 * self.rate_gbps)}/s"]
        return "\n".join(lines).lstrip("\n")


def _parts(file: PlannedFile) -> dict[str, dict[str, tuple[int, int, int]]]:
    """For trunk and head: by type (tensors, bytes, values). A sidecar's copies of trunk tensors count as "copies"."""
    parts: dict[str, dict[str, list[int]]] = defaultdict(lambda: defaultdict(lambda: [0, 0, 0]))
    for tensor in file.tensors:
        if tensor.rule.role is Role.MTP:
            part = "head"
        else:
            part = "copies of the trunk's" if file.kind == "sidecar" else "trunk"
        values = tensor.entry.nbytes // tensor.type.nbytes * tensor.type.block
        entry = parts[part][tensor.type.name]
        for i, count in enumerate((1, tensor.entry.nbytes, values)):
            entry[i] += count
    return {p: {t: (e[0], e[1], e[2]) for t, e in by_type.items()} for p, by_type in parts.items()}


def _summary(file: PlannedFile) -> dict[str, Any]:
    parts = _parts(file)
    return {
        "bits_per_weight": round(_bits_per_weight(file), 4),
        "parts": {
            part: {t: {"tensors": n, "bytes": size} for t, (n, size, _) in by_type.items()}
            for part, by_type in parts.items()
        },
        "fallbacks": [
            {"tensor": t.entry.name, "wanted": t.wanted, "type": t.type.name} for t in file.tensors if t.wanted
        ],
    }


def _bits_per_weight(file: PlannedFile) -> float:
    values = sum(v for by_type in _parts(file).values() for _, _, v in by_type.values())
    return 8 * file.data_bytes / values


def _file_lines(file: PlannedFile) -> list[str]:
    head = f" + head {file.head_mix}" if file.kind == "bundled" else ""
    lines = [
        f"{file.path}  ({file.kind}, {file.mix}{head})",
        f"  {amount(file.size)}, {len(file.tensors)} tensors, {_bits_per_weight(file):.2f} bits per weight",
    ]
    for part, by_type in _parts(file).items():
        total = sum(size for _, size, _ in by_type.values())
        types = ", ".join(f"{t} {n}x {amount(size)}" for t, (n, size, _) in sorted(by_type.items()))
        lines.append(f"  {part}: {amount(total)}: {types}")
    fallbacks = Counter((t.wanted, t.type.name) for t in file.tensors if t.wanted)
    for (wanted, got), count in sorted(fallbacks.items()):
        lines.append(f"  fallback: {count} tensors have rows that {wanted} cannot hold, stored as {got}:")
        lines += [f"    {t.entry.name}" for t in file.tensors if (t.wanted, t.type.name) == (wanted, got)]
    return lines
