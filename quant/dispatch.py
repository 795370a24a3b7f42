"""From arrays of any shape to the kernels: checks, flat views, and the rest that a kernel's batch leaves over."""

from __future__ import annotations

import numpy as np

from quant.block import BlockType, takes_weights
from quant.errors import QuantizationError, UnknownTypeError
from quant.lanes import WIDTH
from quant.scan import any_not_finite, first_not_finite

_STRIP_VALUES = 2**16  # 256 kB of float32, which a core's cache holds
_INPUTS = (np.float32, np.float16, np.uint16)


def quantize(
    x: np.ndarray, kind: BlockType, weights: np.ndarray | None = None, out: np.ndarray | None = None
) -> np.ndarray:
    """See `quant.quantize`."""
    if x.dtype not in _INPUTS:
        raise TypeError(f"cannot quantize {x.dtype}: float32, float16 or bfloat16 bits as uint16 are expected")
    if x.ndim == 0 or x.shape[-1] % kind.block:
        raise ValueError(f"rows of shape {x.shape} are not whole blocks of {kind.block} values ({kind.name})")
    if not kind.can_write:
        raise UnknownTypeError(f"{kind.name} cannot be written; this version only reads it")
    shape = (*x.shape[:-1], kind.row_bytes(x.shape[-1]))
    if out is None:
        out = np.empty(shape, np.uint8)
    elif out.shape != shape or out.dtype != np.uint8 or not out.flags.c_contiguous:
        raise ValueError(f"out must be C-contiguous uint8 {shape}, not {out.dtype} {out.shape}")
    importance = _checked_weights(weights, x.shape[-1], kind) if weights is not None and takes_weights(kind) else None
    flat, packed = np.ascontiguousarray(x).reshape(-1), out.reshape(-1)
    if importance is None:
        _in_strips(flat, kind, packed)
    elif len(flat):
        _refuse_not_finite(flat, kind, "NaN or infinity")
        _refuse(_run_weighted(flat, kind, importance, packed), kind)
    return out


def _in_strips(x: np.ndarray, kind: BlockType, out: np.ndarray) -> None:
    """Check and quantize piece by piece, so that the second look finds the values in the cache."""
    module = kind.kernels()
    blocks = len(x) // kind.block
    if blocks < max(module.BATCH, WIDTH):
        _refuse_not_finite(x, kind, "NaN or infinity")
        _refuse(_run_few(x, kind, out), kind)
        return
    check, run = any_not_finite.raw((x,), 1), module.quantize.raw((x, out), 1)
    source, target, width = x.ctypes.data, out.ctypes.data, x.itemsize * kind.block
    step = _STRIP_VALUES // kind.block
    for first in range(0, blocks, step):
        first = min(first, blocks - step) if blocks >= step else 0  # noqa: PLW2901  (the last strip is a whole one)
        count = min(step, blocks)
        if check(source + first * width, count * kind.block):
            _refuse_not_finite(x, kind, "NaN or infinity")
        bad = run(source + first * width, target + first * kind.nbytes, count)
        _refuse(first + bad if bad >= 0 else -1, kind)


def _refuse_not_finite(x: np.ndarray, kind: BlockType, what: str) -> None:
    bad = first_not_finite(x)
    if bad >= 0:
        raise QuantizationError(what, kind.name, bad)


def _refuse(bad_block: int, kind: BlockType) -> None:
    if bad_block >= 0:
        raise QuantizationError("too large for this type", kind.name, bad_block * kind.block)


def dequantize(data: np.ndarray, kind: BlockType) -> np.ndarray:
    """See `quant.dequantize`."""
    if data.dtype != np.uint8 or data.ndim == 0 or data.shape[-1] % kind.nbytes:
        raise ValueError(f"{data.dtype} {data.shape} is not rows of {kind.nbytes}-byte blocks ({kind.name})")
    if not kind.can_write:
        raise UnknownTypeError(f"{kind.name} is not known to this version's kernels")
    flat = np.ascontiguousarray(data).reshape(-1)
    blocks = len(flat) // kind.nbytes
    module = kind.kernels()
    least = max(blocks, module.BATCH)
    out = np.empty(least * kind.block, np.float32)
    module.dequantize(flat if least == blocks else _padded(flat, least * kind.nbytes), out, least)
    return out[: blocks * kind.block].reshape(*data.shape[:-1], -1)


def _checked_weights(weights: np.ndarray, row: int, kind: BlockType) -> np.ndarray:
    if weights.shape != (row,) or weights.dtype != np.float32:
        raise ValueError(f"weights must be float32 [{row}], not {weights.dtype} {weights.shape}")
    weights = np.ascontiguousarray(weights)
    _refuse_not_finite(weights, kind, "NaN or infinity among the weights")
    return weights


def _run_few(x: np.ndarray, kind: BlockType, out: np.ndarray) -> int:
    """Fewer blocks than a batch: padded with zeros to one. The first bad block or -1."""
    module = kind.kernels()
    if not len(x):
        return -1
    least = max(module.BATCH, len(x) // kind.block)
    packed = np.empty(least * kind.nbytes, np.uint8)
    bad = module.quantize(_padded(x, least * kind.block), packed, least)
    out[:] = packed[: len(out)]
    return bad


def _run_weighted(x: np.ndarray, kind: BlockType, weights: np.ndarray, out: np.ndarray) -> int:
    module, row = kind.kernels(), len(weights)
    blocks = len(x) // kind.block
    least = max(blocks, module.WEIGHTED_BATCH)
    source = x if least == blocks else _padded(x, least * kind.block)
    packed = out if least == blocks else np.empty(least * kind.nbytes, np.uint8)
    extra: list[np.ndarray] = []
    over = getattr(module, "SUMS_OVER", None)
    if over is not None:
        from quant.importance import sums_of_squares

        length = row if over == "row" else kind.block
        sums = np.zeros(-(-len(source) // length), np.float32)
        sums_of_squares(x, sums, len(x) // length, length)
        extra.append(sums)
    bad = module.quantize_weighted(source, weights, *extra, packed, least, row)
    if packed is not out:
        out[:] = packed[: len(out)]
    return bad


def _padded(x: np.ndarray, length: int) -> np.ndarray:
    padded = np.zeros(length, x.dtype)
    padded[: len(x)] = x
    return padded
