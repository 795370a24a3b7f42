"""SIMD lanes: kernels that read like the scalar algorithm and become vector instructions.

A kernel is a Python function that runs once, with values that stand for registers: every operation on them emits one
LLVM instruction. Nothing is contracted or reassociated, so each lane has exactly the bits of the scalar sequence, and
nothing is typed or guessed: building a kernel takes milliseconds, LLVM does the rest.

    values       float32, int32 (int64 for positions) and bool; alone or as lanes of WIDTH. Mixed, a scalar is splatted;
                 a Python number takes the type of its partner, so 0.1 is the float32 0.1, as C's 0.1f.
    range(...)   unrolled while building; loop(...) is a loop of the machine. `break` is not possible in either's sense.
    var(x)       a variable: reads as its value, changes by .set(y). Everything else is immutable.
    when(c)      a branch, as `with when(c):`. Lanes are chosen between by select(mask, yes, no).

WIDTH is 16: on AVX-512 one register, on AVX2 and NEON two or four, whose chains of dependent operations overlap.
`CONVERT_MTP_LANES=8` narrows it (the tests run both).
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Literal

import numpy as np
from llvmlite import ir


def _width() -> int:
    chosen = os.environ.get("CONVERT_MTP_LANES", "16")
    if chosen not in {"8", "16"}:
        raise ValueError(f"CONVERT_MTP_LANES must be 8 or 16, not {chosen!r}")
    return int(chosen)


WIDTH = _width()
F32 = np.float32
_FLOAT, _HALF, _BOOL = ir.FloatType(), ir.HalfType(), ir.IntType(1)
_I8, _I16, _I32, _I64 = (ir.IntType(bits) for bits in (8, 16, 32, 64))
_MAGIC = 12582912.0  # 1.5 * 2^23: adding it leaves the nearest integer in the mantissa
Number = int | float | np.floating


class _Building:
    """The function that is being built; there is one at a time."""

    builder: ir.IRBuilder
    constants: dict[tuple[str, float], Value]  # those that fill all lanes, made once per function


def _b() -> Any:
    return _Building.builder


def begin(builder: ir.IRBuilder) -> None:
    """Let all operations emit here from now on."""
    _Building.builder = builder
    _Building.constants = {}


class Value:
    """A register: scalar or lanes of float32, integers or booleans."""

    def __init__(self, register: Any) -> None:
        self._register = register

    @property
    def ir(self) -> Any:
        return self._register

    @property
    def kind(self) -> Any:
        """LLVM type, of one lane."""
        kind = self.ir.type
        return kind.element if isinstance(kind, ir.VectorType) else kind

    @property
    def is_lanes(self) -> bool:
        return isinstance(self.ir.type, ir.VectorType)

    def __add__(self, other: Operand) -> Value:
        return _arithmetic(self, other, "fadd", "add")

    def __radd__(self, other: Operand) -> Value:
        return _arithmetic(other, self, "fadd", "add")

    def __sub__(self, other: Operand) -> Value:
        return _arithmetic(self, other, "fsub", "sub")

    def __rsub__(self, other: Operand) -> Value:
        return _arithmetic(other, self, "fsub", "sub")

    def __mul__(self, other: Operand) -> Value:
        return _arithmetic(self, other, "fmul", "mul")

    def __rmul__(self, other: Operand) -> Value:
        return _arithmetic(other, self, "fmul", "mul")

    def __truediv__(self, other: Operand) -> Value:
        return _arithmetic(self, other, "fdiv", None)

    def __rtruediv__(self, other: Operand) -> Value:
        return _arithmetic(other, self, "fdiv", None)

    def __floordiv__(self, other: Operand) -> Value:
        return _arithmetic(self, other, None, "sdiv")  # of positions, never negative

    def __mod__(self, other: Operand) -> Value:
        return _arithmetic(self, other, None, "srem")

    def __and__(self, other: Operand) -> Value:
        return _arithmetic(self, other, None, "and_")

    def __or__(self, other: Operand) -> Value:
        return _arithmetic(self, other, None, "or_")

    def __lshift__(self, other: Operand) -> Value:
        return _arithmetic(self, other, None, "shl")

    def __rshift__(self, other: Operand) -> Value:
        return _arithmetic(self, other, None, "ashr")

    def __invert__(self) -> Value:
        return Value(_b().not_(self.ir))

    def __neg__(self) -> Value:
        return Value(_b().fneg(self.ir)) if self.kind == _FLOAT else 0 - self

    def __lt__(self, other: Operand) -> Value:
        return _compare(self, other, "<")

    def __le__(self, other: Operand) -> Value:
        return _compare(self, other, "<=")

    def __gt__(self, other: Operand) -> Value:
        return _compare(self, other, ">")

    def __ge__(self, other: Operand) -> Value:
        return _compare(self, other, ">=")

    def __eq__(self, other: Operand) -> Value:  # type: ignore[override]  # comparing registers gives a register
        return _compare(self, other, "==")

    def __ne__(self, other: Operand) -> Value:  # type: ignore[override]  # see __eq__
        return _compare(self, other, "!=")

    __hash__ = None  # type: ignore[assignment]  # equality is an instruction

    def __bool__(self) -> bool:
        raise TypeError("a register has no truth while the kernel is being built: use when() or select()")


class Variable(Value):
    """A place that is read where it is used; LLVM makes registers of it."""

    def __init__(self, place: Any) -> None:
        self._place = place

    @property
    def ir(self) -> Any:
        return _b().load(self._place)

    def set(self, value: Operand) -> None:
        _b().store(_like(value, self).ir, self._place)


Operand = Value | Number


def _like(value: Operand, partner: Value) -> Value:
    """The value with the type of its partner: numbers converted, scalars splatted."""
    if not isinstance(value, Value):
        number = float(F32(value)) if partner.kind == _FLOAT else int(value)
        if partner.is_lanes:
            return _constant_lanes(partner.kind, number)
        value = Value(ir.Constant(partner.kind, number))
    if value.kind != partner.kind:
        if value.kind == _I32 and partner.kind == _I64:
            value = Value(_b().sext(value.ir, _I64))
        else:
            raise TypeError(f"operands of different types: {value.ir.type} and {partner.ir.type}")
    return splat(value) if partner.is_lanes and not value.is_lanes else value


def _constant_lanes(kind: Any, number: float) -> Value:
    """A number in all lanes, from the function's entry. The sign of zero tells two zeros apart."""
    key = (f"{kind}{math.copysign(1, number)}", number)
    if key not in _Building.constants:
        entry = _b().function.entry_basic_block
        with _b().goto_block(entry):
            _b().position_at_start(entry)
            _Building.constants[key] = splat(Value(ir.Constant(kind, number)))
    return _Building.constants[key]


def _pair(a: Operand, b: Operand) -> tuple[Value, Value]:
    if not isinstance(a, Value) or (isinstance(b, Value) and (b.is_lanes or b.kind == _I64) and not a.is_lanes):
        assert isinstance(b, Value), "at least one operand is a register"
        return _like(a, b), _like(b, b)
    return _like(a, a), _like(b, a)


def _arithmetic(a: Operand, b: Operand, on_float: str | None, on_integer: str | None) -> Value:
    left, right = _pair(a, b)
    name = on_float if left.kind == _FLOAT else on_integer
    if name is None:
        raise TypeError(f"this operation is not for {left.ir.type}")
    return Value(getattr(_b(), name)(left.ir, right.ir))


def _compare(a: Operand, b: Operand, sign: str) -> Value:
    left, right = _pair(a, b)
    if left.kind == _FLOAT:
        # Ordered comparisons are false on NaN, as C's are; only != is true there.
        emit = _b().fcmp_unordered if sign == "!=" else _b().fcmp_ordered
        return Value(emit(sign, left.ir, right.ir))
    return Value(_b().icmp_signed(sign, left.ir, right.ir))


# --- values ------------------------------------------------------------------------------------------------------


def splat(value: Operand) -> Value:
    """All lanes hold one value; a Python float becomes float32, an int int32."""
    if not isinstance(value, Value):
        kind = _I32 if isinstance(value, int) else _FLOAT
        return _constant_lanes(kind, value if isinstance(value, int) else float(F32(value)))
    vector = ir.VectorType(value.kind, WIDTH)
    one = _b().insert_element(ir.Constant(vector, ir.Undefined), value.ir, ir.Constant(_I32, 0))
    zeros = ir.Constant(ir.VectorType(_I32, WIDTH), [0] * WIDTH)
    return Value(_b().shuffle_vector(one, ir.Constant(vector, ir.Undefined), zeros))


def number(value: Number) -> Value:
    """A scalar constant: float32 for a float, int32 for an int."""
    return Value(ir.Constant(_I32, value) if isinstance(value, int) else ir.Constant(_FLOAT, float(F32(value))))


def position(value: Operand) -> Value:
    """A value as int64: where something is."""
    if not isinstance(value, Value):
        return Value(ir.Constant(_I64, int(value)))
    return value if value.kind == _I64 else Value(_b().sext(value.ir, _I64))


def var(value: Operand) -> Variable:
    """A variable with a first value."""
    start = value if isinstance(value, Value) else number(value)
    place = _in_entry(start.ir.type)
    _b().store(start.ir, place)
    return Variable(place)


def _in_entry(kind: Any) -> Any:
    """Stack space, taken once however often the code around runs."""
    entry = _b().function.entry_basic_block
    with _b().goto_block(entry):
        _b().position_at_start(entry)
        return _b().alloca(kind)


def select(condition: Value, yes: Operand, no: Operand) -> Value:
    """`yes` where the condition holds, else `no`; lane by lane for a mask."""
    registers = [v for v in (yes, no) if isinstance(v, Value)] or [number(yes)]  # type: ignore[list-item]  # numbers
    partner = next((v for v in registers if v.is_lanes), registers[0])
    if condition.is_lanes and not partner.is_lanes:
        partner = splat(partner)
    return Value(_b().select(condition.ir, _like(yes, partner).ir, _like(no, partner).ir))


def larger(a: Operand, b: Operand) -> Value:
    """A > b ? a : b, as C's MAX macro."""
    left, right = _pair(a, b)
    return select(left > right, left, right)


def smaller(a: Operand, b: Operand) -> Value:
    """A < b ? a : b, as C's MIN macro."""
    left, right = _pair(a, b)
    return select(left < right, left, right)


def _intrinsic(name: str, result: Any, *args: Value) -> Value:
    kind = ir.FunctionType(result, [a.ir.type for a in args])
    module = _b().module
    function = module.globals.get(name) or ir.Function(module, kind, name)
    return Value(_b().call(function, [a.ir for a in args]))


def _suffix(value: Value) -> str:
    return f"v{WIDTH}f32" if value.is_lanes else "f32"


def absolute(value: Value) -> Value:
    """|value|, by clearing the sign bit."""
    return _intrinsic(f"llvm.fabs.{_suffix(value)}", value.ir.type, value)


def square_root(value: Value) -> Value:
    """IEEE square root, correctly rounded."""
    return _intrinsic(f"llvm.sqrt.{_suffix(value)}", value.ir.type, value)


def truncate(value: Value) -> Value:
    """Rounded towards zero, still float."""
    return _intrinsic(f"llvm.trunc.{_suffix(value)}", value.ir.type, value)


def to_int(value: Value) -> Value:
    """float32 to int32, towards zero; the value must fit."""
    return Value(_b().fptosi(value.ir, _kind_like(value, _I32)))


def to_float(value: Value) -> Value:
    """An integer to float32."""
    return Value(_b().sitofp(value.ir, _kind_like(value, _FLOAT)))


def float_bits(value: Value) -> Value:
    """The bits of float32 as int32."""
    return Value(_b().bitcast(value.ir, _kind_like(value, _I32)))


def from_bits(value: Value) -> Value:
    """The float32 with these bits."""
    return Value(_b().bitcast(value.ir, _kind_like(value, _FLOAT)))


def _kind_like(value: Value, kind: Any) -> Any:
    return ir.VectorType(kind, WIDTH) if value.is_lanes else kind


def nearest(value: Value, low: int, high: int) -> Value:
    """Ggml's nearest_int, clamped to low ... high, as float.

    Round half to even for |value| <= 4194303. Outside, and for infinities and NaN, the reference takes whatever stands
    in the mantissa after the magic addition; the bit operations here give the same (spec/quant.md, section 1).
    """
    # The field of an integer k in -2^22 ... 2^22 - 1 is k + 0x400000, so clamping and decoding stay there.
    field = float_bits(value + _MAGIC) & 0x7FFFFF
    field = larger(field, low + 0x400000)
    field = smaller(field, high + 0x400000)
    return from_bits(field | 0x4B000000) - _MAGIC


def nearest_within(value: Value, low: int, high: int) -> Value:
    """`nearest` where |value| <= 4194303 is known: cheaper, the same."""
    rounded = (value + _MAGIC) - _MAGIC
    return smaller(larger(rounded, float(low)), float(high))


def nearest_int(value: Value) -> Value:
    """Ggml's nearest_int, as int32, unclamped."""
    return (float_bits(value + _MAGIC) & 0x7FFFFF) - 0x400000


def bits(mask: Value) -> Value:
    """A mask as an int32: bit i is lane i."""
    packed = _b().bitcast(mask.ir, ir.IntType(WIDTH))
    return Value(_b().zext(packed, _I32))


def any_lane(mask: Value) -> Value:
    """Whether the mask holds in some lane."""
    return bits(mask) != 0


def all_lanes(mask: Value) -> Value:
    """Whether the mask holds in every lane."""
    return bits(mask) == (1 << WIDTH) - 1


def lane_numbers() -> Value:
    """0, 1, 2, ... as int lanes."""
    return Value(ir.Constant(ir.VectorType(_I32, WIDTH), list(range(WIDTH))))


def highest(lanes: Value) -> Value:
    """The largest lane. No lane may be NaN; which zero is returned of two is open."""
    return _reduce(lanes, larger)


def lowest(lanes: Value) -> Value:
    """The smallest lane. No lane may be NaN; which zero is returned of two is open."""
    return _reduce(lanes, smaller)


def _reduce(lanes: Value, choose: Any) -> Value:
    width = WIDTH
    while width > 1:
        width //= 2
        moved = [(i + width) % WIDTH for i in range(WIDTH)]
        mask = ir.Constant(ir.VectorType(_I32, WIDTH), moved)
        lanes = choose(lanes, Value(_b().shuffle_vector(lanes.ir, lanes.ir, mask)))
    return Value(_b().extract_element(lanes.ir, ir.Constant(_I32, 0)))


def transposed(rows: list[Value]) -> list[Value]:
    """WIDTH vectors as a square: vector j of the result holds lane j of every row."""
    rows, distance = list(rows), WIDTH // 2
    while distance:
        keep = [lane if not lane & distance else WIDTH + lane - distance for lane in range(WIDTH)]
        swap = [lane + distance if not lane & distance else WIDTH + lane for lane in range(WIDTH)]
        for i in range(WIDTH):
            if not i & distance:
                a, b = rows[i].ir, rows[i + distance].ir
                rows[i], rows[i + distance] = (
                    Value(_b().shuffle_vector(a, b, ir.Constant(ir.VectorType(_I32, WIDTH), lanes)))
                    for lanes in (keep, swap)
                )
        distance //= 2
    return rows


# --- control -----------------------------------------------------------------------------------------------------


def loop(start: Operand, stop: Operand, step: int = 1) -> Iterator[Value]:
    """A loop of the machine over start, start + step, ... below stop, as int64."""
    builder = _b()
    counter = var(position(start))
    head, body, end = (builder.append_basic_block(name) for name in ("head", "body", "end"))
    builder.branch(head)
    builder.position_at_end(head)
    builder.cbranch((counter < position(stop)).ir, body, end)
    builder.position_at_end(body)
    yield Value(counter.ir)
    counter.set(counter + step)
    builder.branch(head)
    builder.position_at_end(end)


def batches(count: Value, size: int) -> Iterator[Value]:
    """Where batches of `size` begin that cover 0 ... count - 1; the last may overlap the one before. count >= size."""
    for start in loop(0, count, size):
        yield smaller(start, count - size)


@contextmanager
def when(condition: Value, *, rare: bool = False) -> Iterator[None]:
    """What is inside happens only where the (scalar) condition holds."""
    with _b().if_then(condition.ir, likely=False if rare else None):
        yield


# --- memory ------------------------------------------------------------------------------------------------------

Stored = Literal["F32", "F16", "BF16", "U8"]
_STORED = {"F32": _FLOAT, "F16": _HALF, "BF16": _I16, "U8": _I8}


_ALIGN = {"F32": 4, "F16": 2, "BF16": 2, "U8": 1}


def pointer_type(stored: Stored) -> Any:
    """LLVM's type of a pointer to such values."""
    return _STORED[stored].as_pointer()


class Memory:
    """An array in memory. Floats are read as float32, whatever they are stored as; bytes as int32."""

    def __init__(self, pointer: Any, stored: Stored) -> None:
        self.pointer, self.stored = pointer, stored

    def load(self, at: Operand) -> Value:
        """WIDTH consecutive values from `at` on."""
        return self._widened(_b().load(self._at(at, lanes=True), align=_ALIGN[self.stored]))

    def columns(self, at: Operand, stride: Operand) -> Value:
        """Lane i is the value at `at` + i * stride: the same element of WIDTH sub-blocks."""
        kind = _STORED[self.stored]
        value: Any = ir.Constant(ir.VectorType(kind, WIDTH), ir.Undefined)
        for lane in range(WIDTH):
            one = _b().load(self._at(position(at) + position(stride) * lane))
            value = _b().insert_element(value, one, ir.Constant(_I32, lane))
        return self._widened(value)

    def __getitem__(self, at: Operand) -> Value:
        """One value."""
        return self._widened(_b().load(self._at(at)))

    def store(self, at: Operand, lanes: Value) -> None:
        """WIDTH consecutive values; int lanes are cut to bytes (to 16 bits in BF16 and F16 memory)."""
        kind = _STORED[self.stored]
        value = lanes.ir
        if self.stored != "F32":
            width = 8 if self.stored == "U8" else 16
            value = _b().trunc(value, ir.VectorType(ir.IntType(width), WIDTH))
            kind = ir.IntType(width)
        pointer = _b().bitcast(self._at(at, lanes=False), ir.VectorType(kind, WIDTH).as_pointer())
        _b().store(value, pointer, align=_ALIGN[self.stored])

    def __setitem__(self, at: Operand, value: Operand) -> None:
        """One value; an int32 is cut to a byte."""
        register = _like(value, number(0.0) if self.stored == "F32" else number(0)).ir
        _b().store(register if self.stored == "F32" else _b().trunc(register, _STORED[self.stored]), self._at(at))

    def viewed(self, stored: Stored) -> Memory:
        """The same bytes as values of another kind."""
        return Memory(_b().bitcast(self.pointer, _STORED[stored].as_pointer()), stored)

    def _at(self, at: Operand, *, lanes: bool = False) -> Any:
        address = _b().gep(self.pointer, [position(at).ir])
        return _b().bitcast(address, ir.VectorType(_STORED[self.stored], WIDTH).as_pointer()) if lanes else address

    def _widened(self, register: Any) -> Value:
        value = Value(register)
        if self.stored == "F16":
            return Value(_b().fpext(register, _kind_like(value, _FLOAT)))
        if self.stored == "BF16":
            return from_bits(Value(_b().zext(register, _kind_like(value, _I32))) << 16)
        if self.stored == "U8":
            return Value(_b().zext(register, _kind_like(value, _I32)))
        return value


def room(values: int) -> Memory:
    """float32 on the stack for the time of the kernel; `values` at most a few thousand."""
    place = _in_entry(ir.ArrayType(_FLOAT, values))
    place.align = 64
    return Memory(_b().bitcast(place, _FLOAT.as_pointer()), "F32")


def room_per_lane(n: int) -> Memory:
    """Room for n values of every lane."""
    return room(n * WIDTH)
