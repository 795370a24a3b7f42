"""From arrays of any shape to the kernels: checks, flat views, and the rest that a kernel's batch leaves over."""

from __future__ import annotations

import numpy as np

from quant.block import BlockType
from quant.errors import QuantizationError, UnknownTypeError
from quant.scan import first_not_finite

_INPUTS = (np.float32, np.float16, np.uint16)


def quantize(x: np.ndarray, kind: BlockType, out: np.ndarray | None = None) -> np.ndarray:
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
    bits = flat.view(np.int16) if flat.dtype == np.float16 else flat  # how kernels know float16
    _run(bits, kind, out.reshape(-1))
    return out


def _run(x: np.ndarray, kind: BlockType, out: np.ndarray) -> None:
    """Whole batches at once; what is left over is padded with zeros to one batch."""
    module = kind.kernels()
    blocks = len(x) // kind.block
    whole = blocks - blocks % module.BATCH
    bad = module.quantize(x[: whole * kind.block], out[: whole * kind.nbytes])
    if whole < blocks:
        rest = np.zeros(module.BATCH * kind.block, x.dtype)
        rest[: len(x) - whole * kind.block] = x[whole * kind.block :]
        packed = np.empty(module.BATCH * kind.nbytes, np.uint8)
        bad_rest = module.quantize(rest, packed)
        out[whole * kind.nbytes :] = packed[: (blocks - whole) * kind.nbytes]
        if bad < 0 <= bad_rest:
            bad = whole + bad_rest
    if bad >= 0:
        raise QuantizationError("too large for this type", kind.name, int(bad) * kind.block)
