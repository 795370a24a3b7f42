"""What Q4_K and Q5_K share: the search over all lanes' sub-blocks, and the quants from the stored scales."""

from __future__ import annotations

from quant.arithmetic import ZERO
from quant.kernel import inner
from quant.lanes import load, nearest, splat, store
from quant.search import gather_columns, mean_plus_magnitude, scale_and_minimum


@inner
def search_sub_blocks(x, start, top, first, step, steps, columns, weights, quants, scales, minimums, inverses, offsets):
    """Search A on WIDTH sub-blocks of 32 from x[start] on; the last four arrays, float32 [WIDTH], take the result.

    A minimum is stored with its sign turned, as the format has it (>= 0).
    """
    gather_columns(x, start, 32, columns)
    mean_plus_magnitude(columns, 32, weights)
    scale, low, inverse, offset = scale_and_minimum(columns, weights, quants, 32, top, first, step, steps)
    store(scales, 0, scale)
    store(minimums, 0, splat(ZERO) - low)
    store(inverses, 0, inverse)
    store(offsets, 0, offset)


@inner
def final_quants(x, at, sub, scales, minimums, inverses, offsets, top):
    """Quants of x[at : at + WIDTH] in sub-block `sub` from its decoded scale; the search's where that is 0."""
    if scales[sub] != ZERO:
        return nearest((load(x, at) + minimums[sub]) / scales[sub], ZERO, top)
    return nearest((load(x, at) - offsets[sub]) * inverses[sub], ZERO, top)
