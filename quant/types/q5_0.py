"""Q5_0: 32 values in 22 bytes: float16 scale, 5-bit quants around 16 (spec/quant.md, sections 2 and 3)."""

from __future__ import annotations

from quant.arithmetic import INFINITY, put_half, reciprocal
from quant.extremes import signed_extreme
from quant.kernel import kernel
from quant.lanes import F32
from quant.pack import put_five_bits

BATCH = 1
_OFFSET, _TOP = F32(16.5), F32(31)


@kernel
def quantize(x, out):
    """x: [32 * n]; out: uint8 [22 * n]. Returns the first block whose scale does not fit, or -1."""
    bad = -1
    for block in range(len(x) // 32):
        start, at = block * 32, block * 22
        scale = signed_extreme(x, start) / F32(-16)
        if abs(put_half(out, at, scale)) == INFINITY and bad < 0:
            bad = block
        put_five_bits(x, start, F32(0), reciprocal(scale), _OFFSET, _TOP, out, at + 2)
    return bad
