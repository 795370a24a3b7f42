"""Who does the chunks: threads, processes, or a Ray cluster on a shared file system. The bytes are the same."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable, Generator, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from concurrent.futures import Executor as Pool
from itertools import islice
from typing import Any, Protocol

from converter.errors import EnvironmentFailure, UsageError
from converter.execute import Chunk, Done, Work

EXECUTORS = ("threads", "processes", "ray")
_RETRIES = 5  # of a chunk whose Ray worker is lost
_PENDING = 2  # chunks per worker that are handed out at a time


class Executor(Protocol):
    """Does chunks in any order. remote: the workers may be on other machines."""

    remote: bool

    def run(self, work: Work, chunks: Iterator[Chunk]) -> Generator[Done, None, None]:
        """Yield what is done; the first error stops everything and is raised. Closing the iterator stops it too."""
        ...


def open_executor(name: str, workers: int) -> Executor:
    """The executor of that name. Raises UsageError, EnvironmentFailure where what it needs is missing."""
    if name == "threads":
        return Threads(workers)
    if name == "processes":
        return Processes(workers)
    if name == "ray":
        return Ray(workers)
    raise UsageError("there is no such executor", expected=", ".join(EXECUTORS), found=name)


class Threads:
    """Kernels, reads, writes and checksums release the GIL."""

    remote = False

    def __init__(self, workers: int) -> None:
        self.workers = workers

    def run(self, work: Work, chunks: Iterator[Chunk]) -> Generator[Done, None, None]:
        with ThreadPoolExecutor(self.workers) as pool:
            yield from _bounded(pool, work.run, chunks, _PENDING * self.workers)


class Processes:
    """One process per worker: for machines with so many cores that the GIL shows."""

    remote = False

    def __init__(self, workers: int) -> None:
        self.workers = workers

    def run(self, work: Work, chunks: Iterator[Chunk]) -> Generator[Done, None, None]:
        from concurrent.futures import ProcessPoolExecutor
        from concurrent.futures.process import BrokenProcessPool
        from multiprocessing import get_context

        # spawn: the parent has threads, and children must not inherit its locks on the outputs.
        spawn = get_context("spawn")
        try:
            with ProcessPoolExecutor(self.workers, spawn, _begin_worker, (work, os.getpid())) as pool:
                yield from _bounded(pool, _run_in_worker, chunks, _PENDING * self.workers)
        except BrokenProcessPool as error:
            raise EnvironmentFailure(
                "a worker process died", found=str(error), hint="most likely out of memory: fewer --workers take less"
            ) from error


def _bounded(
    pool: Pool, run: Callable[[Chunk], Done], chunks: Iterator[Chunk], most: int
) -> Generator[Done, None, None]:
    """Keep at most so many chunks in the pool; on any way out the rest is cancelled."""
    pending: set[Future[Done]] = set()
    try:
        while True:
            pending |= {pool.submit(run, chunk) for chunk in islice(chunks, most - len(pending))}
            if not pending:
                return
            finished, pending = wait(pending, return_when=FIRST_COMPLETED)
            for future in sorted(finished, key=_failed):  # what is done counts, even where the next one failed
                yield future.result()
    except BaseException:
        pool.shutdown(wait=True, cancel_futures=True)
        raise


def _failed(future: Future[Done]) -> bool:
    return future.exception() is not None


_work: Work  # of this worker process


def _begin_worker(work: Work, parent: int) -> None:
    global _work  # noqa: PLW0603  (a pool's initializer has no other place)
    _work = work
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent decides
    _die_with(parent)


def _run_in_worker(chunk: Chunk) -> Done:
    return _work.run(chunk)


def _die_with(parent: int) -> None:
    """A worker whose parent was killed must not write on: the next run may have begun."""
    if sys.platform == "linux":
        import ctypes

        parent_death_signal = 1  # PR_SET_PDEATHSIG of prctl(2)
        ctypes.CDLL(None).prctl(parent_death_signal, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


class Ray:
    """Tasks on a Ray cluster whose machines share the file system; RAY_ADDRESS names it, else one starts here.

    A chunk whose worker is lost is done again by another: it writes the same bytes at the same place.
    """

    remote = True

    def __init__(self, workers: int) -> None:
        try:
            import ray
        except ImportError as error:
            raise EnvironmentFailure(
                "--executor ray needs Ray, which is not installed", hint="pip install 'convert-mtp[ray]'"
            ) from error
        self.ray, self.workers = ray, workers

    def run(self, work: Work, chunks: Iterator[Chunk]) -> Generator[Done, None, None]:
        ray = self.ray
        ours = not ray.is_initialized()
        if ours:
            self._connect()
        try:
            yield from self._tasks(work, chunks)
        except ray.exceptions.RayTaskError as error:
            raise error.cause from error
        except ray.exceptions.RayError as error:
            raise EnvironmentFailure("the Ray cluster failed", found=str(error)) from error
        finally:
            if ours:
                ray.shutdown()

    def _connect(self) -> None:
        quiet: dict[str, Any] = {"log_to_driver": False, "logging_level": "error"}
        try:
            if os.environ.get("RAY_ADDRESS"):
                self.ray.init(**quiet)
            else:
                self.ray.init("local", num_cpus=self.workers, include_dashboard=False, **quiet)
        except (ConnectionError, RuntimeError, ValueError) as error:
            raise EnvironmentFailure("cannot reach or start a Ray cluster", found=str(error)) from error

    def _tasks(self, work: Work, chunks: Iterator[Chunk]) -> Generator[Done, None, None]:
        ray = self.ray
        task = ray.remote(num_cpus=1, max_retries=_RETRIES)(_run_on_ray)
        shared = ray.put(work)
        most = _PENDING * max(self.workers, int(ray.cluster_resources().get("CPU", 1)))
        pending: list[Any] = []
        try:
            while True:
                # In a list the reference travels, and each worker fetches the work once, not once per chunk.
                pending += [task.remote([shared], chunk) for chunk in islice(chunks, most - len(pending))]
                if not pending:
                    return
                finished, pending = ray.wait(pending)
                yield ray.get(finished[0])
        finally:
            for reference in pending:
                ray.cancel(reference)


_fetched: dict[Any, Work] = {}


def _run_on_ray(shared: list[Any], chunk: Chunk) -> Done:
    import ray

    (reference,) = shared
    if reference not in _fetched:
        for old in _fetched.values():
            old.close()
        _fetched.clear()
        _fetched[reference] = ray.get(reference)
    return _fetched[reference].run(chunk)
