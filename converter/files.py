"""Reading small files of a checkpoint folder with errors that name the file."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from converter.errors import EnvironmentFailure, InputError, ToolError


@contextmanager
def os_errors(what: str, file: Path) -> Iterator[None]:
    """Turn an OSError into an environment failure that names the file."""
    try:
        yield
    except OSError as error:
        raise EnvironmentFailure(what, file, found=error.strerror or str(error)) from error


def read_text(file: Path, error: type[ToolError] = InputError) -> str:
    """The file as UTF-8 text."""
    with os_errors("cannot read this file", file):
        raw = file.read_bytes()
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError as problem:
        raise error("this file is not UTF-8 text", file, found=str(problem)) from problem


def read_json_object(file: Path, error: type[ToolError] = InputError) -> dict[str, Any]:
    """The file as a JSON object."""
    try:
        value = json.loads(read_text(file, error))
    except (json.JSONDecodeError, RecursionError) as problem:
        raise error("this file is not JSON", file, found=str(problem)) from problem
    if not isinstance(value, dict):
        raise error("this file is not a JSON object", file, expected="{...}", found=type(value).__name__)
    return value


def model_name(folder: Path) -> str:
    """What a model folder is called: its own name, or the repository's for a snapshot in the Hub cache."""
    real = folder.resolve()
    repository = real.parent.parent.name
    if real.parent.name == "snapshots" and repository.startswith("models--"):
        return repository.split("--", 2)[-1]
    return real.name


def sync_folder(folder: Path) -> None:
    """Make the names in a folder survive a crash. Raises OSError."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
