"""Tensors and metadata under their GGUF names, from a GGUF file or straight from a model folder."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from converter.errors import GGUFError
from converter.execute import read_tensor
from converter.gguf_model import GGUFModel, is_gguf, open_gguf
from converter.model import Model, read_model
from quant import UnknownTypeError, dequantize


class Weights(Protocol):
    """A model's tensors, read when asked for."""

    file: Path

    def names(self) -> Collection[str]:
        """All tensors."""
        ...

    def key(self, name: str, default: Any = None) -> Any:
        """A metadata value; `name` without the architecture's prefix for keys that are the architecture's own."""
        ...

    def tensor(self, name: str) -> np.ndarray:
        """One tensor in torch order, float32."""
        ...


class FileWeights:
    """What a GGUF file, or a split one, holds, dequantized tensor by tensor."""

    def __init__(self, file: Path) -> None:
        self.file = file
        self.model: GGUFModel = open_gguf(file)
        self._entries = {t.name: t for t in self.model.tensors}
        self._architecture = self.model.get("general.architecture", "")

    def names(self) -> Collection[str]:
        return self._entries.keys()

    def key(self, name: str, default: Any = None) -> Any:
        if name == "general.architecture":
            return self._architecture
        return self.model.get(f"{self._architecture}.{name}", default)

    def tensor(self, name: str) -> np.ndarray:
        entry = self._entries.get(name)
        if entry is None:
            raise GGUFError("a tensor is missing", self.file, name)
        file, begin = self.model.place(name)
        raw = np.fromfile(file, np.uint8, entry.nbytes, offset=begin)
        try:
            return dequantize(raw, entry.type.name).reshape(tuple(reversed(entry.ne)))
        except UnknownTypeError as error:
            raise GGUFError("a tensor has a type that cannot be read", self.file, name, found=str(error)) from error


class FolderWeights:
    """What a model folder would be converted to, without quantizing: the reference."""

    def __init__(self, folder: Path, *, with_head: bool = True) -> None:
        self.file = folder
        self.model: Model = read_model(folder, with_head=with_head)
        self._rules = {r.target: r for r in self.model.rules}
        layers = self.model.head_layers if with_head else 0
        self._keys = {k.key: k.value for k in self.model.table.metadata(layers)}

    def names(self) -> Collection[str]:
        return self._rules.keys()

    def key(self, name: str, default: Any = None) -> Any:
        if name == "general.architecture":
            return self.model.architecture.name
        return self._keys.get(name, default)

    def tensor(self, name: str) -> np.ndarray:
        rule = self._rules[name]
        return read_tensor(rule, self.model.sources[name], self.model.checkpoint)


class PairedWeights:
    """A trunk's file and the head's sidecar as one model."""

    def __init__(self, trunk: Weights, sidecar: Weights) -> None:
        self.file, self.trunk, self.sidecar = trunk.file, trunk, sidecar
        block = f"blk.{trunk.key('block_count')}."
        self._head = {n for n in sidecar.names() if n.startswith(block)}

    def names(self) -> Collection[str]:
        return [*self.trunk.names(), *sorted(self._head)]

    def key(self, name: str, default: Any = None) -> Any:
        own = name in {"block_count", "nextn_predict_layers"}
        return (self.sidecar if own else self.trunk).key(name, default)

    def tensor(self, name: str) -> np.ndarray:
        return (self.sidecar if name in self._head else self.trunk).tensor(name)


def open_weights(path: Path) -> Weights:
    """A GGUF model or a model folder."""
    return FolderWeights(path) if path.is_dir() and not is_gguf(path) else FileWeights(path)
