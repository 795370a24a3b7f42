"""The folders of a release: files that passed in the repository, others apart, and all that is written about them."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from bench.preset import PRESET, draft_keys, ini
from converter.files import os_errors, sync_folder
from release.card import card
from release.facts import Facts, FileFacts
from release.ledger import Ledger, write_whole
from release.make import ReleaseFile
from release.names import BUNDLED, TRUNK, Names
from release.origin import all_files, file_sha256
from release.page import page
from release.plots import plots_of

SUMS, CARD, PLOTS = "SHA256SUMS", "README.md", "plots"
PAGE, RESULTS, PROVENANCE = "report.html", "results.json", "provenance.json"
_DRAFTS = "3"  # the engine's default, where nothing was measured


@dataclass(frozen=True)
class Places:
    """Where things lie below the output folder.

    repository: what is uploaded. presets: the repository of preset.ini. failed: files that did not pass, and why. work:
    what later runs go on from; made: new files, and those of earlier releases that this one does not have.
    """

    out: Path
    names: Names

    @property
    def repository(self) -> Path:
        return self.out / self.names.repository

    @property
    def presets(self) -> Path:
        return self.out / self.names.presets

    @property
    def failed(self) -> Path:
        return self.out / "failed"

    @property
    def work(self) -> Path:
        return self.out / "work"

    @property
    def made(self) -> Path:
        return self.work / "files"

    def all(self) -> tuple[Path, ...]:
        """Where a file of the release may be."""
        return self.repository, self.failed, self.made

    def set_aside(self, files: Sequence[ReleaseFile]) -> None:
        """Take files of the model that are not of this release out of the repository, and forget why others failed."""
        wanted = {part for f in files for part in f.parts}
        for folder in (BUNDLED, TRUNK):
            for file in sorted((self.repository / folder).glob(f"*{self.names.base}-*.gguf")):
                name = f"{folder}/{file.name}"
                if name not in wanted:
                    self.move(name, self.repository, self.made)
        for part in wanted:
            _remove(self.failed / part)

    def move(self, part: str, where: Path, to: Path) -> None:
        """A file from one of the folders to another. A repository that changes has neither card nor sums until it is whole."""
        if where == to:
            return
        if self.repository in {where, to}:
            for name in (SUMS, CARD):
                _remove(self.repository / name)
        file, new = where / part, to / part
        with os_errors("cannot move this file", file):
            new.parent.mkdir(parents=True, exist_ok=True)
            file.replace(new)
            sync_folder(new.parent)


def _remove(file: Path) -> None:
    with os_errors("cannot remove this file", file):
        file.unlink(missing_ok=True)


def write_reasons(facts: FileFacts, places: Places) -> None:
    """Beside a file that failed: why, for people and as data; nothing of the kind for one that passed."""
    base = places.failed / Path(facts.file.name).with_suffix("")
    texts = {
        base.with_name(f"{base.name}.reason.txt"): "\n".join(facts.assessment.reasons()) + "\n",
        base.with_name(f"{base.name}.report.json"): json.dumps(facts.assessment.reports, indent=2),
    }
    for file, text in texts.items():
        if facts.published:
            _remove(file)
        else:
            write_whole(file, text.encode())


def write_repository(facts: Facts, places: Places, ledger: Ledger) -> None:
    """Card, page, plots, figures, provenance, and last the sums of everything. Raises ToolError."""
    root = places.repository
    plots = plots_of(facts)
    pictures = {name: data for plot in plots for name, data in plot.files().items()}
    for file in (root / PLOTS).glob("*.*"):
        if file.name not in pictures and file.suffix in {".svg", ".png"}:
            _remove(file)
    for name, data in pictures.items():
        write_whole(root / PLOTS / name, data)
    texts = {
        PAGE: page(facts, plots), RESULTS: json.dumps(facts.as_json(), indent=1),
        PROVENANCE: json.dumps(facts.provenance(), indent=1), CARD: card(facts, plots),
    }  # fmt: skip
    for name, text in texts.items():  # where files lay on this machine is nobody's business
        write_whole(root / name, text.replace(f"{root}/", "").replace(f"{places.out}/", "").encode())
    write_whole(root / SUMS, "".join(f"{s}  {name}\n" for name, s in _sums(root, ledger)).encode())


def _sums(root: Path, ledger: Ledger) -> Iterator[tuple[str, str]]:
    for file in all_files(root):
        name = file.relative_to(root).as_posix()
        if file.suffix == ".gguf":
            yield name, file_sha256(file, ledger)
        elif name != SUMS:
            yield name, hashlib.sha256(file.read_bytes()).hexdigest()


def write_presets(facts: Facts, places: Places) -> None:
    """preset.ini in its own folder: with a repository for any machine, else for this one."""
    chosen = facts.of_kind("bundled") or facts.of_kind("trunk")
    write_whole(places.presets / PRESET, ini((f.file.stem, _keys(f, facts, places)) for f in chosen).encode())
    write_whole(places.presets / CARD, _about_presets(facts).encode())


def _keys(file: FileFacts, facts: Facts, places: Places) -> dict[str, str]:
    """Of one section. From a repository llama.cpp finds the sidecar of a trunk by itself."""
    is_trunk = file.file.kind == "trunk"
    keys: dict[str, str] = {}
    if facts.repository:
        keys["hf"] = f"{facts.repository}:{file.file.type}"
        if not is_trunk:
            keys["hf-file"] = file.file.first
    else:
        keys["model"] = str(places.repository / file.file.first)
    drafts = {"spec-type": "draft-mtp", "spec-draft-n-max": _DRAFTS} if file.draft is None else draft_keys(file.draft)
    if is_trunk and facts.sidecar is None:
        return keys
    if is_trunk and drafts and facts.sidecar and not facts.repository:
        keys["model-draft"] = str(places.repository / facts.sidecar.file.first)
    return keys | drafts


def _about_presets(facts: Facts) -> str:
    where = facts.repository or "the folder beside this one"
    measured = "as measured there" if facts.measured else "with the engine's default, since nothing was measured"
    use = f"\n\n```sh\nllama-server -hf {facts.repository}-presets:SECTION\n```" if facts.repository else (
        f"\n\n```sh\nllama-server --models-preset {PRESET}\n```"
    )  # fmt: skip
    return (
        f"---\nlibrary_name: gguf\ntags:\n- llama.cpp\n- preset\n---\n\n# Presets of {facts.names.base}\n\nDraft settings of "
        f"the files in {where}, {measured}: where drafts are slower they are off. In a repository of its own, since llama.cpp "
        f"looks at nothing else where it finds a preset.ini.{use}\n"
    )


def clear(places: Places) -> None:
    """Take away what tells of a release, where nothing of it is left."""
    root = places.repository
    files = [root / name for name in (SUMS, CARD, PAGE, RESULTS, PROVENANCE)]
    for file in [*files, *(root / PLOTS).glob("*.*"), places.presets / PRESET, places.presets / CARD]:
        _remove(file)
    remove_empty(root)
    remove_empty(places.presets)


def remove_empty(folder: Path) -> None:
    """A tree without any file."""
    if folder.is_dir() and not any(f.is_file() for f in folder.rglob("*")):
        shutil.rmtree(folder)
