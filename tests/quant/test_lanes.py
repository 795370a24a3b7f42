"""Lanes do what the same IEEE operations do one by one, and nothing is contracted."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quant import lanes
from quant.arithmetic import from_half, nearest_int, to_half
from quant.kernel import inner
from quant.lanes import F32, WIDTH, absolute, load, nearest, select, square_root, store, truncate
from quant.types import q4_k, q5_k, q6_k

floats = st.floats(width=32, allow_nan=False, allow_infinity=False)
vectors = st.lists(floats, min_size=WIDTH, max_size=WIDTH).map(lambda v: np.array(v, np.float32))


@inner
def _arithmetic(a, b, out):
    x, y = load(a, 0), load(b, 0)
    store(out, 0, x + y)
    store(out, WIDTH, x - y)
    store(out, 2 * WIDTH, x * y)
    store(out, 3 * WIDTH, x / y)
    store(out, 4 * WIDTH, select(x < y, x, y))
    store(out, 5 * WIDTH, select((x >= y) & ~(x == F32(0)), absolute(x), F32(1)))
    store(out, 6 * WIDTH, square_root(absolute(x)))
    store(out, 7 * WIDTH, truncate(y))


@given(vectors, vectors)
@settings(max_examples=200, deadline=None)
def test_operations_equal_numpy(a: np.ndarray, b: np.ndarray) -> None:
    """Each of them, lane by lane, bit by bit (NaN of any payload)."""
    out = np.empty(8 * WIDTH, np.float32)
    _arithmetic(a, b, out)
    with np.errstate(all="ignore"):
        expected = [
            a + b, a - b, a * b, a / b, np.where(a < b, a, b),
            np.where((a >= b) & (a != 0), np.abs(a), np.float32(1)), np.sqrt(np.abs(a)), np.trunc(b),
        ]  # fmt: skip
    np.testing.assert_array_equal(out, np.concatenate(expected))


@inner
def _nearest(a, low, high, out):
    store(out, 0, nearest(load(a, 0), low, high))


@given(vectors, st.sampled_from([(0, 15), (0, 31), (-32, 31), (-8, 7)]))
@settings(max_examples=200, deadline=None)
def test_nearest_is_round_half_even_in_its_range(a: np.ndarray, limits: tuple[int, int]) -> None:
    """Clamped to the limits, for all values that the reference rounds properly."""
    a = np.clip(a, -4194303, 4194303)
    out = np.empty(WIDTH, np.float32)
    _nearest(a, F32(limits[0]), F32(limits[1]), out)
    np.testing.assert_array_equal(out, np.clip(np.rint(a), *limits))


def test_nearest_takes_the_mantissa_outside_its_range() -> None:
    """Infinity gives -4194304, as the reference's bit operation does; the scalar form agrees on a spread of values."""
    values = np.array([np.inf, 4194305, 1e7, -1e7, 1e30, -1e30, 8388608, 5e6], np.float32)
    wide = np.resize(values, WIDTH).astype(np.float32)
    out = np.empty(WIDTH, np.float32)
    _nearest(wide, F32(-4194304), F32(4194303), out)
    assert out[0] == -4194304
    mantissa = ((wide + np.float32(12582912)).view(np.int32) & 0x7FFFFF) - 0x400000
    np.testing.assert_array_equal(out, mantissa.astype(np.float32))
    np.testing.assert_array_equal([nearest_int(v) for v in values], mantissa[: len(values)])


def test_half_conversions_equal_numpy() -> None:
    """All float16 there and back, and every float32 near a rounding boundary."""
    halves = np.arange(0x7C00, dtype=np.uint16)
    values = halves.view(np.float16).astype(np.float32)
    assert [from_half(int(h)) for h in halves[::37]] == values[::37].tolist()
    around = (values.view(np.uint32)[:-1, None] + np.array([0, 0xFFF, 0x1000, 0x1001, 0x1FFF])).astype(np.uint32)
    floats32 = around.reshape(-1).view(np.float32)
    floats32 = np.concatenate([floats32, -floats32, np.array([65519.99, 65520, 1e30, 1e-30], np.float32)])
    with np.errstate(over="ignore"):
        expected = floats32.astype(np.float16).view(np.uint16)
    np.testing.assert_array_equal(_all_halves(floats32), expected)


@inner
def _all_halves(values):
    out = np.empty(len(values), np.uint16)
    for i in range(len(values)):
        out[i] = to_half(values[i])
    return out


@pytest.mark.parametrize("module", [q4_k, q5_k, q6_k])
def test_nothing_is_fused(module) -> None:
    """A fused multiply-add rounds once where the reference rounds twice."""
    fresh = inner(module.quantize.py_func)  # the cached one has no assembly to show
    fresh(np.zeros(256 * module.BATCH, np.float32), np.zeros(1024, np.uint8))
    assembly = "".join(fresh.inspect_asm().values())
    assert "mulps" in assembly or "fmul" in assembly
    assert "vfmadd" not in assembly
    assert "fmla" not in assembly


def test_scalars_do_not_promote_lanes() -> None:
    """A Python float beside lanes would mean float64: it is refused at compile time."""
    from numba.core.errors import TypingError

    @inner
    def promoted(a):
        store(a, 0, load(a, 0) + 0.1)

    with pytest.raises(TypingError):
        promoted(np.zeros(lanes.WIDTH, np.float32))
