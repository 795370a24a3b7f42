"""Which class runs which architecture in torch, and how a file or folder is opened as one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from converter.errors import UnsupportedError
from verify.models.base import TorchModel
from verify.models.gemma4 import Gemma4
from verify.models.qwen35 import Qwen35
from verify.models.tensors import free_memory
from verify.models.weights import PairedWeights, Weights, open_weights

_CLASSES: dict[str, type[TorchModel]] = {
    "qwen35": Qwen35, "qwen35moe": Qwen35, "qwen3next": Qwen35, "gemma4": Gemma4,
}  # fmt: skip
_SHARE_OF_MEMORY = 0.8  # of what is free that values may take: the rest is for what is computed


def in_torch(architecture: str) -> bool:
    """Whether a trunk of that name is decoded here."""
    return architecture in _CLASSES


def open_model(file: Path, sidecar: Path | None, device: str) -> TorchModel:
    """The model of a file or folder on a device, "cpu" in float32 or a CUDA device in bfloat16.

    sidecar: the head's file, or for a drafter with a checkpoint of its own its file or folder. Where the values would not
    fit the memory, matrices stay as they are stored and are dequantized when they multiply.
    """
    weights: Weights = open_weights(file)
    if sidecar is not None:
        weights = PairedWeights(weights, open_weights(sidecar))
    dtype = torch.float32 if device == "cpu" else torch.bfloat16
    fits = weights.count() * dtype.itemsize < _SHARE_OF_MEMORY * free_memory(torch.device(device))
    return model_of(weights, device=device, dtype=dtype, packed=not fits)


def model_of(weights: Weights, **how: Any) -> TorchModel:
    """The same of weights; `how` as TorchModel takes it."""
    name = weights.key("general.architecture")
    if name not in _CLASSES:
        raise UnsupportedError("this architecture is not decoded in torch", weights.file, found=str(name))
    return _CLASSES[name](weights, **how)
