"""F32: values as they are (spec/quant.md, section 2)."""

from __future__ import annotations

from quant.kernel import kernel
from quant.lanes import WIDTH, Memory, Value, batches, position

BATCH = WIDTH


@kernel(memories=2)
def quantize(x: Memory, out: Memory, n: Value) -> Value:
    """x: [n], n >= WIDTH; out: uint8 [4 * n]. Returns -1: every float32 fits."""
    values = out.viewed("F32")
    for i in batches(n, WIDTH):
        values.store(i, x.load(i))
    return position(-1)


@kernel(memories=2)
def dequantize(data: Memory, out: Memory, n: Value) -> Value:
    """The inverse."""
    values = data.viewed("F32")
    for i in batches(n, WIDTH):
        out.store(i, values.load(i))
    return position(0)
