"""Looking for values that no type can hold."""

from __future__ import annotations

import numpy as np

from quant.kernel import kernel
from quant.lanes import WIDTH, Memory, Value, absolute, any_lane, batches, position, select, splat, var

_LARGEST = float(np.finfo(np.float32).max)


@kernel(memories=1)
def any_not_finite(x: Memory, n: Value) -> Value:
    """1 where some value of x [n], n >= WIDTH, is NaN or infinite."""
    found = var(splat(0))
    for i in batches(n, WIDTH):
        # No early exit, so that the loop runs at memory bandwidth; NaN is not <= either.
        found.set(select(absolute(x.load(i)) <= _LARGEST, found, 1))
    return select(any_lane(found != 0), position(1), position(0))


def first_not_finite(x: np.ndarray) -> int:
    """Index of the first NaN or infinity of a flat array, or -1. x: float32, float16, or bfloat16 as uint16."""
    if len(x) >= WIDTH and not any_not_finite(x, len(x)):
        return -1
    bad = np.flatnonzero(~_finite(x))
    return int(bad[0]) if len(bad) else -1


def _finite(x: np.ndarray) -> np.ndarray:
    return (x & 0x7F80) != 0x7F80 if x.dtype == np.uint16 else np.isfinite(x)
