"""GGUF files with one thing changed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from converter.gguf_file import KeyValue, TensorEntry, header_bytes, pad, read_gguf
from quant import dequantize, quantize


class Parts:
    """A file taken apart: metadata by key, tensors in order with their bytes."""

    def __init__(self, file: Path) -> None:
        header = read_gguf(file)
        self.keys: dict[str, KeyValue] = dict(header.keys)
        self.entries: dict[str, TensorEntry] = {t.name: t for t in header.tensors}
        raw = file.read_bytes()
        start = header.data_start
        self.data = {t.name: raw[start + t.offset : start + t.offset + t.nbytes] for t in header.tensors}

    # --- tensors as values

    def __getitem__(self, name: str) -> np.ndarray:
        """Values in torch order."""
        entry = self.entries[name]
        return dequantize(np.frombuffer(self.data[name], np.uint8), entry.type.name).reshape(entry.ne[::-1]).copy()

    def __setitem__(self, name: str, values: np.ndarray) -> None:
        kind = self.entries[name].type.name
        self.data[name] = quantize(np.ascontiguousarray(values, np.float32), kind).tobytes()

    def exchange(self, a: str, b: str) -> None:
        assert self.entries[a].ne == self.entries[b].ne
        first, second = self[a], self[b]
        self[a], self[b] = second, first

    def flip(self, name: str, byte: int, bit: int = 0) -> None:
        changed = bytearray(self.data[name])
        changed[byte] ^= 1 << bit
        self.data[name] = bytes(changed)

    # --- the rest

    def set(self, key: str, value: Any) -> None:
        self.keys[key] = replace(self.keys[key], value=value)

    def remove(self, name: str) -> None:
        del self.entries[name], self.data[name]

    def write(self, file: Path) -> Path:
        offset, entries = 0, []
        for entry in self.entries.values():
            entries.append(replace(entry, offset=offset))
            offset += pad(len(self.data[entry.name]))
        body = b"".join(self.data[name].ljust(pad(len(self.data[name])), b"\0") for name in self.entries)
        file.write_bytes(header_bytes(list(self.keys.values()), entries) + body)
        return file


Change = Callable[[Parts], object]


def values(name: str, change: Callable[[np.ndarray], np.ndarray]) -> Change:
    """One tensor's values changed."""

    def apply(file: Parts) -> None:
        file[name] = change(file[name])

    return apply


def noise(x: np.ndarray) -> np.ndarray:
    """Of the same shape and spread."""
    return np.random.default_rng(5).standard_normal(x.shape).astype(np.float32) * x.std()
