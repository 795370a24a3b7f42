"""What is measured: loads (how an engine is started) times cells (what it is asked), in an order fair to all."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import product
from typing import Any

PLAIN = "none"  # the head of plain decoding
OWN = "own"  # the head that a file has itself
LLAMA_CPP, TORCH = "llama.cpp", "torch"


@dataclass(frozen=True)
class Load:
    """One way to start an engine. drafts: most per step, 0 for plain. head: PLAIN, OWN, or a type made from the source."""

    engine: str
    file: str
    head: str = PLAIN
    drafts: int = 0
    p_min: float = 0.0
    slots: int = 1

    @property
    def plain(self) -> Load:
        """The baseline that this is compared with."""
        return Load(self.engine, self.file, slots=self.slots)

    def __str__(self) -> str:
        parts = [self.engine, self.file.rpartition("/")[2]]
        parts.append(f"{self.head} head, n = {self.drafts}" if self.drafts else "plain")
        if self.p_min:
            parts.append(f"p-min {self.p_min:g}")
        if self.slots > 1:
            parts.append(f"{self.slots} slots")
        return ", ".join(parts)


@dataclass(frozen=True)
class Cell:
    """One measurement. context: tokens that a prompt is filled up to, 0 for as it is."""

    load: Load
    task: str
    temperature: float = 0.0
    context: int = 0

    @property
    def plain(self) -> Cell:
        return Cell(self.load.plain, self.task, self.temperature, self.context)

    def as_json(self) -> dict[str, Any]:
        """One flat object."""
        own = {"task": self.task, "temperature": self.temperature, "context": self.context}
        return asdict(self.load) | own

    @classmethod
    def of(cls, values: dict[str, Any]) -> Cell:
        """What `as_json` made; other keys are passed over."""
        load = Load(**{name: values[name] for name in Load.__dataclass_fields__})
        return cls(load, values["task"], values["temperature"], values["context"])


@dataclass(frozen=True)
class Axes:
    """The matrix. drafts of 0 are implied: there is always a baseline."""

    engines: Sequence[str]
    files: Sequence[str]
    heads: Sequence[str]
    drafts: Sequence[int]
    tasks: Sequence[str]
    temperatures: Sequence[float] = (0.0,)
    p_mins: Sequence[float] = (0.0,)
    slots: Sequence[int] = (1,)
    contexts: Sequence[int] = (0,)

    def loads(self) -> list[Load]:
        """All ways to start an engine, plain ones first."""
        found = [Load(e, f, slots=s) for e, f, s in product(self.engines, self.files, self.slots)]
        drafting = product(self.engines, self.files, self.slots, self.heads, self.p_mins, self.drafts)
        return found + [Load(e, f, h, n, p, s) for e, f, s, h, p, n in drafting if n > 0]

    def cells(self, load: Load) -> list[Cell]:
        return [Cell(load, t, x, c) for c, t, x in product(self.contexts, self.tasks, self.temperatures)]


def rounds(loads: Sequence[Load], runs: int, seed: int) -> Iterator[tuple[int, Load]]:
    """(run, load), every load once per run and in another order each time: drift of the machine hits all alike."""
    for run in range(runs):
        order = list(loads)
        random.Random(f"{seed}/{run}").shuffle(order)  # noqa: S311  (an order, no secret)
        for load in order:
            yield run, load
