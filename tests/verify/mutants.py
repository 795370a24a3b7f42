"""Modules with one piece of their source exchanged: defects, planted to be found."""

from __future__ import annotations

import sys
import types
from pathlib import Path


def mutated(module: types.ModuleType, old: str, new: str) -> types.ModuleType:
    """The module with one piece of its source exchanged."""
    source = Path(str(module.__file__)).read_text()
    assert source.count(old) == 1, (source.count(old), old)
    copy = types.ModuleType(f"mutated_{module.__name__.replace('.', '_')}")
    sys.modules[copy.__name__] = copy  # dataclasses look their module up
    exec(compile(source.replace(old, new), str(module.__file__), "exec"), copy.__dict__)
    return copy
