"""The four plain types of 32 values: Q4_0 and Q5_0 around zero, Q4_1 and Q5_1 above a minimum (spec/quant.md, 3, 5, 6).

They differ in the bits of a quant and in whether a minimum is stored; each type's file says which it is.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from quant.arithmetic import FirstBad, get_half, put_half, reciprocal
from quant.importance import put_row_weights
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
    splat,
    to_float,
    to_int,
)
from quant.pack import Quants, bounds, put_halves, signed_extreme, truncated
from quant.search import WEIGHTED, gather_columns, round_weighted, scale_and_minimum, signed_scale

PutQuants = Callable[[Memory, Value, Quants], None]
GetQuants = Callable[[Memory, Value], Quants]


@dataclass(frozen=True)
class AroundZero:
    """x ~ d * (q - zero): float16 d, then the quants."""

    nbytes: int
    zero: int
    put: PutQuants
    get: GetQuants

    def quantize(self, x: Memory, out: Memory, blocks: Value) -> Value:
        """At least WIDTH blocks. Returns the first bad one or -1."""
        bad = FirstBad()
        extremes, inverses = room_per_lane(1), room_per_lane(1)
        for group in batches(blocks, WIDTH):
            for lane in range(WIDTH):
                extremes[lane] = signed_extreme(x, (group + lane) * 32)
            scale = extremes.load(0) / -float(self.zero)
            put_halves(out, group, self.nbytes, 0, scale, bad)
            inverses.store(0, reciprocal(scale))  # of the scale before rounding
            for lane in loop(0, WIDTH):
                start, inverse = (group + lane) * 32, inverses[lane]

                def quants(j: int, start: Value = start, inverse: Value = inverse) -> Value:
                    return truncated(x.load(start + j) * inverse + (self.zero + 0.5), 2 * self.zero - 1)

                self.put(out, (group + lane) * self.nbytes + 2, quants)
        return bad.result()

    def quantize_weighted(
        self, x: Memory, importance: Memory, sums: Memory, out: Memory, blocks: Value, row: Value
    ) -> Value:
        """importance: [row], one per column; sums: of squares of the rows; blocks >= WIDTH."""
        bad = FirstBad()
        columns, weights, scales, inverses = room_per_lane(32), room_per_lane(32), room_per_lane(1), room_per_lane(1)
        for group in batches(blocks, WIDTH):
            gather_columns(x, group * 32, 32, columns)
            put_row_weights(importance, sums, group, row, columns, weights)
            found = signed_scale(columns, 32, self.zero, weights)
            scales.store(0, found.scale)
            inverses.store(0, found.inverse)
            for lane in loop(0, WIDTH):
                block, inverse = group + lane, inverses[lane]
                bad.note(block, put_half(out, block * self.nbytes, scales[lane])[1])

                def quants(j: int, block: Value = block, inverse: Value = inverse) -> Value:
                    q = nearest_within(x.load(block * 32 + j) * inverse, -self.zero, self.zero - 1) + float(self.zero)
                    return to_int(select(inverse != 0, q, splat(0.0)))  # an empty block has quants of 0, not of zero

                self.put(out, block * self.nbytes + 2, quants)
        return bad.result()

    def dequantize(self, data: Memory, out: Memory, blocks: Value) -> Value:
        """(q - zero) * d."""
        for block in loop(0, blocks):
            d = get_half(data, block * self.nbytes)
            quants = self.get(data, block * self.nbytes + 2)
            for j in range(0, 32, WIDTH):
                out.store(block * 32 + j, to_float(quants(j) - self.zero) * d)
        return position(0)


@dataclass(frozen=True)
class AboveMinimum:
    """x ~ d * q + m: float16 d and m, then the quants 0 ... top."""

    nbytes: int
    top: int
    put: PutQuants
    get: GetQuants

    def quantize(self, x: Memory, out: Memory, blocks: Value) -> Value:
        """At least WIDTH blocks. Returns the first bad one or -1."""
        bad = FirstBad()
        lows, highs, inverses = (room_per_lane(1) for _ in range(3))
        for group in batches(blocks, WIDTH):
            for lane in range(WIDTH):
                lows[lane], highs[lane] = bounds(x, (group + lane) * 32)
            scale = (highs.load(0) - lows.load(0)) / float(self.top)
            put_halves(out, group, self.nbytes, 0, scale, bad)
            put_halves(out, group, self.nbytes, 2, lows.load(0), bad)
            inverses.store(0, reciprocal(scale))  # of the scale before rounding
            for lane in loop(0, WIDTH):
                start, low, inverse = (group + lane) * 32, lows[lane], inverses[lane]

                def quants(j: int, start: Value = start, low: Value = low, inverse: Value = inverse) -> Value:
                    return truncated((x.load(start + j) - low) * inverse + 0.5, self.top)

                self.put(out, (group + lane) * self.nbytes + 4, quants)
        return bad.result()

    def quantize_weighted(
        self, x: Memory, importance: Memory, sums: Memory, out: Memory, blocks: Value, row: Value
    ) -> Value:
        """importance: [row], one per column; sums: of squares of the rows; blocks >= WIDTH."""
        bad = FirstBad()
        columns, weights = room_per_lane(32), room_per_lane(32)
        scales, minimums, inverses, offsets = (room_per_lane(1) for _ in range(4))
        for group in batches(blocks, WIDTH):
            gather_columns(x, group * 32, 32, columns)
            put_row_weights(importance, sums, group, row, columns, weights)
            found = scale_and_minimum(columns, weights, 32, self.top, WEIGHTED, weighted=True)
            for memory, value in (
                (scales, found.scale), (minimums, found.minimum), (inverses, found.inverse), (offsets, found.offset),
            ):  # fmt: skip
                memory.store(0, value)
            for lane in loop(0, WIDTH):
                block, at = group + lane, (group + lane) * self.nbytes
                bad.note(block, put_half(out, at, scales[lane])[1] & put_half(out, at + 2, minimums[lane])[1])
                inverse, offset = splat(inverses[lane]), splat(offsets[lane])

                def quants(j: int, block: Value = block, inverse: Value = inverse, offset: Value = offset) -> Value:
                    return to_int(round_weighted(inverse * (x.load(block * 32 + j) - offset), self.top))

                self.put(out, at + 4, quants)
        return bad.result()

    def dequantize(self, data: Memory, out: Memory, blocks: Value) -> Value:
        """Values q * d + m."""
        for block in loop(0, blocks):
            d, m = get_half(data, block * self.nbytes), get_half(data, block * self.nbytes + 2)
            quants = self.get(data, block * self.nbytes + 4)
            for j in range(0, 32, WIDTH):
                out.store(block * 32 + j, to_float(quants(j)) * d + m)
        return position(0)
