"""A model as GGUF: one file, or several parts taken as one (spec/gguf.md, section 4)."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from converter.errors import GGUFError, InputError
from converter.files import os_errors
from converter.gguf_file import GGUFHeader, KeyValue, TensorEntry, read_gguf

_PART = re.compile(r"(.*)-(\d{5})-of-(\d{5})\.gguf")


@dataclass(frozen=True)
class GGUFModel:
    """All parts of a model. file: what an engine is given, the first part. keys: without those of the splitting."""

    file: Path
    parts: Sequence[GGUFHeader]

    @cached_property
    def keys(self) -> Mapping[str, KeyValue]:
        return {name: entry for name, entry in self.parts[0].keys.items() if not name.startswith("split.")}

    @cached_property
    def tensors(self) -> Sequence[TensorEntry]:
        """In the order of the parts; offsets count inside each one's."""
        return [t for part in self.parts for t in part.tensors]

    @property
    def size(self) -> int:
        return sum(part.size for part in self.parts)

    def get(self, key: str, default: Any = None) -> Any:
        found = self.keys.get(key)
        return default if found is None else found.value

    def place(self, name: str) -> tuple[Path, int]:
        """The file that holds a tensor, and the byte where it begins."""
        return self._places[name]

    @cached_property
    def _places(self) -> Mapping[str, tuple[Path, int]]:
        return {t.name: (part.file, part.data_start + t.offset) for part in self.parts for t in part.tensors}


def is_gguf(path: Path) -> bool:
    """Whether this is meant as GGUF rather than as a model folder."""
    return (path.is_file() and path.suffix == ".gguf") or (
        path.is_dir() and not (path / "config.json").exists() and any(path.glob("*.gguf"))
    )


def open_gguf(path: Path) -> GGUFModel:
    """The model of a file, of any part of a split file, or of a folder that holds one.

    Raises GGUFError where a part is missing or is not what the first one announces.
    """
    file = _in_folder(path) if path.is_dir() else path
    header = read_gguf(file)
    count = header.get("split.count", 0)
    if type(count) is not int or count <= 1:
        return GGUFModel(file, [header])
    return _with_all_parts(file, header, count)


def _with_all_parts(file: Path, header: GGUFHeader, count: int) -> GGUFModel:
    name = _PART.fullmatch(file.name)
    if name is None or int(name[3]) != count:
        raise GGUFError(
            "this is a part of a split file, but its name does not say which", file,
            expected=f"NAME-00001-of-{count:05d}.gguf to NAME-{count:05d}-of-{count:05d}.gguf", found=file.name,
        )  # fmt: skip
    files = [file.with_name(f"{name[1]}-{i:05d}-of-{count:05d}.gguf") for i in range(1, count + 1)]
    missing = [f.name for f in files if not f.is_file()]
    if missing:
        raise GGUFError(
            f"{len(missing)} of the {count} parts are missing", file.with_name(missing[0]),
            found=f"{file.name}, without {', '.join(missing[:5])}", hint="fetch them into the same folder",
        )  # fmt: skip
    parts = [header if f == file else read_gguf(f) for f in files]
    for number, part in enumerate(parts):
        if part.get("split.no") != number or part.get("split.count") != count:
            raise GGUFError(
                "this part does not belong where its name puts it", part.file,
                expected=f"split.no {number}, split.count {count}",
                found=f"split.no {part.get('split.no')}, split.count {part.get('split.count')}",
            )  # fmt: skip
    model = GGUFModel(files[0], parts)
    names = {t.name for t in model.tensors}
    total = parts[0].get("split.tensors.count")
    if len(names) != len(model.tensors) or total != len(names):
        raise GGUFError(
            "the parts are not of one model", files[0], expected=f"{total} tensors",
            found=f"{len(model.tensors)} tensors, {len(names)} names",
        )  # fmt: skip
    return model


def _in_folder(folder: Path) -> Path:
    """The one model of a folder; a sidecar beside it does not count."""
    with os_errors("cannot list this folder", folder):
        files = sorted(f for f in folder.iterdir() if f.suffix == ".gguf")
    models = {(m[1] if (m := _PART.fullmatch(f.name)) else f.name): f for f in reversed(files)}
    if len(models) != 1:
        raise InputError(
            "this folder holds more than one GGUF model" if models else "there is no GGUF file in this folder", folder,
            found=", ".join(sorted(models)[:5]) or None, hint="give the file you mean",
        )  # fmt: skip
    return next(iter(models.values()))
