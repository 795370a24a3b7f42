"""ggml's own quantizers, through ctypes: the bytes that ours must equal."""

from __future__ import annotations

import ctypes
from functools import cache
from pathlib import Path

import numpy as np

from quant import block_type


@cache
def _library() -> ctypes.CDLL:
    import libggml

    library = ctypes.CDLL(str(next(Path(libggml.__file__).parent.rglob("libggml-base.so"))))
    library.ggml_quantize_chunk.restype = ctypes.c_size_t
    pointer, integer = ctypes.c_void_p, ctypes.c_int64
    library.ggml_quantize_chunk.argtypes = [ctypes.c_int, pointer, pointer, integer, integer, integer, pointer]
    return library


def quantize_chunk(x: np.ndarray, name: str, weights: np.ndarray | None = None) -> bytes:
    """The bytes that ggml makes of float32 rows [rows, n], with importance weights [n] or without."""
    kind = block_type(name)
    x = np.ascontiguousarray(x, np.float32)
    rows, values = x.shape
    out = np.empty(rows * kind.row_bytes(values), np.uint8)
    _library().ggml_quantize_init(kind.id)
    importance = None if weights is None else weights.ctypes.data
    written = _library().ggml_quantize_chunk(kind.id, x.ctypes.data, out.ctypes.data, 0, rows, values, importance)
    assert written == out.nbytes
    return out.tobytes()
