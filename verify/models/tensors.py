"""A model's tensors on a device: as values, or packed as they are stored and dequantized when they are used."""

from __future__ import annotations

import os
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from converter.errors import GGUFError
from quant import block_type
from quant.gpu import dequantize
from verify.models.weights import Weights

_PIECE = 2**26  # values that are dequantized at once
_CONVOLUTION = "ssm_conv1d.weight"


def free_memory(device: torch.device) -> int:
    """Bytes."""
    if device.type == "cpu":
        return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return torch.cuda.mem_get_info(device)[0]


@dataclass(frozen=True)
class Packed:
    """A matrix, or experts' matrices, as stored: uint8 [..., row bytes] of ggml's type. shape: of its values."""

    data: Tensor
    type: str
    shape: tuple[int, ...]

    def values(self, dtype: torch.dtype) -> Tensor:
        """All of it, [rows, columns] or [experts, rows, columns]."""
        flat = self.data.reshape(-1, self.data.shape[-1])
        out = torch.empty((len(flat), self.shape[-1]), dtype=dtype, device=flat.device)
        step = max(1, _PIECE // self.shape[-1])
        for at in range(0, len(flat), step):
            out[at : at + step] = dequantize(flat[at : at + step], self.type)
        return out.view(self.shape)

    def rows(self, index: Tensor | int, dtype: torch.dtype) -> Tensor:
        """Some of its first axis."""
        return dequantize(self.data[index], self.type).to(dtype)


class Tensors:
    """Tensors by GGUF name. Raises GGUFError for one that is missing."""

    def __init__(self, file: Path, dtype: torch.dtype, stored: Mapping[str, Tensor | Packed]) -> None:
        self.file, self.dtype, self._stored = file, dtype, stored

    def __contains__(self, name: object) -> bool:
        return name in self._stored

    def __iter__(self) -> Iterator[str]:
        return iter(self._stored)

    def __getitem__(self, name: str) -> Tensor:
        found = self._found(name)
        return found.values(self.dtype) if isinstance(found, Packed) else found

    def rows(self, name: str, index: Tensor | int) -> Tensor:
        """tensors[name][index], without more than that being dequantized."""
        found = self._found(name)
        return found.rows(index, self.dtype) if isinstance(found, Packed) else found[index]

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._found(name).shape)

    def changed(self, tensors: Mapping[str, Tensor]) -> Tensors:
        """The same, with some exchanged."""
        return Tensors(self.file, self.dtype, {**self._stored, **tensors})

    def whole(self) -> dict[str, Tensor]:
        """All of them as values."""
        return {name: self[name] for name in self}

    @property
    def nbytes(self) -> int:
        """Of device memory."""
        return sum((t.data if isinstance(t, Packed) else t).nbytes for t in self._stored.values())

    def _found(self, name: str) -> Tensor | Packed:
        if name not in self._stored:
            raise GGUFError("a tensor is missing", self.file, name)
        return self._stored[name]


def load(
    weights: Weights, device: torch.device, dtype: torch.dtype, *, packed: bool, names: Collection[str] = ()
) -> Tensors:
    """All tensors, or those named. Matrices have dtype, or stay packed; vectors and the convolution take part in float32 arithmetic."""
    stored: dict[str, Tensor | Packed] = {}
    for name in names or weights.names():
        narrow = not name.endswith(_CONVOLUTION)
        raw = weights.raw(name) if packed and narrow else None
        if raw is not None and raw.data.ndim > 1 and block_type(raw.type).can_write:
            kind = block_type(raw.type)
            shape = (*raw.data.shape[:-1], raw.data.shape[-1] // kind.nbytes * kind.block)
            stored[name] = Packed(torch.from_numpy(raw.data).to(device), raw.type, shape)
        else:
            tensor = torch.from_numpy(weights.tensor(name)).to(device)
            stored[name] = tensor.to(dtype) if narrow and tensor.ndim > 1 else tensor
    return Tensors(weights.file, dtype, stored)
