"""Threads, processes and Ray do the same chunks and write the same bytes; a worker that dies changes nothing."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from converter import convert
from converter.device import Cpu
from converter.errors import CheckpointError, EnvironmentFailure, UsageError
from converter.execute import Chunk, Work
from tests.checkpoints import variant
from tests.conftest import EXAMPLE

MIXES = ["Q4_K_M", "F16"]


@pytest.fixture(autouse=True)
def many_chunks(monkeypatch) -> None:
    monkeypatch.setattr(Cpu, "chunk_values", 30_000)


@pytest.fixture(scope="module")
def cluster() -> Iterator[object]:
    """A local Ray cluster of two worker processes."""
    ray = pytest.importorskip("ray", reason="needs Ray: pip install 'convert-mtp[ray]'")
    ray.init("local", num_cpus=2, include_dashboard=False, log_to_driver=False, logging_level="error")
    yield ray
    ray.shutdown()


def run(folder: Path, executor: str, **options):
    return convert(EXAMPLE, folder / "{type}.gguf", types=MIXES, workers=2, executor=executor, **options)


def assert_same(folder: Path, conversions) -> None:
    assert sorted(f.name for f in folder.iterdir()) == ["F16.gguf", "Q4_K_M.gguf"]
    for mix in MIXES:
        assert (folder / f"{mix}.gguf").read_bytes() == (conversions("dense", "bundled") / f"{mix}.gguf").read_bytes()


@pytest.mark.parametrize("executor", ["threads", "processes"])
def test_local_workers_give_the_same_bytes(conversions, tmp_path: Path, executor: str) -> None:
    """Two at a time."""
    report = run(tmp_path, executor)
    assert report.source_bytes > 0
    assert_same(tmp_path, conversions)


def test_ray_gives_the_same_bytes(conversions, tmp_path: Path, cluster) -> None:
    """And leaves a cluster running that it did not start."""
    run(tmp_path, "ray")
    assert_same(tmp_path, conversions)
    assert cluster.is_initialized()


def _workers() -> set[int]:
    """Processes that run our task on Ray, by what they call themselves."""
    found: set[int] = set()
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                title = (entry / "cmdline").read_bytes()
            except OSError:
                continue
            if title.startswith(b"ray::_run_on_ray"):
                found.add(int(entry.name))
    return found


@pytest.mark.usefixtures("cluster")
def test_a_ray_worker_that_is_killed_half_way(conversions, tmp_path: Path, monkeypatch) -> None:
    """Its chunks are done by others."""
    killed: list[int] = []
    stop = threading.Event()

    def kill_one() -> None:
        journal = tmp_path / "Q4_K_M.gguf.journal"
        while not stop.is_set():
            half_way = journal.exists() and journal.stat().st_size > 4_000
            if half_way and (busy := _workers()):
                victim = busy.pop()
                os.kill(victim, signal.SIGKILL)
                killed.append(victim)
                return
            time.sleep(0.001)

    monkeypatch.setattr(Cpu, "chunk_values", 10_000)
    killer = threading.Thread(target=kill_one)
    killer.start()
    try:
        run(tmp_path, "ray")
    finally:
        stop.set()
        killer.join()
    assert killed
    assert_same(tmp_path, conversions)


@pytest.mark.parametrize("executor", ["threads", "processes", "ray"])
def test_what_is_wrong_with_a_weight_is_said_by_any_worker(tmp_path: Path, request, executor: str) -> None:
    """The error travels with file, tensor, expected and found."""
    if executor == "ray":
        request.getfixturevalue("cluster")

    def poison(tensors) -> None:
        tensors["lm_head.weight"][7, 9] = float("nan")

    folder = variant(EXAMPLE, tmp_path / "m", tensors=poison)
    with pytest.raises(CheckpointError, match="cannot be stored") as caught:
        convert(folder, tmp_path / "x.gguf", types=["F16"], workers=2, executor=executor)
    assert (caught.value.tensor, caught.value.found) == ("lm_head.weight", "at index [7, 9]")
    assert [f.name for f in tmp_path.iterdir()] == ["m"]


@pytest.mark.usefixtures("cluster")
def test_begun_by_threads_ended_by_ray(conversions, tmp_path: Path, monkeypatch) -> None:
    """The journal does not care who goes on."""
    original, done = Work.run, 0

    class Stop(BaseException):
        pass

    def limited(self: Work, chunk: Chunk):
        nonlocal done
        done += 1
        if done > 40:
            raise Stop
        return original(self, chunk)

    with monkeypatch.context() as patch, pytest.raises(Stop):
        patch.setattr(Work, "run", limited)
        run(tmp_path, "threads")
    assert run(tmp_path, "ray").resumed_bytes > 0
    assert_same(tmp_path, conversions)


def test_a_process_that_dies(tmp_path: Path, monkeypatch) -> None:
    """Exit 5 with a hint; what was done is kept."""
    monkeypatch.setattr("converter.executors._run_in_worker", _die)
    with pytest.raises(EnvironmentFailure, match="a worker process died") as caught:
        run(tmp_path, "processes")
    assert "--workers" in str(caught.value)
    assert not list(tmp_path.glob("*.gguf"))


def _die(_chunk: Chunk) -> None:
    os._exit(9)


def test_an_executor_that_is_not_there(tmp_path: Path, monkeypatch) -> None:
    """By a wrong name, or not installed."""
    with pytest.raises(UsageError, match="no such executor"):
        run(tmp_path, "spark")
    monkeypatch.setitem(__import__("sys").modules, "ray", None)
    with pytest.raises(EnvironmentFailure, match=r"convert-mtp\[ray\]"):
        run(tmp_path, "ray")
