"""What drafts are worth with the released files: bench-mtp's matrix, kept in a folder of its own for every setting."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from bench.measure import TASKS, Options, measure
from bench.policy import Recommendation
from bench.report import BenchReport
from bench.store import Store
from bench.summary import Results
from release.check import default_head
from release.ledger import digest
from release.make import HEADS, ReleaseFile
from release.origin import Origin
from release.recipe import Recipe

Progress = Callable[[int, int, str], None]


@dataclass
class Measured:
    """report: of the measured files; files: them by path, as the report names them. tasks: as the recipe names them."""

    report: BenchReport
    files: dict[str, ReleaseFile]
    tasks: Sequence[str]

    def recommended(self, file: ReleaseFile, task: str | None = None) -> Recommendation | None:
        """For a file, or for another one of the same type: trunks are the same whether the head is in the file.

        None for sidecars, of which the trunk decides.
        """
        if file.kind in HEADS:
            return None
        found = self._recommendations.get(task, {})
        same = [r for name, r in found.items() if self.files[name].type == file.type]
        return next((r for name, r in found.items() if self.files[name] == file), same[0] if same else None)

    def __post_init__(self) -> None:
        self._recommendations = {
            task: {r.file: r for r in self.report.recommendations(task)} for task in (None, *self.tasks)
        }


def measure_release(
    origin: Origin, recipe: Recipe, files: Sequence[ReleaseFile], repository: Path, work: Path, progress: Progress
) -> Measured | None:
    """Measure what can be decoded with drafts: bundled files, or trunk-only ones with a sidecar. None for nothing."""
    wanted = recipe.bench
    bundled = [f for f in files if f.kind == "bundled"]
    heads = [f for f in files if f.kind in HEADS]
    chosen = bundled or ([f for f in files if f.kind == "trunk"] if heads else [])
    if not wanted.runs or not chosen:
        return None
    paths = {str(repository / f.first): f for f in chosen}
    tasks = [t if t in TASKS else str(recipe.path(t)) for t in wanted.tasks]
    options = Options(
        [Path(p) for p in paths], origin.folder, None if bundled else repository / default_head(heads).first,
        tasks=tasks, temperatures=wanted.temperatures, drafts=wanted.drafts, runs=wanted.runs, prompts=wanted.prompts,
        tokens=wanted.tokens, threads=wanted.threads,
    )  # fmt: skip
    texts = [Path(t).read_bytes() if t not in TASKS else t for t in tasks]
    setting = digest(wanted.prompts, wanted.tokens, wanted.threads or os.cpu_count(), [repr(t) for t in texts])
    folder = work / "bench" / setting[:16]
    measure(options, folder, progress)
    store = Store(folder)
    items = (item for item in store if item.file in paths)
    names = [t if t in TASKS else Path(t).stem for t in tasks]
    return Measured(BenchReport(Results(items), settings=store.settings), paths, names)
