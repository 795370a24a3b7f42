"""What we write the reference library reads; what lies we refuse, quickly, with the field named."""

from __future__ import annotations

import contextlib
import struct
import time
from pathlib import Path

import pytest
from gguf import GGUFReader
from hypothesis import given, settings
from hypothesis import strategies as st

from converter import convert
from converter.errors import GGUFError, ToolError
from converter.gguf_file import (
    KeyValue,
    ValueType,
    array,
    entries_in_order,
    f32,
    flag,
    header_bytes,
    read_gguf,
    text,
    u32,
)
from quant import block_type
from tests.conftest import EXAMPLE, MIXES

KEYS = [
    text("general.architecture", "test"), u32("a", 2**32 - 1), f32("b", 0.1), flag("c", value=True),
    KeyValue("d", ValueType.INT64, -5), KeyValue("e", ValueType.FLOAT64, 0.1), KeyValue("f", ValueType.UINT16, 7),
    array("g", ValueType.STRING, ["", "ä", "\U0001f600"]), array("h", ValueType.BOOL, [True, False]),
    array("i", ValueType.INT32, [-1, 2]),
]  # fmt: skip
TENSORS = [("x", (256, 3), block_type("Q4_K")), ("y", (7,), block_type("F32")), ("z", (32, 2, 5), block_type("Q8_0"))]


def write(file: Path) -> bytes:
    entries = entries_in_order(TENSORS)
    raw = header_bytes(KEYS, entries)
    raw = raw.ljust(len(raw) + entries[-1].offset + 352, b"\0")
    file.write_bytes(raw)
    return raw


def test_the_reference_library_reads_our_header(tmp_path: Path) -> None:
    """Keys with types and values; names, shapes, types, offsets."""
    write(tmp_path / "x.gguf")
    reader = GGUFReader(tmp_path / "x.gguf")
    found = {f.name: f for f in reader.fields.values() if not f.name.startswith("GGUF.")}
    assert list(found) == [k.key for k in KEYS]
    for key in KEYS:
        field = found[key.key]
        kinds = [int(t) for t in field.types]
        assert kinds == ([9, key.type] if key.is_array else [key.type])
        assert field.contents() == (pytest.approx(key.value) if key.type is ValueType.FLOAT32 else key.value)
    assert [(t.name, tuple(t.shape), t.tensor_type.name) for t in reader.tensors] == [
        (n, ne, k.name) for n, ne, k in TENSORS
    ]


def test_our_reader_reads_our_header(tmp_path: Path) -> None:
    """And finds the same."""
    raw = write(tmp_path / "x.gguf")
    header = read_gguf(tmp_path / "x.gguf")
    assert [(t.name, t.ne, t.type) for t in header.tensors] == TENSORS
    assert {k: v.value for k, v in header.keys.items() if k != "b"} == {k.key: k.value for k in KEYS if k.key != "b"}
    assert header.size == len(raw)


@pytest.mark.parametrize("packaging", ["bundled", "sidecar", "none"])
@pytest.mark.parametrize("mix", MIXES)
def test_written_files_agree_with_their_plan(conversions, packaging: str, mix: str) -> None:
    """Names, shapes, types and offsets, as the reference library reads them, are those of --dry-run."""
    folder = conversions("dense", packaging)
    report = convert(EXAMPLE, folder / f"{mix}.gguf", types=[mix], mtp=packaging, dry_run=True)
    assert report.plan.files
    for planned in report.plan.files:
        name = planned.path.name
        reader = GGUFReader(folder / (name if planned.kind != "sidecar" else f"mtp-{planned.mix}.gguf"))
        found = [(t.name, tuple(t.shape.tolist()), t.tensor_type.name, t.data_offset) for t in reader.tensors]
        start = len(planned.header)
        assert found == [(t.entry.name, t.entry.ne, t.type.name, start + t.entry.offset) for t in planned.tensors]
        assert planned.size == (folder / reader.data.filename).stat().st_size


@given(position=st.integers(0, 400), value=st.integers(0, 255), width=st.sampled_from([1, 4, 8]))
@settings(max_examples=400, deadline=None)
def test_any_damaged_byte_is_read_or_refused_quickly(tmp_path_factory, position: int, value: int, width: int) -> None:
    """S40: no traceback, no unbounded time, whatever a header claims."""
    file = tmp_path_factory.mktemp("gguf") / "x.gguf"
    raw = bytearray(write(file))
    position = min(position, len(raw) - width)
    raw[position : position + width] = bytes([value]) * width
    file.write_bytes(raw)
    started = time.monotonic()
    header = None
    with contextlib.suppress(GGUFError):
        header = read_gguf(file)
    assert header is None or all(header.data_start + t.offset + t.nbytes <= len(raw) for t in header.tensors)
    assert time.monotonic() - started < 1


@pytest.mark.parametrize("length", [0, 3, 23, 24, 100, 300])
def test_cut_off_files(tmp_path: Path, length: int) -> None:
    """Refused at any length."""
    raw = write(tmp_path / "x.gguf")
    (tmp_path / "x.gguf").write_bytes(raw[:length])
    with pytest.raises(GGUFError):
        read_gguf(tmp_path / "x.gguf")


def test_data_that_is_not_there(tmp_path: Path) -> None:
    """The last byte of the last tensor missing: both sizes."""
    raw = write(tmp_path / "x.gguf")
    (tmp_path / "x.gguf").write_bytes(raw[:-13])
    with pytest.raises(GGUFError, match="shorter than its header says"):
        read_gguf(tmp_path / "x.gguf")


def test_big_endian_is_named(tmp_path: Path) -> None:
    """Not "unknown version 50331648"."""
    (tmp_path / "x.gguf").write_bytes(b"GGUF" + struct.pack(">IQQ", 3, 0, 0))
    with pytest.raises(GGUFError, match="big-endian"):
        read_gguf(tmp_path / "x.gguf")


def test_no_such_file(tmp_path: Path) -> None:
    """An environment failure with the name."""
    with pytest.raises(ToolError, match=r"missing\.gguf"):
        read_gguf(tmp_path / "missing.gguf")
