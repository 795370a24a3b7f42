"""What cannot be stored is refused with its place, never written as garbage."""

from __future__ import annotations

import pickle

import numpy as np
import pytest

from quant import QuantizationError, UnknownTypeError, quantize
from tests.quant.test_bytes import TYPES


@pytest.mark.parametrize("name", TYPES)
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("at", [0, 300, 1023])
def test_not_finite_is_refused_with_its_index(name: str, value: float, at: int) -> None:
    """NaN and infinity: the index is that of the value."""
    x = np.ones((2, 512), np.float32)
    x.reshape(-1)[at] = value
    with pytest.raises(QuantizationError) as caught:
        quantize(x, name)
    assert (caught.value.index, caught.value.type) == (at, name)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_not_finite_is_seen_in_narrow_input(dtype: str) -> None:
    """The check reads the stored bits."""
    x = np.ones((1, 256), np.float16) if dtype == "float16" else np.full((1, 256), 0x3F80, np.uint16)
    x[0, 77] = np.inf if dtype == "float16" else 0xFF80
    with pytest.raises(QuantizationError) as caught:
        quantize(x, "Q6_K")
    assert caught.value.index == 77


@pytest.mark.parametrize(
    ("name", "value"),
    [("F16", 65520.0), ("Q4_0", 6e5), ("Q5_0", 1.2e6), ("Q5_1", 7e4), ("Q8_0", 9e6), ("Q4_K", 1e9), ("Q6_K", 1e12),
     ("Q5_K", 1e9), ("BF16", 3.4e38), ("Q4_1", 7e4), ("IQ4_NL", 1e7), ("Q3_K", 1e8), ("Q2_K", 1e7), ("IQ4_XS", 3e8)],
)  # fmt: skip
def test_scales_beyond_float16_are_refused(name: str, value: float) -> None:
    """A stored scale must not become infinite; the index is that of the block."""
    x = np.zeros((3, 512), np.float32)
    x[1, :256] = np.linspace(-value, value, 256)
    with pytest.raises(QuantizationError) as caught:
        quantize(x, name)
    assert 512 <= caught.value.index < 768


@pytest.mark.parametrize(("name", "value"), [("F16", 65519.0), ("Q8_0", 8.3e6), ("Q4_0", 5.2e5), ("BF16", 3.38e38)])
def test_large_values_that_fit_are_taken(name: str, value: float) -> None:
    """Just below the limit is no error."""
    assert quantize(np.full((1, 32), value, np.float32), name).any()


def test_wrong_calls_are_told_apart() -> None:
    """Shape, dtype, type name, output."""
    with pytest.raises(ValueError, match="whole blocks of 256"):
        quantize(np.zeros((1, 100), np.float32), "Q4_K")
    with pytest.raises(TypeError, match="float64"):
        quantize(np.zeros((1, 256)), "Q4_K")
    with pytest.raises(UnknownTypeError, match="Q9_K"):
        quantize(np.zeros((1, 256), np.float32), "Q9_K")
    with pytest.raises(UnknownTypeError, match="cannot be written"):
        quantize(np.zeros((1, 256), np.float32), "IQ1_S")
    with pytest.raises(ValueError, match="out must be"):
        quantize(np.zeros((1, 256), np.float32), "Q4_K", out=np.zeros((1, 143), np.uint8))


def test_weights_are_checked() -> None:
    """Their shape, dtype and values."""
    x = np.ones((2, 256), np.float32)
    for wrong in (np.ones(255, np.float32), np.ones(256), np.ones((2, 256), np.float32)):
        with pytest.raises(ValueError, match="weights must be"):
            quantize(x, "Q4_K", wrong)
    with pytest.raises(QuantizationError, match="among the weights"):
        quantize(x, "Q4_K", np.full(256, np.nan, np.float32))


def test_errors_survive_a_process_pool() -> None:
    """Pickled and back, nothing is lost."""
    error = pickle.loads(pickle.dumps(QuantizationError("NaN or infinity", "Q4_K", 7)))
    assert (error.what, error.type, error.index) == ("NaN or infinity", "Q4_K", 7)
