"""Q4_K: 256 values in 144 bytes: 8 sub-blocks of 32 with 6-bit scales and minimums (spec/quant.md, sections 2, 4, 5)."""

from __future__ import annotations

from collections.abc import Callable

from quant import affine
from quant.kernel import kernel
from quant.lanes import WIDTH, Memory, Value, loop, position, to_float
from quant.pack import get_levels
from quant.search import Candidates

BATCH = WEIGHTED_BATCH = affine.BATCH
SUMS_OVER = "block"
_TOP, _NBYTES, _CANDIDATES = 15, 144, Candidates(-1.0, 0.1, 20)


def _put(out: Memory, at: Value, quants: Callable[[int], Value]) -> None:
    for pair in range(0, 8, 2):
        for j in range(0, 32, WIDTH):
            low, high = quants(32 * pair + j), quants(32 * pair + 32 + j)
            out.store(at + 16 + 16 * pair + j, low | (high << 4))


@kernel(memories=2)
def quantize(x: Memory, out: Memory, blocks: Value) -> Value:
    """x: [256 * blocks]; out: uint8 [144 * blocks]. Returns the first block whose scales do not fit, or -1."""
    return affine.quantize_affine(x, out, blocks, _NBYTES, _TOP, _CANDIDATES, _put)


@kernel(memories=4)
def quantize_weighted(x: Memory, importance: Memory, sums: Memory, out: Memory, blocks: Value, row: Value) -> Value:
    """importance: [row], one per column; sums: of squares of the blocks."""
    return affine.quantize_affine_weighted(x, importance, sums, out, blocks, row, _NBYTES, _TOP, _put)


@kernel(memories=2)
def dequantize(data: Memory, out: Memory, blocks: Value) -> Value:
    """(d * scale) * q - dmin * minimum."""
    for block in loop(0, blocks):
        scales, minimums = get_levels(data, block * _NBYTES)
        for s in range(8):
            for j in range(0, 32, WIDTH):
                byte = data.load(block * _NBYTES + 16 + s // 2 * 32 + j)
                q = byte & 15 if s % 2 == 0 else byte >> 4
                out.store(block * 256 + 32 * s + j, scales[s] * to_float(q) - minimums[s])
    return position(0)
