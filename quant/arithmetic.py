"""Scalar float16 and rounding exactly as ggml does them, for the few values a block stores (spec/quant.md, section 1)."""

from __future__ import annotations

import numpy as np

from quant.kernel import inner
from quant.lanes import F32, absolute, float_bits, from_bits, select

ZERO, ONE = F32(0), F32(1)
_MAGIC = F32(12582912.0)
EPSILON = F32(1e-15)
INFINITY = F32(np.inf)
_F16_INFINITY = 0x7C00


@inner
def nearest_int(value):
    """Ggml's nearest_int: half to even up to 4194303, beyond that whatever the mantissa holds."""
    return np.int32(float_bits(value + _MAGIC) & 0x7FFFFF) - np.int32(0x400000)


@inner
def to_half(value):
    """float32 to float16 bits: nearest even, subnormals kept, overflow to infinity. value must not be NaN."""
    raw = np.int64(float_bits(value)) & 0xFFFFFFFF
    sign = (raw >> 16) & 0x8000
    magnitude = raw & 0x7FFFFFFF
    if magnitude >= 0x477FF000:  # 65520 and above round to infinity
        return sign | _F16_INFINITY
    if magnitude >= 0x38800000:  # 2^-14: a normal float16
        return sign | ((magnitude - 0x38000000 + 0xFFF + ((magnitude >> 13) & 1)) >> 13)
    # Subnormal: adding 0.5 puts the unit 2^-24 at the end of the mantissa, and the addition rounds to even.
    shifted = from_bits(np.int32(magnitude)) + F32(0.5)
    return sign | (np.int64(float_bits(shifted)) - 0x3F000000)


@inner
def from_half(half):
    """float16 bits to float32; exact. half must not be an infinity or NaN."""
    sign = (half & 0x8000) << 16
    exponent = (half >> 10) & 0x1F
    mantissa = half & 0x3FF
    if exponent == 0:
        value = F32(mantissa) * F32(2.0**-24)
        return -value if sign else value
    return from_bits(np.int32(sign | ((exponent + 112) << 23) | (mantissa << 13)))


@inner
def put_half(out, at, value):
    """Store value as float16 at byte `at` and return it as stored; an infinity there tells that it does not fit."""
    half = to_half(value)
    out[at] = half & 0xFF
    out[at + 1] = half >> 8
    if (half & _F16_INFINITY) == _F16_INFINITY:
        return INFINITY
    return from_half(half)


@inner
def reciprocal(value):
    """1 / value, or 0 for 0."""
    return ONE / value if value != ZERO else ZERO


@inner
def castable(lanes):
    """Float lanes with 0 for what no int32 holds: x86 converts that to INT_MIN, of which the reference keeps 8 bits.

    It occurs where a block is so small that the inverse of its scale is infinite.
    """
    return select(absolute(lanes) < F32(2147483648.0), lanes, ZERO)
