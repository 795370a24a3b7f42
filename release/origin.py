"""The source of a release: which model, which revision, the SHA-256 of every file, and what its own card says."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from converter.errors import InputError
from converter.files import model_name, os_errors, read_text
from converter.hub import locate
from release.ledger import Ledger

_OF_MODEL = {".json", ".safetensors", ".jinja", ".model", ".txt", ".tiktoken"}
_CARD = "README.md"
_SHA256 = re.compile(r"[0-9a-f]{64}")
HASHING = 4  # files at a time


@dataclass(frozen=True)
class Origin:
    """A model folder. repository: its id on the Hub, where it came from there; revision: the commit."""

    folder: Path
    repository: str | None
    revision: str | None
    files: Mapping[str, str]

    @property
    def name(self) -> str:
        return self.repository or model_name(self.folder)

    @cached_property
    def card(self) -> Mapping[str, Any]:
        """The front matter of the source's model card. Raises InputError."""
        file = self.folder / _CARD
        if not file.is_file():
            return {}
        from yaml import YAMLError, safe_load

        matter = re.match(r"\s*---\r?\n(.*?)\n---", read_text(file), re.DOTALL)
        try:
            found = safe_load(matter[1]) if matter else {}
        except YAMLError as error:
            raise InputError("the front matter of this card is not YAML", file, found=str(error)) from error
        return found if isinstance(found, dict) else {}


def origin_of(
    model: str | Path,
    ledger: Ledger,
    *,
    revision: str | None = None,
    notify: Callable[[str], None] = lambda _line: None,
) -> Origin:
    """Find a model, fetch it if it is on the Hub, and hash its files. Raises ToolError."""
    located = locate(model, revision=revision, notify=lambda _name, line, _facts: notify(line))
    folder = located.path
    repository, commit = _snapshot(folder)
    if not folder.is_dir():
        what = "this is no model folder" if folder.exists() else "there is no such folder"
        raise InputError(what, folder, hint="a release is made from the source checkpoint, or its Hub id")
    with os_errors("cannot read the model", folder):
        names = sorted(f.name for f in folder.iterdir() if f.suffix in _OF_MODEL and f.is_file())
    with ThreadPoolExecutor(HASHING) as pool:
        sums = list(pool.map(lambda name: file_sha256(folder / name, ledger), names))
    return Origin(folder, repository, commit, dict(zip(names, sums, strict=True)))


def _snapshot(folder: Path) -> tuple[str | None, str | None]:
    """(repository, commit) of a folder in the Hub cache, models--ORG--NAME/snapshots/COMMIT."""
    real = folder.resolve()
    cached = real.parent.parent.name
    if real.parent.name == "snapshots" and cached.startswith("models--"):
        return cached.removeprefix("models--").replace("--", "/", 1), real.name
    return None, None


def file_sha256(file: Path, ledger: Ledger) -> str:
    """A file's SHA-256; one that is known by inode, size and time is not read again, whatever its name is now.

    Blobs of the Hub cache are named by theirs. Raises EnvironmentFailure.
    """
    with os_errors("cannot read this file", file):
        real = file.resolve()
        if real.parent.name == "blobs" and _SHA256.fullmatch(real.name):
            return real.name
        state = real.stat()
        name, key = f"{state.st_dev}-{state.st_ino}", f"{state.st_size}/{state.st_mtime_ns}"
        known = ledger.get("sha256", name, key)
        if isinstance(known, str):
            return known
        with real.open("rb") as opened:
            found = hashlib.file_digest(opened, "sha256").hexdigest()
    ledger.put("sha256", name, key, found)
    return found


def all_files(folder: Path) -> Iterator[Path]:
    """Files of a folder and those below, in order; hidden ones and what other tools keep there left out."""
    for file in sorted(folder.rglob("*")):
        if file.is_file() and not any(part.startswith(".") for part in file.relative_to(folder).parts):
            yield file
