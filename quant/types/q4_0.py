"""Q4_0: 32 values in 18 bytes: float16 scale, 4-bit quants around 8 (spec/quant.md, sections 2, 3, 5 and 6)."""

from __future__ import annotations

from quant.arithmetic import FirstBad, get_half, put_half, reciprocal
from quant.importance import put_row_weights
from quant.kernel import kernel
from quant.lanes import (
    WIDTH,
    Memory,
    Value,
    batches,
    loop,
    nearest_within,
    position,
    room_per_lane,
    select,
    to_float,
    to_int,
)
from quant.pack import get_nibbles, put_halves, put_nibbles, signed_extreme, truncated
from quant.search import gather_columns, signed_scale

BATCH = WEIGHTED_BATCH = WIDTH
SUMS_OVER = "row"
_NBYTES = 18


@kernel(memories=2)
def quantize(x: Memory, out: Memory, blocks: Value) -> Value:
    """x: [32 * blocks], blocks >= WIDTH; out: uint8 [18 * blocks]. Returns the first bad block or -1."""
    bad = FirstBad()
    extremes, inverses = room_per_lane(1), room_per_lane(1)
    for group in batches(blocks, WIDTH):
        for lane in range(WIDTH):
            extremes[lane] = signed_extreme(x, (group + lane) * 32)
        scale = extremes.load(0) / -8.0
        put_halves(out, group, _NBYTES, 0, scale, bad)
        inverses.store(0, reciprocal(scale))  # of the scale before rounding
        for lane in loop(0, WIDTH):
            start, inverse = (group + lane) * 32, inverses[lane]
            put_nibbles(
                out, (group + lane) * _NBYTES + 2,
                lambda j, s=start, i=inverse: truncated(x.load(s + j) * i + 8.5, 15),
            )  # fmt: skip
    return bad.result()


@kernel(memories=4)
def quantize_weighted(x: Memory, importance: Memory, sums: Memory, out: Memory, blocks: Value, row: Value) -> Value:
    """importance: [row], one per column; sums: of squares of the rows; blocks >= WIDTH."""
    bad = FirstBad()
    columns, weights, scales, inverses = room_per_lane(32), room_per_lane(32), room_per_lane(1), room_per_lane(1)
    for group in batches(blocks, WIDTH):
        gather_columns(x, group * 32, 32, columns)
        put_row_weights(importance, sums, group, row, columns, weights)
        found = signed_scale(columns, 32, 8, weights)
        scales.store(0, found.scale)
        inverses.store(0, found.inverse)
        for lane in loop(0, WIDTH):
            block = group + lane
            bad.note(block, put_half(out, block * _NBYTES, scales[lane])[1])
            inverse = inverses[lane]

            def quants(j: int, block: Value = block, inverse: Value = inverse) -> Value:
                q = nearest_within(x.load(block * 32 + j) * inverse, -8, 7) + 8.0
                return to_int(select(inverse != 0, q, 0.0 * q))

            put_nibbles(out, block * _NBYTES + 2, quants)
    return bad.result()


@kernel(memories=2)
def dequantize(data: Memory, out: Memory, blocks: Value) -> Value:
    """(q - 8) * d."""
    for block in loop(0, blocks):
        d = get_half(data, block * _NBYTES)
        quants = get_nibbles(data, block * _NBYTES + 2)
        for j in range(0, 32, WIDTH):
            out.store(block * 32 + j, to_float(quants(j) - 8) * d)
    return position(0)
