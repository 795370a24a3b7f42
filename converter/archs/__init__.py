"""One file per family; each defines ARCHITECTURES. Adding one is adding a file."""

from __future__ import annotations

import pkgutil
from functools import cache
from importlib import import_module

from converter.config import Config
from converter.errors import UnsupportedError
from converter.rules import Architecture


@cache
def _known() -> dict[str, Architecture]:
    modules = (import_module(f"{__name__}.{m.name}") for m in pkgutil.iter_modules(__path__))
    return {hf: arch for module in modules for arch in module.ARCHITECTURES for hf in arch.hf}


def supported() -> list[str]:
    """The Hugging Face class names that can be converted."""
    return sorted(_known())


def find(config: Config) -> Architecture:
    """The architecture of a checkpoint. Raises UnsupportedError for one that no file here describes."""
    name = config.architecture()
    found = _known().get(name)
    if found is None:
        raise UnsupportedError(
            "no rules for this architecture", config.file, expected=", ".join(supported()), found=name
        )
    return found


def drafter_of(name: str) -> Architecture | None:
    """The architecture of drafters for targets of this GGUF name, where they have a checkpoint of their own."""
    return next((a for a in _known().values() if a.drafts_for == name), None)


def by_gguf_name(name: str) -> Architecture | None:
    """The architecture that writes `general.architecture` = name, if there is one."""
    return next((a for a in _known().values() if a.name == name), None)
