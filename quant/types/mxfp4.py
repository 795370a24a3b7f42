"""MXFP4: 32 values in 17 bytes: a power of two, 4-bit floats (spec/quant.md, sections 2 and 3)."""

from __future__ import annotations

from quant.arithmetic import FirstBad
from quant.kernel import kernel
from quant.lanes import (
    WIDTH,
    Memory,
    Value,
    absolute,
    float_bits,
    from_bits,
    loop,
    number,
    position,
    select,
    splat,
    to_float,
)
from quant.pack import get_nibbles, largest_magnitude, put_nibbles

BATCH = 1
_NBYTES = 17
_TABLE = (0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12)


@kernel(memories=2)
def quantize(x: Memory, out: Memory, blocks: Value) -> Value:
    """x: [32 * blocks]; out: uint8 [17 * blocks]. Returns -1: every finite block fits."""
    bad = FirstBad()
    for block in loop(0, blocks):
        start, at = block * 32, block * _NBYTES
        top = largest_magnitude(x, start)
        exponent = select(top > 0, (_floor_log2(top) - 2 + 127) & 0xFF, 0)
        out[at] = exponent
        scale = _power(exponent)
        put_nibbles(out, at + 1, lambda j, s=start, d=scale: _nearest_index(x.load(s + j), d))
    return bad.result()


def _nearest_index(x: Value, scale: Value) -> Value:
    """The lowest index of the table whose value times scale is nearest to x."""
    best, index = absolute(0.0 * scale - x), splat(0)
    for i, value in enumerate(_TABLE[1:], 1):
        error = absolute(float(value) * scale - x)
        closer = error < best
        best, index = select(closer, error, best), select(closer, i, index)
    return index


def _power(exponent: Value) -> Value:
    """2^(exponent - 128), of an exponent of 8 bits, as float32."""
    return from_bits(select(exponent < 2, number(0x00200000) << exponent, (exponent - 1) << 23))


def _floor_log2(x: Value) -> Value:
    """floor(log2f(x)) for x > 0, as int32: the C library's float32 result, which rounds up just below powers of two."""
    tiny = x < 2.0**-126
    scaled = select(tiny, x * 2.0**32, x)
    raw = float_bits(scaled)
    exponent = (raw >> 23) - 127 - select(tiny, 32, 0)
    # With x = 2^(e + 1) * (1 - r): log2 x = e + 1 - r / ln 2 for the tiny r that matter.
    below = to_float(0x800000 - (raw & 0x7FFFFF)) * 2.0**-24
    next_ = to_float(exponent + 1)
    return select(next_ - below * 1.4426950408889634 == next_, exponent + 1, exponent)


@kernel(memories=2)
def dequantize(data: Memory, out: Memory, blocks: Value) -> Value:
    """Table value * 2^(e - 128)."""
    for block in loop(0, blocks):
        scale = _power(data[block * _NBYTES])
        indices = get_nibbles(data, block * _NBYTES + 1)
        for j in range(0, 32, WIDTH):
            index = indices(j)
            value = splat(0.0)
            for i, entry in enumerate(_TABLE[1:], 1):
                value = select(index == i, float(entry), value)
            out.store(block * 32 + j, value * scale)
    return position(0)
