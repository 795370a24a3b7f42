"""Files in several parts, as llama.cpp names and reads them (spec/gguf.md, section 4)."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from converter.errors import UnsupportedError, UsageError
from converter.gguf_file import KeyValue, ValueType, entries_in_order, pad
from converter.plan import DRAFTER, Part, Plan, PlannedFile, PlannedTensor

_UNITS = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9}  # decimal, as in llama.cpp's own tool
_MOST_PARTS = 2**16 - 1  # split.count is a u16


@dataclass(frozen=True)
class Limits:
    """What a part may hold: bytes of tensor data, tensors; None for any."""

    size: int | None = None
    tensors: int | None = None


def parse_size(value: str) -> int:
    """Bytes of "4G", "500M", "100K" or "123". Raises UsageError."""
    match = re.fullmatch(r"(\d+)([KMG]?)B?", value.strip().upper())
    if match is None or int(match[1]) == 0:
        raise UsageError("not a size", expected="a number with K, M or G, such as 4G", found=value)
    return int(match[1]) * _UNITS[match[2]]


def split_plan(plan: Plan, limits: Limits) -> Plan:
    """The plan with its files cut into parts where they are larger than allowed.

    Sidecars stay whole: engines look for the head in the first part only. A tensor larger than the limit gets a part of
    its own, and a note.
    """
    if limits == Limits():
        return plan
    files = [part for file in plan.files for part in _split(file, limits)]
    large = sorted({
        t.entry.name for f in files for t in f.tensors if f.part and limits.size and t.entry.nbytes > limits.size
    })  # fmt: skip
    notes = [f"larger than --split-max-size by themselves: {', '.join(large)}"] if large else []
    whole = [
        f.path.name for f in files if f.kind in {"sidecar", DRAFTER} and limits.size and f.data_bytes > limits.size
    ]
    notes += [f"{name}: sidecars are not split, engines look for the head in the first part only" for name in whole]
    return replace(plan, files=files, notes=[*plan.notes, *notes])


def part_path(path: Path, number: int, count: int) -> Path:
    """The name of part `number`, from 1: NAME-00001-of-00003.gguf."""
    return path.with_name(f"{path.name.removesuffix('.gguf')}-{number:05d}-of-{count:05d}.gguf")


def _split(file: PlannedFile, limits: Limits) -> list[PlannedFile]:
    groups = [file.tensors] if file.kind in {"sidecar", DRAFTER} else list(_groups(file.tensors, limits))
    if len(groups) == 1:
        return [file]
    if len(groups) > _MOST_PARTS:
        raise UnsupportedError("too many parts", file.path, expected=f"at most {_MOST_PARTS}", found=len(groups))
    parts: list[PlannedFile] = []
    for number, group in enumerate(groups):
        entries = entries_in_order((t.entry.name, t.entry.ne, t.type) for t in group)
        tensors = [replace(t, entry=e) for t, e in zip(group, entries, strict=True)]
        keys = [
            KeyValue("split.no", ValueType.UINT16, number),
            KeyValue("split.count", ValueType.UINT16, len(groups)),
            KeyValue("split.tensors.count", ValueType.INT32, len(file.tensors)),
        ]
        path = part_path(file.path, number + 1, len(groups))
        parts.append(
            replace(
                file, path=path, keys=[*([] if number else file.keys), *keys], tensors=tensors,
                part=Part(number, len(groups), file.path),
            )
        )  # fmt: skip
    return parts


def _groups(tensors: Sequence[PlannedTensor], limits: Limits) -> Iterator[list[PlannedTensor]]:
    """Tensors in order; a part is closed when the next one would exceed a limit."""
    group: list[PlannedTensor] = []
    size = 0
    for tensor in tensors:
        needs = pad(tensor.entry.nbytes)
        over = (limits.size is not None and size + needs > limits.size) or len(group) == limits.tensors
        if group and over:
            yield group
            group, size = [], 0
        group.append(tensor)
        size += needs
    yield group
