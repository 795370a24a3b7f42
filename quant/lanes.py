"""SIMD lanes: kernels that read like the scalar algorithm, for processors and for devices.

A kernel is a Python function over registers and memory. It runs on a machine, which says what an operation does: on
`quant.llvm_lanes` each emits one LLVM instruction (the function runs once, the result is compiled), on
`quant.torch_lanes` each is a torch operation on all batches of a tensor at once. Nothing is contracted or
reassociated, so each lane has exactly the bits of the scalar sequence on every machine.

    values       float32, int32 (int64 for positions) and bool; alone or as lanes of WIDTH. Mixed, a scalar is splatted;
                 a Python number takes the type of its partner, so 0.1 is the float32 0.1, as C's 0.1f.
    range(...)   unrolled; loop(...) is a loop of the machine. `break` is not possible in either's sense. The outermost
                 loop's passes are independent: a machine may take them all at once.
    var(x)       a variable: reads as its value, changes by .set(y). Everything else is immutable; now(v) keeps the
                 value that a variable has at this moment.
    when(c)      a branch, as `for _ in when(c):`. Lanes are chosen between by select(mask, yes, no).

WIDTH is 16: on AVX-512 one register, on AVX2 and NEON two or four, whose chains of dependent operations overlap.
`CONVERT_MTP_LANES=8` narrows it (the tests run both).
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Literal, Protocol, Self

import numpy as np


def _width() -> int:
    chosen = os.environ.get("CONVERT_MTP_LANES", "16")
    if chosen not in {"8", "16"}:
        raise ValueError(f"CONVERT_MTP_LANES must be 8 or 16, not {chosen!r}")
    return int(chosen)


WIDTH = _width()
F32 = np.float32
MAGIC = 12582912.0  # 1.5 * 2^23: adding it leaves the nearest integer in the mantissa
Number = int | float | np.floating
Stored = Literal["F32", "F16", "BF16", "U8"]


class Value:
    """A register: scalar or lanes of float32, integers or booleans. Machines have their own kinds."""

    def __add__(self, other: Operand) -> Self:
        return _m().operate("+", self, other)

    def __radd__(self, other: Operand) -> Self:
        return _m().operate("+", other, self)

    def __sub__(self, other: Operand) -> Self:
        return _m().operate("-", self, other)

    def __rsub__(self, other: Operand) -> Self:
        return _m().operate("-", other, self)

    def __mul__(self, other: Operand) -> Self:
        return _m().operate("*", self, other)

    def __rmul__(self, other: Operand) -> Self:
        return _m().operate("*", other, self)

    def __truediv__(self, other: Operand) -> Self:
        return _m().operate("/", self, other)

    def __rtruediv__(self, other: Operand) -> Self:
        return _m().operate("/", other, self)

    def __floordiv__(self, other: Operand) -> Self:
        return _m().operate("//", self, other)  # of positions, never negative

    def __mod__(self, other: Operand) -> Self:
        return _m().operate("%", self, other)

    def __and__(self, other: Operand) -> Self:
        return _m().operate("&", self, other)

    def __or__(self, other: Operand) -> Self:
        return _m().operate("|", self, other)

    def __lshift__(self, other: Operand) -> Self:
        return _m().operate("<<", self, other)

    def __rshift__(self, other: Operand) -> Self:
        return _m().operate(">>", self, other)

    def __invert__(self) -> Self:
        return _m().invert(self)

    def __neg__(self) -> Self:
        return _m().negate(self)

    def __lt__(self, other: Operand) -> Self:
        return _m().compare("<", self, other)

    def __le__(self, other: Operand) -> Self:
        return _m().compare("<=", self, other)

    def __gt__(self, other: Operand) -> Self:
        return _m().compare(">", self, other)

    def __ge__(self, other: Operand) -> Self:
        return _m().compare(">=", self, other)

    def __eq__(self, other: Operand) -> Self:  # type: ignore[override]  # comparing registers gives a register
        return _m().compare("==", self, other)

    def __ne__(self, other: Operand) -> Self:  # type: ignore[override]  # see __eq__
        return _m().compare("!=", self, other)

    __hash__ = None  # type: ignore[assignment]  # equality is an instruction

    def __bool__(self) -> bool:
        raise TypeError("a register has no truth of its own: use when() or select()")


class Variable(Value):
    """A place that reads as the value it holds."""

    def set(self, value: Operand) -> None:
        raise NotImplementedError


class Memory(Protocol):
    """An array in memory. Floats are read as float32, whatever they are stored as; bytes as int32."""

    def load(self, at: Operand) -> Value:
        """WIDTH consecutive values from `at` on."""
        ...

    def columns(self, at: Operand, stride: Operand) -> Value:
        """Lane i is the value at `at` + i * stride: the same element of WIDTH sub-blocks."""
        ...

    def __getitem__(self, at: Operand) -> Value:
        """One value."""
        ...

    def store(self, at: Operand, lanes: Value) -> None:
        """WIDTH consecutive values; int lanes are cut to bytes (to 16 bits in BF16 and F16 memory)."""
        ...

    def __setitem__(self, at: Operand, value: Operand) -> None:
        """One value; an int32 is cut to a byte (to 16 bits in BF16 and F16 memory)."""
        ...

    def viewed(self, stored: Stored) -> Memory:
        """The same bytes as values of another kind."""
        ...


Operand = Value | Number


class Machine(Protocol):
    """What the operations below are on some processor or device."""

    def operate(self, sign: str, a: Any, b: Any) -> Any: ...
    def compare(self, sign: str, a: Any, b: Any) -> Any: ...
    def invert(self, mask: Any) -> Any: ...
    def negate(self, value: Any) -> Any: ...
    def splat(self, value: Any) -> Any: ...
    def number(self, value: Any) -> Any: ...
    def position(self, value: Any) -> Any: ...
    def var(self, value: Any) -> Any: ...
    def now(self, value: Any) -> Any: ...
    def first(self, block: Any) -> Any: ...
    def select(self, condition: Any, yes: Any, no: Any) -> Any: ...
    def absolute(self, value: Any) -> Any: ...
    def square_root(self, value: Any) -> Any: ...
    def truncate(self, value: Any) -> Any: ...
    def to_int(self, value: Any) -> Any: ...
    def to_float(self, value: Any) -> Any: ...
    def float_bits(self, value: Any) -> Any: ...
    def from_bits(self, value: Any) -> Any: ...
    def nearest_within(self, value: Any, low: int, high: int) -> Any: ...
    def bits(self, mask: Any) -> Any: ...
    def any_lane(self, mask: Any) -> Any: ...
    def all_lanes(self, mask: Any) -> Any: ...
    def lane_numbers(self) -> Any: ...
    def highest(self, lanes: Any) -> Any: ...
    def lowest(self, lanes: Any) -> Any: ...
    def transposed(self, rows: list[Any]) -> list[Any]: ...
    def loop(self, start: Any, stop: Any, step: int) -> Iterator[Any]: ...
    def batches(self, count: Any, size: int) -> Iterator[Any]: ...
    def when(self, condition: Any, *, rare: bool) -> Iterator[None]: ...
    def room(self, values: int) -> Any: ...


_running = threading.local()


def _m() -> Machine:
    return _running.machine


@contextmanager
def on(machine: Machine) -> Iterator[None]:
    """Let kernels called in this thread run on a machine."""
    before = getattr(_running, "machine", None)
    _running.machine = machine
    try:
        yield
    finally:
        _running.machine = before


# --- values ------------------------------------------------------------------------------------------------------


def splat(value: Operand) -> Value:
    """All lanes hold one value; a Python float becomes float32, an int int32."""
    return _m().splat(value)


def number(value: Number) -> Value:
    """A scalar constant: float32 for a float, int32 for an int."""
    return _m().number(value)


def position(value: Operand) -> Value:
    """A value as int64: where something is."""
    return _m().position(value)


def var(value: Operand) -> Variable:
    """A variable with a first value."""
    return _m().var(value)


def now(value: Value) -> Value:
    """The value of a variable at this moment."""
    return _m().now(value)


def first(block: Value) -> Value:
    """Of the numbers that the passes of a loop left in a variable, -1 for none, the first."""
    return _m().first(block)


def select(condition: Value, yes: Operand, no: Operand) -> Value:
    """`yes` where the condition holds, else `no`; lane by lane for a mask."""
    return _m().select(condition, yes, no)


def larger(a: Operand, b: Operand) -> Value:
    """A > b ? a : b, as C's MAX macro."""
    return select(a > b, a, b)  # type: ignore[arg-type,operator]  # one of them is a register


def smaller(a: Operand, b: Operand) -> Value:
    """A < b ? a : b, as C's MIN macro."""
    return select(a < b, a, b)  # type: ignore[arg-type,operator]  # one of them is a register


def absolute(value: Value) -> Value:
    """|value|, by clearing the sign bit."""
    return _m().absolute(value)


def square_root(value: Value) -> Value:
    """IEEE square root, correctly rounded."""
    return _m().square_root(value)


def truncate(value: Value) -> Value:
    """Rounded towards zero, still float."""
    return _m().truncate(value)


def to_int(value: Value) -> Value:
    """float32 to int32, towards zero; the value must fit."""
    return _m().to_int(value)


def to_float(value: Value) -> Value:
    """An integer to float32."""
    return _m().to_float(value)


def float_bits(value: Value) -> Value:
    """The bits of float32 as int32."""
    return _m().float_bits(value)


def from_bits(value: Value) -> Value:
    """The float32 with these bits."""
    return _m().from_bits(value)


def nearest(value: Value, low: int, high: int) -> Value:
    """Ggml's nearest_int, clamped to low ... high, as float.

    Round half to even for |value| <= 4194303. Outside, and for infinities and NaN, the reference takes whatever stands
    in the mantissa after the magic addition; the bit operations here give the same (spec/quant.md, section 1).
    """
    # The field of an integer k in -2^22 ... 2^22 - 1 is k + 0x400000, so clamping and decoding stay there.
    field = float_bits(value + MAGIC) & 0x7FFFFF
    field = larger(field, low + 0x400000)
    field = smaller(field, high + 0x400000)
    return from_bits(field | 0x4B000000) - MAGIC


def nearest_within(value: Value, low: int, high: int) -> Value:
    """`nearest` where |value| <= 4194303 is known: cheaper, the same."""
    return _m().nearest_within(value, low, high)


def nearest_int(value: Value) -> Value:
    """Ggml's nearest_int, as int32, unclamped."""
    return (float_bits(value + MAGIC) & 0x7FFFFF) - 0x400000


def bits(mask: Value) -> Value:
    """A mask as an int32: bit i is lane i."""
    return _m().bits(mask)


def any_lane(mask: Value) -> Value:
    """Whether the mask holds in some lane."""
    return _m().any_lane(mask)


def all_lanes(mask: Value) -> Value:
    """Whether the mask holds in every lane."""
    return _m().all_lanes(mask)


def lane_numbers() -> Value:
    """0, 1, 2, ... as int lanes."""
    return _m().lane_numbers()


def highest(lanes: Value) -> Value:
    """The largest lane. No lane may be NaN; which zero is returned of two is open."""
    return _m().highest(lanes)


def lowest(lanes: Value) -> Value:
    """The smallest lane. No lane may be NaN; which zero is returned of two is open."""
    return _m().lowest(lanes)


def transposed(rows: list[Value]) -> list[Value]:
    """WIDTH vectors as a square: vector j of the result holds lane j of every row."""
    return _m().transposed(rows)


# --- control -----------------------------------------------------------------------------------------------------


def loop(start: Operand, stop: Operand, step: int = 1) -> Iterator[Value]:
    """A loop of the machine over start, start + step, ... below stop, as positions."""
    return _m().loop(start, stop, step)


def batches(count: Value, size: int) -> Iterator[Value]:
    """Where batches of `size` begin that cover 0 ... count - 1; the last may overlap the one before. count >= size."""
    return _m().batches(count, size)


def when(condition: Value, *, rare: bool = False) -> Iterator[None]:
    """A branch: what is inside this loop happens only where the (scalar) condition holds."""
    return _m().when(condition, rare=rare)


# --- memory ------------------------------------------------------------------------------------------------------


def room(values: int) -> Memory:
    """float32 for the time of one pass; `values` at most a few thousand."""
    return _m().room(values)


def room_per_lane(n: int) -> Memory:
    """Room for n values of every lane."""
    return room(n * WIDTH)
