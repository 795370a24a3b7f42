"""BF16: the upper half of a float32, rounded to nearest even (spec/quant.md, section 1)."""

from __future__ import annotations

import numpy as np

from quant.kernel import kernel
from quant.lanes import F32, WIDTH, absolute, bits, float_bits, load, store

BATCH = WIDTH
_OVERFLOW = F32(3.3961775292304957e38)  # from here on rounding gives infinity


@kernel
def quantize(x, out):
    """x: [n], n a multiple of WIDTH; out: uint8 [2 * n]. Returns the first value that does not fit, or -1."""
    halves = out.view(np.uint16)
    bad = -1
    for i in range(0, len(x), WIDTH):
        value = load(x, i)
        if bits(absolute(value) >= _OVERFLOW) != 0 and bad < 0:
            bad = i
        raw = float_bits(value)
        rounded = raw + np.int32(0x7FFF) + ((raw >> np.int32(16)) & np.int32(1))
        store(halves, i, rounded >> np.int32(16))
    return bad
