"""Extremes of a block of 32 values, lanes along the block."""

from __future__ import annotations

from quant.arithmetic import ONE, ZERO
from quant.kernel import inner
from quant.lanes import WIDTH, absolute, bits, highest, load, lowest, select, splat


@inner
def largest_magnitude(x, start):
    """Max |x| of x[start : start + 32]."""
    top = splat(ZERO)
    for j in range(0, 32, WIDTH):
        value = absolute(load(x, start + j))
        top = select(value > top, value, top)
    return highest(top)


@inner
def signed_extreme(x, start):
    """The first value of largest magnitude of x[start : start + 32], with its sign; +0 for zeros."""
    top = largest_magnitude(x, start)
    for j in range(0, 32, WIDTH):
        value = load(x, start + j)
        at = bits(absolute(value) == top)
        if at != 0:
            first = at & -at
            return -top if (bits(value < ZERO) & first) != 0 else top
    return top


@inner
def bounds(x, start):
    """(minimum, maximum) of x[start : start + 32]; of equal zeros the first one's sign, as a strict scan gives."""
    low = high = load(x, start)
    for j in range(WIDTH, 32, WIDTH):
        value = load(x, start + j)
        low = select(value < low, value, low)
        high = select(value > high, value, high)
    least, most = lowest(low), highest(high)
    if least == ZERO:
        for j in range(0, 32, WIDTH):
            value = load(x, start + j)
            at = bits(value == ZERO)
            if at != 0:
                first = at & -at
                least = -ZERO if (bits(ONE / value < ZERO) & first) != 0 else ZERO
                break
    return least, (least if most == ZERO and least == ZERO else most)
