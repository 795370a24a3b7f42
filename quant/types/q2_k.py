"""Q2_K: 256 values in 84 bytes: 16 sub-blocks of 16 with 4-bit scales and minimums (spec/quant.md, sections 2, 4, 5)."""

from __future__ import annotations

from quant.arithmetic import FirstBad, get_half, put_half
from quant.importance import place_importance, put_weights
from quant.kernel import kernel
from quant.lanes import (
    WIDTH,
    Memory,
    Value,
    absolute,
    larger,
    loop,
    nearest,
    nearest_int,
    position,
    room,
    room_per_lane,
    select,
    splat,
    to_float,
    to_int,
)
from quant.search import (
    WEIGHTED,
    Candidates,
    column,
    gather_columns,
    positive_scales,
    round_unweighted,
    round_weighted,
    scale_and_minimum,
)

BATCH = WEIGHTED_BATCH = 1
SUMS_OVER = "block"
_NBYTES, _TOP, _LEVELS, _SUBS, _SUB = 84, 3, 15, 16, 16
_CANDIDATES = Candidates(-0.5, 0.1, 15)


@kernel(memories=2)
def quantize(x: Memory, out: Memory, blocks: Value) -> Value:
    """x: [256 * blocks]; out: uint8 [84 * blocks]. Returns the first block whose scales do not fit, or -1."""
    return _quantize(x, None, None, out, blocks, blocks)


@kernel(memories=4)
def quantize_weighted(x: Memory, importance: Memory, squares: Memory, out: Memory, blocks: Value, row: Value) -> Value:
    """importance: [row], one per column; squares: sums of squares of the blocks."""
    return _quantize(x, importance, squares, out, blocks, row)


def _quantize(
    x: Memory, importance: Memory | None, squares: Memory | None, out: Memory, blocks: Value, row: Value
) -> Value:
    bad, weighted = FirstBad(), importance is not None
    columns, weights, places = room_per_lane(_SUB), room_per_lane(_SUB), room(256)
    scales, minimums, inverses, offsets, sums = (room(_SUBS) for _ in range(5))
    for block in loop(0, blocks):
        at, start = block * _NBYTES, block * 256
        if importance is not None:
            place_importance(importance, block, 1, 256, row, places)
        mean = splat(squares[block] / 256.0) if squares is not None else splat(0.0)
        for group in range(0, _SUBS, WIDTH):
            gather_columns(x, start + group * _SUB, _SUB, columns)
            if weighted:
                put_weights(places, _SUB, mean, columns, weights, group * _SUB)
                total = splat(0.0)
                for j in range(_SUB):
                    total = total + column(weights, j)
                sums.store(group, total)
                found = scale_and_minimum(columns, weights, _SUB, _TOP, WEIGHTED, weighted=True)
            else:
                for j in range(_SUB):
                    weights.store(j * WIDTH, absolute(column(columns, j)))
                found = scale_and_minimum(columns, weights, _SUB, _TOP, _CANDIDATES, weighted=False, mad=True)
            scales.store(group, found.scale)
            minimums.store(group, splat(0.0) - found.minimum)
            inverses.store(group, found.inverse)
            offsets.store(group, found.offset)
        (d, ls), (dmin, lm) = _levels(scales, minimums, sums if weighted else None)
        d, fits_d = put_half(out, at + 80, d)
        dmin, fits_dmin = put_half(out, at + 82, dmin)
        bad.note(block, fits_d & fits_dmin)
        for s in range(_SUBS):
            byte = ((ls[s] & 0xFF) | (lm[s] << 4)) & 0xFF
            out[at + s] = byte
            scales[s], minimums[s] = d * to_float(byte & 15), dmin * to_float(byte >> 4)

        def quants(j: int, start: Value = start) -> Value:
            sub, value = j // _SUB, x.load(start + j)
            stored = nearest((value + minimums[sub]) / scales[sub], 0, _TOP)
            rounding = round_weighted if weighted else round_unweighted
            searched = rounding(splat(inverses[sub]) * (value - offsets[sub]), _TOP)
            return to_int(select(scales[sub] != 0, stored, searched))

        for half in (0, 128):
            for j in range(0, 32, WIDTH):
                a, b, c, e = (quants(half + j + 32 * i) for i in range(4))
                out.store(at + 16 + half // 4 + j, a | (b << 2) | (c << 4) | (e << 6))
    return bad.result()


def _levels(scales: Memory, minimums: Memory, weights: Memory | None) -> list[tuple[Value, list[Value]]]:
    """For scales and minimums: what the super-block stores for all, and 4-bit levels for each sub-block."""
    given = [[values[s] for s in range(_SUBS)] for values in (scales, minimums)]
    if weights is not None:
        importance = [weights[s] for s in range(_SUBS)]
        return positive_scales([(values, importance) for values in given], _LEVELS)
    return [_plain_levels(values) for values in given]


def _plain_levels(values: list[Value]) -> tuple[Value, list[Value]]:
    most = larger(values[0], 0.0)
    for value in values[1:]:
        most = larger(value, most)
    some = most > 0
    inverse = float(_LEVELS) / most
    return select(some, most / float(_LEVELS), 0.0), [select(some, nearest_int(inverse * v), 0) for v in values]


@kernel(memories=2)
def dequantize(data: Memory, out: Memory, blocks: Value) -> Value:
    """(d * scale) * q - dmin * minimum."""
    for block in loop(0, blocks):
        at = block * _NBYTES
        d, dmin = get_half(data, at + 80), get_half(data, at + 82)
        for element in range(0, 256, WIDTH):
            half, part, j = element // 128, element % 128 // 32, element % 32
            byte = data[at + element // _SUB]
            q = (data.load(at + 16 + half * 32 + j) >> (2 * part)) & 3
            scaled = (d * to_float(byte & 15)) * to_float(q)
            out.store(block * 256 + element, scaled - dmin * to_float(byte >> 4))
    return position(0)
