"""What quantizing can refuse."""

from __future__ import annotations

from dataclasses import dataclass, fields


@dataclass(eq=False)
class QuantizationError(Exception):
    """A value that a type cannot hold: NaN, infinity, or a scale beyond float16.

    index: position of the value (or of the first value of its block) in the flattened input.
    """

    what: str
    type: str
    index: int

    def __reduce__(self) -> tuple[object, ...]:
        return type(self), tuple(getattr(self, f.name) for f in fields(self))

    def __str__(self) -> str:
        return f"{self.what} (value {self.index}, type {self.type})"


class UnknownTypeError(ValueError):
    """A type or mix name that this package does not have."""
