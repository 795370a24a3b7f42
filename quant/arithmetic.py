"""float16 and the conversions of ggml, exactly as its x86 build does them (spec/quant.md, section 1)."""

from __future__ import annotations

from quant.lanes import Memory, Operand, Value, Variable, absolute, first, float_bits, from_bits, position, select, var

EPSILON = 1e-15
INFINITE_HALF = 0x7C00


def to_half(value: Value) -> Value:
    """float32 to float16 bits as int32: nearest even, subnormals kept, overflow to infinity. Not for NaN."""
    magnitude = absolute(value)
    raw = float_bits(magnitude)
    normal = (raw - 0x38000000 + 0xFFF + ((raw >> 13) & 1)) >> 13
    # Adding 0.5 puts the unit of subnormals, 2^-24, at the end of the mantissa: the sum rounds to even.
    subnormal = float_bits(magnitude + 0.5) - 0x3F000000
    half = select(magnitude < 2.0**-14, subnormal, normal)
    half = select(magnitude >= 65520.0, INFINITE_HALF, half)
    return half | ((float_bits(value) >> 16) & 0x8000)


def from_half(half: Value) -> Value:
    """float16 bits to float32; exact, subnormals included. Not for infinities and NaN."""
    magnitude = from_bits((half & 0x7FFF) << 13) * 2.0**112
    return from_bits(float_bits(magnitude) | ((half & 0x8000) << 16))


def put_half(out: Memory, at: Value, value: Value) -> tuple[Value, Value]:
    """Store value as float16 at byte `at`. Returns (the value as stored, whether it fits)."""
    half = to_half(value)
    out[at] = half
    out[at + 1] = half >> 8
    return from_half(half), (half & 0x7FFF) < INFINITE_HALF


def get_half(data: Memory, at: Value) -> Value:
    """The float16 at byte `at` as float32."""
    return from_half(data[at] | (data[at + 1] << 8))


def reciprocal(value: Value) -> Value:
    """1 / value, or 0 for 0."""
    return select(value != 0, 1.0 / value, 0.0)


def castable(value: Value) -> Value:
    """0 for what no int32 holds: x86 converts that to INT_MIN, of which the reference keeps the low 8 bits.

    It occurs where a block is so small that the inverse of its scale is infinite.
    """
    return select(absolute(value) < 2147483648.0, value, 0.0)


class FirstBad:
    """The first block that cannot be stored: the result of a kernel, -1 for none."""

    def __init__(self) -> None:
        self._block: Variable = var(position(-1))

    def note(self, block: Operand, fits: Value) -> None:
        """Remember the block where it does not fit and none before it did."""
        self._block.set(select(~fits & (self._block < 0), position(block), self._block))

    def result(self) -> Value:
        return first(self._block)
