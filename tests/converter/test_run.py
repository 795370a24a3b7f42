"""Runs that are cut off and go on: nothing lost, nothing done twice, nothing believed that does not hold."""

from __future__ import annotations

import errno
import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from safetensors.torch import save_file

from converter import convert
from converter.cli import convert_main
from converter.device import Cpu
from converter.errors import CheckpointError, EnvironmentFailure, UsageError
from converter.execute import Chunk, Work
from tests.checkpoints import clone, copy_small_files, edit_json, load
from tests.conftest import EXAMPLE, ROOT

MIXES = ["Q4_K_M", "F16"]


@pytest.fixture(autouse=True)
def many_chunks(monkeypatch) -> None:
    """About 250 chunks where the example's usual size makes one per tensor."""
    monkeypatch.setattr(Cpu, "chunk_values", 30_000)


def files(folder: Path) -> list[str]:
    return sorted(f.name for f in folder.iterdir() if f.is_file())


def run(folder: Path, source: Path = EXAMPLE, **options):
    return convert(source, folder / "{type}.gguf", types=MIXES, workers=1, **options)


def assert_whole(folder: Path, conversions) -> None:
    """What an uninterrupted run makes, and nothing else."""
    assert files(folder) == ["F16.gguf", "Q4_K_M.gguf"]
    for mix in MIXES:
        assert_is(folder, mix, conversions)


def assert_is(folder: Path, mix: str, conversions) -> None:
    assert (folder / f"{mix}.gguf").read_bytes() == (conversions("dense", "bundled") / f"{mix}.gguf").read_bytes()


class Stop(BaseException):
    """Stands for whatever ends a run from outside."""


@pytest.fixture
def stopped(monkeypatch):
    """stopped(folder, after=n, ...) starts a run that ends after n chunks, and returns their keys."""

    def begin(folder: Path, after: int = 20, error: BaseException | None = None, **options):
        done: list[object] = []
        original = Work.run

        def counted(self: Work, chunk: Chunk):
            if len(done) == after:
                raise error or Stop
            result = original(self, chunk)
            done.append(chunk.key)
            return result

        with monkeypatch.context() as patch, pytest.raises(type(error or Stop())):
            patch.setattr(Work, "run", counted)
            run(folder, **options)
        return done

    return begin


@pytest.fixture
def ran(monkeypatch):
    """The chunks that were done since: filled while runs go on."""
    done: list[Chunk] = []
    original = Work.run

    def watched(self: Work, chunk: Chunk):
        done.append(chunk)
        return original(self, chunk)

    monkeypatch.setattr(Work, "run", watched)
    return done


CHILD = """
import sys, time
sys.path.insert(0, {root!r})
from converter import execute
from converter.cli import convert_main
execute.Cpu.chunk_values = 30_000
run = execute.Work.run
def slow(self, chunk):
    time.sleep(0.02)
    with open({log!r}, "a") as log:
        log.write(f"{{list(chunk.key)}}\\n")
    return run(self, chunk)
execute.Work.run = slow
if __name__ == "__main__":  # worker processes import this file too, and are slow as well
    sys.exit(convert_main(sys.argv[1:]))
"""


@pytest.mark.parametrize("executor", ["threads", "processes"])
def test_killed_at_random_moments_again_and_again(conversions, tmp_path: Path, executor: str) -> None:
    """SIGKILL until a run comes through; chunks in the journal are not done again."""
    folder, log = tmp_path / "out", tmp_path / "log"
    chance = random.Random(11)
    script = tmp_path / "child.py"
    script.write_text(CHILD.format(root=str(ROOT), log=str(log)))
    command = [sys.executable, str(script), str(EXAMPLE)]
    command += [str(folder / "{type}.gguf"), "--type", ",".join(MIXES), "--executor", executor, "--workers", "2"]
    journal = folder / "Q4_K_M.gguf.journal"
    kills = 0
    while True:
        log.write_text("")
        recorded = _recorded(journal)
        child = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
        try:
            child.wait(chance.uniform(0.3, 2.5))
        except subprocess.TimeoutExpired:
            child.send_signal(signal.SIGKILL)
            kills += 1
        _, said = child.communicate(timeout=60)
        again = {tuple(json.loads(line)) for line in log.read_text().splitlines()} & recorded
        assert not again
        if child.returncode == 0:
            break
        assert child.returncode == -signal.SIGKILL, said
        for mix in MIXES:  # a kill may come after the last step; what has its name then is whole
            if (folder / f"{mix}.gguf").exists():
                assert_is(folder, mix, conversions)
        if folder.exists() and files(folder) == ["F16.gguf", "Q4_K_M.gguf"]:
            break
        assert kills < 60
    assert kills > 0
    assert_whole(folder, conversions)


def _recorded(journal: Path) -> set[tuple[int, ...]]:
    if not journal.exists():
        return set()
    lines = [line for line in journal.read_bytes().splitlines(keepends=True) if line.endswith(b"\n")]
    return {tuple(json.loads(line)[:3]) for line in lines[1:]}


def test_goes_on_where_it_stopped(conversions, tmp_path: Path, stopped, ran) -> None:
    """Every chunk is done once in two runs, and the line says how much was there."""
    before = stopped(tmp_path, after=40)
    assert files(tmp_path) == ["F16.gguf.partial", "Q4_K_M.gguf.journal", "Q4_K_M.gguf.partial"]
    said: list[str] = []
    ran.clear()
    report = run(tmp_path, notify=lambda name, line, _facts: said.append(f"{name}: {line}"))
    assert not {c.key for c in ran} & set(before)
    assert report.resumed_bytes > 0
    total = sum(s.end - s.begin for s in {s.name: s for t in report.plan.files[0].tensors for s in t.sources}.values())
    assert report.source_bytes + report.resumed_bytes == total
    assert said == [f"resume: going on: {report.resumed_bytes / 1e6:.2f} MB of 10.91 MB were done by an earlier run"]
    assert_whole(tmp_path, conversions)


def test_no_resume_starts_over(conversions, tmp_path: Path, stopped) -> None:
    """Asked to, it forgets."""
    stopped(tmp_path)
    assert run(tmp_path, resume=False).resumed_bytes == 0
    assert_whole(tmp_path, conversions)


def test_other_options_start_over(tmp_path: Path, stopped) -> None:
    """With a line that says why."""
    stopped(tmp_path)
    assert _void(tmp_path, mtp_type="Q6_K") == (
        "void: starting over: it was begun with other options, or from another config or tokenizer"
    )


def test_another_version_starts_over(tmp_path: Path, stopped, monkeypatch) -> None:
    stopped(tmp_path)
    from importlib import metadata

    monkeypatch.setattr(metadata, "version", lambda _name: "9.9.9")
    assert _void(tmp_path) == "void: starting over: it was begun by version 0.1.0 of this program, this is 9.9.9"


def _touch(folder: Path) -> None:
    os.utime(folder / "mtp.safetensors", ns=(1, 1))


def _longer_header(folder: Path) -> None:
    """Blanks at the header's end, which the format allows: another size, the same tensors."""
    shard = folder / "mtp.safetensors"
    when = shard.stat().st_mtime_ns
    raw = shard.read_bytes()
    length = int.from_bytes(raw[:8], "little")
    shard.write_bytes((length + 8).to_bytes(8, "little") + raw[8 : 8 + length] + b" " * 8 + raw[8 + length :])
    os.utime(shard, ns=(when, when))


def _other_header(folder: Path) -> None:
    """The same size, the same mtime; two tensors of one shape have changed places."""
    shard = folder / "mtp.safetensors"
    when = shard.stat().st_mtime_ns
    raw = shard.read_bytes()
    a, b = b'"mtp.pre_fc_norm_embedding.weight"', b'"mtp.pre_fc_norm_hidden.weight"'
    assert raw.count(a) == raw.count(b) == 1
    shard.write_bytes(raw.replace(a, b"elsewhere").replace(b, a).replace(b"elsewhere", b))
    os.utime(shard, ns=(when, when))


def _own_head_shard(folder: Path) -> Path:
    """The example with its head in a file of its own."""
    copy_small_files(EXAMPLE, folder)
    tensors = load(EXAMPLE)
    save_file({n: t for n, t in tensors.items() if not n.startswith("mtp.")}, folder / "model.safetensors")
    save_file({n: t for n, t in tensors.items() if n.startswith("mtp.")}, folder / "mtp.safetensors")
    return folder


@pytest.mark.parametrize("change", [_touch, _longer_header, _other_header])
def test_a_changed_source_starts_over(tmp_path: Path, stopped, change) -> None:
    """By mtime, size or header, each alone; the line names the shard."""
    source = _own_head_shard(tmp_path / "model")
    stopped(tmp_path, source=source)
    change(source)
    assert _void(tmp_path, source) == "void: starting over: the source has changed: mtp.safetensors"


def test_another_config_starts_over(tmp_path: Path, stopped) -> None:
    """What stands in the header counts as the plan does."""
    source = clone(EXAMPLE, tmp_path / "model")
    stopped(tmp_path, source=source)
    edit_json(source / "config.json", lambda c: c["text_config"]["rope_parameters"].update(rope_theta=5e5))
    assert "other options, or from another config" in _void(tmp_path, source)


def _void(folder: Path, source: Path = EXAMPLE, **options) -> str:
    said: list[str] = []
    report = run(folder, source, notify=lambda name, line, _facts: said.append(f"{name}: {line}"), **options)
    assert report.resumed_bytes == 0
    assert files(folder) == ["F16.gguf", "Q4_K_M.gguf"]
    (line,) = said
    return line


@pytest.mark.parametrize("damage", [b"nonsense\n", b"{}\n[1,2]\n", b'["not","a","head"]\n', b"\xff\xfe\n"])
def test_a_journal_that_cannot_be_read_starts_over(conversions, tmp_path: Path, stopped, damage: bytes) -> None:
    stopped(tmp_path)
    (tmp_path / "Q4_K_M.gguf.journal").write_bytes(damage)
    assert _void(tmp_path).startswith("void: starting over: ")
    assert_whole(tmp_path, conversions)


def test_a_torn_last_line_is_forgotten(conversions, tmp_path: Path, stopped, ran) -> None:
    """Written half when the power went; the chunk is done again, and the next record stands on a line of its own."""
    keys = stopped(tmp_path, after=20)
    journal = tmp_path / "Q4_K_M.gguf.journal"
    journal.write_bytes(journal.read_bytes()[:-5])
    ran.clear()
    stopped(tmp_path, after=5)
    assert ran[0].key == keys[-1]
    run(tmp_path)
    assert_whole(tmp_path, conversions)


def test_bytes_that_did_not_reach_the_disk_are_done_again(conversions, tmp_path: Path, stopped, ran) -> None:
    """The record survived the crash, the data did not: the checksum tells. Only that target is written again."""
    keys = stopped(tmp_path, after=20)
    partial = tmp_path / "F16.gguf.partial"
    raw = bytearray(partial.read_bytes())
    wanted = (conversions("dense", "bundled") / "F16.gguf").read_bytes()
    start = next(i for i in range(len(raw) - 200_000, 0, -1) if raw[i] and raw[i] == wanted[i])  # in a written chunk
    raw[start - 100 : start] = bytes(100)
    partial.write_bytes(raw)
    ran.clear()
    run(tmp_path)
    again = [c for c in ran if c.key in keys]
    assert 1 <= len(again) <= 2
    assert all(len(c.targets) == 1 for c in again)
    assert_whole(tmp_path, conversions)


@pytest.mark.parametrize("name", ["F16.gguf.partial", "Q4_K_M.gguf.partial"])
def test_a_partial_file_that_is_gone_is_made_anew(conversions, tmp_path: Path, stopped, name: str) -> None:
    """The other one goes on."""
    stopped(tmp_path)
    (tmp_path / name).unlink()
    run(tmp_path)
    assert_whole(tmp_path, conversions)


def test_killed_between_two_renames(conversions, tmp_path: Path, monkeypatch, ran) -> None:
    """One file has its name already: the next run leaves it and gives the other one its own."""
    from converter.writer import OutputFile

    publish = OutputFile.publish

    def once(self: OutputFile) -> None:
        if self.planned.path.name == "F16.gguf":
            raise Stop
        publish(self)

    with monkeypatch.context() as patch, pytest.raises(Stop):
        patch.setattr(OutputFile, "publish", once)
        run(tmp_path)
    assert files(tmp_path) == ["F16.gguf.partial", "Q4_K_M.gguf", "Q4_K_M.gguf.journal"]
    inode = (tmp_path / "Q4_K_M.gguf").stat().st_ino
    ran.clear()
    report = run(tmp_path)
    assert ran == []
    assert report.source_bytes == 0
    assert (tmp_path / "Q4_K_M.gguf").stat().st_ino == inode
    assert_whole(tmp_path, conversions)


def test_a_foreign_file_under_the_final_name_is_kept(tmp_path: Path, stopped) -> None:
    """A journal is no licence to replace what another program put there."""
    stopped(tmp_path)
    (tmp_path / "F16.gguf").write_bytes(b"precious")
    with pytest.raises(UsageError, match="--force"):
        run(tmp_path)
    assert (tmp_path / "F16.gguf").read_bytes() == b"precious"
    assert run(tmp_path, force=True).resumed_bytes > 0
    assert files(tmp_path) == ["F16.gguf", "Q4_K_M.gguf"]


def test_two_runs_exclude_each_other(conversions, tmp_path: Path) -> None:
    """The second one is exit 5 while the first one lives; the lock dies with its owner, also by SIGKILL."""
    command = [sys.executable, "-c", CHILD.format(root=str(ROOT), log=str(tmp_path / "log")).replace("0.02", "0.2")]
    command += [str(EXAMPLE), str(tmp_path / "{type}.gguf"), "--type", ",".join(MIXES)]
    child = subprocess.Popen(command, stderr=subprocess.DEVNULL)
    try:
        _wait_for((tmp_path / "log").exists)
        with pytest.raises(EnvironmentFailure, match="another run is writing this file") as caught:
            run(tmp_path)
        assert caught.value.exit_code == 5
        # Also where only one file is common, and the journal is another.
        with pytest.raises(EnvironmentFailure, match="another run is writing this file"):
            convert(EXAMPLE, tmp_path / "F16.gguf", types=["F16"])
        assert child.poll() is None
    finally:
        child.kill()
        child.wait()
    (tmp_path / "log").unlink()
    run(tmp_path)
    (tmp_path / "F16.gguf.journal").unlink(missing_ok=True)
    assert_whole(tmp_path, conversions)


def _wait_for(condition) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


@pytest.mark.parametrize(
    ("code", "words"),
    [(errno.ENOSPC, "the disk is full"), (errno.EDQUOT, "the disk is full"), (errno.EIO, "cannot write the output")],
)
def test_a_disk_that_fails_half_way(conversions, tmp_path: Path, monkeypatch, code: int, words: str, capsys) -> None:
    """Exit 5, how much is kept; with room again the same command goes on."""
    written = 0
    pwrite = os.pwrite

    def fails(descriptor: int, data, position: int) -> int:
        nonlocal written
        written += len(data)
        if written > 5_000_000:
            raise OSError(code, os.strerror(code))
        return pwrite(descriptor, data, position)

    command = [str(EXAMPLE), str(tmp_path / "{type}.gguf"), "--type", ",".join(MIXES), "--quiet"]
    with monkeypatch.context() as patch:
        patch.setattr(os, "pwrite", fails)
        assert convert_main(command) == 5
    said = capsys.readouterr().err
    assert words in said
    assert "are done and kept: the same command goes on from there" in said
    assert convert_main(command) == 0
    assert "going on: " in capsys.readouterr().err
    assert_whole(tmp_path, conversions)


@pytest.mark.parametrize("code", [errno.EIO, errno.ESTALE])
def test_a_source_that_cannot_be_read_any_more(conversions, tmp_path: Path, monkeypatch, code: int) -> None:
    """The disk under the checkpoint fails: exit 5, names the shard, keeps what is done."""
    reads = 0
    preadv = os.preadv

    def fails(*args) -> int:
        nonlocal reads
        reads += 1
        if reads > 60:
            raise OSError(code, os.strerror(code))
        return preadv(*args)

    with monkeypatch.context() as patch, pytest.raises(EnvironmentFailure, match="cannot read this shard") as caught:
        patch.setattr(os, "preadv", fails)
        run(tmp_path)
    assert caught.value.exit_code == 5
    assert caught.value.file is not None
    assert caught.value.file.suffix == ".safetensors"
    assert "done and kept" in str(caught.value)
    assert run(tmp_path).resumed_bytes > 0
    assert_whole(tmp_path, conversions)


def test_a_source_that_is_cut_while_it_is_read(tmp_path: Path, monkeypatch) -> None:
    """Something overwrites the checkpoint: exit 5, which shard and tensor; afterwards it is a damaged checkpoint."""
    source = clone(EXAMPLE, tmp_path / "model")
    shard = source / "model.safetensors-00001-of-00002.safetensors"
    original = Work.run

    def cut(self: Work, chunk: Chunk):
        if chunk.job > 5:
            os.truncate(shard, 20_000)
        return original(self, chunk)

    monkeypatch.setattr(Work, "run", cut)
    with pytest.raises(EnvironmentFailure, match="the shard ended") as caught:
        run(tmp_path, source)
    assert caught.value.file == shard
    with pytest.raises(CheckpointError, match="shorter than its header"):
        run(tmp_path, source)


def test_a_bad_weight_leaves_nothing_to_go_on_from(tmp_path: Path, stopped) -> None:
    """The input is at fault: a rerun could only fail again."""
    stopped(tmp_path, after=20, error=CheckpointError("a weight is NaN", tmp_path))
    assert files(tmp_path) == []


def test_log_json(tmp_path: Path, stopped, capsys) -> None:
    """Every line on stderr is an object with an event; the last progress is the total."""
    stopped(tmp_path)
    command = [str(EXAMPLE), str(tmp_path / "{type}.gguf"), "--type", ",".join(MIXES), "--log-json", "--json"]
    assert convert_main(command) == 0
    shown = capsys.readouterr()
    events = [json.loads(line) for line in shown.err.splitlines()]
    assert {e["event"] for e in events} == {"resume", "progress"}
    assert events[0]["event"] == "resume"
    assert events[0]["done"] + json.loads(shown.out)["source_bytes"] == events[0]["total"]
    assert events[-1]["done"] == events[-1]["total"] == events[0]["total"]
    assert set(events[-1]) == {"event", "done", "total", "rate", "seconds_left", "tensor"}


def test_log_json_of_an_error(tmp_path: Path, capsys) -> None:
    """Errors are events too."""
    assert convert_main([str(tmp_path / "absent"), str(tmp_path / "x.gguf"), "--log-json"]) == 3
    events = [json.loads(line) for line in capsys.readouterr().err.splitlines()]
    assert [e["event"] for e in events] == ["error"]
    assert events[0]["exit_code"] == 3
    assert "no such folder" in events[0]["message"]
