"""F16: IEEE half precision, rounded to nearest even (spec/quant.md, section 1)."""

from __future__ import annotations

import numpy as np

from quant.kernel import kernel
from quant.lanes import F32, WIDTH, absolute, bits, float_bits, load, select, store

BATCH = WIDTH
_OVERFLOW = F32(65520)  # from here on rounding gives infinity
_SMALLEST_NORMAL = F32(2.0**-14)


@kernel
def quantize(x, out):
    """x: [n], n a multiple of WIDTH; out: uint8 [2 * n]. Returns the first value that does not fit, or -1."""
    halves = out.view(np.uint16)
    bad = -1
    for i in range(0, len(x), WIDTH):
        value = load(x, i)
        magnitude = absolute(value)
        if bits(magnitude >= _OVERFLOW) != 0 and bad < 0:
            bad = i
        raw = float_bits(magnitude)
        sign = (float_bits(value) >> np.int32(16)) & np.int32(0x8000)
        odd = (raw >> np.int32(13)) & np.int32(1)
        normal = (raw - np.int32(0x38000000) + np.int32(0xFFF) + odd) >> np.int32(13)
        # Adding 0.5 puts the unit of subnormals, 2^-24, at the end of the mantissa: the sum rounds to even.
        subnormal = float_bits(magnitude + F32(0.5)) - np.int32(0x3F000000)
        half = select(magnitude < _SMALLEST_NORMAL, subnormal, normal)
        store(halves, i, half | sign)
    return bad
