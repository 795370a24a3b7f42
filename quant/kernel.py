"""How kernels are compiled: without the GIL, strict IEEE, cached on disk per CPU and per version of this package.

Numba's own cache looks at the file of the cached function only; a kernel also depends on `lanes` and the searches it
calls, so the digest of all sources of the package is part of the key here. Numba writes entries atomically, so several
processes may compile the same kernel at once.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

from numba import njit
from numba.core.caching import FunctionCache

from quant.lanes import WIDTH

_OPTIONS: dict[str, Any] = {"nogil": True, "error_model": "numpy", "fastmath": False, "boundscheck": False}


@cache
def _sources_digest() -> str:
    digest = hashlib.sha256()
    for file in sorted(Path(__file__).parent.rglob("*.py")):
        digest.update(file.read_bytes())
    return digest.hexdigest()


class _KernelCache(FunctionCache):
    def _index_key(self, sig, codegen):
        signature, machine, (code, cells) = super()._index_key(sig, codegen)
        return signature, machine, (code, f"{cells} {_sources_digest()} {WIDTH}")


def kernel(function: Callable) -> Any:
    """An entry point that Python calls: compiled at first use, then loaded from the cache."""
    dispatcher: Any = njit(**_OPTIONS)(function)
    dispatcher._cache = _KernelCache(function)  # noqa: SLF001  (what enable_caching() does, with our key)
    return dispatcher


def inner(function: Callable) -> Any:
    """A function that kernels call; compiled into each of them."""
    return njit(**_OPTIONS)(function)
