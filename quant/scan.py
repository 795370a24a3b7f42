"""Looking for values that no type can hold."""

from __future__ import annotations

import numpy as np

from quant.kernel import kernel


@kernel
def _any_exponent_full(words, mask):
    # No early exit: as a plain OR over all words the loop is vectorised and ends at memory bandwidth.
    found = False
    for word in words:
        found |= (word & mask) == mask
    return found


def first_not_finite(x: np.ndarray) -> int:
    """Index of the first NaN or infinity of a flat array, or -1. x: float32, float16, or bfloat16 as uint16."""
    if x.dtype == np.uint16:
        words, mask = x, np.uint16(0x7F80)
    elif x.dtype == np.float16:
        words, mask = x.view(np.uint16), np.uint16(0x7C00)
    else:
        words, mask = x.view(np.uint32), np.uint32(0x7F800000)
    if not _any_exponent_full(words, mask):
        return -1
    return int(np.flatnonzero((words & mask) == mask)[0])
