"""Q5_1: 32 values in 24 bytes: float16 scale and minimum, 5-bit quants (spec/quant.md, sections 2, 3 and 5)."""

from __future__ import annotations

from quant.arithmetic import FirstBad, get_half, put_half, reciprocal
from quant.importance import put_row_weights
from quant.kernel import kernel
from quant.lanes import WIDTH, Memory, Value, batches, loop, position, room_per_lane, splat, to_float, to_int
from quant.pack import bounds, get_five_bits, put_five_bits, put_halves, truncated
from quant.search import WEIGHTED, gather_columns, round_weighted, scale_and_minimum

BATCH = WEIGHTED_BATCH = WIDTH
SUMS_OVER = "row"
_NBYTES, _TOP = 24, 31


@kernel(memories=2)
def quantize(x: Memory, out: Memory, blocks: Value) -> Value:
    """x: [32 * blocks], blocks >= WIDTH; out: uint8 [24 * blocks]. Returns the first bad block or -1."""
    bad = FirstBad()
    lows, highs, inverses = (room_per_lane(1) for _ in range(3))
    for group in batches(blocks, WIDTH):
        for lane in range(WIDTH):
            lows[lane], highs[lane] = bounds(x, (group + lane) * 32)
        scale = (highs.load(0) - lows.load(0)) / float(_TOP)
        put_halves(out, group, _NBYTES, 0, scale, bad)
        put_halves(out, group, _NBYTES, 2, lows.load(0), bad)
        inverses.store(0, reciprocal(scale))  # of the scale before rounding
        for lane in loop(0, WIDTH):
            start, low, inverse = (group + lane) * 32, lows[lane], inverses[lane]
            put_five_bits(
                out, (group + lane) * _NBYTES + 4,
                lambda j, s=start, m=low, i=inverse: truncated((x.load(s + j) - m) * i + 0.5, _TOP),
            )  # fmt: skip
    return bad.result()


@kernel(memories=4)
def quantize_weighted(x: Memory, importance: Memory, sums: Memory, out: Memory, blocks: Value, row: Value) -> Value:
    """importance: [row], one per column; sums: of squares of the rows; blocks >= WIDTH."""
    bad = FirstBad()
    columns, weights = room_per_lane(32), room_per_lane(32)
    scales, minimums, inverses, offsets = (room_per_lane(1) for _ in range(4))
    for group in batches(blocks, WIDTH):
        gather_columns(x, group * 32, 32, columns)
        put_row_weights(importance, sums, group, row, columns, weights)
        found = scale_and_minimum(columns, weights, 32, _TOP, WEIGHTED, weighted=True)
        for memory, value in zip(
            (scales, minimums, inverses, offsets),
            (found.scale, found.minimum, found.inverse, found.offset), strict=True,
        ):  # fmt: skip
            memory.store(0, value)
        for lane in loop(0, WIDTH):
            block = group + lane
            at = block * _NBYTES
            bad.note(block, put_half(out, at, scales[lane])[1] & put_half(out, at + 2, minimums[lane])[1])
            inverse, offset = splat(inverses[lane]), splat(offsets[lane])
            put_five_bits(
                out, at + 4,
                lambda j, b=block, i=inverse, o=offset: to_int(round_weighted(i * (x.load(b * 32 + j) - o), _TOP)),
            )  # fmt: skip
    return bad.result()


@kernel(memories=2)
def dequantize(data: Memory, out: Memory, blocks: Value) -> Value:
    """Q * d + m."""
    for block in loop(0, blocks):
        d, m = get_half(data, block * _NBYTES), get_half(data, block * _NBYTES + 2)
        quants = get_five_bits(data, block * _NBYTES + 4)
        for j in range(0, 32, WIDTH):
            out.store(block * 32 + j, to_float(quants(j)) * d + m)
    return position(0)
