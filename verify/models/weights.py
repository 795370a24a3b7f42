"""Tensors and metadata under their GGUF names, from a GGUF file or straight from a model folder."""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from converter.archs import by_gguf_name
from converter.errors import GGUFError
from converter.execute import read_tensor
from converter.gguf_model import GGUFModel, is_gguf, open_gguf
from converter.model import Model, read_model
from quant import UnknownTypeError, dequantize


@dataclass(frozen=True)
class Raw:
    """A tensor as it is stored: uint8 [..., row bytes] of ggml's type, the last axis that of rows."""

    data: np.ndarray
    type: str


class Weights(Protocol):
    """A model's tensors, read when asked for."""

    file: Path

    def names(self) -> Collection[str]:
        """All tensors."""
        ...

    def count(self) -> int:
        """Of values in all tensors."""
        ...

    def key(self, name: str, default: Any = None) -> Any:
        """A metadata value; `name` without the architecture's prefix for keys that are the architecture's own."""
        ...

    def tensor(self, name: str) -> np.ndarray:
        """One tensor in torch order, float32."""
        ...

    def raw(self, name: str) -> Raw | None:
        """The same as it is stored, None where it is not stored in one of ggml's types."""
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

    def count(self) -> int:
        return sum(math.prod(t.ne) for t in self._entries.values())

    def key(self, name: str, default: Any = None) -> Any:
        if name == "general.architecture":
            return self._architecture
        return self.model.get(f"{self._architecture}.{name}", default)

    def tensor(self, name: str) -> np.ndarray:
        stored = self.raw(name)
        try:
            return dequantize(stored.data, stored.type)
        except UnknownTypeError as error:
            raise GGUFError("a tensor has a type that cannot be read", self.file, name, found=str(error)) from error

    def raw(self, name: str) -> Raw:
        entry = self._entries.get(name)
        if entry is None:
            raise GGUFError("a tensor is missing", self.file, name)
        file, begin = self.model.place(name)
        data = np.fromfile(file, np.uint8, entry.nbytes, offset=begin)
        return Raw(data.reshape(*reversed(entry.ne[1:]), -1), entry.type.name)


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

    def count(self) -> int:
        return sum(math.prod(r.target_shape) for r in self._rules.values())

    def key(self, name: str, default: Any = None) -> Any:
        if name == "general.architecture":
            return self.model.architecture.name
        return self._keys.get(name, default)

    def tensor(self, name: str) -> np.ndarray:
        rule = self._rules[name]
        return read_tensor(rule, self.model.sources[name], self.model.checkpoint)

    def raw(self, name: str) -> None:  # noqa: ARG002
        return None


DRAFTER_PREFIX = "drafter."  # before all names of a drafter with a checkpoint of its own


class DrafterWeights:
    """What drafts for another model, its tensors under names with a prefix, its keys under their own."""

    def __init__(self, own: Weights) -> None:
        self.file, self.own = own.file, own

    @staticmethod
    def within(weights: Weights) -> Weights | None:
        """The drafter of a pair, under its own names."""
        sidecar = weights.sidecar if isinstance(weights, PairedWeights) else None
        return sidecar.own if isinstance(sidecar, DrafterWeights) else None

    def names(self) -> Collection[str]:
        return [f"{DRAFTER_PREFIX}{name}" for name in self.own.names()]

    def count(self) -> int:
        return self.own.count()

    def key(self, name: str, default: Any = None) -> Any:
        return self.own.key(name, default)

    def tensor(self, name: str) -> np.ndarray:
        return self.own.tensor(name.removeprefix(DRAFTER_PREFIX))

    def raw(self, name: str) -> Raw | None:
        return self.own.raw(name.removeprefix(DRAFTER_PREFIX))


class PairedWeights:
    """A trunk's file, and the head's sidecar or the drafter, as one model."""

    def __init__(self, trunk: Weights, sidecar: Weights) -> None:
        architecture = by_gguf_name(str(sidecar.key("general.architecture")))
        drafts = architecture is not None and architecture.drafts_for
        self.file, self.trunk = trunk.file, trunk
        self.sidecar: Weights = DrafterWeights(sidecar) if drafts else sidecar
        prefix = DRAFTER_PREFIX if drafts else f"blk.{trunk.key('block_count')}."
        self._own_keys = set() if drafts else {"block_count", "nextn_predict_layers"}
        self._head = {n for n in self.sidecar.names() if n.startswith(prefix)}

    def names(self) -> Collection[str]:
        return [*self.trunk.names(), *sorted(self._head)]

    def count(self) -> int:
        return self.trunk.count() + self.sidecar.count()

    def key(self, name: str, default: Any = None) -> Any:
        return (self.sidecar if name in self._own_keys else self.trunk).key(name, default)

    def tensor(self, name: str) -> np.ndarray:
        return (self.sidecar if name in self._head else self.trunk).tensor(name)

    def raw(self, name: str) -> Raw | None:
        return (self.sidecar if name in self._head else self.trunk).raw(name)


def open_weights(path: Path) -> Weights:
    """A GGUF model or a model folder."""
    return FolderWeights(path) if path.is_dir() and not is_gguf(path) else FileWeights(path)
