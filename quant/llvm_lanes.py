"""Lanes as LLVM instructions: a kernel runs once, and each operation emits one. The module is the machine.

Nothing is typed or guessed: building a kernel takes milliseconds, LLVM does the rest.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

from llvmlite import ir

from quant.lanes import F32, MAGIC, WIDTH, Number, Stored, Value, Variable

_FLOAT, _HALF, _BOOL = ir.FloatType(), ir.HalfType(), ir.IntType(1)
_I8, _I16, _I32, _I64 = (ir.IntType(bits) for bits in (8, 16, 32, 64))
_STORED = {"F32": _FLOAT, "F16": _HALF, "BF16": _I16, "U8": _I8}
_ALIGN = {"F32": 4, "F16": 2, "BF16": 2, "U8": 1}


class _Building:
    """The function that is being built; there is one at a time."""

    builder: ir.IRBuilder
    constants: dict[tuple[str, float], Register]  # those that fill all lanes, made once per function


def _b() -> Any:
    return _Building.builder


def begin(builder: ir.IRBuilder) -> None:
    """Let all operations emit here from now on."""
    _Building.builder = builder
    _Building.constants = {}


class Register(Value):
    """A `lanes.Value` that the processor will hold."""

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


Operand = Register | Number


class Place(Register, Variable):
    """A `lanes.Variable`: stack space that is read where it is used; LLVM makes registers of it."""

    def __init__(self, place: Any) -> None:
        self._place = place

    @property
    def ir(self) -> Any:
        return _b().load(self._place)

    def set(self, value: Any) -> None:
        _b().store(_like(value, self).ir, self._place)


def _like(value: Operand, partner: Register) -> Register:
    """The value with the type of its partner: numbers converted, scalars splatted."""
    if not isinstance(value, Register):
        number = float(F32(value)) if partner.kind == _FLOAT else int(value)
        if partner.is_lanes:
            return _constant_lanes(partner.kind, number)
        value = Register(ir.Constant(partner.kind, number))
    if value.kind != partner.kind:
        if value.kind == _I32 and partner.kind == _I64:
            value = Register(_b().sext(value.ir, _I64))
        else:
            raise TypeError(f"operands of different types: {value.ir.type} and {partner.ir.type}")
    return splat(value) if partner.is_lanes and not value.is_lanes else value


def _constant_lanes(kind: Any, number: float) -> Register:
    """A number in all lanes, from the function's entry. The sign of zero tells two zeros apart."""
    key = (f"{kind}{math.copysign(1, number)}", number)
    if key not in _Building.constants:
        entry = _b().function.entry_basic_block
        with _b().goto_block(entry):
            _b().position_at_start(entry)
            _Building.constants[key] = splat(Register(ir.Constant(kind, number)))
    return _Building.constants[key]


def _pair(a: Operand, b: Operand) -> tuple[Register, Register]:
    if not isinstance(a, Register) or (isinstance(b, Register) and (b.is_lanes or b.kind == _I64) and not a.is_lanes):
        assert isinstance(b, Register), "at least one operand is a register"
        return _like(a, b), _like(b, b)
    return _like(a, a), _like(b, a)


_OPERATIONS = {  # sign: on floats, on integers
    "+": ("fadd", "add"), "-": ("fsub", "sub"), "*": ("fmul", "mul"), "/": ("fdiv", None), "//": (None, "sdiv"),
    "%": (None, "srem"), "&": (None, "and_"), "|": (None, "or_"), "<<": (None, "shl"), ">>": (None, "ashr"),
}  # fmt: skip


def operate(sign: str, a: Operand, b: Operand) -> Register:
    left, right = _pair(a, b)
    name = _OPERATIONS[sign][left.kind != _FLOAT]
    if name is None:
        raise TypeError(f"{sign} is not for {left.ir.type}")
    return Register(getattr(_b(), name)(left.ir, right.ir))


def compare(sign: str, a: Operand, b: Operand) -> Register:
    left, right = _pair(a, b)
    if left.kind == _FLOAT:
        # Ordered comparisons are false on NaN, as C's are; only != is true there.
        emit = _b().fcmp_unordered if sign == "!=" else _b().fcmp_ordered
        return Register(emit(sign, left.ir, right.ir))
    return Register(_b().icmp_signed(sign, left.ir, right.ir))


def invert(mask: Register) -> Register:
    return Register(_b().not_(mask.ir))


def negate(value: Register) -> Register:
    return Register(_b().fneg(value.ir)) if value.kind == _FLOAT else operate("-", 0, value)


# --- values ------------------------------------------------------------------------------------------------------


def splat(value: Operand) -> Register:
    if not isinstance(value, Register):
        kind = _I32 if isinstance(value, int) else _FLOAT
        return _constant_lanes(kind, value if isinstance(value, int) else float(F32(value)))
    vector = ir.VectorType(value.kind, WIDTH)
    one = _b().insert_element(ir.Constant(vector, ir.Undefined), value.ir, ir.Constant(_I32, 0))
    zeros = ir.Constant(ir.VectorType(_I32, WIDTH), [0] * WIDTH)
    return Register(_b().shuffle_vector(one, ir.Constant(vector, ir.Undefined), zeros))


def number(value: Any) -> Register:
    return Register(ir.Constant(_I32, value) if isinstance(value, int) else ir.Constant(_FLOAT, float(F32(value))))


def position(value: Any) -> Register:
    if not isinstance(value, Register):
        return Register(ir.Constant(_I64, int(value)))
    return value if value.kind == _I64 else Register(_b().sext(value.ir, _I64))


def var(value: Register | Number) -> Place:
    start = value if isinstance(value, Register) else number(value)
    place = _in_entry(start.ir.type)
    _b().store(start.ir, place)
    return Place(place)


def _in_entry(kind: Any) -> Any:
    """Stack space, taken once however often the code around runs."""
    entry = _b().function.entry_basic_block
    with _b().goto_block(entry):
        _b().position_at_start(entry)
        return _b().alloca(kind)


def select(condition: Register, yes: Operand, no: Operand) -> Register:
    registers = [v for v in (yes, no) if isinstance(v, Register)] or [number(yes)]  # type: ignore[list-item]  # numbers
    partner = next((v for v in registers if v.is_lanes), registers[0])
    if condition.is_lanes and not partner.is_lanes:
        partner = splat(partner)
    return Register(_b().select(condition.ir, _like(yes, partner).ir, _like(no, partner).ir))


def _intrinsic(name: str, result: Any, *args: Register) -> Register:
    kind = ir.FunctionType(result, [a.ir.type for a in args])
    module = _b().module
    function = module.globals.get(name) or ir.Function(module, kind, name)
    return Register(_b().call(function, [a.ir for a in args]))


def _suffix(value: Register) -> str:
    return f"v{WIDTH}f32" if value.is_lanes else "f32"


def now(value: Register) -> Register:
    return Register(value.ir)


def first(block: Register) -> Register:
    return now(block)  # passes come in order, and a block is noted only where none was before


def absolute(value: Register) -> Register:
    return _intrinsic(f"llvm.fabs.{_suffix(value)}", value.ir.type, value)


def square_root(value: Register) -> Register:
    return _intrinsic(f"llvm.sqrt.{_suffix(value)}", value.ir.type, value)


def truncate(value: Register) -> Register:
    return _intrinsic(f"llvm.trunc.{_suffix(value)}", value.ir.type, value)


def to_int(value: Register) -> Register:
    return Register(_b().fptosi(value.ir, _kind_like(value, _I32)))


def to_float(value: Register) -> Register:
    return Register(_b().sitofp(value.ir, _kind_like(value, _FLOAT)))


def float_bits(value: Register) -> Register:
    return Register(_b().bitcast(value.ir, _kind_like(value, _I32)))


def from_bits(value: Register) -> Register:
    return Register(_b().bitcast(value.ir, _kind_like(value, _FLOAT)))


def _kind_like(value: Register, kind: Any) -> Any:
    return ir.VectorType(kind, WIDTH) if value.is_lanes else kind


def nearest_within(value: Register, low: int, high: int) -> Register:
    rounded = (value + MAGIC) - MAGIC
    above = select(rounded > float(low), rounded, float(low))
    return select(above < float(high), above, float(high))


def bits(mask: Register) -> Register:
    packed = _b().bitcast(mask.ir, ir.IntType(WIDTH))
    return Register(_b().zext(packed, _I32))


def any_lane(mask: Register) -> Register:
    return bits(mask) != 0


def all_lanes(mask: Register) -> Register:
    return bits(mask) == (1 << WIDTH) - 1


def lane_numbers() -> Register:
    return Register(ir.Constant(ir.VectorType(_I32, WIDTH), list(range(WIDTH))))


def highest(lanes: Register) -> Register:
    return _reduce(lanes, ">")


def lowest(lanes: Register) -> Register:
    return _reduce(lanes, "<")


def _reduce(lanes: Register, sign: str) -> Register:
    width = WIDTH
    while width > 1:
        width //= 2
        moved = [(i + width) % WIDTH for i in range(WIDTH)]
        mask = ir.Constant(ir.VectorType(_I32, WIDTH), moved)
        other = Register(_b().shuffle_vector(lanes.ir, lanes.ir, mask))
        lanes = select(compare(sign, lanes, other), lanes, other)
    return Register(_b().extract_element(lanes.ir, ir.Constant(_I32, 0)))


def transposed(rows: list[Register]) -> list[Register]:
    rows, distance = list(rows), WIDTH // 2
    while distance:
        keep = [lane if not lane & distance else WIDTH + lane - distance for lane in range(WIDTH)]
        swap = [lane + distance if not lane & distance else WIDTH + lane for lane in range(WIDTH)]
        for i in range(WIDTH):
            if not i & distance:
                a, b = rows[i].ir, rows[i + distance].ir
                rows[i], rows[i + distance] = (
                    Register(_b().shuffle_vector(a, b, ir.Constant(ir.VectorType(_I32, WIDTH), lanes)))
                    for lanes in (keep, swap)
                )
        distance //= 2
    return rows


# --- control -----------------------------------------------------------------------------------------------------


def loop(start: Operand, stop: Operand, step: int = 1) -> Iterator[Register]:
    builder = _b()
    counter = var(position(start))
    head, body, end = (builder.append_basic_block(name) for name in ("head", "body", "end"))
    builder.branch(head)
    builder.position_at_end(head)
    builder.cbranch((counter < position(stop)).ir, body, end)
    builder.position_at_end(body)
    yield Register(counter.ir)
    counter.set(counter + step)
    builder.branch(head)
    builder.position_at_end(end)


def batches(count: Register, size: int) -> Iterator[Register]:
    for start in loop(0, count, size):
        last = count - size
        yield select(start < last, start, last)


def when(condition: Register, *, rare: bool = False) -> Iterator[None]:
    with _b().if_then(condition.ir, likely=False if rare else None):
        yield


# --- memory ------------------------------------------------------------------------------------------------------


def pointer_type(stored: Stored) -> Any:
    """LLVM's type of a pointer to such values."""
    return _STORED[stored].as_pointer()


class Array:
    """A `lanes.Memory`: what a pointer points to."""

    def __init__(self, pointer: Any, stored: Stored) -> None:
        self.pointer, self.stored = pointer, stored

    def load(self, at: Operand) -> Register:
        return self._widened(_b().load(self._at(at, lanes=True), align=_ALIGN[self.stored]))

    def columns(self, at: Operand, stride: Operand) -> Register:
        kind = _STORED[self.stored]
        value: Any = ir.Constant(ir.VectorType(kind, WIDTH), ir.Undefined)
        for lane in range(WIDTH):
            one = _b().load(self._at(position(at) + position(stride) * lane))
            value = _b().insert_element(value, one, ir.Constant(_I32, lane))
        return self._widened(value)

    def __getitem__(self, at: Operand) -> Register:
        return self._widened(_b().load(self._at(at)))

    def store(self, at: Operand, lanes: Register) -> None:
        kind = _STORED[self.stored]
        value = lanes.ir
        if self.stored != "F32":
            width = 8 if self.stored == "U8" else 16
            value = _b().trunc(value, ir.VectorType(ir.IntType(width), WIDTH))
            kind = ir.IntType(width)
        pointer = _b().bitcast(self._at(at, lanes=False), ir.VectorType(kind, WIDTH).as_pointer())
        _b().store(value, pointer, align=_ALIGN[self.stored])

    def __setitem__(self, at: Operand, value: Operand) -> None:
        register = _like(value, number(0.0) if self.stored == "F32" else number(0)).ir
        _b().store(register if self.stored == "F32" else _b().trunc(register, _STORED[self.stored]), self._at(at))

    def viewed(self, stored: Stored) -> Array:
        return Array(_b().bitcast(self.pointer, _STORED[stored].as_pointer()), stored)

    def _at(self, at: Operand, *, lanes: bool = False) -> Any:
        address = _b().gep(self.pointer, [position(at).ir])
        return _b().bitcast(address, ir.VectorType(_STORED[self.stored], WIDTH).as_pointer()) if lanes else address

    def _widened(self, register: Any) -> Register:
        value = Register(register)
        if self.stored == "F16":
            return Register(_b().fpext(register, _kind_like(value, _FLOAT)))
        if self.stored == "BF16":
            return from_bits(Register(_b().zext(register, _kind_like(value, _I32))) << 16)
        if self.stored == "U8":
            return Register(_b().zext(register, _kind_like(value, _I32)))
        return value


def room(values: int) -> Array:
    place = _in_entry(ir.ArrayType(_FLOAT, values))
    place.align = 64
    return Array(_b().bitcast(place, _FLOAT.as_pointer()), "F32")
