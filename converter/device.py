"""Where quantizing happens: compiled kernels on the CPU, or torch on a GPU. The bytes are the same."""

from __future__ import annotations

import importlib.util
import os
import threading
from typing import Any, Protocol

import numpy as np

from converter.errors import EnvironmentFailure
from quant import quantize

DEVICES = ("cpu", "cuda", "auto")


class Device(Protocol):
    """What the executor asks of a device. All calls come from several threads at once; it pickles."""

    chunk_values: int  # read, quantized and written in one go
    strip_values: int  # of a chunk, quantized at a time
    workers: int  # threads that keep it busy

    def empty(self, shape: tuple[int, ...], dtype: Any) -> np.ndarray:
        """Memory that chunks are read into."""
        ...

    def place(self, x: np.ndarray) -> Any:
        """Rows float32, float16 or bfloat16 (as uint16) on the device; slices of it can be quantized."""
        ...

    def quantize(self, x: Any, type_name: str, weights: np.ndarray | None, out: np.ndarray) -> None:
        """As `quant.quantize`, from placed rows into `out`."""
        ...


class Cpu:
    """The compiled kernels; strips stay in a core's cache while several types are made of them."""

    chunk_values = 2 * 2**20  # 4 MB of BF16: with all its results some 20 MB, times many cores
    strip_values = 2**18  # 1 MB of float32
    workers = os.cpu_count() or 1

    def empty(self, shape: tuple[int, ...], dtype: Any) -> np.ndarray:
        return np.empty(shape, dtype)

    def place(self, x: np.ndarray) -> np.ndarray:
        return x

    def quantize(self, x: np.ndarray, type_name: str, weights: np.ndarray | None, out: np.ndarray) -> None:
        quantize(x, type_name, weights, out)


class Torch:
    """A torch device.

    On CUDA each thread has a stream and copies from pinned memory: one chunk travels while another is quantized.
    """

    workers = 3  # one reads, one computes, one writes; each holds a chunk of some 150 MB

    def __init__(self, name: str) -> None:
        import torch

        from quant.gpu import piece_values

        self.device = torch.device(name)
        self.cuda = self.device.type == "cuda"
        self.chunk_values = self.strip_values = min(piece_values(self.device), 2**24)
        self._threads = threading.local()

    def __reduce__(self) -> tuple[object, ...]:
        return Torch, (str(self.device),)

    def empty(self, shape: tuple[int, ...], dtype: Any) -> np.ndarray:
        if not self.cuda:
            return np.empty(shape, dtype)
        import torch

        size = int(np.prod(shape)) * np.dtype(dtype).itemsize
        # The array keeps torch's memory alive: it is the base of the view.
        return torch.empty(size, dtype=torch.uint8, pin_memory=True).numpy().view(dtype).reshape(shape)

    def place(self, x: np.ndarray) -> Any:
        import torch

        brain = x.dtype == np.uint16
        tensor = torch.from_numpy(x.view(np.int16) if brain else x)
        with self._stream():
            placed = tensor.to(self.device, non_blocking=True)
        return placed.view(torch.bfloat16) if brain else placed

    def quantize(self, x: Any, type_name: str, weights: np.ndarray | None, out: np.ndarray) -> None:
        import torch

        from quant import gpu

        with self._stream():
            importance = None if weights is None else torch.from_numpy(weights).to(self.device)
            packed = gpu.quantize(x, type_name, importance)
            torch.from_numpy(out).copy_(packed)  # waits for the stream

    def _stream(self) -> Any:
        """The calling thread's stream as a context."""
        import torch

        if self.cuda and not hasattr(self._threads, "stream"):
            self._threads.stream = torch.cuda.Stream(self.device)
        return torch.cuda.stream(getattr(self._threads, "stream", None))  # type: ignore[arg-type]  # None: no stream


def open_device(name: str) -> Device:
    """The device of that name: cpu, cuda, or auto for cuda where there is one. Raises EnvironmentFailure."""
    if name == "cpu":
        return Cpu()
    torch_is_there = importlib.util.find_spec("torch") is not None
    if torch_is_there:
        import torch

        if torch.cuda.is_available():
            return Torch("cuda")
    if name == "auto":
        return Cpu()
    raise EnvironmentFailure(
        "there is no CUDA device to quantize on",
        expected="torch with a CUDA device",
        found="torch, but no device" if torch_is_there else "no torch",
        hint="--device cpu gives the same bytes" if torch_is_there else "pip install torch, or --device cpu",
    )
