"""Which files an engine takes for what, by their names (spec/runtime.md, section 1, which tells llama.cpp's rules)."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import PurePosixPath

_NOT_MAIN = ("mmproj", "imatrix", "mtp-", "eagle3-", "dflash-", "dspark-")


def mains(files: Sequence[str]) -> list[str]:
    """Files that count as models."""
    return [f for f in files if f.endswith(".gguf") and not any(w in PurePosixPath(f).name for w in _NOT_MAIN)]


def by_tag(files: Sequence[str], tag: str) -> list[str]:
    """All main models that a tag matches, as listed; the first is taken."""
    return [f for f in mains(files) if re.search(rf"{re.escape(tag)}[.-]", f, re.IGNORECASE)]


def sidecars(files: Sequence[str], main: str) -> list[str]:
    """What may be paired with a main model: in its folder, or one above."""
    folder = PurePosixPath(main).parent
    near = {folder, folder.parent}
    return [f for f in files if f.endswith(".gguf") and "mtp-" in f and PurePosixPath(f).parent in near]
