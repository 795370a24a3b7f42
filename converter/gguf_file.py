"""GGUF v3: writing the header, and reading it back with every count checked before it is believed (spec/gguf.md)."""

from __future__ import annotations

import math
import mmap
import struct
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path
from typing import Any

from converter.errors import GGUFError
from converter.files import os_errors
from quant import BlockType
from quant.block import TYPES_BY_ID

MAGIC = b"GGUF"
VERSION = 3
ALIGNMENT = 32
MAX_NAME = 63
MAX_DIMS = 4
MAX_STRING = 2**30


class ValueType(IntEnum):
    """Type ids of metadata values."""

    UINT8 = 0
    INT8 = 1
    UINT16 = 2
    INT16 = 3
    UINT32 = 4
    INT32 = 5
    FLOAT32 = 6
    BOOL = 7
    STRING = 8
    ARRAY = 9
    UINT64 = 10
    INT64 = 11
    FLOAT64 = 12


_FORMATS = {
    ValueType.UINT8: "<B", ValueType.INT8: "<b", ValueType.UINT16: "<H", ValueType.INT16: "<h",
    ValueType.UINT32: "<I", ValueType.INT32: "<i", ValueType.FLOAT32: "<f", ValueType.BOOL: "<?",
    ValueType.UINT64: "<Q", ValueType.INT64: "<q", ValueType.FLOAT64: "<d",
}  # fmt: skip


@dataclass(frozen=True)
class KeyValue:
    """One metadata entry. The engine takes a key only in its exact type; `is_array` makes value a sequence of it."""

    key: str
    type: ValueType
    value: Any
    is_array: bool = False


def u32(key: str, value: int) -> KeyValue:
    return KeyValue(key, ValueType.UINT32, value)


def f32(key: str, value: float) -> KeyValue:
    return KeyValue(key, ValueType.FLOAT32, value)


def text(key: str, value: str) -> KeyValue:
    return KeyValue(key, ValueType.STRING, value)


def flag(key: str, value: bool) -> KeyValue:
    return KeyValue(key, ValueType.BOOL, value)


def array(key: str, kind: ValueType, values: Sequence[Any]) -> KeyValue:
    assert values, f"{key}: readers may refuse empty arrays"
    return KeyValue(key, kind, list(values), is_array=True)


@dataclass(frozen=True)
class TensorEntry:
    """A tensor as the header lists it: ne is fastest axis first, offset counts from the start of the data section."""

    name: str
    ne: tuple[int, ...]
    type: BlockType
    offset: int

    @property
    def nbytes(self) -> int:
        rows = math.prod(self.ne[1:])
        return rows * self.type.row_bytes(self.ne[0])


def pad(position: int, alignment: int = ALIGNMENT) -> int:
    """The next multiple of the alignment."""
    return -(-position // alignment) * alignment


def header_bytes(keys: Sequence[KeyValue], tensors: Sequence[TensorEntry]) -> bytes:
    """Everything before the data section, padded to where it starts."""
    parts = [MAGIC, struct.pack("<IQQ", VERSION, len(tensors), len(keys))]
    for entry in keys:
        parts.append(_string(entry.key))
        if entry.is_array:
            parts.append(struct.pack("<IIQ", ValueType.ARRAY, entry.type, len(entry.value)))
            parts.extend(_value(entry.type, v) for v in entry.value)
        else:
            parts += [struct.pack("<I", entry.type), _value(entry.type, entry.value)]
    for tensor in tensors:
        dims = struct.pack(f"<I{len(tensor.ne)}Q", len(tensor.ne), *tensor.ne)
        parts += [_string(tensor.name), dims, struct.pack("<IQ", tensor.type.id, tensor.offset)]
    header = b"".join(parts)
    return header.ljust(pad(len(header)), b"\0")


def _string(value: str) -> bytes:
    raw = value.encode("utf-8")
    return struct.pack("<Q", len(raw)) + raw


def _value(kind: ValueType, value: Any) -> bytes:
    return _string(value) if kind is ValueType.STRING else struct.pack(_FORMATS[kind], value)


# --- reading -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class GGUFHeader:
    """The header of a file: metadata by key, tensors in order, where the data starts, bytes of the whole file."""

    file: Path
    keys: Mapping[str, KeyValue]
    tensors: Sequence[TensorEntry]
    data_start: int
    size: int

    def get(self, key: str, default: Any = None) -> Any:
        found = self.keys.get(key)
        return default if found is None else found.value


def read_gguf(file: Path) -> GGUFHeader:
    """The checked header of a GGUF file. Raises GGUFError naming the field that lies."""
    with os_errors("cannot read this file", file), file.open("rb") as stream:
        size = stream.seek(0, 2)
        if size < 24:
            raise GGUFError(
                "this is not a GGUF file: it is too short", file, expected="24 bytes", found=f"{size} bytes"
            )
        with mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ) as data:
            return _Reader(file, data, size).header()


class _Reader:
    """A cursor that refuses to leave the file."""

    def __init__(self, file: Path, data: mmap.mmap, size: int) -> None:
        self.file, self.data, self.size, self.at = file, data, size, 0

    def header(self) -> GGUFHeader:
        if self.data[:4] != MAGIC:
            raise self.error("this is not a GGUF file", expected="it to start with GGUF", found=repr(self.data[:4]))
        self.at = 4
        version = self.number(ValueType.UINT32, "version")
        if version & 0xFFFF == 0:
            raise self.error("this GGUF file is big-endian, engines here read little-endian", found=f"{version:#010x}")
        if version not in {2, VERSION}:
            raise self.error("unknown GGUF version", expected=VERSION, found=version)
        tensor_count, key_count = (self.number(ValueType.UINT64, f"{what} count") for what in ("tensor", "key"))
        # The smallest entries possible: a bound that keeps lying counts from costing time or memory.
        if tensor_count * 24 + key_count * 13 > self.size:
            raise self.error("the header's counts do not fit into the file", found=f"{tensor_count=} {key_count=}")
        keys: dict[str, KeyValue] = {}
        for _ in range(key_count):
            entry = self.key_value()
            if entry.key in keys or not entry.key:
                raise self.error("a metadata key is empty or occurs twice", found=repr(entry.key))
            keys[entry.key] = entry
        alignment = self.alignment(keys.get("general.alignment"))
        tensors = self.tensors(tensor_count, alignment)
        data_start = pad(self.at, alignment)
        for tensor in tensors:
            end = data_start + tensor.offset + tensor.nbytes
            if end > self.size:
                raise self.error(
                    "the file is shorter than its header says", tensor.name, f"{end:,} bytes", f"{self.size:,} bytes"
                )
        return GGUFHeader(self.file, keys, tensors, data_start, self.size)

    def alignment(self, entry: KeyValue | None) -> int:
        if entry is None:
            return ALIGNMENT
        value = entry.value
        if entry.is_array or entry.type is not ValueType.UINT32 or value == 0 or value & (value - 1):
            raise self.error("general.alignment is not a power of two of type u32", found=repr(value))
        return value

    def tensors(self, count: int, alignment: int) -> list[TensorEntry]:
        names: set[str] = set()
        entries: list[TensorEntry] = []
        expected = 0
        for _ in range(count):
            entry = self.tensor()
            if entry.name in names or len(entry.name.encode()) > MAX_NAME:
                raise self.error(f"a tensor name occurs twice or is longer than {MAX_NAME} bytes", entry.name)
            if entry.offset != expected:
                raise self.error("a tensor is not where the one before it ends", entry.name, expected, entry.offset)
            expected = pad(entry.offset + entry.nbytes, alignment)
            names.add(entry.name)
            entries.append(entry)
        return entries

    def tensor(self) -> TensorEntry:
        name = self.string("tensor name")
        dims = self.number(ValueType.UINT32, "n_dims")
        if dims > MAX_DIMS:
            raise self.error("a tensor has too many dimensions", name, f"at most {MAX_DIMS}", dims)
        ne = tuple(self.number(ValueType.UINT64, "ne") for _ in range(dims)) or (1,)
        kind = TYPES_BY_ID.get(type_id := self.number(ValueType.UINT32, "tensor type"))
        if kind is None:
            raise self.error("unknown tensor type", name, found=type_id)
        if math.prod(ne) >= 2**63 or ne[0] % kind.block:
            raise self.error("a tensor's shape cannot be", name, f"rows in blocks of {kind.block}", f"ne {list(ne)}")
        return TensorEntry(name, ne, kind, self.number(ValueType.UINT64, "tensor offset"))

    def key_value(self) -> KeyValue:
        key = self.string("key")
        kind = self.value_type(key)
        if kind is not ValueType.ARRAY:
            return KeyValue(key, kind, self.value(kind, key))
        element = self.value_type(key)
        count = self.number(ValueType.UINT64, key)
        if element is ValueType.ARRAY:
            raise self.error("arrays of arrays are not allowed", found=key)
        if element is ValueType.STRING:
            if count * 8 > self.size - self.at:
                raise self.error("an array does not fit into the file", found=f"{key}: {count} strings")
            return KeyValue(key, element, [self.string(key) for _ in range(count)], is_array=True)
        width = struct.calcsize(_FORMATS[element])
        raw = self.take(count * width, key)
        return KeyValue(key, element, list(struct.unpack(f"<{count}{_FORMATS[element][1]}", raw)), is_array=True)

    def value_type(self, key: str) -> ValueType:
        number = self.number(ValueType.UINT32, key)
        try:
            return ValueType(number)
        except ValueError:
            raise self.error("unknown value type", found=f"{key}: {number}") from None

    def value(self, kind: ValueType, what: str) -> Any:
        return self.string(what) if kind is ValueType.STRING else self.number(kind, what)

    def number(self, kind: ValueType, what: str) -> Any:
        form = _FORMATS[kind]
        return struct.unpack(form, self.take(struct.calcsize(form), what))[0]

    def string(self, what: str) -> str:
        length = self.number(ValueType.UINT64, what)
        if length > MAX_STRING:
            raise self.error("a string is longer than 1 GiB", found=f"{what}: {length:,} bytes")
        raw = self.take(length, what)
        try:
            return raw.decode("utf-8")
        except UnicodeDecodeError:
            raise self.error("a string is not UTF-8", found=f"{what}: {raw[:40]!r}") from None

    def take(self, count: int, what: str) -> bytes:
        if count > self.size - self.at:
            raise self.error("the file ends inside its header", expected=f"{count:,} bytes for {what}", found=self.size)
        self.at += count
        return self.data[self.at - count : self.at]

    def error(self, what: str, tensor: str | None = None, expected: object = None, found: object = None) -> GGUFError:
        return GGUFError(what, self.file, tensor, expected, found)


def entries_in_order(tensors: Iterable[tuple[str, tuple[int, ...], BlockType]]) -> list[TensorEntry]:
    """Give each (name, ne, type) its offset: one after the other, each aligned."""
    entries: list[TensorEntry] = []
    offset = 0
    for name, ne, kind in tensors:
        entries.append(TensorEntry(name, ne, kind, offset))
        offset = pad(offset + entries[-1].nbytes)
    return entries
