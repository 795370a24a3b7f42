"""Exact GGUF quantization of arrays: the bytes of ggml's reference, at SIMD speed. Knows nothing of models or files."""

from __future__ import annotations

from typing import TYPE_CHECKING

from quant.block import TYPES, BlockType, block_type
from quant.errors import QuantizationError, UnknownTypeError

if TYPE_CHECKING:
    import numpy as np

__all__ = ["TYPES", "BlockType", "QuantizationError", "UnknownTypeError", "block_type", "dequantize", "quantize"]


def quantize(
    x: np.ndarray,
    type: str,  # noqa: A002  (ggml's word)
    weights: np.ndarray | None = None,
    out: np.ndarray | None = None,
) -> np.ndarray:
    """Quantize rows to a ggml type; every byte is the one ggml's reference writes.

    x: float32, float16 or bfloat16 (as uint16 bits), [..., n] with n a multiple of the type's block. type: a ggml type
    such as "Q4_K". weights: importance of the n columns, float32 [n]; types that ggml quantizes without ignore it.
    out: uint8 [..., row_bytes], C-contiguous, made where not given. Returns out. Raises QuantizationError for NaN,
    infinities, and scales that float16 cannot hold. Releases the GIL. Source: spec/quant.md; ggml-quants.c.

    >>> import numpy as np
    >>> quantize(np.full(32, 0.5, np.float32), "Q8_0").shape
    (34,)
    """
    from quant.dispatch import quantize as run

    return run(x, block_type(type), weights, out)


def dequantize(data: np.ndarray, type: str) -> np.ndarray:  # noqa: A002  (ggml's word)
    """Values of quantized rows: uint8 [..., row_bytes] to float32 [..., n], as ggml's reference computes them.

    >>> import numpy as np
    >>> dequantize(quantize(np.full(32, 127, np.float32), "Q8_0"), "Q8_0")[:2]
    array([127., 127.], dtype=float32)
    """
    from quant.dispatch import dequantize as run

    return run(data, block_type(type))
