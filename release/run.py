"""The steps of a release in order; each is done again only where something that it depends on has changed."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from importlib.metadata import version
from pathlib import Path

from converter.device import open_device
from converter.executors import open_executor
from converter.files import os_errors
from converter.run import run_plan
from converter.writer import open_locked
from release.check import Assessment, Verifier, levels_of
from release.facts import Facts, FileFacts
from release.folder import Places, clear, remove_empty, write_presets, write_reasons, write_repository
from release.ledger import Ledger
from release.make import Making, ReleaseFile, open_making
from release.measure import Measured, measure_release
from release.names import names_of
from release.origin import Origin, file_sha256, origin_of
from release.push import Pushed, push
from release.recipe import Recipe
from release.report import DryRun, ReleaseReport

Progress = Callable[[int, int, str], None]


@dataclass(frozen=True)
class Hooks:
    """What is told while a release goes on.

    notify: called with a line about what begins. progress: makes the (done, total, what) function of a step that counts
    in a unit, "B" or "cells".
    """

    notify: Callable[[str], None] = lambda _line: None
    progress: Callable[[str], Progress] = lambda _unit: lambda _done, _total, _what: None


def release(
    model: str | Path,
    out: Path,
    recipe: Recipe,
    *,
    revision: str | None = None,
    push_to: str | None = None,
    private: bool = False,
    dry_run: bool = False,
    device: str = "cpu",
    workers: int | None = None,
    hooks: Hooks | None = None,
) -> ReleaseReport | DryRun:
    """Make, verify, measure, describe and perhaps push.

    model: folder or Hub id; revision: of the latter. push_to: repository, "user/name". device: where to quantize.
    Raises ToolError; files that fail verification are no error but stand in the report, and nothing is pushed then.
    """
    hooks, out = hooks or Hooks(), out.resolve()
    if push_to is not None:
        recipe = replace(recipe, card=replace(recipe.card, repository=push_to))
    levels = levels_of(recipe.verify)  # what is not installed is better known before hours of work
    with _locked(out / "work") as ledger:
        hooks.notify("hashing the source")
        origin = origin_of(model, ledger, revision=revision, notify=hooks.notify)
        drafter = origin_of(_assistant(recipe), ledger, notify=hooks.notify) if recipe.assistant else None
        places = Places(out, names_of(origin.name, recipe.name))
        with open_making(origin, drafter, recipe, places.names, places.made, ledger, hooks.notify) as making:
            if dry_run:
                made = {f.name for f in making.files if making.find(f, places.all(), ledger)}
                return DryRun(places.repository, levels, making.plan.notes, making.files, made)
            _make(making, places, ledger, device, workers, hooks)
            return _Release(origin, drafter, recipe, places, ledger, making, levels, hooks).finish(
                push_to, private=private
            )


def _assistant(recipe: Recipe) -> str | Path:
    assert recipe.assistant is not None
    folder = recipe.path(recipe.assistant)
    return folder if folder.exists() else recipe.assistant


@contextmanager
def _locked(work: Path) -> Iterator[Ledger]:
    """The ledger, while no other run works in this folder."""
    with os_errors("cannot write here", work):
        work.mkdir(parents=True, exist_ok=True)
        descriptor = open_locked(work / "lock", os.O_RDWR | os.O_CREAT)
    try:
        yield Ledger(work)
    finally:
        os.close(descriptor)


def _make(making: Making, places: Places, ledger: Ledger, device: str, workers: int | None, hooks: Hooks) -> None:
    """Convert what is in none of the places, in one pass over the source."""
    found = {f.name: making.find(f, places.all(), ledger) for f in making.files}
    for file in making.files:
        folders = found[file.name]
        if folders and len(set(folders)) > 1:  # a run was cut off between parts
            for part, folder in zip(file.parts, folders, strict=True):
                places.move(part, folder, places.made)
    missing = [f for f in making.files if not found[f.name]]
    if not missing:
        return
    hooks.notify(f"converting {len(missing)} of {len(making.files)} files")
    plan = making.only(missing)
    with os_errors("cannot write here", places.made):
        for file in plan.files:
            file.path.parent.mkdir(parents=True, exist_ok=True)
            file.path.unlink(missing_ok=True)  # of an earlier source or version
    place = open_device(device)
    run_plan(
        plan, making.checkpoint, device=place, executor=open_executor("threads", workers or place.workers), force=True,
        progress=hooks.progress("B"), notify=lambda _name, message, _facts: hooks.notify(message),
    )  # fmt: skip
    hooks.notify("hashing what was made")
    making.record(missing, ledger)


@dataclass
class _Release:
    """What follows when all files are made."""

    origin: Origin
    drafter: Origin | None
    recipe: Recipe
    places: Places
    ledger: Ledger
    making: Making
    levels: tuple[str, ...]
    hooks: Hooks

    def finish(self, push_to: str | None, *, private: bool) -> ReleaseReport:
        verifier = Verifier(
            self.origin,
            self.drafter,
            self.recipe,
            self.levels,
            self.making.imatrix,
            self.making.mtp_imatrix,
            self.ledger,
            self._find,
            self.hooks.notify,
        )
        found = verifier.all(self.making.files)
        files = [self._placed(a) for a in found]
        published = [f.file for f in files if f.published]
        self.places.set_aside(published)
        measured = measure_release(
            self.origin, self.recipe, published, self.places.repository, self.places.work,
            self.hooks.progress("cells"),
        )  # fmt: skip
        facts = self._facts(files, measured)
        if published:
            write_repository(facts, self.places, self.ledger)
            write_presets(facts, self.places)
        else:
            clear(self.places)
        remove_empty(self.places.failed)
        return ReleaseReport(facts, self.places, self._push(facts, push_to, private=private) if push_to else [])

    def _find(self, file: ReleaseFile) -> Path:
        found = self.making.find(file, self.places.all(), self.ledger)
        assert found is not None, file.name
        return found[0]

    def _placed(self, found: Assessment) -> FileFacts:
        """Into the repository, or apart."""
        file = found.file
        passed = found.passes(self.recipe.verify)
        to = self.places.repository if passed else self.places.failed
        now = self._find(file)
        for part in reversed(file.parts):  # the first one, which engines are given, when all others are there
            self.places.move(part, now, to)
        sums = {part: file_sha256(to / part, self.ledger) for part in file.parts}
        facts = FileFacts(file, found, passed, sums)
        write_reasons(facts, self.places)
        return facts

    def _facts(self, files: list[FileFacts], measured: Measured | None) -> Facts:
        if measured is not None:
            for facts in files:
                facts.draft = measured.recommended(facts.file)
                found = {task: measured.recommended(facts.file, task) for task in measured.tasks}
                facts.drafts = {task: r for task, r in found.items() if r is not None}
        plan = self.making.plan
        return Facts(
            self.origin, self.drafter, self.recipe, self.places.names, plan.architecture, files, measured, plan.notes,
            self.levels, f"convert-mtp {version('convert-mtp')}",
        )  # fmt: skip

    def _push(self, facts: Facts, repository: str, *, private: bool) -> list[Pushed]:
        """Both repositories, if every file passed."""
        if facts.refused:
            self.hooks.notify("not pushed: files failed verification")
            return []
        message = f"{facts.names.base}: {len(facts.published)} files, made with {facts.program}"
        pairs = ((self.places.repository, repository), (self.places.presets, f"{repository}-presets"))
        return [
            push(folder, name, message, private=private, notify=lambda line: self.hooks.notify(f"pushing {line}"))
            for folder, name in pairs
        ]
