"""Q4_K: 256 values in 144 bytes: 8 sub-blocks of 32 with 6-bit scales and minimums (spec/quant.md, sections 2, 4)."""

from __future__ import annotations

import numpy as np

from quant.affine import final_quants, search_sub_blocks
from quant.kernel import kernel
from quant.lanes import F32, WIDTH, store, to_int
from quant.pack import put_six_bit_scales
from quant.search import scratch

BATCH = WIDTH // 8
_TOP, _FIRST, _STEP, _STEPS = F32(15), F32(-1), F32(0.1), 20
_LEVELS = F32(63)


@kernel
def quantize(x, out):
    """x: [256 * n], n a multiple of BATCH; out: uint8 [144 * n]. Returns the first bad block or -1."""
    bad = -1
    columns, weights, quants = scratch(32), scratch(32), scratch(32)
    scales, minimums, inverses, offsets = scratch(1), scratch(1), scratch(1), scratch(1)
    for batch in range(0, len(x) // 256, BATCH):
        search_sub_blocks(
            x, batch * 256, _TOP, _FIRST, _STEP, _STEPS, columns, weights, quants, scales, minimums, inverses, offsets
        )
        for block in range(BATCH):
            start, at, first = (batch + block) * 256, (batch + block) * 144, block * 8
            if not put_six_bit_scales(scales, minimums, first, out, at, _LEVELS) and bad < 0:
                bad = batch + block
            for pair in range(0, 8, 2):
                sub = first + pair
                for j in range(0, 32, WIDTH):
                    here = start + 32 * pair + j
                    low = final_quants(x, here, sub, scales, minimums, inverses, offsets, _TOP)
                    high = final_quants(x, here + 32, sub + 1, scales, minimums, inverses, offsets, _TOP)
                    store(out, at + 16 + 16 * pair + j, to_int(low) | (to_int(high) << np.int32(4)))
    return bad
