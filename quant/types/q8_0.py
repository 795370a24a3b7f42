"""Q8_0: 32 values in 34 bytes: float16 scale, 32 signed bytes (spec/quant.md, sections 2 and 3)."""

from __future__ import annotations

from quant.arithmetic import INFINITY, ZERO, castable, put_half, reciprocal
from quant.extremes import largest_magnitude
from quant.kernel import kernel
from quant.lanes import F32, WIDTH, load, select, store, to_int, truncate

BATCH = 1
_HALF, _ONE, _TOP = F32(0.5), F32(1), F32(127)


@kernel
def quantize(x, out):
    """x: [32 * n]; out: uint8 [34 * n]. Returns the first block whose scale does not fit, or -1."""
    bad = -1
    for block in range(len(x) // 32):
        start, at = block * 32, block * 34
        scale = largest_magnitude(x, start) / _TOP
        if put_half(out, at, scale) == INFINITY and bad < 0:
            bad = block
        inverse = reciprocal(scale)  # of the scale before rounding, as the reference has it
        for j in range(0, 32, WIDTH):
            value = castable(load(x, start + j) * inverse)
            whole = truncate(value)
            rest = value - whole
            away = select(rest >= _HALF, _ONE, ZERO) - select(rest <= -_HALF, _ONE, ZERO)
            store(out, at + 2 + j, to_int(whole + away))
    return bad
