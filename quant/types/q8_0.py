"""Q8_0: 32 values in 34 bytes: float16 scale, 32 signed bytes (spec/quant.md, sections 2 and 3)."""

from __future__ import annotations

from quant.arithmetic import FirstBad, castable, get_half, put_half, reciprocal
from quant.kernel import kernel
from quant.lanes import WIDTH, Memory, Value, loop, position, select, to_float, to_int, truncate
from quant.pack import largest_magnitude

BATCH = 1


@kernel(memories=2)
def quantize(x: Memory, out: Memory, blocks: Value) -> Value:
    """x: [32 * blocks]; out: uint8 [34 * blocks]. Returns the first block whose scale does not fit, or -1."""
    bad = FirstBad()
    for block in loop(0, blocks):
        start, at = block * 32, block * 34
        scale = largest_magnitude(x, start) / 127.0
        bad.note(block, put_half(out, at, scale)[1])
        inverse = reciprocal(scale)  # of the scale before rounding, as the reference has it
        for j in range(0, 32, WIDTH):
            value = castable(x.load(start + j) * inverse)
            whole = truncate(value)
            away = select(value - whole >= 0.5, 1.0, 0.0) - select(value - whole <= -0.5, 1.0, 0.0)
            out.store(at + 2 + j, to_int(whole + away))
    return bad.result()


@kernel(memories=2)
def dequantize(data: Memory, out: Memory, blocks: Value) -> Value:
    """Q * d."""
    for block in loop(0, blocks):
        d = get_half(data, block * 34)
        for j in range(0, 32, WIDTH):
            signed = (data.load(block * 34 + 2 + j) << 24) >> 24
            out.store(block * 32 + j, to_float(signed) * d)
    return position(0)
