"""Reading GGUF files with the reference library, and the tables of what the reference tools make."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGUFReader, GGUFValueType

Digest = tuple[str, tuple[int, ...], str]


def tensor_digests(file: Path) -> dict[str, Digest]:
    """By name: type, ne without trailing ones (ggml does not tell them), start of the SHA-256 of the bytes."""
    return {t.name: _digest(t) for t in GGUFReader(file).tensors}


def _digest(tensor: Any) -> Digest:
    data = hashlib.sha256(np.ascontiguousarray(tensor.data).tobytes()).hexdigest()
    return tensor.tensor_type.name, trimmed(tensor.shape.tolist()), data[:32]


def trimmed(ne: list[int]) -> tuple[int, ...]:
    while len(ne) > 1 and ne[-1] == 1:
        ne = ne[:-1]
    return tuple(ne)


def expected_digests(table: Path) -> dict[str, Digest]:
    tensors = json.loads(table.read_text())["tensors"]
    return {name: (kind, trimmed(ne), sha) for name, (kind, ne, sha) in tensors.items()}


def metadata(file: Path) -> dict[str, Any]:
    """By key: {"type": names, "value": value}, long arrays as length and digest, in the form of the tables."""
    fields = GGUFReader(file).fields.values()
    return {f.name: _entry(f) for f in fields if not f.name.startswith("GGUF.")}


def _entry(field: Any) -> dict[str, Any]:
    value = field.contents()
    kinds = [GGUFValueType(t).name for t in field.types]
    if isinstance(value, list) and len(value) > 64:
        digest = hashlib.sha256(json.dumps(value, ensure_ascii=False).encode()).hexdigest()[:32]
        value = {"len": len(value), "sha256": digest}
    return {"type": kinds, "value": value}


def expected_metadata(table: Path) -> dict[str, Any]:
    return json.loads(table.read_text())["metadata"]
