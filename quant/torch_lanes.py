"""Lanes as torch operations: a kernel runs once for all batches of a tensor, on any device torch knows.

The passes of a kernel's outermost loop become the first axis: lanes are tensors [passes, WIDTH], scalars [passes, 1],
what is the same in all passes [1, 1]. Each operation is one IEEE operation per element, eager, so nothing can be fused.
Positions in that loop stay symbolic, which makes most of a kernel's memory accesses strided views.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch

from quant.lanes import F32, MAGIC, WIDTH, Stored, Value, Variable

_STORED = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.int16, "U8": torch.uint8}


class HasData(Value):
    """What all values of this machine can become."""

    @property
    def data(self) -> torch.Tensor:
        raise NotImplementedError


class Tensor(HasData):
    """A `lanes.Value`: lanes [passes, WIDTH], a scalar [passes, 1], or the same in all passes [1, 1]."""

    def __init__(self, data: torch.Tensor) -> None:
        self._data = data

    @property
    def data(self) -> torch.Tensor:
        return self._data


class Place(Tensor, Variable):
    """A `lanes.Variable`; where a branch is not taken it keeps its value."""

    def __init__(self, machine: TorchMachine, data: torch.Tensor) -> None:
        super().__init__(data)
        self._machine = machine

    def set(self, value: Any) -> None:
        new = self._machine.tensor(value, self._data.dtype)
        mask = self._machine.mask
        self._data = new if mask is None else torch.where(mask, new, self._data)


class Position(HasData):
    """The whole number step * pass + offset, for pass = 0 ... passes - 1."""

    def __init__(self, machine: TorchMachine, step: int, offset: int, passes: int) -> None:
        self._machine, self.step, self.offset, self.passes = machine, step, offset, passes

    @property
    def data(self) -> torch.Tensor:
        count = torch.arange(self.passes, device=self._machine.device)
        return (count * self.step + self.offset)[:, None]

    def moved(self, step: int, offset: int) -> Position:
        return Position(self._machine, step, offset, self.passes)


class TorchMachine:
    """A `lanes.Machine` on a torch device. One kernel at a time runs on an instance."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.mask: torch.Tensor | None = None  # [passes or 1, 1]: where the branch that is running is taken
        self._in_loop = False
        self._constants: dict[tuple[torch.dtype, float, float], torch.Tensor] = {}

    # --- operations

    def tensor(self, value: Any, dtype: torch.dtype) -> torch.Tensor:
        if isinstance(value, HasData):
            return value.data
        return self._constant(value, dtype)

    def _constant(self, value: float, dtype: torch.dtype) -> torch.Tensor:
        key = (dtype, float(value), math.copysign(1, value))
        if key not in self._constants:
            self._constants[key] = torch.full((1, 1), value, dtype=dtype, device=self.device)
        return self._constants[key]

    def operate(self, sign: str, a: Any, b: Any) -> Any:
        if isinstance(a, Position) or isinstance(b, Position):
            symbolic = _of_positions(sign, a, b)
            if symbolic is not None:
                return symbolic
        known = (a if isinstance(a, HasData) else b).data
        # Division by a number must see a tensor: torch would multiply by its reciprocal.
        keep = sign != "/" and not known.dtype.is_floating_point
        left, right = (self._operand(v, known.dtype, keep=keep or sign in "+-*") for v in (a, b))
        return Tensor(_OPERATIONS[sign](left, right))

    def _operand(self, value: Any, dtype: torch.dtype, *, keep: bool) -> Any:
        if isinstance(value, HasData):
            return value.data
        if keep:
            return float(F32(value)) if dtype.is_floating_point else int(value)
        return self._constant(value, dtype)

    def compare(self, sign: str, a: Any, b: Any) -> Tensor:
        known = (a if isinstance(a, HasData) else b).data
        left, right = (self._operand(v, known.dtype, keep=True) for v in (a, b))
        return Tensor(_COMPARISONS[sign](left, right))

    def invert(self, mask: Any) -> Tensor:
        return Tensor(~mask.data)

    def negate(self, value: Any) -> Tensor:
        return Tensor(-value.data)

    def splat(self, value: Any) -> Any:
        return value if isinstance(value, HasData) else self.number(value)

    def number(self, value: Any) -> Tensor:
        kinds = {bool: torch.bool, int: torch.int32}
        return Tensor(self._constant(value, kinds.get(type(value), torch.float32)))

    def position(self, value: Any) -> Any:
        return value  # a number, a Position, or what became of one

    def var(self, value: Any) -> Place:
        start = value if isinstance(value, HasData) else self.number(value)
        return Place(self, start.data)

    def now(self, value: Any) -> Tensor:
        return Tensor(value.data)

    def first(self, block: Any) -> Tensor:
        noted = block.data.flatten()
        noted = noted[noted >= 0]
        return Tensor(noted.min().reshape(1, 1) if len(noted) else self._constant(-1, torch.int64))

    def select(self, condition: Any, yes: Any, no: Any) -> Any:
        if not isinstance(condition, HasData):
            return yes if condition else no
        known = next((v.data for v in (yes, no) if isinstance(v, HasData)), None)
        dtype = known.dtype if known is not None else (torch.int32 if isinstance(yes, int) else torch.float32)
        return Tensor(torch.where(condition.data, self.tensor(yes, dtype), self.tensor(no, dtype)))

    def absolute(self, value: Any) -> Tensor:
        return Tensor(value.data.abs())

    def square_root(self, value: Any) -> Tensor:
        # torch's float32 root may be one bit off (on CPUs it is); float64 has bits to spare, so rounding is correct.
        return Tensor(value.data.double().sqrt().float())

    def truncate(self, value: Any) -> Tensor:
        return Tensor(value.data.trunc())

    def to_int(self, value: Any) -> Any:
        return Tensor(value.data.to(torch.int32))

    def to_float(self, value: Any) -> Any:
        return Tensor(value.data.to(torch.float32)) if isinstance(value, HasData) else float(F32(value))

    def float_bits(self, value: Any) -> Tensor:
        return Tensor(value.data.view(torch.int32))

    def from_bits(self, value: Any) -> Tensor:
        return Tensor(value.data.view(torch.float32))

    def nearest_within(self, value: Any, low: int, high: int) -> Tensor:
        return Tensor(value.data.add(MAGIC).sub_(MAGIC).clamp_(low, high))

    def bits(self, mask: Any) -> Tensor:
        powers = torch.tensor([1 << lane for lane in range(WIDTH)], dtype=torch.int32, device=self.device)
        return Tensor((mask.data * powers).sum(1, keepdim=True, dtype=torch.int32))

    def any_lane(self, mask: Any) -> Tensor:
        return Tensor(mask.data.any(1, keepdim=True))

    def all_lanes(self, mask: Any) -> Tensor:
        return Tensor(mask.data.all(1, keepdim=True))

    def lane_numbers(self) -> Tensor:
        return Tensor(torch.arange(WIDTH, dtype=torch.int32, device=self.device)[None])

    def highest(self, lanes: Any) -> Tensor:
        return Tensor(lanes.data.amax(1, keepdim=True))

    def lowest(self, lanes: Any) -> Tensor:
        return Tensor(lanes.data.amin(1, keepdim=True))

    def transposed(self, rows: list[Any]) -> list[Any]:
        square = torch.stack([r.data for r in rows], dim=1)  # [passes, row, lane]
        return [Tensor(column) for column in square.permute(2, 0, 1).contiguous()]

    # --- control

    def loop(self, start: Any, stop: Any, step: int) -> Iterator[Any]:
        if self._in_loop or start == stop:
            yield from range(start, stop, step)
            return
        self._in_loop = True
        yield Position(self, step, start, len(range(start, stop, step)))
        self._in_loop = False

    def batches(self, count: int, size: int) -> Iterator[Any]:
        assert count % size == 0, (count, size)
        yield from self.loop(0, count, size)

    def when(self, condition: Any, *, rare: bool) -> Iterator[None]:
        del rare
        if not isinstance(condition, HasData):
            yield from [None] * bool(condition)
            return
        before = self.mask
        mask = condition.data if before is None else condition.data & before
        # One look at the device is cheaper than a branch for nothing, or masks where all take it.
        some, every = torch.stack([mask.any(), mask.all()]).tolist()
        if not some:
            return
        self.mask = None if every else mask
        yield
        self.mask = before

    def room(self, values: int) -> Room:
        return Room(self, values)


_OPERATIONS: dict[str, Any] = {
    "+": lambda a, b: a + b, "-": lambda a, b: a - b, "*": lambda a, b: a * b, "/": torch.div,
    "//": lambda a, b: a // b, "%": lambda a, b: a % b, "&": lambda a, b: a & b, "|": lambda a, b: a | b,
    "<<": lambda a, b: a << b, ">>": lambda a, b: a >> b,
}  # fmt: skip
_COMPARISONS: dict[str, Any] = {
    "<": lambda a, b: a < b, "<=": lambda a, b: a <= b, ">": lambda a, b: a > b, ">=": lambda a, b: a >= b,
    "==": lambda a, b: a == b, "!=": lambda a, b: a != b,
}  # fmt: skip


def _of_positions(sign: str, a: Any, b: Any) -> Position | None:
    """A sum or product that is again of the form step * pass + offset; None where it is not."""
    if isinstance(a, Position) and isinstance(b, Position):
        return a.moved(a.step + b.step, a.offset + b.offset) if sign == "+" else None
    position, other = (a, b) if isinstance(a, Position) else (b, a)
    if isinstance(other, HasData):
        return None
    if sign == "+":
        return position.moved(position.step, position.offset + other)
    if sign == "*":
        return position.moved(position.step * other, position.offset * other)
    if sign == "-" and position is a:
        return position.moved(position.step, position.offset - other)
    if sign == "//" and position is a and position.step % other == 0 and position.offset >= 0:
        return position.moved(position.step // other, position.offset // other)
    return None


class Array:
    """A `lanes.Memory`: a flat contiguous tensor of F32, F16, int16 (bfloat16 bits) or uint8."""

    def __init__(self, machine: TorchMachine, data: torch.Tensor, stored: Stored) -> None:
        self._machine, self._data, self._stored = machine, data, stored

    def load(self, at: Any) -> Tensor:
        return self._widened(self._view(at, WIDTH, 1))

    def columns(self, at: Any, stride: Any) -> Tensor:
        return self._widened(self._view(at, WIDTH, stride))

    def __getitem__(self, at: Any) -> Tensor:
        return self._widened(self._view(at, 1, 1))

    def store(self, at: Any, lanes: Any) -> None:
        self._put(at, WIDTH, lanes)

    def __setitem__(self, at: Any, value: Any) -> None:
        self._put(at, 1, value)

    def viewed(self, stored: Stored) -> Array:
        return Array(self._machine, self._data.view(_STORED[stored]), stored)

    def _put(self, at: Any, width: int, value: Any) -> None:
        view = self._view(at, width, 1)
        if self._stored == "F16":
            view = view.view(torch.int16)  # halves are computed as bits
        new = self._machine.tensor(value, torch.float32 if self._stored == "F32" else torch.int32).to(view.dtype)
        mask = self._machine.mask
        view.copy_(new if mask is None else torch.where(mask, new, view))

    def _view(self, at: Any, width: int, stride: int) -> torch.Tensor:
        """Elements at + stride * lane of every pass, [passes, width]: where positions are regular no copy."""
        if isinstance(at, Position):
            return self._strided(at.passes, at.step, width, stride, at.offset)
        if isinstance(at, HasData):
            lanes = torch.arange(width, device=self._machine.device) * stride
            return self._data[at.data + lanes]
        return self._strided(1, 0, width, stride, int(at))

    def _strided(self, passes: int, step: int, width: int, stride: int, offset: int) -> torch.Tensor:
        assert offset >= 0
        assert offset + (passes - 1) * step + (width - 1) * stride < len(self._data)
        return self._data.as_strided((passes, width), (step, stride), self._data.storage_offset() + offset)

    def _widened(self, view: torch.Tensor) -> Tensor:
        if self._stored == "BF16":
            view = view.view(torch.bfloat16)
        return Tensor(view.to(torch.int32 if self._stored == "U8" else torch.float32))


class Room:
    """A `lanes.Memory` of one pass: rows of WIDTH float32, each a tensor [passes, WIDTH]. Positions are numbers."""

    def __init__(self, machine: TorchMachine, values: int) -> None:
        self._machine = machine
        self._rows: list[torch.Tensor | None] = [None] * -(-values // WIDTH)
        self._flat: torch.Tensor | None = None

    def load(self, at: int) -> Tensor:
        row, lane = divmod(at, WIDTH)
        return Tensor(self._row(row)) if lane == 0 else self.columns(at, 1)

    def columns(self, at: int, stride: int) -> Tensor:
        if self._flat is None:
            passes = max(len(r) for r in self._rows if r is not None)
            rows = [torch.zeros(1, 1, device=self._machine.device) if r is None else r for r in self._rows]
            self._flat = torch.cat([r.expand(passes, WIDTH) for r in rows], dim=1)
        return Tensor(self._flat[:, at : at + (WIDTH - 1) * stride + 1 : stride])

    def __getitem__(self, at: int) -> Tensor:
        row, lane = divmod(at, WIDTH)
        data = self._row(row)
        return Tensor(data if data.shape[1] == 1 else data[:, lane : lane + 1])

    def store(self, at: int, lanes: Any) -> None:
        row, lane = divmod(at, WIDTH)
        assert lane == 0, at
        self._set(row, self._machine.tensor(lanes, torch.float32))

    def __setitem__(self, at: int, value: Any) -> None:
        row, lane = divmod(at, WIDTH)
        new, old = self._machine.tensor(value, torch.float32), self._rows[row]
        passes = max(len(new), 1 if old is None else len(old))
        if old is None:
            changed = torch.zeros(passes, WIDTH, device=self._machine.device)
        else:
            changed = old.expand(passes, WIDTH).clone()
        changed[:, lane : lane + 1] = new
        self._set(row, changed)

    def viewed(self, stored: Stored) -> Room:
        raise TypeError(f"room holds float32, not {stored}")

    def _row(self, row: int) -> torch.Tensor:
        data = self._rows[row]
        assert data is not None, row
        return data

    def _set(self, row: int, new: torch.Tensor) -> None:
        old, mask = self._rows[row], self._machine.mask
        self._rows[row] = new if mask is None or old is None else torch.where(mask, new, old)
        self._flat = None
