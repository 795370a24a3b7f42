"""From importance to weights: w = importance * sqrt(s2 + x * x), s2 by type (spec/quant.md, section 5)."""

from __future__ import annotations

from quant.kernel import kernel
from quant.lanes import WIDTH, Memory, Value, loop, number, position, room_per_lane, splat, square_root, to_float, var
from quant.search import column


@kernel(memories=2)
def sums_of_squares(x: Memory, sums: Memory, count: Value, length: Value) -> Value:
    """Sum of x * x in order, of `count` stretches of `length` values; WIDTH stretches side by side where there are."""
    whole = count // WIDTH * WIDTH
    for group in loop(0, whole, WIDTH):
        totals = var(splat(0.0))
        for i in loop(0, length):
            value = x.columns(group * length + i, length)
            totals.set(totals + value * value)
        sums.store(group, totals)
    for one in loop(whole, count):
        total = var(number(0.0))
        for i in loop(0, length):
            total.set(total + x[one * length + i] * x[one * length + i])
        sums[one] = total
    return position(0)


def place_importance(importance: Memory, first: Value, count: int, size: int, row: Value, places: Memory) -> None:
    """The importance of the columns of `count` blocks of `size` values, from block `first` on, one after the other.

    importance: of the `row` columns of every row; the blocks may belong to several rows.
    """
    for b in loop(0, count):
        at = (first + b) * size % row
        for j in range(0, size, WIDTH):
            places.store(b * size + j, importance.load(at + j))


def put_weights(places: Memory, n: int, mean: Value, columns: Memory, weights: Memory, first: int = 0) -> None:
    """Weights of WIDTH sub-blocks of n values, whose importance begins at places[first]; `mean` is s2, per lane."""
    for j in range(n):
        x = column(columns, j)
        weights.store(j * WIDTH, places.columns(first + j, n) * square_root(mean + x * x))


def put_row_weights(
    importance: Memory, sums: Memory, group: Value, row: Value, columns: Memory, weights: Memory
) -> None:
    """Weights of WIDTH blocks of 32, from block `group` on, where s2 is the mean square of a block's row.

    sums: sums of squares of the rows.
    """
    places, spread = room_per_lane(32), room_per_lane(1)
    place_importance(importance, group, WIDTH, 32, row, places)
    for lane in loop(0, WIDTH):
        spread[lane] = sums[(group + lane) * 32 // row] / to_float(row)
    put_weights(places, 32, spread.load(0), columns, weights)
