"""From arrays of any shape to the kernels: checks, flat views, and the rest that a kernel's batch leaves over."""

from __future__ import annotations

import numpy as np

from quant.block import BlockType, takes_weights
from quant.errors import QuantizationError, UnknownTypeError
from quant.scan import first_not_finite

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
    flat = np.ascontiguousarray(x).reshape(-1)
    bad = first_not_finite(flat)
    if bad >= 0:
        raise QuantizationError("NaN or infinity", kind.name, bad)
    if weights is not None and takes_weights(kind):
        bad = _run_weighted(flat, kind, _checked_weights(weights, x.shape[-1], kind), out.reshape(-1))
    else:
        bad = _run(flat, kind, out.reshape(-1))
    if bad >= 0:
        raise QuantizationError("too large for this type", kind.name, bad * kind.block)
    return out


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
    bad = first_not_finite(np.ascontiguousarray(weights))
    if bad >= 0:
        raise QuantizationError("NaN or infinity among the weights", kind.name, bad)
    return np.ascontiguousarray(weights)


def _run(x: np.ndarray, kind: BlockType, out: np.ndarray) -> int:
    """The first bad block or -1."""
    module = kind.kernels()
    blocks = len(x) // kind.block
    if not blocks:
        return -1
    if blocks >= module.BATCH:
        return module.quantize(x, out, blocks)
    packed = np.empty(module.BATCH * kind.nbytes, np.uint8)
    bad = module.quantize(_padded(x, module.BATCH * kind.block), packed, module.BATCH)
    out[:] = packed[: len(out)]
    return bad


def _run_weighted(x: np.ndarray, kind: BlockType, weights: np.ndarray, out: np.ndarray) -> int:
    module, row = kind.kernels(), len(weights)
    blocks = len(x) // kind.block
    if not blocks:
        return -1
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
