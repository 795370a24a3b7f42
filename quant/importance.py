"""From importance to weights: w = importance * sqrt(s2 + x * x), s2 by type (spec/quant.md, section 5)."""

from __future__ import annotations

from quant.kernel import kernel
from quant.lanes import WIDTH, Memory, Value, loop, number, position, room_per_lane, square_root, to_float, var
from quant.search import column


@kernel(memories=2)
def row_means(x: Memory, means: Memory, rows: Value, row: Value) -> Value:
    """Mean square of every row of `row` values, summed in order."""
    for r in loop(0, rows):
        means[r] = sum_of_squares(x, r * row, row) / to_float(row)
    return position(0)


def sum_of_squares(x: Memory, start: Value, n: Value | int) -> Value:
    """Sum of x * x in order, a scalar."""
    total = var(number(0.0))
    for i in loop(0, n):
        total.set(total + x[start + i] * x[start + i])
    return Value(total.ir)


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
    importance: Memory, means: Memory, group: Value, row: Value, columns: Memory, weights: Memory
) -> None:
    """Weights of WIDTH blocks of 32, from block `group` on, where s2 is the mean square of a block's row."""
    places, spread = room_per_lane(32), room_per_lane(1)
    place_importance(importance, group, WIDTH, 32, row, places)
    for lane in loop(0, WIDTH):
        spread[lane] = means[(group + lane) * 32 // row]
    put_weights(places, 32, spread.load(0), columns, weights)
