"""The files of a release: planned all together, made in one pass over the source, and only those that are not there."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

from converter.calibration import AUTO
from converter.checkpoint import Checkpoint, join
from converter.errors import CheckpointError
from converter.imatrix import read_imatrix
from converter.metadata import Provenance
from converter.model import SEPARATE_DRAFTER, Model, read_model
from converter.plan import DRAFTER, Options, Packaging, Plan, PlannedFile, make_plan, refuse_strangers
from converter.rules import Role
from converter.splits import Limits, split_plan
from quant.mixes import mix
from release.ledger import Ledger, digest
from release.names import Names
from release.origin import HASHING, Origin, file_sha256
from release.recipe import BUNDLED, SIDECAR, Recipe

HEADS = ("sidecar", DRAFTER)  # kinds that draft for trunk-only files
_MADE = "made"


@dataclass(frozen=True)
class ReleaseFile:
    """One file of a release, split or not.

    name: its path in the repository, without the number of a part. kind: bundled, trunk, sidecar or drafter. type, head:
    mixes. parts: paths in the repository. tensors: (type, bytes) by tensor.
    """

    name: str
    kind: str
    type: str
    head: str | None
    parts: tuple[str, ...]
    size: int
    bits_per_weight: float
    tensors: Mapping[str, tuple[str, int]]

    @property
    def stem(self) -> str:
        return Path(self.name).stem

    @property
    def first(self) -> str:
        """What an engine is given."""
        return self.parts[0]


@dataclass
class Making:
    """A plan of all files, under names below `folder`. imatrix, mtp_imatrix: by what they are weighted."""

    folder: Path
    plan: Plan
    checkpoint: Checkpoint
    files: list[ReleaseFile]
    imatrix: Path | None
    mtp_imatrix: Path | None

    def planned(self, file: ReleaseFile) -> list[PlannedFile]:
        wanted = {self.folder / part for part in file.parts}
        return [p for p in self.plan.files if p.path in wanted]

    def find(self, file: ReleaseFile, places: Sequence[Path], ledger: Ledger) -> list[Path] | None:
        """The folder that each part of a file lies in; None where one is in none of these.

        Headers tell, since the first one names source, hashes and options, and hashes that were kept when the file was
        made. Where a run was cut off before that, complete files in the folder they are made in count too.
        """
        found = [self._place_of(part, key, places, ledger) for part, key in self._keyed(file)]
        return [place for place in found if place is not None] if all(found) else None

    def only(self, files: Sequence[ReleaseFile]) -> Plan:
        return replace(self.plan, files=[p for f in files for p in self.planned(f)])

    def record(self, files: Sequence[ReleaseFile], ledger: Ledger) -> None:
        """Keep the hashes of files that were made just now."""
        parts = [keyed for file in files for keyed in self._keyed(file)]
        with ThreadPoolExecutor(HASHING) as pool:
            sums = pool.map(lambda keyed: file_sha256(keyed[0].path, ledger), parts)
            for (part, key), found in zip(parts, sums, strict=True):
                ledger.put(_MADE, str(part.path.relative_to(self.folder)), key, found)

    def _keyed(self, file: ReleaseFile) -> list[tuple[PlannedFile, str]]:
        """Parts with their keys: the first one's header says what the file is, its own which part."""
        parts = self.planned(file)
        return [(p, hashlib.sha256(parts[0].header + p.header).hexdigest()) for p in parts]

    def _place_of(self, planned: PlannedFile, key: str, places: Sequence[Path], ledger: Ledger) -> Path | None:
        name = planned.path.relative_to(self.folder)
        made = ledger.get(_MADE, str(name), key)
        for place in places:
            if _has_header(place / name, planned) and (
                place == self.folder if made is None else made == file_sha256(place / name, ledger)
            ):
                return place
        return None


def _has_header(file: Path, planned: PlannedFile) -> bool:
    try:
        if file.stat().st_size != planned.size:
            return False
        with file.open("rb") as opened:
            return opened.read(len(planned.header)) == planned.header
    except OSError:
        return False


@contextmanager
def open_making(
    origin: Origin,
    drafter: Origin | None,
    recipe: Recipe,
    names: Names,
    folder: Path,
    ledger: Ledger,
    notify: Callable[[str], None] = lambda _line: None,
) -> Iterator[Making]:
    """Plan everything. Raises ToolError for a recipe that does not fit the model."""
    model = read_model(origin.folder)
    assistant = read_model(drafter.folder) if drafter is not None else None
    try:
        imatrix = recipe.path(recipe.files.imatrix) if recipe.files.imatrix else None
        of_head = _head_imatrix(origin, recipe, ledger, notify)
        plans = list(_plans(model, assistant, _Choice(origin, drafter, recipe, names, folder, imatrix, of_head)))
        notes = list(dict.fromkeys(n for p in plans for n in p.notes if n != SEPARATE_DRAFTER or drafter is None))
        whole = replace(plans[0], files=[f for plan in plans for f in plan.files], notes=notes,
                        importance=next((p.importance for p in plans if p.importance is not None), None),
                        head_layers=max(p.head_layers for p in plans))  # fmt: skip
        whole = split_plan(whole, Limits(recipe.files.split_max_size))
        checkpoint = join(model.checkpoint, assistant.checkpoint) if assistant is not None else model.checkpoint
        yield Making(folder, whole, checkpoint, _files(whole, folder), imatrix, of_head)
    finally:
        model.close()
        if assistant is not None:
            assistant.close()


@dataclass(frozen=True)
class _Choice:
    """What the recipe asks for, as options of a conversion."""

    origin: Origin
    drafter: Origin | None
    recipe: Recipe
    names: Names
    folder: Path
    imatrix: Path | None
    mtp_imatrix: Path | None

    def options(self, model: Model, types: tuple[str, ...], packaging: Packaging, roles: Sequence[Role]) -> Options:
        files = self.recipe.files
        head = read_imatrix(self.mtp_imatrix) if self.mtp_imatrix else None
        patterns = _fitting(files.tensor_types, model, roles)
        origin = self.drafter if self.drafter is not None and model.architecture.drafts_for else self.origin
        asked = {
            "tensor_types": patterns, "imatrix_sha256": read_imatrix(self.imatrix).digest() if self.imatrix else None,
            "mtp_imatrix_sha256": head.digest() if head else None, "split_max_size": files.split_max_size,
        }  # fmt: skip
        provenance = Provenance(
            f"convert-mtp {version('convert-mtp')}", origin.name, origin.revision, origin.files,
            {k: v for k, v in asked.items() if v},
        )  # fmt: skip
        return Options(
            types, files.head, packaging, patterns, None, self.recipe.name, self.imatrix, head, provenance,
        )  # fmt: skip

    def out(self, pattern: str) -> Path:
        return self.folder / pattern


def _head_imatrix(origin: Origin, recipe: Recipe, ledger: Ledger, notify: Callable[[str], None]) -> Path | None:
    """The file that the recipe names; "auto" is recorded once for a source."""
    asked = recipe.files.mtp_imatrix
    if asked is None:
        return None
    if asked != AUTO:
        return recipe.path(asked)
    from verify.calibrate import calibrate

    file = ledger.folder / "mtp-imatrix.gguf"
    key = digest(origin.files)
    if not file.is_file() or ledger.get("calibrations", file.name, key) is None:
        notify("recording the importance of the head")
        made = calibrate(origin.folder, file)
        ledger.put("calibrations", file.name, key, made.as_json())
    return file


def _fitting(patterns: Sequence[str], model: Model, roles: Sequence[Role]) -> tuple[str, ...]:
    """Those that mean a tensor of these files; those that mean none of the model stay, to be complained of."""

    def hits(pattern: str, rules: Any) -> bool:
        try:
            return any(re.search(pattern.rpartition("=")[0], r.target) for r in rules)
        except re.error:
            return True

    mine = [r for r in model.rules if r.role in roles]
    return tuple(p for p in patterns if hits(p, mine) or not hits(p, model.rules))


def _plans(model: Model, assistant: Model | None, choice: _Choice) -> Iterator[Plan]:
    """One for each packaging and, of heads that stand alone, each type."""
    recipe, names = choice.recipe, choice.names
    trunk_roles, head_roles = (Role.SHARED, Role.TRUNK), (Role.SHARED, Role.MTP)
    if assistant is not None:
        refuse_strangers(assistant, model)
    elif not model.head_layers:
        raise CheckpointError(
            "there is no MTP head to release", model.folder, expected="a checkpoint with a head",
            hint='for a model whose drafter is a checkpoint of its own: assistant = "…" in the recipe; '
            "convert-mtp --no-mtp converts without a head",
        )  # fmt: skip
    if BUNDLED in recipe.files.packagings and assistant is None:
        every = (*trunk_roles, Role.MTP)
        options = choice.options(model, recipe.files.types, Packaging.BUNDLED, every)
        yield make_plan(model, choice.out(names.bundled), options)
    if SIDECAR not in recipe.files.packagings and assistant is None:
        return
    options = choice.options(model, recipe.files.types, Packaging.NONE, trunk_roles)
    yield make_plan(model, choice.out(names.trunk), replace(options, mtp_type=None))
    for kind in recipe.files.sidecars:
        if assistant is not None:
            own = choice.options(assistant, (kind,), Packaging.NONE, trunk_roles)
            yield make_plan(
                assistant, choice.out(names.sidecar), replace(own, mtp_type=None, imatrix=None, head_importance=None)
            )
        else:
            own = choice.options(model, (kind,), Packaging.ONLY, head_roles)
            yield make_plan(model, choice.out(names.sidecar), replace(own, mtp_type=None))


def _files(plan: Plan, folder: Path) -> list[ReleaseFile]:
    wholes: dict[Path, list[PlannedFile]] = {}
    for file in plan.files:
        wholes.setdefault(file.whole, []).append(file)
    return [_file(whole, parts, folder) for whole, parts in wholes.items()]


def _file(whole: Path, parts: list[PlannedFile], folder: Path) -> ReleaseFile:
    first = parts[0]
    tensors = {t.entry.name: (t.type.name, t.entry.nbytes) for p in parts for t in p.tensors}
    values = sum(t.entry.nbytes // t.type.nbytes * t.type.block for p in parts for t in p.tensors)
    return ReleaseFile(
        str(whole.relative_to(folder)), first.kind, mix(first.mix).name, first.head_mix,
        tuple(str(p.path.relative_to(folder)) for p in parts), sum(p.size for p in parts),
        8 * sum(p.data_bytes for p in parts) / values, tensors,
    )  # fmt: skip
