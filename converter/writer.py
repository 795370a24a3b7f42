"""Output files that have their final name only when they are complete and checked."""

from __future__ import annotations

import errno
import os
import shutil
import threading
from collections import defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Protocol

from converter.errors import EnvironmentFailure, GGUFError, UsageError
from converter.gguf_file import read_gguf
from converter.plan import Plan, PlannedFile

_FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}


class ChunkSink(Protocol):
    """Where the executor puts finished bytes of one file."""

    def write(self, offset: int, data: memoryview) -> None:
        """Any order, any thread; each planned byte exactly once. offset counts from the start of the data section."""
        ...

    def finish(self) -> None:
        """All bytes are there: flush and check. The final name does not exist yet."""
        ...

    def publish(self) -> Path:
        """Give the checked file its final name."""
        ...

    def abort(self) -> None:
        """Leave nothing behind."""
        ...


def write_plan(plan: Plan, *, force: bool, run: Callable[[Sequence[ChunkSink]], list[str]]) -> list[str]:
    """Open all outputs of a plan, let `run` fill them, check all, and only then publish them.

    Raises UsageError where an output exists and force is not set, EnvironmentFailure where it cannot be written; after
    any failure no partial file is left.
    """
    _refuse_existing(plan, force=force)
    _refuse_full_disk(plan)
    sinks: list[PartialFile] = []
    try:
        for planned in plan.files:
            sinks.append(PartialFile(planned))  # noqa: PERF401  (those opened before a failure are aborted below)
        notes = run(sinks)
        for sink in sinks:
            sink.finish()
        for sink in sinks:
            sink.publish()
    except BaseException:
        for sink in sinks:
            sink.abort()
        raise
    return notes


def _refuse_existing(plan: Plan, *, force: bool) -> None:
    for planned in plan.files:
        if planned.path.is_dir():
            raise UsageError("the output's name is a folder", planned.path)
        if planned.path.exists() and not force:
            raise UsageError("the output exists already", planned.path, hint="--force replaces it")


def _refuse_full_disk(plan: Plan) -> None:
    """All outputs together must fit, per file system; quotas and limits show only when space is reserved."""
    needed: dict[int, list[PlannedFile]] = defaultdict(list)
    for planned in plan.files:
        folder = _existing_parent(planned.path)
        needed[folder.stat().st_dev].append(planned)
    for files in needed.values():
        folder = _existing_parent(files[0].path)
        size, free = sum(f.size for f in files), shutil.disk_usage(folder).free
        if size > free:
            raise EnvironmentFailure(
                f"not enough disk space: {size - free:,} bytes are missing", folder,
                expected=f"{size:,} bytes for {len(files)} file(s)", found=f"{free:,} bytes free",
            )  # fmt: skip


def _existing_parent(path: Path) -> Path:
    return next(p for p in path.absolute().parents if p.is_dir())


class PartialFile:
    """A ChunkSink on disk: NAME.partial beside the output, preallocated, renamed at the end."""

    def __init__(self, planned: PlannedFile) -> None:
        self.planned = planned
        self.path = planned.path.with_name(planned.path.name + ".partial")
        self._written = 0
        self._lock = threading.Lock()
        self._descriptor = -1
        try:
            planned.path.parent.mkdir(parents=True, exist_ok=True)
            self._descriptor = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o666)
            _allocate(self._descriptor, planned.size)
            _write_all(self._descriptor, memoryview(planned.header), 0)
        except OSError as error:
            self.abort()
            raise self._failure(error) from error

    def write(self, offset: int, data: memoryview) -> None:
        try:
            _write_all(self._descriptor, data, len(self.planned.header) + offset)
        except OSError as error:
            raise self._failure(error) from error
        with self._lock:
            self._written += len(data)

    def finish(self) -> None:
        assert self._written == self.planned.data_bytes, (self._written, self.planned.data_bytes)
        try:
            os.fsync(self._descriptor)
        except OSError as error:
            raise self._failure(error) from error
        header = read_gguf(self.path)
        if list(header.tensors) != [t.entry for t in self.planned.tensors] or header.size != self.planned.size:
            raise GGUFError("the written file does not read back as planned", self.path, hint="is the disk sound?")

    def publish(self) -> Path:
        try:
            os.close(self._descriptor)
            self._descriptor = -1
            self.path.replace(self.planned.path)
            folder = os.open(self.planned.path.parent, os.O_RDONLY)
            try:
                os.fsync(folder)
            finally:
                os.close(folder)
        except OSError as error:
            raise self._failure(error) from error
        return self.planned.path

    def abort(self) -> None:
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1
            self.path.unlink(missing_ok=True)

    def _failure(self, error: OSError) -> EnvironmentFailure:
        full = error.errno in _FULL
        return EnvironmentFailure(
            "the disk is full" if full else "cannot write the output", self.planned.path,
            expected=f"room for {self.planned.size:,} bytes" if full else None, found=error.strerror or str(error),
            hint="free space or choose another folder; nothing was left under the final name",
        )  # fmt: skip


def _allocate(descriptor: int, size: int) -> None:
    """Reserve the space, so that a full disk shows at once; the bytes are zero, as padding has to be."""
    reserve = getattr(os, "posix_fallocate", None)  # not everywhere
    try:
        if reserve is not None:
            reserve(descriptor, 0, size)
            return
    except OSError as error:
        if error.errno not in {errno.EOPNOTSUPP, errno.EINVAL, errno.ENOSYS}:
            raise
    os.ftruncate(descriptor, size)


def _write_all(descriptor: int, data: memoryview, position: int) -> None:
    done = 0
    while done < len(data):
        done += os.pwrite(descriptor, data[done:], position + done)
