"""Every type writes the bytes of ggml's reference."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quant import block_type, dequantize, quantize
from tests.oracles import ggml
from tests.quant.data import kinds, rows

WEIGHTED = ("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "IQ4_NL", "IQ4_XS")
TYPES = ("F32", "F16", "BF16", "Q8_0", "MXFP4", *WEIGHTED)
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


def importances() -> dict[str, np.ndarray]:
    rng = np.random.default_rng(7)
    uniform = rng.random(512).astype(np.float32) * 2
    return {
        "uniform": uniform,
        "some zero": np.where(rng.random(512) < 0.3, np.float32(0), uniform),
        "heavy tails": np.exp(rng.standard_normal(512) * 4).astype(np.float32),
        "all zero": np.zeros(512, np.float32),
    }


@pytest.mark.parametrize("name", [*WEIGHTED, "Q8_0", "F16"])
@pytest.mark.parametrize("importance", importances())
def test_weighted_bytes_equal_ggml(name: str, importance: str) -> None:
    """With importance weights, on all kinds of rows; types that ggml quantizes without ignore them."""
    weights = importances()[importance]
    for kind, x in DATA.items():
        assert quantize(x, name, weights).tobytes() == ggml.quantize_chunk(x, name, weights), kind


@pytest.mark.parametrize("name", WEIGHTED)
@given(x=rows(), seed=st.integers(0, 2**32 - 1), spread=st.floats(0, 6))
@settings(max_examples=60, deadline=None)
def test_weighted_bytes_equal_ggml_on_any_block(name: str, x: np.ndarray, seed: int, spread: float) -> None:
    """Whatever hypothesis thinks of, weighted by anything."""
    weights = np.exp(np.random.default_rng(seed).standard_normal(x.shape[1]) * spread).astype(np.float32)
    assert quantize(x, name, weights).tobytes() == ggml.quantize_chunk(x, name, weights)


@pytest.mark.parametrize("name", WEIGHTED)
@pytest.mark.parametrize("width", [256, 768, 1280])
def test_weighted_rows_of_any_width(name: str, width: int) -> None:
    """Batches that reach from one row into the next find every column's importance."""
    rng = np.random.default_rng(3)
    x, weights = rng.standard_normal((5, width)).astype(np.float32), rng.random(width).astype(np.float32)
    assert quantize(x, name, weights).tobytes() == ggml.quantize_chunk(x, name, weights)
    assert quantize(x[:1], name, weights).tobytes() == ggml.quantize_chunk(x[:1], name, weights)


@pytest.mark.parametrize("name", TYPES)
def test_dequantize_equals_the_reference_library(name: str) -> None:
    """Every bit of every value, as gguf's own dequantizers have them."""
    import gguf

    for x in DATA.values():
        data = quantize(x, name)
        expected = gguf.quants.dequantize(data, gguf.GGMLQuantizationType[name])
        np.testing.assert_array_equal(dequantize(data, name), expected.reshape(x.shape))


@pytest.mark.parametrize("name", TYPES)
@given(data=st.data())
@settings(max_examples=50, deadline=None)
def test_dequantize_takes_any_bytes(name: str, data: st.DataObject) -> None:
    """Blocks that no quantizer writes decode as in the reference library (scales of infinity and NaN left out)."""
    import gguf

    kind = block_type(name)
    raw = np.frombuffer(data.draw(st.binary(min_size=kind.nbytes * 2, max_size=kind.nbytes * 2)), np.uint8)
    with np.errstate(all="ignore"):
        expected = gguf.quants.dequantize(raw, gguf.GGMLQuantizationType[name])
    if np.isfinite(expected).all():
        np.testing.assert_array_equal(dequantize(raw, name), expected)


@pytest.mark.parametrize("name", TYPES)
def test_narrow_input_is_widened_exactly(name: str) -> None:
    """float16 and bfloat16 input give the bytes of the same values in float32."""
    x = DATA["normal"]
    half = x.astype(np.float16)
    brain = (x.view(np.uint32) >> 16).astype(np.uint16)
    assert quantize(half, name).tobytes() == ggml.quantize_chunk(half.astype(np.float32), name)
    widened = (brain.astype(np.uint32) << 16).view(np.float32)
    assert quantize(brain, name).tobytes() == ggml.quantize_chunk(widened, name)


@pytest.mark.parametrize("name", ["Q8_0", "Q4_K", "Q5_K", "Q6_K", "F16", "IQ4_NL", "IQ4_XS", "Q2_K"])
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
    assert quantize(x, "Q4_K", out=out) is out
    assert out.tobytes() == ggml.quantize_chunk(x, "Q4_K")
