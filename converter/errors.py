"""Errors with an exit code and the facts a person needs at night: file, tensor, expected, found, what to do."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields
from pathlib import Path
from typing import ClassVar


@dataclass(eq=False)
class ToolError(Exception):
    """Something a user can act on. Subclasses set the exit code of the command line; all survive a process pool."""

    what: str
    file: Path | None = None
    tensor: str | None = None
    expected: object = None
    found: object = None
    hint: str = ""

    exit_code: ClassVar[int]

    def __reduce__(self) -> tuple[object, ...]:
        return type(self), tuple(getattr(self, f.name) for f in fields(self))

    def __str__(self) -> str:
        return "\n  ".join([self.what, *(f"{key}: {value}" for key, value in self.facts())])

    def facts(self) -> Iterator[tuple[str, object]]:
        """What is known beyond the sentence, in reading order."""
        for key in ("file", "tensor", "expected", "found", "hint"):
            value = getattr(self, key)
            if value is not None and value != "":
                yield key, value


class UsageError(ToolError):
    """The command was called in a way that cannot be meant."""

    exit_code = 2


class InputError(ToolError):
    """The checkpoint, its config, its tokenizer or a GGUF file is not what it has to be."""

    exit_code = 3


class CheckpointError(InputError):
    """Shards, index or tensors."""


class ConfigError(InputError):
    """config.json."""


class TokenizerError(InputError):
    """tokenizer.json, its config, or the chat template."""


class GGUFError(InputError):
    """A GGUF file."""


class UnsupportedError(ToolError):
    """Well-formed, but not something this version can convert."""

    exit_code = 4


class EnvironmentFailure(ToolError):
    """Disk, permissions, memory, or a missing program."""

    exit_code = 5
