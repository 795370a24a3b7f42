"""Q4_0: 32 values in 18 bytes: float16 scale, 4-bit quants around 8 (spec/quant.md, sections 2 and 3)."""

from __future__ import annotations

import numpy as np

from quant.arithmetic import INFINITY, castable, put_half, reciprocal
from quant.extremes import signed_extreme
from quant.kernel import inner, kernel
from quant.lanes import F32, WIDTH, load, select, store, to_int

BATCH = 1
_OFFSET, _TOP = F32(8.5), F32(15)


@inner
def _quants(x, at, inverse):
    q = castable(load(x, at) * inverse + _OFFSET)
    return to_int(select(q > _TOP, _TOP, q))


@kernel
def quantize(x, out):
    """x: [32 * n]; out: uint8 [18 * n]. Returns the first block whose scale does not fit, or -1."""
    bad = -1
    for block in range(len(x) // 32):
        start, at = block * 32, block * 18
        scale = signed_extreme(x, start) / F32(-8)
        if abs(put_half(out, at, scale)) == INFINITY and bad < 0:
            bad = block
        inverse = reciprocal(scale)
        for j in range(0, 16, WIDTH):
            low = _quants(x, start + j, inverse)
            high = _quants(x, start + j + 16, inverse)
            store(out, at + 2 + j, low | (high << np.int32(4)))
    return bad
