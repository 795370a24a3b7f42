"""Output files that have their final name only when they are complete and checked."""

from __future__ import annotations

import ctypes
import errno
import fcntl
import os
import shutil
import threading
import zlib
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

from converter.errors import EnvironmentFailure, GGUFError, UsageError
from converter.files import sync_folder
from converter.gguf_file import read_gguf
from converter.plan import Plan, PlannedFile

_FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
_READ_BYTES = 2**20


class Sink:
    """Where workers put finished bytes of one file; each process opens it for itself, at its first write.

    inode: of the file that the run began; a worker that outlived an earlier run finds another one and stops.
    """

    def __init__(self, path: Path, inode: int, data_start: int) -> None:
        self.path, self.inode, self.data_start = path.absolute(), inode, data_start
        self._descriptor = -1
        self._opening = threading.Lock()

    def __reduce__(self) -> tuple[object, ...]:
        return Sink, (self.path, self.inode, self.data_start)

    def write(self, offset: int, data: memoryview, *, sync: bool = False) -> None:
        """Any order, any thread. offset counts from the start of the data section. sync: until it is on disk."""
        try:
            descriptor = self._open()
            write_all(descriptor, data, self.data_start + offset)
            if sync:
                os.fsync(descriptor)
        except OSError as error:
            raise write_failure(self.path, error) from error

    def close(self) -> None:
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

    def _open(self) -> int:
        with self._opening:
            if self._descriptor < 0:
                opened = os.open(self.path, os.O_WRONLY)
                if os.fstat(opened).st_ino != self.inode:
                    os.close(opened)
                    raise EnvironmentFailure("another run began this file anew", self.path)
                self._descriptor = opened
            return self._descriptor


def write_failure(path: Path, error: OSError, needed: int | None = None) -> EnvironmentFailure:
    """What a failed write means."""
    full = error.errno in _FULL
    return EnvironmentFailure(
        "the disk is full" if full else "cannot write the output", path,
        expected=f"room for {needed:,} bytes" if full and needed else None, found=error.strerror or str(error),
        hint="free space or choose another folder; nothing was left under the final name",
    )  # fmt: skip


class OutputFile:
    """One planned file on its way: NAME.partial beside the output, locked, preallocated, renamed at the end.

    A run that was cut off between two renames finds some of its files under their final names: those are `published`.
    """

    def __init__(self, planned: PlannedFile) -> None:
        self.planned = planned
        self.partial = planned.path.with_name(planned.path.name + ".partial")
        self.published = False
        self._descriptor = -1

    @property
    def is_open(self) -> bool:
        return self._descriptor >= 0

    @property
    def path(self) -> Path:
        return self.planned.path if self.published else self.partial

    def adopt(self) -> bool:
        """Go on with what an earlier run left: its partial file, or the finished one. False where there is neither."""
        for self.published in (False, True):
            if self._fits():
                self._open(os.O_RDONLY if self.published else os.O_RDWR)
                return True
        self.published = False
        return False

    def start(self) -> None:
        """A new file of the planned size: zeros behind the header."""
        self.published = False
        self.close()
        try:
            self.partial.parent.mkdir(parents=True, exist_ok=True)
            # Not truncated but replaced: whoever still writes to an older one does it out of sight.
            if self.partial.exists():
                self._open(os.O_RDWR)
                self.partial.unlink()
                self.close()
            self._open(os.O_RDWR | os.O_CREAT)
            _allocate(self._descriptor, self.planned.size)
            write_all(self._descriptor, memoryview(self.planned.header), 0)
        except OSError as error:
            self.discard()
            raise write_failure(self.planned.path, error, self.planned.size) from error

    def sink(self) -> Sink:
        return Sink(self.path, os.fstat(self._descriptor).st_ino, len(self.planned.header))

    def checksum(self, offset: int, count: int) -> int:
        """CRC-32 of what stands in the data section now."""
        position, value = len(self.planned.header) + offset, 0
        try:
            for begin in range(0, count, _READ_BYTES):
                value = zlib.crc32(os.pread(self._descriptor, min(_READ_BYTES, count - begin), position + begin), value)
        except OSError as error:
            raise EnvironmentFailure("cannot read what was written", self.path, found=error.strerror) from error
        return value

    def finish(self) -> None:
        """All bytes are there: flush and check."""
        if self.published:
            return
        try:
            os.fsync(self._descriptor)
        except OSError as error:
            raise write_failure(self.planned.path, error) from error
        header = read_gguf(self.partial)
        if list(header.tensors) != [t.entry for t in self.planned.tensors] or header.size != self.planned.size:
            raise GGUFError("the written file does not read back as planned", self.partial, hint="is the disk sound?")

    def publish(self) -> None:
        """Give the checked file its final name."""
        if self.published:
            return
        try:
            self.partial.replace(self.planned.path)
            sync_folder(self.planned.path.parent)
        except OSError as error:
            raise write_failure(self.planned.path, error) from error
        self.published = True

    def discard(self) -> None:
        """Leave no partial file behind."""
        if self._descriptor >= 0 and not self.published:
            self.partial.unlink(missing_ok=True)
        self.close()

    def close(self) -> None:
        """Let go of file and lock."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

    def _fits(self) -> bool:
        """Whether the file at `path` has the planned size and header."""
        try:
            with self.path.open("rb") as stream:
                size = os.fstat(stream.fileno()).st_size
                return size == self.planned.size and stream.read(len(self.planned.header)) == self.planned.header
        except OSError:
            return False

    def _open(self, flags: int) -> None:
        self._descriptor = open_locked(self.path, flags)


def open_locked(path: Path, flags: int) -> int:
    """A descriptor with an exclusive lock, which dies with its owner. Raises OSError, EnvironmentFailure where taken."""
    while True:
        descriptor = os.open(path, flags, 0o666)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            try:
                if os.fstat(descriptor).st_ino == path.stat().st_ino:
                    return descriptor
            except FileNotFoundError:
                pass  # the owner finished and renamed it in between
        except BlockingIOError as error:
            os.close(descriptor)
            raise EnvironmentFailure(
                "another run is writing this file", path, hint="wait for it, or choose another output"
            ) from error
        except BaseException:
            os.close(descriptor)
            raise
        os.close(descriptor)
        if not flags & os.O_CREAT:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(path))


def refuse_folders(plan: Plan) -> None:
    """Raise UsageError where an output's name is taken by a folder."""
    for planned in plan.files:
        if planned.path.is_dir():
            raise UsageError("the output's name is a folder", planned.path)


def refuse_full_disk(files: Sequence[OutputFile]) -> None:
    """All outputs together must fit, per file system; quotas and limits show only when space is reserved."""
    needed: dict[int, list[tuple[Path, int]]] = defaultdict(list)
    for file in files:
        folder = _existing_parent(file.path)
        needed[folder.stat().st_dev].append((folder, max(0, file.planned.size - _reserved(file.path))))
    for on_disk in needed.values():
        folder = on_disk[0][0]
        size, free = sum(s for _, s in on_disk), shutil.disk_usage(folder).free
        if size > free:
            raise EnvironmentFailure(
                f"not enough disk space: {size - free:,} bytes are missing", folder,
                expected=f"{size:,} bytes for {len(on_disk)} file(s)", found=f"{free:,} bytes free",
            )  # fmt: skip


def _reserved(path: Path) -> int:
    """Bytes that a file has on disk already."""
    try:
        return path.stat().st_blocks * 512
    except OSError:
        return 0


def _existing_parent(path: Path) -> Path:
    return next(p for p in path.absolute().parents if p.is_dir())


def _allocate(descriptor: int, size: int) -> None:
    """Reserve the space, so that a full disk shows at once; the bytes are zero, as padding has to be.

    Linux's own call: the portable one writes into every block where the file system cannot reserve.
    """
    reserve = getattr(ctypes.CDLL(None, use_errno=True), "fallocate", None)
    if reserve is not None:
        reserve.argtypes = (ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64)
        while reserve(descriptor, 0, 0, size):
            code = ctypes.get_errno()
            if code in {errno.EOPNOTSUPP, errno.ENOSYS}:
                break
            if code != errno.EINTR:
                raise OSError(code, os.strerror(code))
        else:
            return
    os.ftruncate(descriptor, size)


def write_all(descriptor: int, data: memoryview, position: int) -> None:
    """All of it, however many calls that takes. Raises OSError."""
    done = 0
    while done < len(data):
        done += os.pwrite(descriptor, data[done:], position + done)
