"""The pump and the writer: any cut, any number of workers, the same bytes; any failure, nothing under a final name."""

from __future__ import annotations

import json
import resource
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from converter import convert
from converter.device import Cpu, Torch, open_device
from converter.errors import CheckpointError, EnvironmentFailure, UsageError
from tests.checkpoints import Tensors, variant
from tests.conftest import EXAMPLE, checkpoint

CONVERT = [sys.executable, "-m", "converter"]


def files(folder: Path) -> list[str]:
    return sorted(f.name for f in folder.iterdir())


@pytest.mark.parametrize(
    ("kind", "chunk", "strip", "workers"),
    [("dense", 3000, 1, 1), ("dense", 20_000, 7000, 4), ("moe", 30_000, 3000, 4), ("moe", 100_000, 100_000, 2)],
)
def test_any_cut_gives_the_same_bytes(
    conversions, tmp_path: Path, monkeypatch, kind: str, chunk: int, strip: int, workers: int
) -> None:
    """Strips of one row, odd pieces, several workers."""
    monkeypatch.setattr(Cpu, "chunk_values", chunk)
    monkeypatch.setattr(Cpu, "strip_values", strip)
    mixes = ["Q4_K_M", "F16"]
    convert(checkpoint(kind), tmp_path / "{type}.gguf", types=mixes, workers=workers)
    for mix in mixes:
        assert (tmp_path / f"{mix}.gguf").read_bytes() == (conversions(kind, "bundled") / f"{mix}.gguf").read_bytes()


@pytest.mark.parametrize("name", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_a_torch_device_gives_the_same_bytes(conversions, tmp_path: Path, monkeypatch, name: str) -> None:
    """One upload for all types, importance and small tensors included."""
    monkeypatch.setattr("converter.device.open_device", lambda _name: Torch(name))
    mixes = ["Q4_K_M", "Q8_0", "F16"]
    convert(EXAMPLE, tmp_path / "{type}.gguf", types=mixes, device="cuda")
    for mix in mixes:
        assert (tmp_path / f"{mix}.gguf").read_bytes() == (conversions("dense", "bundled") / f"{mix}.gguf").read_bytes()


def test_a_device_that_is_not_there(tmp_path: Path, monkeypatch) -> None:
    """Asked for by name it is exit 5 with what to do; auto goes on without."""
    import torch

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(EnvironmentFailure, match="no CUDA device"):
        convert(EXAMPLE, tmp_path / "x.gguf", device="cuda")
    assert isinstance(open_device("auto"), Cpu)


def test_each_source_byte_is_read_once_for_all_types(tmp_path: Path, monkeypatch) -> None:
    """Ten mixes from one pass."""
    from converter.checkpoint import Checkpoint

    counted: list[int] = []
    read = Checkpoint.read
    monkeypatch.setattr(
        Checkpoint, "read", lambda self, info, at, out: (counted.append(out.nbytes), read(self, info, at, out))
    )
    report = convert(EXAMPLE, tmp_path / "{type}.gguf", types=["F16", "Q4_0", "Q8_0", "BF16", "F32"])
    assert sum(counted) == report.source_bytes
    used = {s.name: s.end - s.begin for f in report.plan.files for t in f.tensors for s in t.sources}
    assert report.source_bytes == sum(used.values())


def test_existing_output_is_kept(tmp_path: Path) -> None:
    """Without --force it is exit 2 and untouched; a failing run with --force leaves the old file."""
    out = tmp_path / "x.gguf"
    out.write_bytes(b"precious")
    with pytest.raises(UsageError, match="--force"):
        convert(EXAMPLE, out)
    with pytest.raises(CheckpointError):
        convert(_poisoned(tmp_path / "bad"), out, force=True)
    assert out.read_bytes() == b"precious"
    convert(EXAMPLE, out, force=True)
    assert out.read_bytes()[:4] == b"GGUF"
    assert files(tmp_path) == ["bad", "x.gguf"]


def _poisoned(folder: Path) -> Path:
    def poison(tensors: Tensors) -> None:
        tensors["mtp.fc.weight"][-1, -1] = float("nan")

    return variant(EXAMPLE, folder, tensors=poison)


def test_one_failing_output_publishes_none(tmp_path: Path) -> None:
    """All files of a run or none."""
    with pytest.raises(CheckpointError):
        convert(_poisoned(tmp_path / "bad"), tmp_path / "{type}.gguf", types=["Q8_0", "F16"])
    assert files(tmp_path) == ["bad"]


def test_value_too_large_for_one_type(tmp_path: Path) -> None:
    """F16 cannot hold 1e5: which tensor, where, and the range."""

    def large(tensors: Tensors) -> None:
        tensors["lm_head.weight"][7, 9] = 1e5

    folder = variant(EXAMPLE, tmp_path / "m", tensors=large)
    with pytest.raises(CheckpointError, match="too large for this type") as caught:
        convert(folder, tmp_path / "x.gguf", types=["F16"])
    assert (caught.value.tensor, caught.value.found) == ("lm_head.weight", "at index [7, 9]")
    convert(folder, tmp_path / "x.gguf", types=["BF16"])


def test_unwritable_folder(tmp_path: Path) -> None:
    """Exit 5; a file in place of the folder stands in for a missing permission, which root would have."""
    (tmp_path / "file").write_text("")
    with pytest.raises(EnvironmentFailure) as caught:
        convert(EXAMPLE, tmp_path / "file" / "x.gguf")
    assert caught.value.exit_code == 5


AS_NOBODY = """
import os, sys
from converter.cli import convert_main
convert_main([*sys.argv[1:], "--dry-run"])  # everything is imported now: root's interpreter may be closed to others
if os.getuid() == 0:
    os.setuid(65534)
sys.exit(convert_main(sys.argv[1:]))
"""


def test_folder_without_permission(tmp_path: Path) -> None:
    """Permission denied is exit 5 and names the file; root gives up its rights for it."""
    folder = tmp_path / "locked"
    folder.mkdir(mode=0o555)
    for parent in (tmp_path, *tmp_path.parents[:3]):
        if parent.owner() == folder.owner() and parent != Path("/tmp"):
            parent.chmod(0o755)
    command = [sys.executable, "-c", AS_NOBODY, str(EXAMPLE), str(folder / "x.gguf"), "--type", "F16"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=EXAMPLE.parents[1])
    assert done.returncode == 5, done.stderr
    assert "Permission denied" in done.stderr
    assert str(folder / "x.gguf") in done.stderr
    assert files(folder) == []


def test_full_disk(tmp_path: Path) -> None:
    """RLIMIT_FSIZE stands in for a full disk: exit 5, how much is needed, nothing left."""

    def limit() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (1_000_000, 1_000_000))

    command = [*CONVERT, str(EXAMPLE), str(tmp_path / "x.gguf"), "--type", "F16"]
    done = subprocess.run(command, capture_output=True, text=True, preexec_fn=limit, check=False)
    assert done.returncode == 5
    assert "the disk is full" in done.stderr
    assert "x.gguf" in done.stderr
    assert files(tmp_path) == []


def test_not_enough_space_is_seen_before_work(tmp_path: Path, monkeypatch) -> None:
    """All outputs together; how much is missing."""
    monkeypatch.setattr("shutil.disk_usage", lambda _folder: SimpleNamespace(free=20_000_000))
    with pytest.raises(EnvironmentFailure, match=r"not enough disk space: [\d,]+ bytes are missing") as caught:
        convert(EXAMPLE, tmp_path / "{type}.gguf", types=["F32", "F16"])
    assert "2 file(s)" in str(caught.value)
    convert(EXAMPLE, tmp_path / "{type}.gguf", types=["F16"])
    assert files(tmp_path) == ["F16.gguf"]


SLOW = """
import signal, sys, time
sys.path.insert(0, {root!r})
from converter import execute
from converter.cli import convert_main
run = execute.Work.run
def slow(*args):
    time.sleep(0.5)
    return run(*args)
execute.Work.run = slow
signal.signal(signal.SIGINT, signal.default_int_handler)  # what runs in the background inherits that it is ignored
sys.exit(convert_main(sys.argv[1:]))
"""


@pytest.mark.parametrize(("sent", "code"), [(signal.SIGKILL, -9), (signal.SIGINT, 130)])
def test_killed_or_interrupted(tmp_path: Path, sent: signal.Signals, code: int) -> None:
    """No file that looks whole; the next run succeeds."""
    out = tmp_path / "x.gguf"
    script = SLOW.format(root=str(EXAMPLE.parents[1]))
    child = subprocess.Popen([sys.executable, "-c", script, str(EXAMPLE), str(out)], stderr=subprocess.PIPE)
    deadline = time.monotonic() + 60
    while not out.with_name("x.gguf.partial").exists():
        assert time.monotonic() < deadline
        time.sleep(0.02)
    time.sleep(1.5)
    child.send_signal(sent)
    assert child.wait(60) == code
    assert not out.exists()
    assert files(tmp_path) == ["x.gguf.journal", "x.gguf.partial"]
    report = convert(EXAMPLE, out)
    assert report.resumed_bytes > 0
    assert files(tmp_path) == ["x.gguf"]


def test_progress_reaches_the_total(tmp_path: Path) -> None:
    """Bytes only grow, and end where they should."""
    seen: list[tuple[int, int, str]] = []
    report = convert(EXAMPLE, tmp_path / "x.gguf", progress=lambda *args: seen.append(args))
    assert [done for done, _, _ in seen] == sorted(done for done, _, _ in seen)
    assert seen[-1][:2] == (report.source_bytes, report.source_bytes)


MEASURED = """
import json, sys
sys.path.insert(0, {root!r})
from converter import convert
def counted():
    return {{k: int(v) for k, v in (line.split(": ") for line in open("/proc/self/io"))}}
convert({example!r}, {out!r} + "/{{type}}-warm.gguf", types={types!r})
before = counted()
report = convert({model!r}, {out!r} + "/{{type}}.gguf", types={types!r})
after = counted()
peak = next(l for l in open("/proc/self/status") if "VmHWM" in l).split()[1]
written = sum(f.size for f in report.plan.files)
print(json.dumps([int(peak) / 1024, after["rchar"] - before["rchar"] - report.source_bytes,
                  after["wchar"] - before["wchar"] - written, report.source_bytes]))
"""


def test_memory_does_not_grow_with_the_model_and_bytes_move_once(tmp_path: Path) -> None:
    """A child's VmHWM and the kernel's own counters, with default workers, for a model and one of four times the size."""

    def widen(factor: int):
        def change(tensors: Tensors) -> None:
            for name, tensor in tensors.items():
                if ".mlp." in name:
                    across = (1, factor) if "down_proj" in name else (factor, 1)
                    tensors[name] = tensor.repeat(*across)

        return change

    found = []
    for factor in (32, 128):
        folder = variant(
            EXAMPLE, tmp_path / str(factor), tensors=widen(factor),
            config=lambda c, f=factor: c["text_config"].update(intermediate_size=768 * f),
        )  # fmt: skip
        (tmp_path / "out").mkdir()
        script = MEASURED.format(
            root=str(EXAMPLE.parents[1]), example=str(EXAMPLE), model=str(folder), out=str(tmp_path / "out"),
            types=["Q4_K_M", "Q8_0", "F16"],
        )  # fmt: skip
        done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
        found.append(json.loads(done.stdout))
        shutil.rmtree(tmp_path / "out")
        shutil.rmtree(folder)
    (small, _, _, small_bytes), (large, _, _, large_bytes) = found
    assert large_bytes > 700e6 > 3.5 * small_bytes
    assert large < 1500, found
    assert large - small < 64, found
    for _, read_besides, written_besides, _ in found:  # config, tokenizer, headers; journal
        assert 0 <= read_besides < 3e6, found
        assert 0 <= written_besides < 1e6, found
