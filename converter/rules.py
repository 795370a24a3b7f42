"""The table of an architecture: which tensors must exist, what each becomes, and which are left out and why."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from fnmatch import fnmatchcase

from converter.config import Config
from converter.gguf_file import KeyValue
from converter.transforms import Shape, Transform, target_shape


class Role(StrEnum):
    """Which part of the model a tensor belongs to; packagings choose by it."""

    TRUNK = "trunk"
    MTP = "mtp"
    SHARED = "shared"  # embedding, final norm, output: a sidecar needs them too


@dataclass(frozen=True)
class Rule:
    """One GGUF tensor: its sources, their shape, and the steps between.

    sources: canonical names, `{expert}` order where several are stacked on a new first axis. shape: of one source, in
    torch order. duplicates: the GGUF tensor that this one is dropped for when both have the same bytes. known_wrong:
    shapes that tell a story, with the story. made: the values of a vector that no source holds. Which type it gets is not decided here but by the mix.
    """

    target: str
    sources: tuple[str, ...]
    shape: Shape
    transforms: tuple[Transform, ...] = ()
    role: Role = Role.TRUNK
    duplicates: str | None = None
    known_wrong: Mapping[Shape, str] = field(default_factory=dict)
    made: tuple[float, ...] = ()

    @property
    def target_shape(self) -> Shape:
        shape = target_shape(self.shape, self.transforms)
        return (len(self.sources), *shape) if self.is_stacked else shape

    @property
    def is_stacked(self) -> bool:
        return len(self.sources) > 1


@dataclass(frozen=True)
class Drop:
    """Source tensors that are left out on purpose; pattern with `*`, on canonical names."""

    pattern: str
    why: str

    def matches(self, name: str) -> bool:
        return fnmatchcase(name, self.pattern)


@dataclass(frozen=True)
class Table:
    """What an architecture says about one checkpoint.

    optional: sources that an index may list without any file having them. metadata: the architecture's own keys,
    without its prefix, of a file that holds so many layers of the head.
    """

    rules: list[Rule]
    drops: list[Drop]
    trunk_layers: int
    head_layers: int
    experts: int
    heads_per_kv_head: int
    vocabulary: int
    optional: Collection[str]
    metadata: Callable[[int], list[KeyValue]]


@dataclass(frozen=True)
class Architecture:
    """A family's conversion; `converter.archs` finds it by the Hugging Face class name.

    table: from config and canonical source names, everything that must be there. head_input: which of
    the trunk's states feeds the head. most_head_layers: what the engine's graph can run. tokenizer: the engine's name
    for its kind. drafts_for: GGUF name of the architecture whose drafter this is; check_pair(drafter, target) raises
    CheckpointError where two configs do not belong together.
    """

    name: str
    hf: tuple[str, ...]
    canonical: Callable[[str], str]
    table: Callable[[Config, Collection[str]], Table]
    head_input: str
    most_head_layers: int
    tokenizer: str = "gpt2"
    drafts_for: str | None = None
    check_pair: Callable[[Config, Config], None] | None = None
