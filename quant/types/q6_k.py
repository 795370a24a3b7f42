"""Q6_K: 256 values in 210 bytes: 16 sub-blocks of 16 with signed 8-bit scales (spec/quant.md, sections 2 and 6)."""

from __future__ import annotations

import numpy as np

from quant.arithmetic import EPSILON, INFINITY, ONE, ZERO, nearest_int, put_half
from quant.kernel import inner, kernel
from quant.lanes import F32, WIDTH, load, nearest, store, to_int
from quant.search import gather_columns, scratch, signed_scale

BATCH = 1
_TOP = F32(32)
_SUB_BLOCKS, _SUB_BLOCK = 16, 16
_INT15 = np.int32(15)


@inner
def _put_scales(scales, out, at):
    """Store d and the 16 scales at byte 192; `scales` becomes what they decode to. False where d does not fit."""
    extreme = ZERO
    for s in range(_SUB_BLOCKS):
        if abs(scales[s]) > abs(extreme):
            extreme = scales[s]
    if abs(extreme) < EPSILON:
        return True, True
    inverse = F32(-128) / extreme
    d = put_half(out, at + 208, ONE / inverse)
    for s in range(_SUB_BLOCKS):
        scale = np.int8(min(127, nearest_int(inverse * scales[s])))
        out[at + 192 + s] = np.uint8(scale)
        scales[s] = d * F32(scale)
    return False, abs(d) != INFINITY


@inner
def _quants(x, start, j, scales, inverses):
    """Quants 0 ... 63 of x[start + j : ... + WIDTH], as int lanes."""
    # A vector of 16 covers one sub-block, one of 8 half of it.
    sub = j // _SUB_BLOCK
    if scales[sub] != ZERO:
        return to_int(nearest(load(x, start + j) / scales[sub], -_TOP, _TOP - ONE) + _TOP)
    if inverses[sub] != ZERO:
        return to_int(nearest(load(x, start + j) * inverses[sub], -_TOP, _TOP - ONE) + _TOP)
    return to_int(load(x, start + j) * ZERO)


@kernel
def quantize(x, out):
    """x: [256 * n]; out: uint8 [210 * n]. Returns the first block whose scale does not fit, or -1."""
    bad = -1
    columns = scratch(_SUB_BLOCK)
    scales, inverses = np.empty(_SUB_BLOCKS, np.float32), np.empty(_SUB_BLOCKS, np.float32)
    for block in range(len(x) // 256):
        start, at = block * 256, block * 210
        for group in range(0, _SUB_BLOCKS, WIDTH):
            gather_columns(x, start + group * _SUB_BLOCK, _SUB_BLOCK, columns)
            scale, inverse = signed_scale(columns, _SUB_BLOCK, _TOP)
            store(scales, group, scale)
            store(inverses, group, inverse)
        empty, fits = _put_scales(scales, out, at)
        if empty:
            out[at : at + 210] = 0
            continue
        if not fits and bad < 0:
            bad = block
        for half in range(0, 256, 128):
            for j in range(0, 32, WIDTH):
                a = _quants(x, start, half + j, scales, inverses)
                b = _quants(x, start, half + j + 32, scales, inverses)
                c = _quants(x, start, half + j + 64, scales, inverses)
                d = _quants(x, start, half + j + 96, scales, inverses)
                nibble, two, four, six = np.int32(4), np.int32(2), np.int32(4), np.int32(6)
                store(out, at + half // 2 + j, (a & _INT15) | ((c & _INT15) << nibble))
                store(out, at + half // 2 + 32 + j, (b & _INT15) | ((d & _INT15) << nibble))
                upper = (a >> four) | ((b >> four) << two) | ((c >> four) << four) | ((d >> four) << six)
                store(out, at + 128 + half // 4 + j, upper)
    return bad
