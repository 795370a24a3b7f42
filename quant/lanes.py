"""SIMD lanes as a Numba value type: a kernel reads like the scalar algorithm and runs on a whole vector.

A value of `lanes` type is an LLVM vector of WIDTH float32, WIDTH int32 or WIDTH booleans (a mask). Every operation is
one IEEE operation per lane in the order written: nothing is contracted or reassociated, so a lane has exactly the bits
of the scalar sequence. Scalars mix with lanes only as float32 (or an integer beside int lanes), because a Python float
or an int64 would promote the arithmetic to float64 without a word.

    lanes      +  -  *  /  <  <=  >  >=  ==  !=      float32 per lane
    int lanes  +  -  &  |  <<  >>                    int32 per lane
    masks      &  |  ~

WIDTH is 16 on hosts with AVX-512F, else 8; `CONVERT_MTP_LANES` overrides it (the tests run both).
"""

from __future__ import annotations

import operator
import os
from collections.abc import Callable
from typing import Any

import llvmlite.binding as llvm
import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.core.datamodel.models import PrimitiveModel
from numba.extending import intrinsic, lower_builtin, register_model, type_callable

F32 = np.float32
Value = Any  # an LLVM value; llvmlite's own annotations are too loose to check against
MAGIC = 12582912.0  # 1.5 * 2^23: adding it leaves the nearest integer in the mantissa


def _width() -> int:
    chosen = os.environ.get("CONVERT_MTP_LANES")
    if chosen is not None:
        if chosen not in {"8", "16"}:
            raise ValueError(f"CONVERT_MTP_LANES must be 8 or 16, not {chosen!r}")
        return int(chosen)
    return 16 if llvm.get_host_cpu_features().get("avx512f", False) else 8


WIDTH = _width()
_I32 = ir.IntType(32)
_ELEMENTS = {"float": ir.FloatType(), "int": _I32, "mask": ir.IntType(1)}


class LaneType(types.Type):
    """Numba type of WIDTH lanes; `element` is "float", "int" or "mask"."""

    def __init__(self, element: str) -> None:
        self.element = element
        super().__init__(name=f"{element}_x{WIDTH}")


class FloatLanes(LaneType):
    """WIDTH float32."""

    def __init__(self) -> None:
        super().__init__("float")


class IntLanes(LaneType):
    """WIDTH int32."""

    def __init__(self) -> None:
        super().__init__("int")


class MaskLanes(LaneType):
    """WIDTH booleans, what a comparison gives."""

    def __init__(self) -> None:
        super().__init__("mask")


FLOAT, INT, MASK = FloatLanes(), IntLanes(), MaskLanes()
_VECTOR = {kind: ir.VectorType(element, WIDTH) for kind, element in _ELEMENTS.items()}


@register_model(FloatLanes)
@register_model(IntLanes)
@register_model(MaskLanes)
class _LaneModel(PrimitiveModel):
    def __init__(self, dmm, fe_type) -> None:
        super().__init__(dmm, fe_type, _VECTOR[fe_type.element])


def operation(emitter: Callable) -> Any:
    """A function on lanes that kernels call; `emitter` says its type and emits its instructions."""
    return intrinsic(emitter)


# --- operators ---------------------------------------------------------------------------------------------------


def _splat(builder: ir.IRBuilder, scalar: Value) -> Value:
    vector = ir.VectorType(scalar.type, WIDTH)
    one = builder.insert_element(ir.Constant(vector, ir.Undefined), scalar, ir.Constant(_I32, 0))
    zeros = ir.Constant(ir.VectorType(_I32, WIDTH), [0] * WIDTH)
    return builder.shuffle_vector(one, ir.Constant(vector, ir.Undefined), zeros)


def _as_lanes(builder: ir.IRBuilder, value: Value, kind: Any) -> Value:
    if isinstance(kind, LaneType):
        return value
    if isinstance(kind, types.Integer):
        value = builder.trunc(value, _I32) if kind.bitwidth > 32 else value  # pyright: ignore[reportAttributeAccessIssue]
    return _splat(builder, value)


def _is(kind: Any, lane: LaneType) -> bool:
    """Whether a value may stand where lanes of this kind do: the lanes themselves, or the scalar to be splatted."""
    if kind == lane:
        return True
    if lane is FLOAT:
        return kind == types.float32
    return lane is INT and isinstance(kind, types.Integer) and kind.bitwidth >= 32  # pyright: ignore[reportAttributeAccessIssue]


def _binary(op: Callable, operand: LaneType, result: LaneType, emit: Callable) -> None:
    @type_callable(op)
    def _typing(_context):
        def typer(a, b):
            lanes = operand in {a, b}
            return result if lanes and _is(a, operand) and _is(b, operand) else None

        return typer

    def lower(_context, builder, signature, args):
        return emit(builder, *(_as_lanes(builder, v, t) for v, t in zip(args, signature.args, strict=True)))

    scalar = {FLOAT: types.float32, INT: types.Integer, MASK: None}[operand]
    lower_builtin(op, type(operand), type(operand))(lower)
    if scalar is not None:
        lower_builtin(op, type(operand), scalar)(lower)
        lower_builtin(op, scalar, type(operand))(lower)


def _compare(sign: str) -> Callable:
    # Ordered comparisons are false on NaN, as C's are; only != is true there.
    emit = ir.IRBuilder.fcmp_unordered if sign == "!=" else ir.IRBuilder.fcmp_ordered
    return lambda builder, a, b: emit(builder, sign, a, b)


for _op, _emit in {
    operator.add: ir.IRBuilder.fadd,
    operator.sub: ir.IRBuilder.fsub,
    operator.mul: ir.IRBuilder.fmul,
    operator.truediv: ir.IRBuilder.fdiv,
}.items():
    _binary(_op, FLOAT, FLOAT, _emit)
for _op, _sign in {
    operator.lt: "<",
    operator.le: "<=",
    operator.gt: ">",
    operator.ge: ">=",
    operator.eq: "==",
    operator.ne: "!=",
}.items():
    _binary(_op, FLOAT, MASK, _compare(_sign))
for _op, _emit in {
    operator.add: ir.IRBuilder.add,
    operator.sub: ir.IRBuilder.sub,
    operator.and_: ir.IRBuilder.and_,
    operator.or_: ir.IRBuilder.or_,
    operator.lshift: ir.IRBuilder.shl,
    operator.rshift: ir.IRBuilder.ashr,
}.items():
    _binary(_op, INT, INT, _emit)
for _op, _emit in {operator.and_: ir.IRBuilder.and_, operator.or_: ir.IRBuilder.or_}.items():
    _binary(_op, MASK, MASK, _emit)


@type_callable(operator.invert)
def _invert_typing(_context):
    return lambda a: MASK if a == MASK else None


@lower_builtin(operator.invert, MaskLanes)
def _invert(_context, builder, _signature, args):
    return builder.not_(args[0])


# --- functions ---------------------------------------------------------------------------------------------------


def _vector_intrinsic(builder: ir.IRBuilder, name: str, *args: Value) -> Value:
    """Call llvm.NAME.vNf32; llvmlite cannot derive the overloaded name of a vector by itself."""
    vector = _VECTOR["float"]
    kind = ir.FunctionType(vector, [vector] * len(args))
    return builder.call(cgutils.get_or_insert_function(builder.module, kind, f"llvm.{name}.v{WIDTH}f32"), args)


@operation
def splat(_typing, value):
    """All lanes hold one float32 (or one integer)."""
    if value != types.float32 and not isinstance(value, types.Integer):
        return None
    result = FLOAT if value == types.float32 else INT
    return result(value), lambda _c, builder, sig, args: _as_lanes(builder, args[0], sig.args[0])


@operation
def select(_typing, mask, yes, no):
    """Per lane `yes` where the mask holds, else `no`; scalars are splatted."""
    result = next((t for t in (FLOAT, INT) if _is(yes, t) and _is(no, t)), None)
    if mask != MASK or result is None:
        return None

    def emit(_context, builder, signature, args):
        yes, no = (_as_lanes(builder, v, t) for v, t in zip(args[1:], signature.args[1:], strict=True))
        return builder.select(args[0], yes, no)

    return result(mask, yes, no), emit


@operation
def absolute(_typing, value):
    """|value| by clearing the sign bit."""
    return FLOAT(value), lambda _c, builder, _s, args: _vector_intrinsic(builder, "fabs", args[0])


@operation
def square_root(_typing, value):
    """IEEE square root, correctly rounded."""
    return FLOAT(value), lambda _c, builder, _s, args: _vector_intrinsic(builder, "sqrt", args[0])


@operation
def truncate(_typing, value):
    """Rounded towards zero, still float."""
    return FLOAT(value), lambda _c, builder, _s, args: _vector_intrinsic(builder, "trunc", args[0])


@operation
def to_int(_typing, value):
    """Float lanes to int lanes, towards zero; the values must fit."""
    return INT(value), lambda _c, builder, _s, args: builder.fptosi(args[0], _VECTOR["int"])


@operation
def nearest(_typing, value, low, high):
    """Ggml's nearest_int, clamped to low...high (integers of type float32), as float lanes.

    Round half to even for |value| <= 4194303. Outside, and for infinities and NaN, the reference takes whatever stands
    in the mantissa after the magic addition; the bit operations here give the same (spec/quant.md, section 1).
    """
    if value != FLOAT or low != types.float32 or high != types.float32:
        return None

    def emit(_context, builder, _signature, args):
        ints = _VECTOR["int"]

        def const(n: int) -> Value:
            return ir.Constant(ints, [n] * WIDTH)

        # The field of an integer k in -2^22 ... 2^22 - 1 is k + 0x400000, so clamping and decoding stay there.
        magic = _splat(builder, ir.Constant(ir.FloatType(), MAGIC))
        limits = [_splat(builder, builder.fadd(v, ir.Constant(ir.FloatType(), MAGIC))) for v in args[1:]]
        low_field, high_field = (builder.and_(builder.bitcast(v, ints), const(0x7FFFFF)) for v in limits)
        field = builder.and_(builder.bitcast(builder.fadd(args[0], magic), ints), const(0x7FFFFF))
        field = builder.select(builder.icmp_signed("<", field, low_field), low_field, field)
        field = builder.select(builder.icmp_signed(">", field, high_field), high_field, field)
        return builder.fsub(builder.bitcast(builder.or_(field, const(0x4B000000)), _VECTOR["float"]), magic)

    return FLOAT(value, low, high), emit


@operation
def bits(_typing, mask):
    """The mask as an integer: bit i is lane i."""

    def emit(_context, builder, _signature, args):
        return builder.zext(builder.bitcast(args[0], ir.IntType(WIDTH)), ir.IntType(64))

    return types.int64(mask), emit


def _pointer(context, builder, array_type, array, index, element: ir.Type, count: int):
    data = context.make_array(array_type)(context, builder, array).data
    address = builder.gep(data, [index])
    return builder.bitcast(address, ir.VectorType(element, count).as_pointer())


# What a kernel may read: float32 as it is; bfloat16 as bits in uint16, float16 as bits in int16 (Numba has no half).
_WIDEN = {types.float32: ir.FloatType(), types.int16: ir.HalfType(), types.uint16: ir.IntType(16)}


def _widened(builder: ir.IRBuilder, value: Value, dtype: Any) -> Value:
    if dtype == types.int16:
        return builder.fpext(value, _VECTOR["float"])
    if dtype == types.uint16:
        wide = builder.shl(builder.zext(value, _VECTOR["int"]), ir.Constant(_VECTOR["int"], [16] * WIDTH))
        return builder.bitcast(wide, _VECTOR["float"])
    return value


@operation
def load(_typing, array, index):
    """WIDTH consecutive values from array[index] on, as float lanes; float16 (int16) and bfloat16 (uint16) bits are widened."""
    if not isinstance(array, types.Array) or array.dtype not in _WIDEN or not isinstance(index, types.Integer):
        return None

    def emit(context, builder, signature, args):
        dtype = signature.args[0].dtype
        pointer = _pointer(context, builder, signature.args[0], args[0], args[1], _WIDEN[dtype], WIDTH)
        return _widened(builder, builder.load(pointer, align=dtype.bitwidth // 8), dtype)

    return FLOAT(array, index), emit


@operation
def load_columns(_typing, array, index, stride):
    """Lane i is array[index + i * stride]: the same element of WIDTH sub-blocks; widened as load does."""
    if not isinstance(array, types.Array) or array.dtype not in _WIDEN:
        return None

    def emit(context, builder, signature, args):
        array_type, index_type, stride_type = signature.args
        dtype = array_type.dtype
        data = context.make_array(array_type)(context, builder, args[0]).data
        start = context.cast(builder, args[1], index_type, types.int64)
        stride = context.cast(builder, args[2], stride_type, types.int64)
        raw = ir.VectorType(_WIDEN[dtype], WIDTH)
        value = ir.Constant(raw, ir.Undefined)
        pointer = builder.bitcast(data, _WIDEN[dtype].as_pointer())
        for lane in range(WIDTH):
            at = builder.add(start, builder.mul(stride, ir.Constant(ir.IntType(64), lane)))
            one = builder.load(builder.gep(pointer, [at]))
            value = builder.insert_element(value, one, ir.Constant(_I32, lane))
        return _widened(builder, value, dtype)

    return FLOAT(array, index, stride), emit


@operation
def store(_typing, array, index, value):
    """Write lanes to array[index ...]: float lanes to a float32 array, int lanes as bytes to a uint8 array."""
    if not isinstance(array, types.Array):
        return None
    if (array.dtype, value) not in {(types.float32, FLOAT), (types.uint8, INT), (types.uint16, INT)}:
        return None

    def emit(context, builder, signature, args):
        dtype = signature.args[0].dtype
        lanes = args[2]
        element = ir.FloatType() if dtype == types.float32 else ir.IntType(dtype.bitwidth)
        if dtype != types.float32:
            lanes = builder.trunc(lanes, ir.VectorType(element, WIDTH))
        pointer = _pointer(context, builder, signature.args[0], args[0], args[1], element, WIDTH)
        builder.store(lanes, pointer, align=dtype.bitwidth // 8)
        return context.get_dummy_value()

    return types.void(array, index, value), emit


@operation
def float_bits(_typing, value):
    """The bits of float lanes as int lanes, or of a float32 as an int32."""
    result = INT if value == FLOAT else types.int32
    target = _VECTOR["int"] if value == FLOAT else _I32
    return result(value), lambda _c, builder, _s, args: builder.bitcast(args[0], target)


@operation
def from_bits(_typing, value):
    """The float32 (or float lanes) with these bits: the inverse of float_bits."""
    result = FLOAT if value == INT else types.float32
    target = _VECTOR["float"] if value == INT else ir.FloatType()

    def emit(_context, builder, signature, args):
        value = args[0]
        if isinstance(signature.args[0], types.Integer) and signature.args[0].bitwidth > 32:
            value = builder.trunc(value, _I32)
        return builder.bitcast(value, target)

    return result(value), emit


def _reduction(name: str, doc: str):
    @operation
    def reduce(_typing, value):
        if value != FLOAT:
            return None

        def emit(_context, builder, _signature, args):
            kind = ir.FunctionType(ir.FloatType(), [_VECTOR["float"]])
            function = cgutils.get_or_insert_function(builder.module, kind, f"llvm.vector.reduce.{name}.v{WIDTH}f32")
            return builder.call(function, args, fastmath=("nnan",))

        return types.float32(value), emit

    reduce.__doc__ = doc
    return reduce


highest = _reduction("fmax", "The largest lane. No lane may be NaN; which zero is returned of two is open.")
lowest = _reduction("fmin", "The smallest lane. No lane may be NaN; which zero is returned of two is open.")
