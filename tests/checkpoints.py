"""Building variants of a trained checkpoint, and broken ones, with the safetensors library."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

Tensors = dict[str, torch.Tensor]
INDEX = "model.safetensors.index.json"


def load(folder: Path) -> Tensors:
    """All tensors of a checkpoint folder."""
    return {k: v for f in sorted(folder.glob("*.safetensors")) for k, v in load_file(f).items()}


def save(folder: Path, tensors: Tensors, shards: int = 1, *, index: bool | None = None) -> None:
    """Write tensors as shards as upstream does; an index is written when there are several, unless told otherwise."""
    names = list(tensors)
    files = {}
    for i in range(shards):
        file = f"model-{i + 1:05d}-of-{shards:05d}.safetensors" if shards > 1 else "model.safetensors"
        part = {n: tensors[n].contiguous() for n in names[i::shards]}
        save_file(part, folder / file, {"format": "pt"})
        files |= dict.fromkeys(part, file)
    if index or (index is None and shards > 1):
        write_index(folder, files)


def write_index(folder: Path, files: dict[str, str]) -> None:
    (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": files}))


def read_index(folder: Path) -> dict[str, str]:
    return json.loads((folder / INDEX).read_text())["weight_map"]


def edit_json(file: Path, change: Callable[[dict[str, Any]], object]) -> None:
    """Change a JSON file in place."""
    value = json.loads(file.read_text())
    change(value)
    file.write_text(json.dumps(value))


def variant(
    source: Path,
    folder: Path,
    *,
    tensors: Callable[[Tensors], object] | None = None,
    config: Callable[[dict[str, Any]], object] | None = None,
    shards: int = 1,
    index: bool | None = None,
) -> Path:
    """A copy of a checkpoint with changed tensors (in place, or a new dictionary) and a changed config."""
    copy_small_files(source, folder)
    values = load(source)
    if tensors is not None:
        changed = tensors(values)
        values = changed if isinstance(changed, dict) else values
    save(folder, values, shards, index=index)
    if config is not None:
        edit_json(folder / "config.json", config)
    return folder


def copy_small_files(source: Path, folder: Path) -> None:
    """Config, tokenizer and templates; no weights."""
    folder.mkdir(parents=True, exist_ok=True)
    for file in source.iterdir():
        if file.is_file() and "safetensors" not in file.name:
            shutil.copyfile(file, folder / file.name)


def clone(source: Path, folder: Path) -> Path:
    """The checkpoint as it is, in files that may be damaged."""
    folder.mkdir(parents=True, exist_ok=True)
    for file in source.iterdir():
        if file.is_file():
            shutil.copyfile(file, folder / file.name)
    return folder
