"""Every type writes the bytes of ggml's reference."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quant import quantize
from tests.oracles import ggml
from tests.quant.data import kinds, rows

TYPES = ("F32", "F16", "BF16", "Q8_0", "Q4_0", "Q5_0", "Q5_1", "Q4_K", "Q5_K", "Q6_K")
DATA = kinds()


@pytest.mark.parametrize("name", TYPES)
@pytest.mark.parametrize("kind", DATA)
def test_bytes_equal_ggml(name: str, kind: str) -> None:
    """Ordinary and odd rows alike."""
    x = DATA[kind]
    assert quantize(x, name).tobytes() == ggml.quantize_chunk(x, name)


@pytest.mark.parametrize("name", TYPES)
@given(x=rows())
@settings(max_examples=150, deadline=None)
def test_bytes_equal_ggml_on_any_block(name: str, x: np.ndarray) -> None:
    """Whatever hypothesis thinks of."""
    assert quantize(x, name).tobytes() == ggml.quantize_chunk(x, name)


@pytest.mark.parametrize("name", TYPES)
def test_narrow_input_is_widened_exactly(name: str) -> None:
    """float16 and bfloat16 input give the bytes of the same values in float32."""
    x = DATA["normal"]
    half = x.astype(np.float16)
    brain = (x.view(np.uint32) >> 16).astype(np.uint16)
    assert quantize(half, name).tobytes() == ggml.quantize_chunk(half.astype(np.float32), name)
    widened = (brain.astype(np.uint32) << 16).view(np.float32)
    assert quantize(brain, name).tobytes() == ggml.quantize_chunk(widened, name)


@pytest.mark.parametrize("name", ["Q8_0", "Q4_K", "Q5_K", "Q6_K", "F16"])
@pytest.mark.parametrize("blocks", [1, 2, 3])
def test_any_number_of_blocks(name: str, blocks: int) -> None:
    """Kernels that take several blocks at a time leave none over."""
    x = DATA["heavy tails"].reshape(-1)[None, : 256 * blocks]
    assert quantize(x, name).tobytes() == ggml.quantize_chunk(x, name)


@pytest.mark.parametrize("name", ["F32", "F16", "BF16"])
@given(length=st.integers(1, 70))
@settings(max_examples=40, deadline=None)
def test_float_rows_of_any_length(name: str, length: int) -> None:
    """Types without blocks take rows of any length."""
    x = np.ascontiguousarray(DATA["normal"][:3, :length])
    assert quantize(x, name).tobytes() == ggml.quantize_chunk(x, name)


def test_threads_do_not_disturb_each_other() -> None:
    """Many calls at once give what one call gives."""
    x = DATA["heavy tails"]
    expected = ggml.quantize_chunk(x, "Q4_K")
    with ThreadPoolExecutor(8) as pool:
        results = list(pool.map(lambda _: quantize(x, "Q4_K").tobytes(), range(64)))
    assert all(result == expected for result in results)


def test_output_array_is_used() -> None:
    """`out` is filled and returned."""
    x = DATA["normal"]
    out = np.zeros((len(x), 2 * 144), np.uint8)
    assert quantize(x, "Q4_K", out) is out
    assert out.tobytes() == ggml.quantize_chunk(x, "Q4_K")
