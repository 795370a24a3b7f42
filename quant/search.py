"""The searches for a block's scale that types share, one sub-block per lane (spec/quant.md, sections 4 and 6).

Both read `columns`, float32 [n * WIDTH] with element j of the lanes' sub-blocks at j * WIDTH, and return besides the
scales what is needed to compute the quants of the winner again: storing them at every improvement would cost more.
"""

from __future__ import annotations

import numpy as np

from quant.arithmetic import EPSILON, ONE, ZERO
from quant.kernel import inner
from quant.lanes import F32, WIDTH, absolute, bits, load, load_columns, nearest, select, splat, square_root, store


@inner
def gather_columns(x, start, n, columns):
    """Lay WIDTH consecutive sub-blocks of n values, from x[start] on, side by side; widened to float32."""
    for j in range(n):
        store(columns, j * WIDTH, load_columns(x, start + j, n))


@inner
def mean_plus_magnitude(columns, n, weights):
    """The weights of Q4_K and Q5_K: root mean square of the sub-block plus |x|."""
    total = splat(ZERO)
    for j in range(n):
        x = load(columns, j * WIDTH)
        total = total + x * x
    rms = square_root(total / F32(n))
    for j in range(n):
        store(weights, j * WIDTH, rms + absolute(load(columns, j * WIDTH)))


@inner
def _squared_error(columns, weights, quants, n, scale, minimum):
    total = splat(ZERO)
    for j in range(n):
        error = (scale * load(quants, j * WIDTH) + minimum) - load(columns, j * WIDTH)
        total = total + load(weights, j * WIDTH) * (error * error)
    return total


@inner
def scale_and_minimum(columns, weights, quants, n, top, first, step, steps):
    """Search A, make_qkx2_quants with squared errors: x ~ scale * q + minimum, 0 <= q <= top.

    Candidates are the inverse scales (first + step * s + top) / range, s = 0 ... steps; each is refitted by least
    squares. quants: scratch, float32 [n * WIDTH]. Returns (scale, minimum, inverse, offset), the winner's quants being
    nearest(inverse * (x - offset), 0, top); all of them 0 for a flat sub-block.
    """
    x = load(columns, 0)
    w = load(weights, 0)
    low, high = x, x
    sum_w, sum_x = w, w * x
    for j in range(1, n):
        x = load(columns, j * WIDTH)
        w = load(weights, j * WIDTH)
        low = select(x < low, x, low)
        high = select(x > high, x, high)
        sum_w = sum_w + w
        sum_x = sum_x + w * x
    low = select(low > ZERO, ZERO, low)
    flat = high == low
    inverse = top / (high - low)
    scale = ONE / inverse
    for j in range(n):
        store(quants, j * WIDTH, nearest(inverse * (load(columns, j * WIDTH) - low), ZERO, top))
    best = _squared_error(columns, weights, quants, n, scale, low)
    minimum, offset = low, low
    for s in range(steps + 1):
        # A better candidate's minimum is the one that later candidates start from.
        trial = (first + step * F32(s) + top) / (high - minimum)
        sum_q, sum_qq, sum_xq = splat(ZERO), splat(ZERO), splat(ZERO)
        for j in range(n):
            x = load(columns, j * WIDTH)
            w = load(weights, j * WIDTH)
            q = nearest(trial * (x - minimum), ZERO, top)
            store(quants, j * WIDTH, q)
            wq = w * q
            sum_q = sum_q + wq
            sum_qq = sum_qq + wq * q
            sum_xq = sum_xq + wq * x
        determinant = sum_w * sum_qq - sum_q * sum_q
        trial_scale = (sum_w * sum_xq - sum_x * sum_q) / determinant
        trial_minimum = (sum_qq * sum_x - sum_q * sum_xq) / determinant
        above = trial_minimum > ZERO
        trial_scale = select(above, sum_xq / sum_qq, trial_scale)
        trial_minimum = select(above, ZERO, trial_minimum)
        error = _squared_error(columns, weights, quants, n, trial_scale, trial_minimum)
        better = (determinant > ZERO) & (error < best) & ~flat
        if bits(better) != 0:
            best = select(better, error, best)
            scale = select(better, trial_scale, scale)
            inverse = select(better, trial, inverse)
            offset = select(better, minimum, offset)
            minimum = select(better, trial_minimum, minimum)
    return select(flat, ZERO, scale), minimum, select(flat, ZERO, inverse), offset


@inner
def signed_scale(columns, n, top):
    """Search B, make_qx_quants with weights x * x: x ~ scale * q, -top <= q < top.

    Returns (scale, inverse), the winner's quants being nearest(inverse * x, -top, top - 1); both 0 where all
    magnitudes are below 1e-15 (there the reference leaves q = -top).
    """
    largest, extreme = splat(ZERO), splat(ZERO)
    for j in range(n):
        x = load(columns, j * WIDTH)
        larger = absolute(x) > largest
        largest = select(larger, absolute(x), largest)
        extreme = select(larger, x, extreme)
    empty = largest < EPSILON
    inverse, scale, best = splat(ZERO), splat(ZERO), splat(ZERO)
    for t in range(19):
        s = 0 if t == 0 else (t - 10 if t < 10 else t - 9)  # the plain scale, then -9 ... -1 and 1 ... 9
        trial = splat(-(top + F32(0.1) * F32(s))) / extreme
        sum_xq, sum_qq = splat(ZERO), splat(ZERO)
        for j in range(n):
            x = load(columns, j * WIDTH)
            w = x * x
            q = nearest(trial * x, -top, top - ONE)
            sum_xq = sum_xq + (w * x) * q
            sum_qq = sum_qq + (w * q) * q
        if t == 0:
            scale = select(sum_qq != ZERO, sum_xq / sum_qq, ZERO)
            best = scale * sum_xq
            inverse = trial
        else:
            better = (sum_qq > ZERO) & (sum_xq * sum_xq > best * sum_qq)
            if bits(better) != 0:
                scale = select(better, sum_xq / sum_qq, scale)
                inverse = select(better, trial, inverse)
                best = select(better, scale * sum_xq, best)
    return select(empty, ZERO, scale), select(empty, ZERO, inverse)


@inner
def scratch(values):
    """Room for `values` float32 per lane."""
    return np.empty(values * WIDTH, np.float32)
