"""The facts of ggml's tensor types: id, values per block, bytes per block (spec/quant.md, section 2; ggml-common.h).

All types that a GGUF file may hold are here, since files of others are inspected too. Those that this package writes
have a module in `quant.types`, named like the type, with the kernel `quantize(x, out) -> first bad block or -1`.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from types import ModuleType

from quant.errors import UnknownTypeError


@dataclass(frozen=True)
class BlockType:
    """A tensor encoding. `block` values take `nbytes` bytes; a row is a whole number of blocks."""

    name: str
    id: int
    block: int
    nbytes: int

    @property
    def bits_per_value(self) -> float:
        return 8 * self.nbytes / self.block

    def row_bytes(self, values: int) -> int:
        """Bytes of a row of `values` values, a multiple of `block`."""
        assert values % self.block == 0, (self.name, values)
        return values // self.block * self.nbytes

    @property
    def can_write(self) -> bool:
        return find_spec(f"quant.types.{self.name.lower()}") is not None

    def kernels(self) -> ModuleType:
        """The type's module; importing it brings LLVM, so it is left until data is to be touched."""
        return _kernels(self.name)


@cache
def _kernels(name: str) -> ModuleType:
    return import_module(f"quant.types.{name.lower()}")


TYPES = {
    t.name: t
    for t in (
        BlockType("F32", 0, 1, 4),
        BlockType("F16", 1, 1, 2),
        BlockType("Q4_0", 2, 32, 18),
        BlockType("Q4_1", 3, 32, 20),
        BlockType("Q5_0", 6, 32, 22),
        BlockType("Q5_1", 7, 32, 24),
        BlockType("Q8_0", 8, 32, 34),
        BlockType("Q8_1", 9, 32, 36),
        BlockType("Q2_K", 10, 256, 84),
        BlockType("Q3_K", 11, 256, 110),
        BlockType("Q4_K", 12, 256, 144),
        BlockType("Q5_K", 13, 256, 176),
        BlockType("Q6_K", 14, 256, 210),
        BlockType("Q8_K", 15, 256, 292),
        BlockType("IQ2_XXS", 16, 256, 66),
        BlockType("IQ2_XS", 17, 256, 74),
        BlockType("IQ3_XXS", 18, 256, 98),
        BlockType("IQ1_S", 19, 256, 50),
        BlockType("IQ4_NL", 20, 32, 18),
        BlockType("IQ3_S", 21, 256, 110),
        BlockType("IQ2_S", 22, 256, 82),
        BlockType("IQ4_XS", 23, 256, 136),
        BlockType("I8", 24, 1, 1),
        BlockType("I16", 25, 1, 2),
        BlockType("I32", 26, 1, 4),
        BlockType("I64", 27, 1, 8),
        BlockType("F64", 28, 1, 8),
        BlockType("IQ1_M", 29, 256, 56),
        BlockType("BF16", 30, 1, 2),
        BlockType("TQ1_0", 34, 256, 54),
        BlockType("TQ2_0", 35, 256, 66),
        BlockType("MXFP4", 39, 32, 17),
        BlockType("NVFP4", 40, 64, 36),
    )
}
TYPES_BY_ID = {t.id: t for t in TYPES.values()}


def block_type(name: str) -> BlockType:
    """The type of that name, in any case. Raises UnknownTypeError."""
    found = TYPES.get(name.upper())
    if found is None:
        raise UnknownTypeError(f"no ggml type is called {name!r}; known: {', '.join(TYPES)}")
    return found


# Types for which ggml uses an importance matrix; all others ignore it.
_WEIGHTED = {"Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "IQ4_NL", "IQ4_XS"}


def takes_weights(kind: BlockType) -> bool:
    """Whether importance changes the bytes of this type."""
    return kind.name in _WEIGHTED
