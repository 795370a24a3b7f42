"""What a run has done, written beside its first output while it goes on, so that the next run can go on from there.

Lines of JSON: a head that says what the run is, then one record per finished chunk. A record is written after the
chunk's bytes; its checksums are compared with the file before they are believed, since a machine that crashed may have
kept the record and lost the bytes.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from converter.checkpoint import Checkpoint
from converter.execute import ChunkKey, Done
from converter.files import sync_folder
from converter.plan import Plan
from converter.writer import open_locked, write_failure

FORMAT = 1


@dataclass(frozen=True)
class Identity:
    """What has to be the same for a run to be continued."""

    version: str
    plan: str
    sources: Mapping[str, list[object]]

    @classmethod
    def of(cls, plan: Plan, checkpoint: Checkpoint) -> Identity:
        from importlib.metadata import version

        used = {s.file for f in plan.files for t in f.tensors for s in t.sources}
        folders = {file.parent for file in used}
        ids = {
            (file.name if len(folders) == 1 else f"{file.parent.name}/{file.name}"): checkpoint.ids[file]
            for file in sorted(used)
        }
        sources = {name: [i.size, i.stamp, i.header_sha256] for name, i in ids.items()}
        return cls(version("convert-mtp"), plan.digest(), sources)

    def as_json(self) -> dict[str, object]:
        return {"journal": FORMAT, "version": self.version, "plan": self.plan, "sources": dict(self.sources)}

    def differs(self, other: Mapping[str, Any]) -> str | None:
        """Why what that head describes cannot be continued; None where it can."""
        if other.get("journal") != FORMAT or other.get("version") != self.version:
            return f"it was begun by version {other.get('version')} of this program, this is {self.version}"
        sources = other.get("sources")
        if sources != self.sources:
            names = sorted(self.sources.keys() ^ sources.keys()) if isinstance(sources, dict) else []
            if isinstance(sources, dict) and not names:
                names = [n for n in self.sources if self.sources[n] != sources[n]]
            return f"the source has changed: {', '.join(names[:3]) or 'unknown'}"
        if other.get("plan") != self.plan:
            return "it was begun with other options, or from another config or tokenizer"
        return None


@dataclass(frozen=True)
class Record:
    """A finished chunk: checksums by target, experts that were seen to live."""

    checksums: Mapping[int, int]
    experts: frozenset[int]


class Journal:
    """The journal of a run; holding it open excludes other runs. void: why an earlier one cannot be continued."""

    def __init__(self, path: Path, identity: Identity) -> None:
        self.path = path
        self.records: dict[ChunkKey, Record] = {}
        self.void: str | None = None
        self.worth_keeping = False  # whether there is anything that a later run could use
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._descriptor = open_locked(path, os.O_RDWR | os.O_CREAT | os.O_APPEND)
            self._read(identity)
        except OSError as error:
            raise write_failure(path, error) from error

    def begin(self, identity: Identity) -> None:
        """Forget what is there and start a new run."""
        self.records, self.worth_keeping = {}, False
        try:
            os.ftruncate(self._descriptor, 0)
            self._append(identity.as_json() | {"pid": os.getpid()})
        except OSError as error:
            raise write_failure(self.path, error) from error

    def append(self, done: Done) -> None:
        """Record a chunk whose bytes are written."""
        try:
            self._append([*done.chunk.key, sorted(done.checksums.items()), sorted(done.experts)])
        except OSError as error:
            raise write_failure(self.path, error) from error
        self.worth_keeping = True

    def remove(self) -> None:
        """The run is over, for good or because nothing of it can be used."""
        self.path.unlink(missing_ok=True)
        sync_folder(self.path.parent)
        self.close()

    def close(self) -> None:
        os.close(self._descriptor)

    def _append(self, value: object) -> None:
        line = json.dumps(value, separators=(",", ":")).encode() + b"\n"
        while line:
            line = line[os.write(self._descriptor, line) :]

    def _read(self, identity: Identity) -> None:
        with os.fdopen(os.dup(self._descriptor), "rb") as stream:
            stream.seek(0)
            raw = stream.read()
        if not raw:
            return
        self.worth_keeping = True
        # What stands behind the last line's end was cut off while it was written.
        lines, torn = raw[: raw.rfind(b"\n") + 1].splitlines(), not raw.endswith(b"\n")
        try:
            head, *records = (json.loads(line) for line in lines)
            self.void = identity.differs(head)
            if self.void is None:
                for job, first, stop, checksums, experts in records:
                    earlier = self.records.get((job, first, stop), Record({}, frozenset()))
                    merged = {**earlier.checksums, **dict(checksums)}
                    self.records[job, first, stop] = Record(merged, earlier.experts | set(experts))
        except (ValueError, TypeError, AttributeError):
            self.void, self.records = "its journal cannot be read", {}
        if torn and self.void is None:
            os.ftruncate(self._descriptor, len(b"\n".join(lines)) + 1)
