"""The searches for a block's scale that types share (spec/quant.md, sections 4 to 6), one sub-block per lane.

They read columns: `Memory` with element j of the lanes' sub-blocks at j * WIDTH. Besides the scales they return what is
needed to compute the winner's quants again, since storing those at every improvement would cost more.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from quant.arithmetic import EPSILON
from quant.lanes import (
    WIDTH,
    Memory,
    Value,
    absolute,
    all_lanes,
    any_lane,
    larger,
    loop,
    nearest,
    nearest_int,
    nearest_within,
    now,
    number,
    position,
    room_per_lane,
    select,
    smaller,
    splat,
    square_root,
    to_float,
    to_int,
    transposed,
    var,
    when,
)

_EXACT_UP_TO = 4194303.0  # nearest_within equals nearest below this


def gather_columns(x: Memory, start: Value, n: int, columns: Memory) -> None:
    """Lay WIDTH consecutive sub-blocks of n values, from x[start] on, side by side; widened to float32."""
    for tile in range(0, n, WIDTH):
        rows = [x.load(start + (sub * n + tile)) for sub in range(WIDTH)]
        for j, lanes in enumerate(transposed(rows)):
            columns.store((tile + j) * WIDTH, lanes)


def column(columns: Memory, j: int) -> Value:
    """Element j of every lane's sub-block."""
    return columns.load(j * WIDTH)


@dataclass(frozen=True)
class Affine:
    """Result of search A: x ~ scale * q + minimum; the winner's quants are round(inverse * (x - offset))."""

    scale: Value
    minimum: Value
    inverse: Value
    offset: Value


@dataclass(frozen=True)
class Candidates:
    """Inverse scales to try: (first + step * s + top) / range for s = 0 ... steps."""

    first: float
    step: float
    steps: int


WEIGHTED = Candidates(-0.9, 0.05, 36)


def round_unweighted(value: Value, top: int) -> Value:
    """Quants of make_qkx2_quants: rounded, then clamped, with the reference's results on overflow."""
    return nearest(value, 0, top)


def round_weighted(value: Value, top: int) -> Value:
    """Quants of make_qkx3_quants: clamped, then rounded; 0 for NaN."""
    return (smaller(larger(value, 0.0), float(top)) + 12582912.0) - 12582912.0


def scale_and_minimum(  # noqa: C901
    columns: Memory, weights: Memory, n: int, top: int, candidates: Candidates, *, weighted: bool, mad: bool = False
) -> Affine:
    """Search A: make_qkx2_quants, or make_qkx3_quants for columns that are weighted by importance.

    mad: the error is |x - ...| in place of its square.
    """
    quants = room_per_lane(n)

    def x(j: int) -> Value:
        return column(columns, j)

    def w(j: int) -> Value:
        return column(weights, j)

    def error(scale: Value, minimum: Value) -> Value:
        total = splat(0.0)
        for j in range(n):
            delta = (scale * column(quants, j) + minimum) - x(j)
            total = total + w(j) * (absolute(delta) if mad else delta * delta)
        return total

    low = high = x(0)
    sum_w, sum_x = w(0), w(0) * x(0)
    for j in range(1, n):
        low, high = select(x(j) < low, x(j), low), select(x(j) > high, x(j), high)
        sum_w, sum_x = sum_w + w(j), sum_x + w(j) * x(j)
    low = select(low > 0, 0.0, low)
    flat = high == low
    first_inverse = float(top) / select(flat, 1.0, high - low)
    for j in range(n):
        quants.store(j * WIDTH, nearest(first_inverse * (x(j) - low), 0, top))
    scale, minimum, offset = var(1.0 / first_inverse), var(low), var(low)
    # Where the range is so small that its inverse overflows, the reference's rounding makes every quant 0.
    inverse = var(select(first_inverse < float("inf"), first_inverse, 0.0))
    best = var(error(scale, low))
    sum_q, sum_qq, sum_xq = (var(splat(0.0)) for _ in range(3))

    def try_quants(trial: Value, rounding: Callable[[Value], Value]) -> None:
        q_, qq, xq = splat(0.0), splat(0.0), splat(0.0)
        from_ = now(minimum)
        for j in range(n):
            q = rounding(trial * (x(j) - from_))
            quants.store(j * WIDTH, q)
            wq = w(j) * q
            q_, qq, xq = q_ + wq, qq + wq * q, xq + wq * x(j)
        for sum_, value in ((sum_q, q_), (sum_qq, qq), (sum_xq, xq)):
            sum_.set(value)

    for s in loop(0, candidates.steps + 1):
        # A better candidate's minimum is the one that later candidates start from.
        above = (number(candidates.first) + number(candidates.step) * to_float(s)) + float(top)
        trial = splat(above) / select(flat, 1.0, high - minimum)
        if weighted:
            try_quants(trial, lambda v: round_weighted(v, top))
        else:
            inside = absolute(trial * (low - minimum)) < _EXACT_UP_TO
            inside = all_lanes(inside & (absolute(trial * (high - minimum)) < _EXACT_UP_TO))
            for _ in when(inside):
                try_quants(trial, lambda v: nearest_within(v, 0, top))
            for _ in when(~inside, rare=True):
                try_quants(trial, lambda v: nearest(v, 0, top))
        determinant = sum_w * sum_qq - sum_q * sum_q
        trial_scale = (sum_w * sum_xq - sum_x * sum_q) / determinant
        trial_minimum = (sum_qq * sum_x - sum_q * sum_xq) / determinant
        above_zero = trial_minimum > 0
        trial_scale = select(above_zero, sum_xq / sum_qq, trial_scale)
        trial_minimum = select(above_zero, 0.0, trial_minimum)
        trial_error = error(trial_scale, trial_minimum)
        better = (determinant > 0) & (trial_error < best) & ~flat
        for _ in when(any_lane(better)):
            best.set(select(better, trial_error, best))
            scale.set(select(better, trial_scale, scale))
            inverse.set(select(better, trial, inverse))
            offset.set(select(better, minimum, offset))
            minimum.set(select(better, trial_minimum, minimum))
    return Affine(select(flat, 0.0, scale), now(minimum), select(flat, 0.0, inverse), select(flat, low, offset))


@dataclass(frozen=True)
class Signed:
    """Result of search B: x ~ scale * q; the winner's quants are nearest(inverse * x), 0 in both for empty lanes."""

    scale: Value
    inverse: Value


def signed_scale(columns: Memory, n: int, top: int, weights: Memory | None = None) -> Signed:
    """Search B: make_qx_quants with rmse type 1, -top <= q < top. Without weights x * x takes their place.

    Where all magnitudes are below 1e-15 scale and inverse are 0; there the reference leaves the stored q at 0.
    """
    products = room_per_lane(n)  # w * x, of every candidate the same

    def w(j: int) -> Value:
        return column(weights, j) if weights else column(columns, j) * column(columns, j)

    extreme = first_extreme([column(columns, j) for j in range(n)])
    for j in range(n):
        products.store(j * WIDTH, w(j) * column(columns, j))
    empty = absolute(extreme) < EPSILON
    extreme = select(empty, 1.0, extreme)

    def sums(trial: Value) -> tuple[Value, Value]:
        xq, qq = splat(0.0), splat(0.0)
        for j in range(n):
            q = nearest_within(trial * column(columns, j), -top, top - 1)
            xq, qq = xq + column(products, j) * q, qq + (w(j) * q) * q
        return xq, qq

    plain = splat(-float(top)) / extreme
    xq, qq = sums(plain)
    scale = var(select(qq != 0, xq / qq, 0.0))
    best, inverse = var(scale * xq), var(plain)
    for t in loop(0, 18):
        s = select(t < 9, to_float(t) - 9.0, to_float(t) - 8.0)  # -9 ... -1 and 1 ... 9
        trial = splat(-(float(top) + number(0.1) * s)) / extreme
        xq, qq = sums(trial)
        better = (qq > 0) & (xq * xq > best * qq)
        for _ in when(any_lane(better)):
            scale.set(select(better, xq / qq, scale))
            inverse.set(select(better, trial, inverse))
            best.set(select(better, scale * xq, best))
    return Signed(select(empty, 0.0, scale), select(empty, 0.0, inverse))


def first_extreme(values: list[Value]) -> Value:
    """The first value of largest magnitude, with its sign."""
    largest, extreme = absolute(values[0]), values[0]
    for value in values[1:]:
        more = absolute(value) > largest
        largest, extreme = select(more, absolute(value), largest), select(more, value, extreme)
    return extreme


def positive_scales(problems: list[tuple[list[Value], list[Value]]], top: int) -> list[tuple[Value, list[Value]]]:
    """Search P, make_qp_quants, for several problems at once: non-negative values ~ scale * level, 0 <= level <= top.

    A problem is (values, weights), scalars; all have the same number. Returns (scale, levels as int32) of each. The
    steps wait for each other, so the problems take a lane each.
    """
    n = len(problems[0][0])
    values, weights = room_per_lane(n), room_per_lane(n)
    for j in range(n):
        values.store(j * WIDTH, splat(0.0))
        weights.store(j * WIDTH, splat(0.0))
        for lane, (x, w) in enumerate(problems):
            values[j * WIDTH + lane], weights[j * WIDTH + lane] = x[j], w[j]
    scale, levels = _positive_scale([column(values, j) for j in range(n)], [column(weights, j) for j in range(n)], top)
    weights.store(0, scale)
    for j, level in enumerate(levels):
        values.store(j * WIDTH, level)
    return [(weights[lane], [to_int(values[j * WIDTH + lane]) for j in range(n)]) for lane in range(len(problems))]


def _positive_scale(values: list[Value], weights: list[Value], top: int) -> tuple[Value, list[Value]]:
    largest = splat(0.0)
    for x in values:
        largest = select(x > largest, x, largest)
    empty = largest < EPSILON
    largest = select(empty, 1.0, largest)

    def level(inverse: Value, x: Value) -> Value:
        return to_float(nearest_int(inverse * x))

    def error(scale: Value, levels: list[Value]) -> Value:
        total = splat(0.0)
        for x, w, q in zip(values, weights, levels, strict=True):
            delta = x - scale * q
            total = total + (w * delta) * delta
        return total

    inverse = float(top) / largest
    best = error(1.0 / inverse, [level(inverse, x) for x in values])
    for s in (-4, -3, -2, -1, 1, 2, 3, 4):
        trial = (number(0.1) * float(s) + float(top)) / largest
        trial_error = error(1.0 / trial, [smaller(float(top), level(trial, x)) for x in values])
        better = trial_error < best
        best, inverse = select(better, trial_error, best), select(better, trial, inverse)
    levels = [var(smaller(float(top), level(inverse, x))) for x in values]
    sum_xq, sum_qq = var(splat(0.0)), var(splat(0.0))
    for x, w, q in zip(values, weights, levels, strict=True):
        sum_xq.set(sum_xq + (w * x) * q)
        sum_qq.set(sum_qq + (w * q) * q)
    changed = var(position(1) == 1)
    for _ in loop(0, 5):
        for _ in when(changed):
            moved_some = splat(0) != 0
            for x, w, q in zip(values, weights, levels, strict=True):
                without_xq, without_qq = sum_xq - (w * x) * q, sum_qq - (w * q) * q
                moved = smaller(float(top), to_float(nearest_int((x * without_qq) / without_xq)))
                new_xq, new_qq = without_xq + (w * x) * moved, without_qq + (w * moved) * moved
                better = (without_xq > 0) & (without_qq > 0) & (moved != q)
                better = better & ((new_xq * new_xq) * sum_qq > (sum_xq * sum_xq) * new_qq)
                q.set(select(better, moved, q))
                sum_xq.set(select(better, new_xq, sum_xq))
                sum_qq.set(select(better, new_qq, sum_qq))
                moved_some = moved_some | better
            changed.set(any_lane(moved_some))
    scale = select(sum_qq > 0, sum_xq / sum_qq, 0.0)
    return select(empty, 0.0, scale), [select(empty, 0.0, q) for q in levels]


def rms(columns: Memory, n: int) -> Value:
    """Root mean square of every lane's sub-block."""
    total = splat(0.0)
    for j in range(n):
        total = total + column(columns, j) * column(columns, j)
    return square_root(total / float(n))
