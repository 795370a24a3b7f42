"""Results on disk: a line of JSON per measurement, appended and synced, so that a run that was cut off goes on."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from bench.matrix import Cell
from converter.errors import InputError, UsageError
from converter.files import os_errors, read_json_object

SCHEMA = 1
CELLS, SETTINGS = "cells.jsonl", "settings.json"


@dataclass(frozen=True)
class Record:
    """One cell, measured once.

    engine_build: name and build. files: fingerprint of the files. run: which repetition. tokens: answers, by prompt.
    decode_s, prompt_s, seconds: by prompt; prompt_n: tokens of each. wall_s: all of them together. steps, drafted,
    accepted, by_position: what the engine counted, None where it does not say. peak_bytes: of its process.
    failed: why there is nothing.
    """

    cell: Cell
    run: int
    files: str
    engine_build: str = ""
    tokens: list[list[int]] = field(default_factory=list)
    decode_s: list[float] = field(default_factory=list)
    prompt_s: list[float] = field(default_factory=list)
    prompt_n: list[int] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    wall_s: float = 0.0
    steps: int | None = None
    drafted: int | None = None
    accepted: int | None = None
    by_position: list[int] = field(default_factory=list)
    peak_bytes: int | None = None
    failed: str = ""

    @property
    def file(self) -> str:
        return self.cell.load.file

    def as_json(self) -> dict[str, Any]:
        values = asdict(self)
        return {"kind": "cell", **self.cell.as_json(), **{k: v for k, v in values.items() if k != "cell"}}

    @classmethod
    def of(cls, values: dict[str, Any]) -> Record:
        own = {name: values[name] for name in cls.__dataclass_fields__ if name != "cell"}
        return cls(Cell.of(values), **own)


@dataclass(frozen=True)
class Cost:
    """What a step costs whatever is drafted, by the engine's made-up acceptance.

    step_s: seconds of a step with so many drafts, all rejected. None of drafts: plain. draft_s: of one draft alone.
    """

    engine: str
    file: str
    head: str
    run: int
    files: str
    step_s: dict[int, float]
    draft_s: float | None
    experts: int = 0
    experts_used: int = 0

    def as_json(self) -> dict[str, Any]:
        return {"kind": "cost", **asdict(self)}

    @classmethod
    def of(cls, values: dict[str, Any]) -> Cost:
        own = {name: values[name] for name in cls.__dataclass_fields__}
        return cls(**{**own, "step_s": {int(n): s for n, s in own["step_s"].items()}})


@dataclass(frozen=True)
class HeadScore:
    """A head judged on one decode of a trunk in torch: (accepted, drafted) by draft position, cumulative."""

    file: str
    head: str
    task: str
    files: str
    counts: list[tuple[int, int]]

    def as_json(self) -> dict[str, Any]:
        return {"kind": "head", **asdict(self)}

    @classmethod
    def of(cls, values: dict[str, Any]) -> HeadScore:
        own = {name: values[name] for name in cls.__dataclass_fields__}
        return cls(**{**own, "counts": [(a, d) for a, d in own["counts"]]})


_KINDS: dict[str, type[Record | Cost | HeadScore]] = {"cell": Record, "cost": Cost, "head": HeadScore}


class Store:
    """A folder of results. Raises InputError for lines that it did not write."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.file = folder, folder / CELLS

    def begin(self, settings: dict[str, Any]) -> None:
        """Make the folder, or go on in one of the same settings. Raises UsageError where they are others."""
        with os_errors("cannot write the results", self.folder):
            self.folder.mkdir(parents=True, exist_ok=True)
            file = self.folder / SETTINGS
            settings = json.loads(json.dumps({"schema": SCHEMA, **settings}))
            if not file.exists():
                file.write_text(json.dumps(settings, indent=2))
        found = read_json_object(file)
        for name in settings.keys() | found.keys():
            if settings.get(name) != found.get(name):
                raise UsageError(
                    f"this folder holds results of another setting of {name}", file, expected=settings.get(name),
                    found=found.get(name), hint="another -o DIR, or the same options",
                )  # fmt: skip
        self._drop_torn_line()

    @property
    def settings(self) -> dict[str, Any]:
        """What all results have in common."""
        return read_json_object(self.folder / SETTINGS)

    def append(self, item: Record | Cost | HeadScore) -> None:
        line = json.dumps(item.as_json(), separators=(",", ":")) + "\n"
        with os_errors("cannot write the results", self.file), self.file.open("a", encoding="utf-8") as out:
            out.write(line)
            out.flush()
            os.fsync(out.fileno())

    def __iter__(self) -> Iterator[Record | Cost | HeadScore]:
        if not self.file.exists():
            raise InputError(
                "there are no results in this folder", self.folder, hint="bench-mtp FILES -o DIR makes them"
            )
        with os_errors("cannot read the results", self.file), self.file.open(encoding="utf-8") as lines:
            for number, line in enumerate(lines, 1):
                if not line.endswith("\n"):
                    return
                try:
                    values = json.loads(line)
                    item = _KINDS[values["kind"]].of(values)
                except (ValueError, KeyError, TypeError) as error:
                    raise InputError("this line is no result", self.file, expected="one of bench-mtp's",
                                     found=f"line {number}: {error}") from error  # fmt: skip
                yield item

    def _drop_torn_line(self) -> None:
        """What a kill left of the last line."""
        if not self.file.exists():
            return
        data = self.file.read_bytes()
        whole = data.rfind(b"\n") + 1
        if whole < len(data):
            with os_errors("cannot write the results", self.file):
                os.truncate(self.file, whole)
