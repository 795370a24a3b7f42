"""The torch form of every type gives the bytes of the reference, on every device there is."""

from __future__ import annotations

import numpy as np
import pytest

from quant import QuantizationError, UnknownTypeError, quantize
from tests.oracles import ggml
from tests.quant.data import kinds
from tests.quant.test_bytes import TYPES, WEIGHTED, importances

torch = pytest.importorskip("torch", reason="needs torch")
from quant import gpu  # noqa: E402  (needs torch)

ROWS = np.concatenate(list(kinds().values()))
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


def on(device: str, x: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(x).to(device)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", TYPES)
def test_bytes_equal_ggml(name: str, device: str) -> None:
    """Rows of every kind at once."""
    assert gpu.quantize(on(device, ROWS), name).cpu().numpy().tobytes() == ggml.quantize_chunk(ROWS, name)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", [*WEIGHTED, "Q8_0"])
def test_weighted_bytes_equal_ggml(name: str, device: str) -> None:
    """With importance, some of it zero."""
    weights = importances()["some zero"]
    packed = gpu.quantize(on(device, ROWS), name, on(device, weights))
    assert packed.cpu().numpy().tobytes() == ggml.quantize_chunk(ROWS, name, weights)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", TYPES)
def test_dequantize_equals_the_reference_library(name: str, device: str) -> None:
    """Every bit of every value."""
    import gguf

    data = quantize(ROWS, name)
    expected = gguf.quants.dequantize(data, gguf.GGMLQuantizationType[name]).reshape(ROWS.shape)
    np.testing.assert_array_equal(gpu.dequantize(on(device, data), name).cpu().numpy(), expected)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", ["Q8_0", "Q6_K", "F16", "F32"])
def test_narrow_input_is_widened_exactly(name: str, device: str) -> None:
    """float16 and bfloat16 tensors give the bytes of the same values in float32."""
    x = kinds()["normal"]
    for dtype in (torch.float16, torch.bfloat16):
        narrow = on(device, x).to(dtype)
        expected = ggml.quantize_chunk(narrow.float().cpu().numpy(), name)
        assert gpu.quantize(narrow, name).cpu().numpy().tobytes() == expected


@pytest.mark.parametrize("width", [32, 96])
def test_pieces_leave_no_seam(monkeypatch: pytest.MonkeyPatch, width: int) -> None:
    """A tensor that is too large for one piece is taken in several, with the same bytes, weighted or not."""
    monkeypatch.setattr(gpu, "piece_values", lambda _device: 16 * width)
    x = np.random.default_rng(2).standard_normal((41, width)).astype(np.float32)
    weights = np.random.default_rng(3).random(width).astype(np.float32)
    for name in ("Q8_0", "Q4_0", "F16"):
        packed = gpu.quantize(torch.from_numpy(x), name)
        assert packed.numpy().tobytes() == ggml.quantize_chunk(x, name)
        assert torch.equal(gpu.dequantize(packed, name), gpu.dequantize(packed[None], name)[0])
        weighted = gpu.quantize(torch.from_numpy(x), name, torch.from_numpy(weights))
        assert weighted.numpy().tobytes() == ggml.quantize_chunk(x, name, weights)


@pytest.mark.parametrize("name", ["Q8_0", "Q4_K", "F16"])
def test_refusals_name_the_value(name: str) -> None:
    """NaN, infinities and values beyond the type, by index, as on the CPU."""
    for bad in (np.nan, np.inf, np.float32(3e38)):
        x = np.ones((40, 256), np.float32)
        x[33, 17] = bad
        with pytest.raises(QuantizationError) as ours:
            gpu.quantize(torch.from_numpy(x), name)
        with pytest.raises(QuantizationError) as expected:
            quantize(x, name)
        assert (ours.value.index, ours.value.what) == (expected.value.index, expected.value.what)


def test_wrong_calls_are_refused() -> None:
    """Dtypes, shapes, weights and types that cannot be."""
    x = torch.ones(2, 256)
    with pytest.raises(TypeError, match="float64"):
        gpu.quantize(x.double(), "Q8_0")
    with pytest.raises(ValueError, match="whole blocks"):
        gpu.quantize(x[:, :255], "Q8_0")
    with pytest.raises(ValueError, match="weights"):
        gpu.quantize(x, "Q4_K", torch.ones(3))
    with pytest.raises(QuantizationError, match="weights"):
        gpu.quantize(x, "Q4_K", torch.full((256,), torch.nan))
    with pytest.raises(UnknownTypeError):
        gpu.quantize(x, "IQ1_S")
    with pytest.raises(ValueError, match="rows of"):
        gpu.dequantize(torch.zeros(7, dtype=torch.uint8), "Q8_0")
    assert gpu.quantize(torch.empty(0, 256), "Q4_K").shape == (0, 144)
