"""Q8_0: 32 values in 34 bytes: float16 scale, 32 signed bytes (spec/quant.md, sections 2 and 3)."""

from __future__ import annotations

from quant.arithmetic import FirstBad, castable, get_half, reciprocal
from quant.kernel import kernel
from quant.lanes import WIDTH, Memory, Value, batches, loop, position, room_per_lane, select, to_float, to_int, truncate
from quant.pack import largest_magnitude, put_halves

BATCH = WIDTH
_NBYTES = 34


@kernel(memories=2)
def quantize(x: Memory, out: Memory, blocks: Value) -> Value:
    """x: [32 * blocks], blocks >= WIDTH; out: uint8 [34 * blocks]. Returns the first bad block or -1."""
    bad = FirstBad()
    extremes, inverses = room_per_lane(1), room_per_lane(1)
    for group in batches(blocks, WIDTH):
        for lane in range(WIDTH):
            extremes[lane] = largest_magnitude(x, (group + lane) * 32)
        scale = extremes.load(0) / 127.0
        put_halves(out, group, _NBYTES, 0, scale, bad)
        inverses.store(0, reciprocal(scale))  # of the scale before rounding, as the reference has it
        for lane in loop(0, WIDTH):
            for j in range(0, 32, WIDTH):
                value = castable(x.load((group + lane) * 32 + j) * inverses[lane])
                whole = truncate(value)
                away = select(value - whole >= 0.5, 1.0, 0.0) - select(value - whole <= -0.5, 1.0, 0.0)
                out.store((group + lane) * _NBYTES + 2 + j, to_int(whole + away))
    return bad.result()


@kernel(memories=2)
def dequantize(data: Memory, out: Memory, blocks: Value) -> Value:
    """Q * d."""
    for block in loop(0, blocks):
        d = get_half(data, block * _NBYTES)
        for j in range(0, 32, WIDTH):
            signed = (data.load(block * _NBYTES + 2 + j) << 24) >> 24
            out.store(block * 32 + j, to_float(signed) * d)
    return position(0)
