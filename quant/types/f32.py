"""F32: values as they are (spec/quant.md, section 2)."""

from __future__ import annotations

import numpy as np

from quant.kernel import kernel
from quant.lanes import WIDTH, load, store

BATCH = WIDTH


@kernel
def quantize(x, out):
    """x: [n], n a multiple of WIDTH; out: uint8 [4 * n]."""
    values = out.view(np.float32)
    for i in range(0, len(x), WIDTH):
        store(values, i, load(x, i))
    return -1
