"""F16: IEEE half precision, rounded to nearest even (spec/quant.md, section 1)."""

from __future__ import annotations

from quant.arithmetic import FirstBad, to_half
from quant.kernel import kernel
from quant.lanes import WIDTH, Memory, Value, absolute, any_lane, batches, loop, position, when

BATCH = WIDTH
_OVERFLOW = 65520.0  # from here on rounding gives infinity


@kernel(memories=2)
def quantize(x: Memory, out: Memory, n: Value) -> Value:
    """x: [n], n >= WIDTH; out: uint8 [2 * n]. Returns where a value does not fit, or -1."""
    bad, halves = FirstBad(), out.viewed("F16")
    for i in batches(n, WIDTH):
        value = x.load(i)
        for _ in when(any_lane(absolute(value) >= _OVERFLOW), rare=True):
            for lane in loop(0, WIDTH):
                bad.note(i + lane, absolute(x[i + lane]) < _OVERFLOW)
        halves.store(i, to_half(value))
    return bad.result()


@kernel(memories=2)
def dequantize(data: Memory, out: Memory, n: Value) -> Value:
    """The inverse; exact."""
    halves = data.viewed("F16")
    for i in batches(n, WIDTH):
        out.store(i, halves.load(i))
    return position(0)
