"""Lanes do what the same IEEE operations do one by one, nothing is contracted, and the cache can be trusted."""

from __future__ import annotations

import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quant import TYPES
from quant import kernel as kernels
from quant.arithmetic import from_half, to_half
from quant.kernel import Kernel, kernel
from quant.lanes import (
    WIDTH,
    Memory,
    Value,
    absolute,
    batches,
    highest,
    loop,
    lowest,
    nearest,
    nearest_int,
    nearest_within,
    now,
    number,
    position,
    select,
    square_root,
    to_float,
    to_int,
    transposed,
    truncate,
    var,
    when,
)
from tests.conftest import ROOT

floats = st.floats(width=32, allow_nan=False, allow_infinity=False)
vectors = st.lists(floats, min_size=WIDTH, max_size=WIDTH).map(lambda v: np.array(v, np.float32))


@kernel(memories=3)
def _arithmetic(a: Memory, b: Memory, out: Memory, n: Value) -> Value:
    x, y = a.load(0), b.load(0)
    results = (
        x + y, x - y, x * y, x / y, select(x < y, x, y), select((x >= y) & ~(x == 0.0), absolute(x), 1.0),
        square_root(absolute(x)), truncate(y), 0.1 * x, -x,
    )  # fmt: skip
    for i, result in enumerate(results):
        out.store(i * WIDTH, result)
    return n


@given(vectors, vectors)
@settings(max_examples=200, deadline=None)
def test_operations_equal_numpy(a: np.ndarray, b: np.ndarray) -> None:
    """Each of them, lane by lane, bit by bit (NaN of any payload)."""
    out = np.empty(10 * WIDTH, np.float32)
    _arithmetic(a, b, out, 0)
    with np.errstate(all="ignore"):
        expected = [
            a + b, a - b, a * b, a / b, np.where(a < b, a, b),
            np.where((a >= b) & (a != 0), np.abs(a), np.float32(1)), np.sqrt(np.abs(a)), np.trunc(b),
            np.float32(0.1) * a, -a,
        ]  # fmt: skip
    np.testing.assert_array_equal(out, np.concatenate(expected))


@kernel(memories=2)
def _nearest(a: Memory, out: Memory, n: Value) -> Value:
    out.store(0, nearest(a.load(0), -32, 31))
    out.store(WIDTH, nearest_within(a.load(0), -32, 31))
    out.store(2 * WIDTH, to_float(nearest_int(a.load(0))))
    return n


@given(vectors)
@settings(max_examples=300, deadline=None)
def test_nearest_is_round_half_even_in_its_range(a: np.ndarray) -> None:
    """Clamped to the limits, for all values that the reference rounds properly."""
    a = np.clip(a, -4194303, 4194303)
    out = np.empty((3, WIDTH), np.float32)
    _nearest(a, out.reshape(-1), 0)
    np.testing.assert_array_equal(out[0], np.clip(np.rint(a), -32, 31))
    np.testing.assert_array_equal(out[1], out[0])
    np.testing.assert_array_equal(out[2], np.rint(a))


def test_nearest_takes_the_mantissa_outside_its_range() -> None:
    """Infinity gives -4194304, as the reference's bit operation does."""
    values = np.array([np.inf, 4194305, 1e7, -1e7, 1e30, -1e30, 8388608, 5e6], np.float32)
    wide = np.resize(values, WIDTH).astype(np.float32)
    out = np.empty((3, WIDTH), np.float32)
    _nearest(wide, out.reshape(-1), 0)
    assert out[2, 0] == -4194304
    mantissa = ((wide + np.float32(12582912)).view(np.int32) & 0x7FFFFF) - 0x400000
    np.testing.assert_array_equal(out[2], mantissa.astype(np.float32))
    np.testing.assert_array_equal(out[0], np.clip(mantissa, -32, 31))


@kernel(memories=3)
def _halves(x: Memory, out: Memory, back: Memory, n: Value) -> Value:
    for i in batches(n, WIDTH):
        half = to_half(x.load(i))
        out.viewed("BF16").store(i, half)
        back.store(i, from_half(half))
    return n


def test_half_conversions_equal_numpy() -> None:
    """All float16 there and back, and every float32 near a rounding boundary."""
    values = np.arange(0x7C00, dtype=np.uint16).view(np.float16).astype(np.float32)
    around = (values.view(np.uint32)[:-1, None] + np.array([0, 0xFFF, 0x1000, 0x1001, 0x1FFF])).astype(np.uint32)
    x = around.reshape(-1).view(np.float32)
    x = np.concatenate([x, -x, np.array([65519.99, 1e-30, -1e-30, 65504], np.float32)])
    out, back = np.empty(2 * len(x), np.uint8), np.empty(len(x), np.float32)
    _halves(x, out, back, len(x))
    with np.errstate(over="ignore"):
        expected = x.astype(np.float16)
    fits = np.isfinite(expected)
    np.testing.assert_array_equal(out.view(np.uint16), expected.view(np.uint16))
    np.testing.assert_array_equal(back[fits], expected[fits].astype(np.float32))


@kernel(memories=2)
def _control(x: Memory, out: Memory, n: Value) -> Value:
    count, total = var(position(0)), var(number(0.0))
    for i in loop(0, n):
        for _ in when(x[i] > 0):
            total.set(total + x[i])
            count.set(count + 1)
    out[0] = total
    out[1], out[2] = highest(x.load(0)), lowest(x.load(0))
    out[3] = to_float(to_int(x[0]))
    return now(count)


def test_loops_branches_and_variables() -> None:
    """A sum over a condition, in order; the extremes of lanes."""
    x = np.random.default_rng(0).standard_normal(100).astype(np.float32)
    out = np.empty(4, np.float32)
    assert _control(x, out, 100) == (x > 0).sum()
    total = np.float32(0)
    for value in x[x > 0]:
        total += value
    np.testing.assert_array_equal(out, [total, x[:WIDTH].max(), x[:WIDTH].min(), np.trunc(x[0])])


@kernel(memories=2)
def _transpose(x: Memory, out: Memory, n: Value) -> Value:
    for j, lanes in enumerate(transposed([x.load(i * WIDTH) for i in range(WIDTH)])):
        out.store(j * WIDTH, lanes)
    return n


def test_transposition() -> None:
    """Lane j of row i becomes lane i of row j."""
    x = np.arange(WIDTH * WIDTH, dtype=np.float32)
    out = np.empty_like(x)
    _transpose(x, out, 0)
    np.testing.assert_array_equal(out.reshape(WIDTH, WIDTH), x.reshape(WIDTH, WIDTH).T)


@pytest.mark.parametrize("name", [t for t, kind in TYPES.items() if kind.can_write])
def test_nothing_is_fused(name: str) -> None:
    """A fused multiply-add rounds once where the reference rounds twice."""
    module = TYPES[name].kernels()
    weighted = getattr(module, "quantize_weighted", None)
    for built in (module.quantize, module.dequantize, *([weighted] if weighted else [])):
        stored = ("F32",) * (built.memories - 1) + ("U8",)
        if built is module.dequantize:
            stored = ("U8", "F32")
        assembly = built.assembly(stored, 2 if built is weighted else 1)
        assert "vfmadd" not in assembly
        assert "vfnmadd" not in assembly
        assert "fmla" not in assembly
        assert "kernel:" in assembly


def test_mistakes_show_while_building() -> None:
    """A register has no truth; operands of different types do not mix."""

    def truth(x: Memory, n: Value) -> Value:
        return n if x[0] > 0 else position(0)

    def mixed(x: Memory, n: Value) -> Value:
        return to_int(x[0] + to_int(x[0])) + n

    for build in (truth, mixed):
        with pytest.raises(TypeError):
            Kernel(build, 1).assembly(("F32",), 1)


SCRIPT = """
import time, sys
sys.path.insert(0, {root!r})
import numpy as np
x = np.linspace(-1, 1, 512, dtype=np.float32)[None]
started = time.perf_counter()
from quant import quantize
print(quantize(x, {name!r}).tobytes().hex(), time.perf_counter() - started)
"""


def _run(name: str, cache: Path) -> tuple[str, float]:
    environment = {"CONVERT_MTP_CACHE": str(cache), "PATH": "/usr/bin:/bin", "CONVERT_MTP_LANES": str(WIDTH)}
    script = SCRIPT.format(root=str(ROOT), name=name)
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, env=environment, check=True)
    digest, seconds = done.stdout.split()
    return digest, float(seconds)


def test_concurrent_first_use(tmp_path: Path) -> None:
    """Several processes that find an empty cache agree, and leave it whole."""
    with ThreadPoolExecutor(4) as pool:
        results = {digest for digest, _ in pool.map(lambda _: _run("Q6_K", tmp_path), range(4))}
    assert len(results) == 1
    assert not [f for f in tmp_path.iterdir() if f.suffix != ".o"]


def test_a_damaged_cache_is_not_believed(tmp_path: Path) -> None:
    """Cut off or changed files are compiled anew."""
    expected, _ = _run("Q8_0", tmp_path)
    for file in tmp_path.iterdir():
        raw = bytearray(file.read_bytes())
        raw[len(raw) // 2] ^= 0xFF
        file.write_bytes(raw)
    assert _run("Q8_0", tmp_path)[0] == expected
    for file in tmp_path.iterdir():
        file.write_bytes(file.read_bytes()[:50])
    assert _run("Q8_0", tmp_path)[0] == expected


def test_an_unwritable_cache_does_not_matter(tmp_path: Path) -> None:
    """A file where the folder should be."""
    (tmp_path / "file").write_text("")
    assert _run("Q8_0", tmp_path / "file" / "cache")[0] == _run("Q8_0", tmp_path / "cache")[0]


def test_the_cache_saves_the_compilation(tmp_path: Path) -> None:
    """No second compilation: the file's own time stays, whatever the machine's speed."""
    _run("Q4_K", tmp_path)
    before = {f: f.stat().st_mtime_ns for f in tmp_path.iterdir()}
    time.sleep(0.05)
    _run("Q4_K", tmp_path)
    assert {f: f.stat().st_mtime_ns for f in tmp_path.iterdir()} == before
    assert before


def test_the_key_names_processor_and_sources() -> None:
    """Another build, another width or another processor never shares code."""
    one = kernels._key("quant.types.q8_0.quantize", ("F32", "U8"))
    assert one != kernels._key("quant.types.q8_0.quantize", ("BF16", "U8"))
    assert one != kernels._key("quant.types.q4_0.quantize", ("F32", "U8"))
    assert one.startswith("types.q8_0.quantize-")
