"""Q3_K: 256 values in 110 bytes: 16 sub-blocks of 16 with 6-bit scales (spec/quant.md, sections 2 and 6)."""

from __future__ import annotations

from quant.arithmetic import EPSILON, FirstBad, get_half, put_half
from quant.importance import place_importance, put_weights
from quant.kernel import kernel
from quant.lanes import (
    WIDTH,
    Memory,
    Value,
    Variable,
    absolute,
    any_lane,
    batches,
    loop,
    nearest,
    nearest_within,
    now,
    number,
    position,
    room,
    room_per_lane,
    select,
    splat,
    to_float,
    to_int,
    var,
    when,
)
from quant.search import column, first_extreme, gather_columns, signed_scale

BATCH, WEIGHTED_BATCH = 1, 1
SUMS_OVER = "block"
_NBYTES, _TOP, _SUBS, _SUB = 110, 4, 16, 16


@kernel(memories=2)
def quantize(x: Memory, out: Memory, blocks: Value) -> Value:
    """x: [256 * blocks], blocks >= BATCH; out: uint8 [110 * blocks]. Returns the first bad block or -1."""
    bad = FirstBad()
    columns, levels, scales = ([room(256) for _ in range(BATCH)] for _ in range(3))
    for batch in batches(blocks, BATCH):
        for group in range(0, _SUBS, WIDTH):
            for b in range(BATCH):
                gather_columns(x, (batch + b) * 256 + group * _SUB, _SUB, columns[b])
            for b, scale in enumerate(_refined_scales(columns, levels, group * _SUB)):
                scales[b].store(group, scale)
        for b in range(BATCH):
            block = batch + b
            extreme = first_extreme([scales[b][s] for s in range(_SUBS)])
            some = extreme != 0
            inverse = -32.0 / extreme
            stored = [select(some, to_int(nearest(inverse * scales[b][s], -32, 31)) + 32, 0) for s in range(_SUBS)]
            d, fits = put_half(out, block * _NBYTES + 108, select(some, 1.0 / inverse, 0.0))
            bad.note(block, fits)
            _put(x, block * 256, d, stored, levels[b], out, block * _NBYTES)
    return bad.result()


class _Refinement:
    """make_q3_quants on the lanes' sub-blocks: levels are moved one by one while that lowers the error."""

    def __init__(self, columns: Memory) -> None:
        self.columns = columns
        extreme = first_extreme([column(columns, j) for j in range(_SUB)])
        self.empty = absolute(extreme) < EPSILON
        inverse = splat(-float(_TOP)) / select(self.empty, 1.0, extreme)
        self.levels = [var(nearest_within(inverse * column(columns, j), -_TOP, _TOP - 1)) for j in range(_SUB)]
        xq, qq = splat(0.0), splat(0.0)
        for j, level in enumerate(self.levels):
            x = column(columns, j)
            xq, qq = xq + ((x * x) * x) * level, qq + ((x * x) * level) * level
        self.xq, self.qq = var(xq), var(qq)

    def move(self, j: int, changed: Variable) -> None:
        """Try to move level j in every lane; tell where that helped."""
        x, level = column(self.columns, j), now(self.levels[j])
        w = x * x
        without_xq, without_qq = self.xq - (w * x) * level, self.qq - (w * level) * level
        # Where x * qq / xq is clearly nearest to the level that is there, nothing moves: no need to divide.
        stays = absolute(x * without_qq - level * without_xq) < 0.499 * without_xq
        for _ in when(any_lane((without_xq > 0) & ~stays)):
            moved = nearest((x * without_qq) / without_xq, -_TOP, _TOP - 1)
            new_xq, new_qq = without_xq + (w * x) * moved, without_qq + (w * moved) * moved
            better = (without_xq > 0) & (moved != level) & (new_qq > 0)
            better = better & ((new_xq * new_xq) * self.qq > (self.xq * self.xq) * new_qq)
            self.levels[j].set(select(better, moved, level))
            self.xq.set(select(better, new_xq, self.xq))
            self.qq.set(select(better, new_qq, self.qq))
            changed.set(changed | any_lane(better))


def _refined_scales(columns: list[Memory], levels: list[Memory], place: int) -> list[Value]:
    """Scales of several groups of lanes; their levels are left, + 4, from levels[place] on.

    The steps of one group wait for each other (there is a division in each), so several go side by side.
    """
    groups = [_Refinement(c) for c in columns]
    changed = var(position(1) == 1)
    for _ in loop(0, 5):
        for _ in when(changed):
            changed.set(position(1) == 0)
            for j in range(_SUB):
                for group in groups:
                    group.move(j, changed)
    for group, memory in zip(groups, levels, strict=True):
        for j, level in enumerate(group.levels):
            memory.store(place + j * WIDTH, select(group.empty, 0.0, level + float(_TOP)))
    return [select(g.empty, 0.0, select(g.qq > 0, g.xq / g.qq, 0.0)) for g in groups]


@kernel(memories=4)
def quantize_weighted(x: Memory, importance: Memory, squares: Memory, out: Memory, blocks: Value, row: Value) -> Value:
    """importance: [row], one per column; squares: sums of squares of the blocks."""
    bad = FirstBad()
    columns, weights, levels, places = room_per_lane(_SUB), room_per_lane(_SUB), room(256), room(256)
    scales, sums, spread, spread_weights = room(_SUBS), room(_SUBS), room_per_lane(_SUBS), room_per_lane(_SUBS)
    for block in loop(0, blocks):
        at, start = block * _NBYTES, block * 256
        place_importance(importance, block, 1, 256, row, places)
        mean = splat((number(2.0) * squares[block]) / 256.0)
        for group in range(0, _SUBS, WIDTH):
            gather_columns(x, start + group * _SUB, _SUB, columns)
            put_weights(places, _SUB, mean, columns, weights, group * _SUB)
            total = splat(0.0)
            for j in range(_SUB):
                total = total + column(weights, j)
            sums.store(group, total)
            found = signed_scale(columns, _SUB, _TOP, weights)
            scales.store(group, found.scale)
            for j in range(_SUB):
                q = nearest_within(found.inverse * column(columns, j), -_TOP, _TOP - 1) + float(_TOP)
                levels.store(group * _SUB + j * WIDTH, select(found.inverse != 0, q, 0.0))
        # The scales are searched as the values were; every lane does the same here.
        for s in range(_SUBS):
            spread.store(s * WIDTH, splat(scales[s]))
            spread_weights.store(s * WIDTH, splat(sums[s]))
        found = signed_scale(spread, _SUBS, 32, spread_weights)
        stored = []
        for s in range(_SUBS):
            level = nearest_within(found.inverse * column(spread, s), -32, 31) + 32.0
            spread.store(s * WIDTH, select(found.inverse != 0, level, 0.0))
            stored.append(to_int(spread[s * WIDTH]))
        spread_weights.store(0, found.scale)
        d, fits = put_half(out, at + 108, spread_weights[0])
        bad.note(block, fits)
        _put(x, start, d, stored, levels, out, at)
    return bad.result()


def _put(x: Memory, start: Value, d: Value, stored: list[Value], levels: Memory, out: Memory, at: Value) -> None:
    """Scales, high bits and low bits. levels: the search's quants, for sub-blocks whose scale is 0.

    Values are at most 32 stored scales large, so that their quotients stay where nearest_within is exact.
    """
    for s in range(8):
        out[at + 96 + s] = (stored[s] & 15) | ((stored[s + 8] & 15) << 4)
    for s in range(4):
        upper = stored[s] >> 4
        for i in range(1, 4):
            upper = upper | ((stored[s + 4 * i] >> 4) << (2 * i))
        out[at + 104 + s] = upper
    decoded = [d * to_float(v - 32) for v in stored]

    def quants(j: int) -> Value:
        sub = j // _SUB
        new = nearest_within(x.load(start + j) / decoded[sub], -_TOP, _TOP - 1) + float(_TOP)
        group, lane = sub // WIDTH * WIDTH, sub % WIDTH
        old = levels.columns(group * _SUB + lane + j % _SUB * WIDTH, WIDTH)
        return to_int(select(decoded[sub] != 0, new, old))

    for j in range(0, 32, WIDTH):
        parts = [quants(32 * part + j) for part in range(8)]
        mask = parts[0] >> 2
        for part in range(1, 8):
            mask = mask | ((parts[part] >> 2) << part)
        out.store(at + j, mask)
        for half in range(2):
            a, b, c, e = (parts[4 * half + i] & 3 for i in range(4))
            out.store(at + 32 + 32 * half + j, a | (b << 2) | (c << 4) | (e << 6))


@kernel(memories=2)
def dequantize(data: Memory, out: Memory, blocks: Value) -> Value:
    """(d * (scale - 32)) * (q - 4)."""
    for block in loop(0, blocks):
        at = block * _NBYTES
        d = get_half(data, at + 108)
        for element in range(0, 256, WIDTH):
            half, part, j, sub = element // 128, element % 128 // 32, element % 32, element // _SUB
            low = data[at + 96 + sub % 8]
            low = low & 15 if sub < 8 else low >> 4
            scale = (low | (((data[at + 104 + sub % 4] >> (2 * (sub // 4))) & 3) << 4)) - 32
            q = (data.load(at + 32 + half * 32 + j) >> (2 * part)) & 3
            q = q | (((data.load(at + j) >> (element // 32)) & 1) << 2)
            out.store(block * 256 + element, (d * to_float(scale)) * to_float(q - 4))
    return position(0)
