"""What Q4_K and Q5_K share: the search over a batch of super-blocks, and the quants from the stored scales."""

from __future__ import annotations

from collections.abc import Callable

from quant.arithmetic import FirstBad
from quant.importance import place_importance, put_weights
from quant.lanes import (
    WIDTH,
    Memory,
    Value,
    absolute,
    batches,
    nearest,
    number,
    position,
    room_per_lane,
    select,
    splat,
    to_int,
)
from quant.pack import put_levels, put_six_bit_scales
from quant.search import (
    WEIGHTED,
    Candidates,
    column,
    gather_columns,
    positive_scales,
    rms,
    round_unweighted,
    round_weighted,
    scale_and_minimum,
)

BATCH = WIDTH // 8  # super-blocks whose sub-blocks fill the lanes
PutQuants = Callable[[Memory, Value, Callable[[int], Value]], None]


def quantize_affine(
    x: Memory, out: Memory, blocks: Value, nbytes: int, top: int, candidates: Candidates, put: PutQuants
) -> Value:
    """Q4_K, Q5_K without importance; blocks >= BATCH. Returns the first bad block or -1."""
    bad = FirstBad()
    columns, weights = room_per_lane(32), room_per_lane(32)
    scales, minimums, inverses, offsets = (room_per_lane(1) for _ in range(4))
    for batch in batches(blocks, BATCH):
        gather_columns(x, batch * 256, 32, columns)
        mean = rms(columns, 32)
        for j in range(32):
            weights.store(j * WIDTH, mean + absolute(column(columns, j)))
        found = scale_and_minimum(columns, weights, 32, top, candidates, weighted=False)
        scales.store(0, found.scale)
        minimums.store(0, splat(0.0) - found.minimum)
        inverses.store(0, found.inverse)
        offsets.store(0, found.offset)
        for block in range(BATCH):
            at = (batch + block) * nbytes
            bad.note(batch + block, put_six_bit_scales(scales, minimums, block * 8, out, at))
            put(
                out,
                at,
                _final(x, (batch + block) * 256, block * 8, scales, minimums, inverses, offsets, top, round_unweighted),
            )
    return bad.result()


def quantize_affine_weighted(
    x: Memory,
    importance: Memory,
    squares: Memory,
    out: Memory,
    blocks: Value,
    row: Value,
    nbytes: int,
    top: int,
    put: PutQuants,
) -> Value:
    """Q4_K, Q5_K with one importance per column. squares: sums of squares of the blocks; blocks >= BATCH."""
    bad = FirstBad()
    columns, weights, places = room_per_lane(32), room_per_lane(32), room_per_lane(32)
    scales, minimums, inverses, offsets, sums, spread = (room_per_lane(1) for _ in range(6))
    for batch in batches(blocks, BATCH):
        gather_columns(x, batch * 256, 32, columns)
        place_importance(importance, batch, BATCH, 256, row, places)
        for block in range(BATCH):
            mean = (number(2.0) * squares[batch + block]) / 256.0
            for s in range(8):
                spread[position(block * 8 + s)] = mean
        put_weights(places, 32, spread.load(0), columns, weights)
        total = splat(0.0)
        for j in range(32):
            total = total + column(weights, j)
        sums.store(0, total)
        found = scale_and_minimum(columns, weights, 32, top, WEIGHTED, weighted=True)
        scales.store(0, found.scale)
        minimums.store(0, splat(0.0) - found.minimum)
        inverses.store(0, found.inverse)
        offsets.store(0, found.offset)
        problems = [
            ([chosen[block * 8 + s] for s in range(8)], [sums[block * 8 + s] for s in range(8)])
            for block in range(BATCH)
            for chosen in (scales, minimums)
        ]
        solved = positive_scales(problems, 63)
        for block in range(BATCH):
            at, first = (batch + block) * nbytes, block * 8
            (d, ls), (dmin, lm) = solved[2 * block : 2 * block + 2]
            bad.note(batch + block, put_levels(d, dmin, ls, lm, scales, minimums, first, out, at))
            put(
                out, at,
                _final(x, (batch + block) * 256, first, scales, minimums, inverses, offsets, top, round_weighted),
            )  # fmt: skip
    return bad.result()


def _final(
    x: Memory, start: Value, first: int, scales: Memory, minimums: Memory, inverses: Memory, offsets: Memory,
    top: int, rounding: Callable[[Value, int], Value],
) -> Callable[[int], Value]:  # fmt: skip
    """Quants of WIDTH elements of a super-block from its decoded scales; the search's own where a scale is 0."""

    def quants(j: int) -> Value:
        sub = position(first + j // 32)
        scale = scales[sub]
        value = x.load(start + j)
        stored = nearest((value + minimums[sub]) / scale, 0, top)
        searched = rounding(splat(inverses[sub]) * (value - offsets[sub]), top)
        return to_int(select(scale != 0, stored, searched))

    return quants
