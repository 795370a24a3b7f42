"""Importance matrices of llama-imatrix: the GGUF form and the legacy .dat, read and written (spec/quant.md, 13)."""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from converter.errors import InputError
from converter.files import os_errors
from converter.gguf_file import (
    MAGIC,
    GGUFHeader,
    KeyValue,
    ValueType,
    array,
    entries_in_order,
    header_bytes,
    pad,
    read_gguf,
    text,
    u32,
)
from quant import block_type

if TYPE_CHECKING:
    import numpy as np

_SUMS, _COUNTS = ".in_sum2", ".counts"


@dataclass(frozen=True)
class ImportanceMatrix:
    """Mean squared input per column: name of a GGUF tensor -> float32 [matrices, columns], one matrix per expert."""

    file: Path
    entries: Mapping[str, np.ndarray]
    datasets: tuple[str, ...]
    chunks: int

    def keys(self) -> list[KeyValue]:
        """The metadata that says by what a file was weighted."""
        keys = [text("quantize.imatrix.file", self.file.name[:127])]
        if self.datasets:
            keys.append(text("quantize.imatrix.dataset", self.datasets[0][:127]))
        return [
            *keys,
            u32("quantize.imatrix.entries_count", len(self.entries)),
            u32("quantize.imatrix.chunks_count", self.chunks),
        ]

    def digest(self) -> str:
        """Names the values, whatever file they came from."""
        digest = hashlib.sha256()
        for name in sorted(self.entries):
            digest.update(name.encode() + b"\0" + self.entries[name].tobytes())
        return digest.hexdigest()


def read_imatrix(file: Path) -> ImportanceMatrix:
    """Read either form. Raises InputError for what is neither, and for NaN or infinity."""
    import numpy as np

    with os_errors("cannot read this importance matrix", file), file.open("rb") as stream:
        is_gguf = stream.read(4) == MAGIC
    matrix = _read_gguf(read_gguf(file)) if is_gguf else _read_legacy(file)
    for name, values in matrix.entries.items():
        if not np.isfinite(values).all():
            raise InputError("the importance matrix holds NaN or infinity", file, name)
    return matrix


def _read_gguf(header: GGUFHeader) -> ImportanceMatrix:
    import numpy as np

    if header.get("general.type") != "imatrix":
        raise InputError("this GGUF file is no importance matrix", header.file, expected="general.type = imatrix")
    arrays: dict[str, np.ndarray] = {}
    for tensor in header.tensors:
        if tensor.type.name == "F32":
            count = tensor.nbytes // 4
            at = header.data_start + tensor.offset
            arrays[tensor.name] = np.fromfile(header.file, np.float32, count, offset=at).reshape(-1, tensor.ne[0])
    entries: dict[str, np.ndarray] = {}
    for name in [n.removesuffix(_SUMS) for n in arrays if n.endswith(_SUMS)]:
        counts = arrays.get(name + _COUNTS)
        sums = arrays[name + _SUMS]
        if counts is None or sums.size % counts.size:
            raise InputError("an entry of the importance matrix has no fitting counts", header.file, name)
        entries[name] = _mean(sums.reshape(counts.size, -1), counts.reshape(-1, 1))
    lost = [n for n in arrays if n.endswith(_COUNTS) and n.removesuffix(_COUNTS) not in entries]
    if lost or not entries:
        raise InputError(
            "the importance matrix has counts without sums, or nothing", header.file, lost[0] if lost else None
        )
    chunks = header.get("imatrix.chunk_count", 0)
    datasets = header.get("imatrix.datasets", [])
    return ImportanceMatrix(header.file, entries, tuple(datasets), chunks if type(chunks) is int else 0)


def _mean(sums: np.ndarray, counts: np.ndarray) -> np.ndarray:
    """Sum / count in float32; 1 for experts that were never routed to."""
    import numpy as np

    with np.errstate(divide="ignore", invalid="ignore"):
        return np.where(counts == 0, np.float32(1), sums / counts).astype(np.float32)


def _read_legacy(file: Path) -> ImportanceMatrix:
    import numpy as np

    raw = file.read_bytes()
    at = 0

    def take(count: int) -> bytes:
        nonlocal at
        if count < 0 or at + count > len(raw):
            raise InputError(
                "this is no importance matrix, or it is cut off", file, expected="GGUF or llama-imatrix .dat"
            )
        at += count
        return raw[at - count : at]

    def integer() -> int:
        return struct.unpack("<i", take(4))[0]

    entries: dict[str, np.ndarray] = {}
    for _ in range(integer()):
        name = take(integer()).decode("utf-8", errors="replace")
        calls, count = integer(), integer()
        values = np.frombuffer(take(4 * count), np.float32)
        entries[name] = (values / np.float32(calls) if calls > 0 else values).reshape(1, -1)
    if not entries:
        raise InputError("the importance matrix is empty", file)
    chunks, datasets = 0, ()
    if at < len(raw):
        chunks = integer()
        datasets = (take(integer()).decode("utf-8", errors="replace"),)
    return ImportanceMatrix(file, entries, datasets, chunks)


def write_imatrix(
    file: Path, sums: Mapping[str, tuple[np.ndarray, np.ndarray]], dataset: str, chunks: int, chunk_size: int
) -> None:
    """Write sums as llama-imatrix does: name -> (float32 [matrices, columns], counts float32 [matrices])."""
    keys = [
        text("general.type", "imatrix"),
        array("imatrix.datasets", ValueType.STRING, [dataset]),
        u32("imatrix.chunk_count", chunks),
        u32("imatrix.chunk_size", chunk_size),
    ]
    arrays = dict(_arrays(sums))
    f32 = block_type("F32")
    entries = entries_in_order((name, tuple(reversed(a.shape)), f32) for name, a in arrays.items())
    partial = file.with_name(file.name + ".partial")
    with os_errors("cannot write the importance matrix", file):
        with partial.open("wb") as stream:
            stream.write(header_bytes(keys, entries))
            for entry, values in zip(entries, arrays.values(), strict=True):
                stream.write(values.astype("<f4").tobytes().ljust(pad(entry.nbytes), b"\0"))
        partial.replace(file)


def _arrays(sums: Mapping[str, tuple[np.ndarray, np.ndarray]]) -> Iterator[tuple[str, np.ndarray]]:
    for name in sorted(sums):
        total, counts = sums[name]
        yield name + _SUMS, total
        yield name + _COUNTS, counts.reshape(-1, 1)
