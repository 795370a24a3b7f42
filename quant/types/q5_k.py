"""Q5_K: 256 values in 176 bytes: as Q4_K with a fifth bit per value (spec/quant.md, sections 2 and 4)."""

from __future__ import annotations

import numpy as np

from quant.affine import final_quants, search_sub_blocks
from quant.arithmetic import ZERO
from quant.kernel import kernel
from quant.lanes import F32, WIDTH, select, splat, store, to_int
from quant.pack import put_six_bit_scales
from quant.search import scratch

BATCH = WIDTH // 8
_TOP, _FIRST, _STEP, _STEPS = F32(31), F32(-0.5), F32(0.1), 15
_LEVELS, _FIFTH = F32(63), F32(16)


@kernel
def quantize(x, out):
    """x: [256 * n], n a multiple of BATCH; out: uint8 [176 * n]. Returns the first bad block or -1."""
    bad = -1
    columns, weights, quants = scratch(32), scratch(32), scratch(32)
    scales, minimums, inverses, offsets = scratch(1), scratch(1), scratch(1), scratch(1)
    for batch in range(0, len(x) // 256, BATCH):
        search_sub_blocks(
            x, batch * 256, _TOP, _FIRST, _STEP, _STEPS, columns, weights, quants, scales, minimums, inverses, offsets
        )
        for block in range(BATCH):
            start, at, first = (batch + block) * 256, (batch + block) * 176, block * 8
            if not put_six_bit_scales(scales, minimums, first, out, at, _LEVELS) and bad < 0:
                bad = batch + block
            for j in range(0, 32, WIDTH):
                fifth_bits = splat(np.int32(0))
                for pair in range(0, 8, 2):
                    here, sub = start + 32 * pair + j, first + pair
                    low = final_quants(x, here, sub, scales, minimums, inverses, offsets, _TOP)
                    high = final_quants(x, here + 32, sub + 1, scales, minimums, inverses, offsets, _TOP)
                    low_bit = to_int(select(low >= _FIFTH, F32(1), ZERO))
                    high_bit = to_int(select(high >= _FIFTH, F32(1), ZERO))
                    fifth_bits = fifth_bits | (low_bit << np.int32(pair)) | (high_bit << np.int32(pair + 1))
                    low_nibble = to_int(low) & np.int32(15)
                    high_nibble = to_int(high) & np.int32(15)
                    store(out, at + 48 + 16 * pair + j, low_nibble | (high_nibble << np.int32(4)))
                store(out, at + 16 + j, fifth_bits)
    return bad
