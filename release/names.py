"""Names and places of files in a repository, such that engines and front ends pair what belongs together.

llama.cpp looks for main models and sidecars by name and folder (spec/runtime.md, section 1): a sidecar is a file with
`mtp-` in its path, in the model's folder or one above. So bundled files and trunk-only files with their sidecars lie in
folders side by side: nothing can give a bundled file a second head. Of two files that match a tag the first listed is
taken: bundled/ comes before trunk/, and either of them works with the same command.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from converter.errors import UsageError
from quant.mixes import MIXES

BUNDLED, TRUNK = "bundled", "trunk"  # folders
_NAME = re.compile(r"[A-Za-z0-9][\w.-]*")
_ENGINE_WORDS = ("mmproj", "imatrix", "mtp-", "eagle3-", "dflash-", "dspark-")  # no main model has these in its name
_TAG = re.compile(rf"(?:^|[^A-Za-z0-9])({'|'.join(MIXES)})(?=[.-])", re.IGNORECASE)
_HINT = 'set name in the recipe, such as name = "Qwen3.6-27B"'


@dataclass(frozen=True)
class Names:
    """Files of a model, as paths in the repository; {type} stands for the type."""

    base: str

    @property
    def bundled(self) -> str:
        return f"{BUNDLED}/{self.base}-MTP-{{type}}.gguf"

    @property
    def trunk(self) -> str:
        return f"{TRUNK}/{self.base}-{{type}}.gguf"

    @property
    def sidecar(self) -> str:
        return f"{TRUNK}/mtp-{self.base}-{{type}}.gguf"

    @property
    def repository(self) -> str:
        """The folder that is uploaded."""
        return f"{self.base}-MTP-GGUF"

    @property
    def presets(self) -> str:
        """The folder of the repository with preset.ini alone: where an engine finds one it looks at nothing else."""
        return f"{self.repository}-presets"


def names_of(source: str, wanted: str | None = None) -> Names:
    """Names from the source's name, or as the recipe wants. Raises UsageError for what engines would misread.

    >>> names_of("Qwen3.6-27B-MTP").bundled, names_of("tiny-mtp-7B").trunk
    ('bundled/Qwen3.6-27B-MTP-{type}.gguf', 'trunk/tiny-MTP-7B-{type}.gguf')
    """
    base = wanted or source.rpartition("/")[2].replace("mtp-", "MTP-")
    if not wanted:  # both forms of a file get or lack the MTP themselves
        base = re.sub(r"[-_.]MTP$", "", base, flags=re.IGNORECASE)
    if not _NAME.fullmatch(base):
        raise UsageError(
            "this is no name for files on the Hub", expected="letters, digits, . _ -", found=base, hint=_HINT
        )
    for word in _ENGINE_WORDS:
        if word in base:
            raise UsageError(f"engines take no file with '{word}' in its name for a model", found=base, hint=_HINT)
    if tag := _TAG.search(f"{base}-"):
        raise UsageError(
            "engines find files by their type's name, which is a part of this model's name", expected=f"no {tag[1]}",
            found=base, hint=_HINT,
        )  # fmt: skip
    return Names(base)
