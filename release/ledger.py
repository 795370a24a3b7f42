"""What is known already: results of steps, each under a key that names everything they depend on.

A step whose key is the same is not done again; one that was cut off has no entry. Entries are files of JSON, whole or
absent.
"""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path
from typing import Any
from urllib.parse import quote

from converter.files import os_errors


class Ledger:
    """Entries by kind and name, in a folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def get(self, kind: str, name: str, key: str) -> Any:
        """What was put under that key; None where there is none, or one of another key, or one that cannot be read."""
        try:
            entry = json.loads(self._file(kind, name).read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return None
        return entry["value"] if isinstance(entry, dict) and entry.get("key") == key else None

    def put(self, kind: str, name: str, key: str, value: Any) -> None:
        """Replace an entry. Raises EnvironmentFailure."""
        write_whole(self._file(kind, name), json.dumps({"key": key, "value": value}).encode())

    def _file(self, kind: str, name: str) -> Path:
        return self.folder / kind / f"{quote(name, safe='')}.json"


def digest(*parts: Any) -> str:
    """Of JSON-able values."""
    return hashlib.sha256(json.dumps(parts, sort_keys=True, default=str).encode()).hexdigest()


def write_whole(file: Path, data: bytes) -> None:
    """Write a small file so that it is there whole or not at all; one that has these bytes is left as it is.

    Raises EnvironmentFailure.
    """
    with os_errors("cannot write this file", file):
        if file.is_file() and file.read_bytes() == data:
            return
        file.parent.mkdir(parents=True, exist_ok=True)
        beside = file.with_name(f".{file.name}.new")
        with beside.open("wb") as out:
            out.write(data)
            out.flush()
            os.fsync(out.fileno())
        beside.replace(file)
