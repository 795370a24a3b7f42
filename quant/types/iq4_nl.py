"""IQ4_NL: 32 values in 18 bytes: float16 scale, 4-bit indices into a table (spec/quant.md, sections 2 and 7)."""

from __future__ import annotations

from quant.arithmetic import FirstBad, get_half, put_half, reciprocal
from quant.importance import place_importance, put_weights
from quant.iq4 import entry, nearest_index, table_scale
from quant.kernel import kernel
from quant.lanes import WIDTH, Memory, Value, batches, loop, position, room_per_lane, splat
from quant.pack import get_nibbles, put_nibbles
from quant.search import column, gather_columns

BATCH = WEIGHTED_BATCH = WIDTH
_NBYTES = 18


@kernel(memories=2)
def quantize(x: Memory, out: Memory, blocks: Value) -> Value:
    """x: [32 * blocks], blocks >= WIDTH; out: uint8 [18 * blocks]. Returns the first bad block or -1."""
    return _quantize(x, None, out, blocks, blocks)


@kernel(memories=3)
def quantize_weighted(x: Memory, importance: Memory, out: Memory, blocks: Value, row: Value) -> Value:
    """importance: [row], one per column."""
    return _quantize(x, importance, out, blocks, row)


def _quantize(x: Memory, importance: Memory | None, out: Memory, blocks: Value, row: Value) -> Value:
    bad = FirstBad()
    columns, weights, places, scales = room_per_lane(32), room_per_lane(32), room_per_lane(32), room_per_lane(1)
    for group in batches(blocks, WIDTH):
        gather_columns(x, group * 32, 32, columns)
        if importance is not None:
            place_importance(importance, group, WIDTH, 32, row, places)
            total = splat(0.0)
            for j in range(32):
                total = total + column(columns, j) * column(columns, j)
            put_weights(places, 32, total * (2.0 / 32), columns, weights)
        else:
            for j in range(32):
                weights.store(j * WIDTH, column(columns, j) * column(columns, j))
        scales.store(0, table_scale(columns, weights))
        for lane in loop(0, WIDTH):
            at, start = (group + lane) * _NBYTES, (group + lane) * 32
            bad.note(group + lane, put_half(out, at, scales[lane])[1])
            inverse = reciprocal(scales[lane])  # of the scale before rounding
            put_nibbles(out, at + 2, lambda j, s=start, i=inverse: nearest_index(x.load(s + j) * i))
    return bad.result()


@kernel(memories=2)
def dequantize(data: Memory, out: Memory, blocks: Value) -> Value:
    """D * table entry."""
    for block in loop(0, blocks):
        d = get_half(data, block * _NBYTES)
        indices = get_nibbles(data, block * _NBYTES + 2)
        for j in range(0, 32, WIDTH):
            out.store(block * 32 + j, entry(indices(j)) * d)
    return position(0)
