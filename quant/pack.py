"""Bit packing that several types share (spec/quant.md, section 2)."""

from __future__ import annotations

import numpy as np

from quant.arithmetic import INFINITY, ZERO, castable, nearest_int, put_half
from quant.kernel import inner
from quant.lanes import F32, WIDTH, bits, load, select, store, to_int, truncate


@inner
def _five_bit_quants(x, at, low, inverse, offset, top):
    q = truncate(castable((load(x, at) - low) * inverse + offset))
    return select(q > top, top, q)


@inner
def put_five_bits(x, start, low, inverse, offset, top, out, at):
    """Quantize 32 values to min(top, trunc((x - low) * inverse + offset)): fifth bits in 4 bytes, then 16 of nibbles."""
    fifth = 0
    half = F32(16)
    for j in range(0, 16, WIDTH):
        a = _five_bit_quants(x, start + j, low, inverse, offset, top)
        b = _five_bit_quants(x, start + j + 16, low, inverse, offset, top)
        fifth |= (bits(a >= half) << j) | (bits(b >= half) << (j + 16))
        a = to_int(select(a >= half, a - half, a))
        b = to_int(select(b >= half, b - half, b))
        store(out, at + 4 + j, a | (b << np.int32(4)))
    for i in range(4):
        out[at + i] = (fifth >> (8 * i)) & 0xFF


@inner
def put_six_bit_scales(scales, minimums, first, out, at, levels):
    """The head of a Q4_K or Q5_K super-block: d, dmin and eight 6-bit scales and minimums in 16 bytes.

    scales, minimums: float32, those of the super-block from index `first` on; they are replaced by what the stored
    values decode to. Returns False where d or dmin does not fit in float16.
    """
    most_scale, most_minimum = ZERO, ZERO
    for s in range(8):
        most_scale = max(most_scale, scales[first + s])
        most_minimum = max(most_minimum, minimums[first + s])
    inverse_scale = levels / most_scale if most_scale > ZERO else ZERO
    inverse_minimum = levels / most_minimum if most_minimum > ZERO else ZERO
    d = put_half(out, at, most_scale / levels)
    dmin = put_half(out, at + 2, most_minimum / levels)
    for s in range(8):
        # The reference narrows to 8 bits before it limits to 63.
        scale = min(63, nearest_int(inverse_scale * scales[first + s]) & 0xFF)
        minimum = min(63, nearest_int(inverse_minimum * minimums[first + s]) & 0xFF)
        if s < 4:
            out[at + 4 + s] = scale
            out[at + 8 + s] = minimum
        else:
            out[at + 8 + s] = (scale & 0xF) | ((minimum & 0xF) << 4)
            out[at + s] |= (scale >> 4) << 6
            out[at + 4 + s] |= (minimum >> 4) << 6
        scales[first + s] = d * F32(scale)
        minimums[first + s] = dmin * F32(minimum)
    return d != INFINITY and dmin != INFINITY
