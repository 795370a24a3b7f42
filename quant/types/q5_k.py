"""Q5_K: 256 values in 176 bytes: as Q4_K with a fifth bit per value (spec/quant.md, sections 2, 4, 5)."""

from __future__ import annotations

from collections.abc import Callable

from quant import affine
from quant.kernel import kernel
from quant.lanes import WIDTH, Memory, Value, loop, position, splat, to_float
from quant.pack import get_levels
from quant.search import Candidates

BATCH = WEIGHTED_BATCH = affine.BATCH
SUMS_OVER = "block"
_TOP, _NBYTES, _CANDIDATES = 31, 176, Candidates(-0.5, 0.1, 15)


def _put(out: Memory, at: Value, quants: Callable[[int], Value]) -> None:
    for j in range(0, 32, WIDTH):
        fifth = splat(0)
        for pair in range(0, 8, 2):
            low, high = quants(32 * pair + j), quants(32 * pair + 32 + j)
            fifth = fifth | ((low >> 4) << pair) | ((high >> 4) << (pair + 1))
            out.store(at + 48 + 16 * pair + j, (low & 15) | ((high & 15) << 4))
        out.store(at + 16 + j, fifth)


@kernel(memories=2)
def quantize(x: Memory, out: Memory, blocks: Value) -> Value:
    """x: [256 * blocks]; out: uint8 [176 * blocks]. Returns the first block whose scales do not fit, or -1."""
    return affine.quantize_affine(x, out, blocks, _NBYTES, _TOP, _CANDIDATES, _put)


@kernel(memories=4)
def quantize_weighted(x: Memory, importance: Memory, sums: Memory, out: Memory, blocks: Value, row: Value) -> Value:
    """importance: [row], one per column; sums: of squares of the blocks."""
    return affine.quantize_affine_weighted(x, importance, sums, out, blocks, row, _NBYTES, _TOP, _put)


@kernel(memories=2)
def dequantize(data: Memory, out: Memory, blocks: Value) -> Value:
    """(d * scale) * q - dmin * minimum."""
    for block in loop(0, blocks):
        at = block * _NBYTES
        scales, minimums = get_levels(data, at)
        for s in range(8):
            for j in range(0, 32, WIDTH):
                byte = data.load(at + 48 + s // 2 * 32 + j)
                q = (byte & 15 if s % 2 == 0 else byte >> 4) | (((data.load(at + 16 + j) >> s) & 1) << 4)
                out.store(block * 256 + 32 * s + j, scales[s] * to_float(q) - minimums[s])
    return position(0)
