"""IQ4_XS: 256 values in 136 bytes: 8 sub-blocks of 32 as IQ4_NL, with 6-bit scales (spec/quant.md, sections 2 and 7)."""

from __future__ import annotations

from quant.arithmetic import FirstBad, get_half, put_half, reciprocal
from quant.importance import place_importance, put_weights
from quant.iq4 import entry, nearest_index, table_scale
from quant.kernel import kernel
from quant.lanes import (
    WIDTH,
    Memory,
    Value,
    batches,
    larger,
    loop,
    nearest_int,
    position,
    room_per_lane,
    smaller,
    to_float,
)
from quant.pack import get_nibbles, put_nibbles
from quant.search import column, first_extreme, gather_columns

BATCH = WEIGHTED_BATCH = WIDTH // 8
SUMS_OVER = "block"
_NBYTES, _SUBS = 136, 8


@kernel(memories=2)
def quantize(x: Memory, out: Memory, blocks: Value) -> Value:
    """x: [256 * blocks], blocks >= BATCH; out: uint8 [136 * blocks]. Returns the first bad block or -1."""
    return _quantize(x, None, None, out, blocks, blocks)


@kernel(memories=4)
def quantize_weighted(x: Memory, importance: Memory, squares: Memory, out: Memory, blocks: Value, row: Value) -> Value:
    """importance: [row], one per column; squares: sums of squares of the blocks."""
    return _quantize(x, importance, squares, out, blocks, row)


def _quantize(
    x: Memory, importance: Memory | None, squares: Memory | None, out: Memory, blocks: Value, row: Value
) -> Value:
    bad = FirstBad()
    columns, weights, places = room_per_lane(32), room_per_lane(32), room_per_lane(32)
    scales, spread = room_per_lane(1), room_per_lane(1)
    for batch in batches(blocks, BATCH):
        gather_columns(x, batch * 256, 32, columns)
        if importance is not None and squares is not None:
            place_importance(importance, batch, BATCH, 256, row, places)
            for block in range(BATCH):
                mean = squares[batch + block] * (2.0 / 256)
                for s in range(_SUBS):
                    spread[block * _SUBS + s] = mean
            put_weights(places, 32, spread.load(0), columns, weights)
        else:
            for j in range(32):
                weights.store(j * WIDTH, column(columns, j) * column(columns, j))
        scales.store(0, table_scale(columns, weights))
        for block in range(BATCH):
            bad.note(batch + block, _put(x, batch + block, scales, block * _SUBS, out))
    return bad.result()


def _put(x: Memory, block: Value, scales: Memory, first: int, out: Memory) -> Value:
    """One super-block from its sub-blocks' scales. Whether d fits."""
    at, start = block * _NBYTES, block * 256
    given = [scales[first + s] for s in range(_SUBS)]
    d = first_extreme(given) / -32.0
    _, fits = put_half(out, at, d)
    inverse = reciprocal(d)
    levels = [smaller(larger(nearest_int(inverse * v), -32), 31) for v in given]
    upper = (levels[0] + 32) >> 4
    for s in range(1, _SUBS):
        upper = upper | (((levels[s] + 32) >> 4) << (2 * s))
    out[at + 2], out[at + 3] = upper, upper >> 8
    for s in range(0, _SUBS, 2):
        out[at + 4 + s // 2] = ((levels[s] + 32) & 15) | (((levels[s + 1] + 32) & 15) << 4)
    for s in range(_SUBS):
        inner = reciprocal(d * to_float(levels[s]))  # of d before rounding
        put_nibbles(
            out, at + 8 + 16 * s, lambda j, s=s, i=inner: nearest_index(x.load(start + 32 * s + j) * i)
        )  # fmt: skip
    return fits


@kernel(memories=2)
def dequantize(data: Memory, out: Memory, blocks: Value) -> Value:
    """(d * (scale - 32)) * table entry."""
    for block in loop(0, blocks):
        at = block * _NBYTES
        d = get_half(data, at)
        upper = data[at + 2] | (data[at + 3] << 8)
        for s in range(_SUBS):
            low = data[at + 4 + s // 2]
            low = low & 15 if s % 2 == 0 else low >> 4
            scale = d * to_float((low | (((upper >> (2 * s)) & 3) << 4)) - 32)
            indices = get_nibbles(data, at + 8 + 16 * s)
            for j in range(0, 32, WIDTH):
                out.store(block * 256 + 32 * s + j, scale * entry(indices(j)))
    return position(0)
