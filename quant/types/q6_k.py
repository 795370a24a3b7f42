"""Q6_K: 256 values in 210 bytes: 16 sub-blocks of 16 with signed 8-bit scales (spec/quant.md, sections 2 and 6)."""

from __future__ import annotations

from quant.arithmetic import EPSILON, FirstBad, get_half, put_half
from quant.importance import place_importance
from quant.kernel import kernel
from quant.lanes import (
    WIDTH,
    Memory,
    Value,
    absolute,
    loop,
    nearest_int,
    nearest_within,
    position,
    room,
    room_per_lane,
    select,
    smaller,
    splat,
    to_float,
    to_int,
    when,
)
from quant.search import first_extreme, gather_columns, signed_scale

BATCH = WEIGHTED_BATCH = 1
_TOP, _NBYTES, _SUBS, _SUB = 32, 210, 16, 16


@kernel(memories=2)
def quantize(x: Memory, out: Memory, blocks: Value) -> Value:
    """x: [256 * blocks]; out: uint8 [210 * blocks]. Returns the first block whose scale does not fit, or -1."""
    return _quantize(x, None, out, blocks, blocks)


@kernel(memories=3)
def quantize_weighted(x: Memory, importance: Memory, out: Memory, blocks: Value, row: Value) -> Value:
    """importance: [row], one per column, which is the weight as it stands."""
    return _quantize(x, importance, out, blocks, row)


def _quantize(x: Memory, importance: Memory | None, out: Memory, blocks: Value, row: Value) -> Value:
    bad = FirstBad()
    columns, weights = room_per_lane(_SUB), room_per_lane(_SUB)
    scales, inverses, places = room(_SUBS), room(_SUBS), room(256)
    for block in loop(0, blocks):
        at = block * _NBYTES
        if importance is not None:
            place_importance(importance, block, 1, 256, row, places)
        for group in range(0, _SUBS, WIDTH):
            gather_columns(x, block * 256 + group * _SUB, _SUB, columns)
            if importance is not None:
                for j in range(_SUB):
                    weights.store(j * WIDTH, places.columns(group * _SUB + j, _SUB))
            found = signed_scale(columns, _SUB, _TOP, weights if importance is not None else None)
            scales.store(group, found.scale)
            inverses.store(group, found.inverse)
        extreme = first_extreme([scales[s] for s in range(_SUBS)])
        empty = absolute(extreme) < EPSILON
        for _ in when(empty, rare=True):
            for i in loop(0, _NBYTES):
                out[at + i] = 0
        for _ in when(~empty):
            bad.note(block, _put_scales(scales, extreme, out, at))
            _put_quants(x, block * 256, scales, inverses, out, at)
    return bad.result()


def _put_scales(scales: Memory, extreme: Value, out: Memory, at: Value) -> Value:
    """Store d and the 16 scales; `scales` becomes what they decode to. Whether d fits."""
    inverse = -128.0 / extreme
    d, fits = put_half(out, at + 208, 1.0 / inverse)
    for s in range(_SUBS):
        scale = (smaller(nearest_int(inverse * scales[s]), 127) << 24) >> 24  # narrowed to int8 as the reference does
        out[at + 192 + s] = scale
        scales[s] = d * to_float(scale)
    return fits


def _put_quants(x: Memory, start: Value, scales: Memory, inverses: Memory, out: Memory, at: Value) -> None:
    def quants(j: int) -> Value:
        # WIDTH elements lie in one sub-block. A value is at most 32 * 128 decoded scales large: nearest_within is exact.
        sub = j // _SUB
        value, scale, inverse = x.load(start + j), scales[sub], inverses[sub]
        stored = nearest_within(value / scale, -_TOP, _TOP - 1) + float(_TOP)
        searched = nearest_within(value * inverse, -_TOP, _TOP - 1) + float(_TOP)
        return to_int(select(scale != 0, stored, select(inverse != 0, searched, splat(0.0))))

    for half in (0, 128):
        for j in range(0, 32, WIDTH):
            a, b, c, d = (quants(half + j + 32 * i) for i in range(4))
            out.store(at + half // 2 + j, (a & 15) | ((c & 15) << 4))
            out.store(at + half // 2 + 32 + j, (b & 15) | ((d & 15) << 4))
            out.store(at + 128 + half // 4 + j, (a >> 4) | ((b >> 4) << 2) | ((c >> 4) << 4) | ((d >> 4) << 6))


@kernel(memories=2)
def dequantize(data: Memory, out: Memory, blocks: Value) -> Value:
    """(d * scale) * (q - 32)."""
    for block in loop(0, blocks):
        at = block * _NBYTES
        d = get_half(data, at + 208)
        for half in (0, 128):
            for part in range(4):
                for j in range(0, 32, WIDTH):
                    low = data.load(at + half // 2 + part % 2 * 32 + j)
                    low = low & 15 if part < 2 else low >> 4
                    q = (low | (((data.load(at + 128 + half // 4 + j) >> (2 * part)) & 3) << 4)) - 32
                    element = half + 32 * part + j
                    scale = (data[at + 192 + element // _SUB] << 24) >> 24
                    out.store(block * 256 + element, (d * to_float(scale)) * to_float(q))
    return position(0)
