"""Q5_1: 32 values in 24 bytes: float16 scale and minimum, 5-bit quants (spec/quant.md, sections 2 and 3)."""

from __future__ import annotations

from quant.arithmetic import INFINITY, put_half, reciprocal
from quant.extremes import bounds
from quant.kernel import kernel
from quant.lanes import F32
from quant.pack import put_five_bits

BATCH = 1
_OFFSET, _TOP = F32(0.5), F32(31)


@kernel
def quantize(x, out):
    """x: [32 * n]; out: uint8 [24 * n]. Returns the first block whose scale or minimum does not fit, or -1."""
    bad = -1
    for block in range(len(x) // 32):
        start, at = block * 32, block * 24
        low, high = bounds(x, start)
        scale = (high - low) / _TOP
        stored = put_half(out, at, scale), put_half(out, at + 2, low)
        if (abs(stored[0]) == INFINITY or abs(stored[1]) == INFINITY) and bad < 0:
            bad = block
        put_five_bits(x, start, low, reciprocal(scale), _OFFSET, _TOP, out, at + 4)
    return bad
