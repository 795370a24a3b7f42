"""What IQ4_NL and IQ4_XS share: the table of 16 values, the nearest entry, the search (spec/quant.md, section 7)."""

from __future__ import annotations

from itertools import pairwise

from quant.arithmetic import EPSILON
from quant.lanes import Memory, Value, absolute, any_lane, loop, select, splat, to_float, var, when
from quant.search import column, first_extreme

TABLE = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
# u - a < b - u is u < (a + b) / 2: around these points float32 differences are exact; a tie goes up.
_MIDPOINTS = tuple((a + b) / 2 for a, b in pairwise(TABLE))


def nearest_entry(u: Value) -> Value:
    """The table's value nearest to u, as float."""
    entry = splat(float(TABLE[0]))
    for midpoint, value in zip(_MIDPOINTS, TABLE[1:], strict=True):
        entry = select(u >= midpoint, float(value), entry)
    return entry


def nearest_index(u: Value) -> Value:
    """Its index, as int lanes."""
    index = splat(0)
    for i, midpoint in enumerate(_MIDPOINTS):
        index = select(u >= midpoint, i + 1, index)
    return index


def entry(index: Value) -> Value:
    """The table's value at an index, as float."""
    value = splat(float(TABLE[0]))
    for i, other in enumerate(TABLE[1:]):
        value = select(index >= i + 1, float(other), value)
    return value


def table_scale(columns: Memory, weights: Memory) -> Value:
    """Scale of every lane's 32 values: x ~ scale * table entry; 0 where all magnitudes are below 1e-15."""
    extreme = first_extreme([column(columns, j) for j in range(32)])
    empty = absolute(extreme) < EPSILON
    extreme = select(empty, 1.0, extreme)

    def sums(inverse: Value) -> tuple[Value, Value]:
        xq, qq = splat(0.0), splat(0.0)
        for j in range(32):
            value = nearest_entry(inverse * column(columns, j))
            wv = column(weights, j) * value
            xq, qq = xq + wv * column(columns, j), qq + wv * value
        return xq, qq

    xq, qq = sums(1.0 / (-extreme / float(TABLE[0])))
    scale = var(select(qq > 0, xq / qq, 0.0))
    best = var(scale * xq)
    for t in loop(0, 15):
        xq, qq = sums(splat((to_float(t) - 7.0) + float(TABLE[0])) / extreme)
        better = (qq > 0) & (xq * xq > best * qq)
        for _ in when(any_lane(better)):
            scale.set(select(better, xq / qq, scale))
            best.set(select(better, scale * xq, best))
    return select(empty, 0.0, scale)
