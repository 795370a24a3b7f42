"""The same types on any torch device: the kernels' own text, run on whole tensors by `quant.torch_lanes`.

Bytes equal those of `quant.quantize`. Needs torch; without CUDA it runs on torch's CPU device, which is slower than
the compiled kernels and serves as their check.
"""

from __future__ import annotations

from types import ModuleType

import torch

from quant.block import BlockType, block_type, takes_weights
from quant.errors import QuantizationError, UnknownTypeError
from quant.importance import sums_of_squares
from quant.lanes import WIDTH, Stored, on
from quant.torch_lanes import Array, TorchMachine

_BYTES_PER_VALUE = 40  # of device memory while a tensor is quantized; several threads may do so at once
_STORED: dict[torch.dtype, Stored] = {torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16"}


def quantize(x: torch.Tensor, type: str, weights: torch.Tensor | None = None) -> torch.Tensor:  # noqa: A002  (ggml's word)
    """Quantize rows on the device that they are on.

    x: float32, float16 or bfloat16 [..., n]; weights: importance of the n columns, float32 [n], same device. Returns
    uint8 [..., row_bytes]. Raises as `quant.quantize` does.

    >>> quantize(torch.full((32,), 0.5), "Q8_0").shape
    torch.Size([34])
    """
    kind = block_type(type)
    if x.dtype not in _STORED:
        raise TypeError(f"cannot quantize {x.dtype}: float32, float16 or bfloat16 are expected")
    if x.ndim == 0 or x.shape[-1] % kind.block:
        raise ValueError(f"rows of shape {list(x.shape)} are not whole blocks of {kind.block} values ({kind.name})")
    if not kind.can_write:
        raise UnknownTypeError(f"{kind.name} cannot be written; this version only reads it")
    row = x.shape[-1]
    importance = weights if weights is not None and takes_weights(kind) else None
    if importance is not None:
        if importance.shape != (row,) or importance.dtype != torch.float32:
            raise ValueError(f"weights must be float32 [{row}], not {importance.dtype} {list(importance.shape)}")
        _refuse_not_finite(importance, kind, "NaN or infinity among the weights", 0)
    flat = x.reshape(-1)
    out = torch.empty(flat.numel() // kind.block * kind.nbytes, dtype=torch.uint8, device=x.device)
    for begin, stop in _pieces(flat.numel(), row, x.device):
        part = flat[begin:stop]
        _refuse_not_finite(part, kind, "NaN or infinity", begin)
        packed, bad = _run(part, kind, importance, row)
        if bad >= 0:
            raise QuantizationError("too large for this type", kind.name, begin + bad * kind.block)
        out[begin // kind.block * kind.nbytes : stop // kind.block * kind.nbytes] = packed
    return out.reshape(*x.shape[:-1], kind.row_bytes(row))


def dequantize(data: torch.Tensor, type: str) -> torch.Tensor:  # noqa: A002  (ggml's word)
    """Values of quantized rows on their device: uint8 [..., row_bytes] to float32 [..., n]."""
    kind = block_type(type)
    if data.dtype != torch.uint8 or data.ndim == 0 or data.shape[-1] % kind.nbytes:
        raise ValueError(f"{data.dtype} {list(data.shape)} is not rows of {kind.nbytes}-byte blocks ({kind.name})")
    if not kind.can_write:
        raise UnknownTypeError(f"{kind.name} is not known to this version's kernels")
    flat = data.reshape(-1)
    blocks = flat.numel() // kind.nbytes
    out = torch.empty(blocks * kind.block, dtype=torch.float32, device=data.device)
    module = kind.kernels()
    for begin, stop in _pieces(blocks, 1, data.device, kind.block):
        count = _rounded(stop - begin, module)
        values = torch.empty(count * kind.block, device=data.device)
        raw = _padded(flat[begin * kind.nbytes : stop * kind.nbytes], count * kind.nbytes)
        machine = TorchMachine(data.device)
        with on(machine):
            module.dequantize.build(Array(machine, raw, "U8"), Array(machine, values, "F32"), count)
        out[begin * kind.block : stop * kind.block] = values[: (stop - begin) * kind.block]
    return out.reshape(*data.shape[:-1], data.shape[-1] // kind.nbytes * kind.block)


def _pieces(count: int, unit: int, device: torch.device, values: int = 1) -> list[tuple[int, int]]:
    """(begin, stop) of parts of whole units that fit the device's memory; all but the last of whole batches."""
    units = max(1, piece_values(device) // (unit * values) // 16) * 16
    return [(begin, min(begin + units * unit, count)) for begin in range(0, count, units * unit)]


def piece_values(device: torch.device) -> int:
    """How many values are quantized at once: all, if memory allows; on the CPU what its cache holds."""
    if device.type != "cuda":
        return 2**20
    return min(2**27, torch.cuda.mem_get_info(device)[0] // (4 * _BYTES_PER_VALUE))


def _run(x: torch.Tensor, kind: BlockType, importance: torch.Tensor | None, row: int) -> tuple[torch.Tensor, int]:
    """Bytes of a part, and its first bad block or -1."""
    module = kind.kernels()
    blocks = x.numel() // kind.block
    count = _rounded(blocks, module)
    machine = TorchMachine(x.device)
    padded = _padded(x, count * kind.block)
    source = _array(machine, padded)
    packed = torch.empty(count * kind.nbytes, dtype=torch.uint8, device=x.device)
    out = Array(machine, packed, "U8")
    with on(machine):
        if importance is None:
            bad = module.quantize.build(source, out, count)
        else:
            extra = [Array(machine, importance.contiguous(), "F32")]
            if over := getattr(module, "SUMS_OVER", None):
                extra.append(_sums(machine, x, padded.numel(), row if over == "row" else kind.block))
            bad = module.quantize_weighted.build(source, *extra, out, count, row)
    first = bad if isinstance(bad, int) else int(bad.data)
    return packed[: blocks * kind.nbytes], first


def _sums(machine: TorchMachine, x: torch.Tensor, padded: int, length: int) -> Array:
    """Sums of squares of stretches of x, zeros for those of the padding."""
    sums = torch.zeros(-(-padded // length), device=x.device)
    array = Array(machine, sums, "F32")
    sums_of_squares.build(_array(machine, x.contiguous()), array, x.numel() // length, length)
    return array


def _rounded(blocks: int, module: ModuleType) -> int:
    batch = max(module.BATCH, getattr(module, "WEIGHTED_BATCH", 1), WIDTH)
    return -(-blocks // batch) * batch


def _array(machine: TorchMachine, flat: torch.Tensor) -> Array:
    stored = _STORED[flat.dtype]
    return Array(machine, flat.view(torch.int16) if stored == "BF16" else flat, stored)


def _padded(flat: torch.Tensor, length: int) -> torch.Tensor:
    if flat.numel() == length:
        return flat.contiguous()
    padded = torch.zeros(length, dtype=flat.dtype, device=flat.device)
    padded[: flat.numel()] = flat
    return padded


def _refuse_not_finite(x: torch.Tensor, kind: BlockType, what: str, begin: int) -> None:
    finite = torch.isfinite(x)
    if not bool(finite.all()):
        raise QuantizationError(what, kind.name, begin + int((~finite).nonzero()[0]))
