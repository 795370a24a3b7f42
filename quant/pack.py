"""Bit packing that several types share (spec/quant.md, section 2). Lanes run along the block here."""

from __future__ import annotations

from collections.abc import Callable

from quant.arithmetic import INFINITE_HALF, FirstBad, castable, get_half, put_half, to_half
from quant.lanes import (
    WIDTH,
    Memory,
    Operand,
    Value,
    absolute,
    all_lanes,
    bits,
    float_bits,
    from_bits,
    highest,
    lane_numbers,
    larger,
    loop,
    lowest,
    nearest_int,
    now,
    room_per_lane,
    select,
    smaller,
    splat,
    to_float,
    to_int,
    truncate,
    var,
    when,
)

Quants = Callable[[int], Value]  # from an element's place in the block to the int quants of WIDTH elements there


def put_nibbles(out: Memory, at: Value, quants: Quants) -> None:
    """32 quants of 4 bits in 16 bytes: byte j has element j below and element j + 16 above."""
    for j in range(0, 16, WIDTH):
        out.store(at + j, quants(j) | (quants(j + 16) << 4))


def put_five_bits(out: Memory, at: Value, quants: Quants) -> None:
    """32 quants of 5 bits: the fifth bits in 4 bytes, then the others as nibbles."""
    fifth: Operand = 0
    for j in range(0, 32, WIDTH):
        fifth = (bits(quants(j) > 15) << j) | fifth
    for i in range(4):
        assert isinstance(fifth, Value)
        out[at + i] = fifth >> (8 * i)
    put_nibbles(out, at + 4, lambda j: quants(j) & 15)


def get_nibbles(data: Memory, at: Value) -> Quants:
    """The inverse of put_nibbles, as int lanes."""

    def quants(j: int) -> Value:
        byte = data.load(at + j % 16)
        return byte & 15 if j < 16 else byte >> 4

    return quants


def get_five_bits(data: Memory, at: Value) -> Quants:
    """The inverse of put_five_bits."""
    low = get_nibbles(data, at + 4)

    def quants(j: int) -> Value:
        return low(j) | (_bit_lanes(data, at, j) << 4)

    return quants


def _bit_lanes(data: Memory, at: Value, j: int) -> Value:
    """Bits j ... j + WIDTH - 1 of the bytes from `at` on, one per lane."""
    word = data[at + j // 8]
    for i in range(1, WIDTH // 8):
        word = word | (data[at + j // 8 + i] << (8 * i))
    return (splat(word) >> lane_numbers()) & 1


# --- extremes of 32 values -----------------------------------------------------------------------------------------


def largest_magnitude(x: Memory, start: Value) -> Value:
    """Max |x| of x[start : start + 32]."""
    top = absolute(x.load(start))
    for j in range(WIDTH, 32, WIDTH):
        top = larger(absolute(x.load(start + j)), top)
    return highest(top)


def signed_extreme(x: Memory, start: Value) -> Value:
    """The first value of largest magnitude of x[start : start + 32], with its sign; +0 for zeros."""
    low = high = x.load(start)
    for j in range(WIDTH, 32, WIDTH):
        value = x.load(start + j)
        low, high = smaller(value, low), larger(value, high)
    least, most = lowest(low), highest(high)
    extreme = var(select(most > -least, most, least))
    for _ in when(most == -least, rare=True):
        extreme.set(select(first_is_negative(x, start, lambda v: absolute(v) == most), -most, absolute(most)))
    return now(extreme)


def first_is_negative(x: Memory, start: Value, holds: Callable[[Value], Value]) -> Value:
    """Of the values of the block for which a condition holds, whether the first is below zero (-0 is not)."""
    where: Operand = 0
    negative: Operand = 0
    for j in range(0, 32, WIDTH):
        value = x.load(start + j)
        where = (bits(holds(value)) << j) | where
        negative = (bits(value < 0) << j) | negative
    assert isinstance(where, Value)
    assert isinstance(negative, Value)
    return (where & -where & negative) != 0


def bounds(x: Memory, start: Value) -> tuple[Value, Value]:
    """(minimum, maximum) of x[start : start + 32]; of equal zeros the first one's sign, as a strict scan gives."""
    low = high = x.load(start)
    for j in range(WIDTH, 32, WIDTH):
        value = x.load(start + j)
        low, high = smaller(value, low), larger(value, high)
    least, most = var(lowest(low)), var(highest(high))
    for _ in when(least == 0, rare=True):
        where: Operand = 0
        negative: Operand = 0
        for j in range(0, 32, WIDTH):
            value = x.load(start + j)
            where = (bits(value == 0) << j) | where
            negative = (bits(1.0 / value < 0) << j) | negative
        assert isinstance(where, Value)
        least.set(select((where & -where & negative) != 0, -0.0, 0.0))
        most.set(select(most == 0, least, most))
    return now(least), now(most)


def truncated(value: Value, top: int) -> Value:
    """min(top, trunc(value)) as int lanes, with x86's result for what no int32 holds."""
    return to_int(truncate(smaller(castable(value), float(top))))


def put_halves(out: Memory, group: Value, nbytes: int, offset: int, values: Value, bad: FirstBad) -> None:
    """Store lane i of `values` as float16 at byte `offset` of block group + i; nbytes and offset are even."""
    halves = room_per_lane(1)
    half = to_half(values)
    halves.store(0, from_bits(half))
    words = out.viewed("BF16")  # 16 bits at a time
    for lane in range(WIDTH):
        words[(group + lane) * (nbytes // 2) + offset // 2] = float_bits(halves[lane])
    for _ in when(~all_lanes((half & 0x7FFF) < INFINITE_HALF), rare=True):
        for lane in loop(0, WIDTH):
            bad.note(group + lane, (float_bits(halves[lane]) & 0x7FFF) < INFINITE_HALF)


# --- 6-bit scales ----------------------------------------------------------------------------------------------------


def put_six_bit_scales(scales: Memory, minimums: Memory, first: int, out: Memory, at: Value) -> Value:
    """The head of a Q4_K or Q5_K super-block: d, dmin and eight 6-bit scales and minimums, 16 bytes.

    scales, minimums: those of the super-block from index `first` on; they are replaced by what the stored values decode
    to. Returns whether d and dmin fit in float16.
    """
    most_scale = most_minimum = splat(0.0)
    chosen = [scales[first + s] for s in range(8)], [minimums[first + s] for s in range(8)]
    most_scale, most_minimum = (_most(values) for values in chosen)
    inverse_scale, inverse_minimum = (select(m > 0, 63.0 / m, 0.0) for m in (most_scale, most_minimum))
    levels = [
        # The reference narrows to 8 bits before it limits to 63.
        [smaller(nearest_int(inverse * v) & 0xFF, 63) for v in values]
        for inverse, values in zip((inverse_scale, inverse_minimum), chosen, strict=True)
    ]
    return put_levels(most_scale / 63.0, most_minimum / 63.0, levels[0], levels[1], scales, minimums, first, out, at)


def put_levels(
    scale: Value, minimum: Value, ls: list[Value], lm: list[Value], scales: Memory, minimums: Memory, first: int,
    out: Memory, at: Value,
) -> Value:  # fmt: skip
    """Store d, dmin and the levels; leave in scales and minimums what they decode to. Whether d and dmin fit."""
    d, fits_d = put_half(out, at, scale)
    dmin, fits_dmin = put_half(out, at + 2, minimum)
    for s in range(4):
        out[at + 4 + s] = ls[s] | ((ls[s + 4] >> 4) << 6)
        out[at + 8 + s] = lm[s] | ((lm[s + 4] >> 4) << 6)
        out[at + 12 + s] = (ls[s + 4] & 15) | ((lm[s + 4] & 15) << 4)
    for s in range(8):
        scales[first + s] = d * to_float(ls[s])
        minimums[first + s] = dmin * to_float(lm[s])
    return fits_d & fits_dmin


def get_levels(data: Memory, at: Value) -> tuple[list[Value], list[Value]]:
    """The eight decoded scales d * ls and minimums dmin * lm of a Q4_K or Q5_K super-block."""
    d, dmin = get_half(data, at), get_half(data, at + 2)
    ls = [data[at + 4 + s] & 63 for s in range(4)]
    lm = [data[at + 8 + s] & 63 for s in range(4)]
    for s in range(4):
        ls.append((data[at + 12 + s] & 15) | ((data[at + 4 + s] >> 6) << 4))
        lm.append((data[at + 12 + s] >> 4) | ((data[at + 8 + s] >> 6) << 4))
    return [d * to_float(v) for v in ls], [dmin * to_float(v) for v in lm]


def _most(values: list[Value]) -> Value:
    most = larger(values[0], 0.0)
    for value in values[1:]:
        most = larger(value, most)
    return most
