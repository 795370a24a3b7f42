"""Decoding in torch, plain and with drafts, in one loop: what is emitted is always the trunk's own choice.

A step evaluates the last token and the drafts after it; the trunk's choices are emitted one after the other as long as
the drafts agree with them, so each step yields one token more than it accepts. Plain decoding is the same with no
drafts. In exact mode every evaluation has the same width, so that a row has the same bits in both (spec/exact-mode.md).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from verify.models.base import HeadState, TorchModel, TrunkState

_DUMMY = 0  # stands in rows that only fill up the width


@dataclass(frozen=True)
class Settings:
    """How to decode. tokens: at most so many. width: rows of every evaluation, 0 for as many as needed (native mode).

    temperature 0 is greedy; above, noise is a function of (seed, position) alone. stop: tokens that end the text, emitted
    as the last one. context: positions that the state has room for.
    """

    tokens: int
    width: int = 0
    temperature: float = 0.0
    seed: int = 0
    stop: frozenset[int] = frozenset()
    context: int = 4096


@dataclass
class Stream:
    """What a run gave. rows: the logits that decided each token, on the CPU; drafted, accepted: by step."""

    tokens: list[int] = field(default_factory=list)
    rows: list[Tensor] = field(default_factory=list)
    drafted: list[int] = field(default_factory=list)
    accepted: list[int] = field(default_factory=list)
    ended: str = ""

    @property
    def acceptance(self) -> float | None:
        """Accepted drafts of all; None where nothing was drafted."""
        return sum(self.accepted) / sum(self.drafted) if sum(self.drafted) else None

    def by_position(self) -> list[tuple[int, int]]:
        """For draft position 1, 2, …: (how often accepted, how often drafted)."""
        drafted = Counter(k for n in self.drafted for k in range(n))
        accepted = Counter(k for a in self.accepted for k in range(a))
        return [(accepted[k], drafted[k]) for k in sorted(drafted)]


class Drafter(Protocol):
    """Guesses what comes next; the trunk decides."""

    def begin(self, hidden: Tensor, prompt: Sequence[int], trunk: TrunkState) -> None:
        """A new text: the trunk's states [rows, hidden] of the prompt, and the one it goes on from."""
        ...

    def draft(self, token: int, most: int) -> list[int]:
        """At most so many tokens that may follow `token`, which stands at the next position."""
        ...

    def accept(self, hidden: Tensor, tokens: Sequence[int]) -> None:
        """`tokens` are part of the text now; hidden: the trunk's states [rows, hidden] at their positions."""
        ...


class HeadDrafter:
    """The model's own head or drafter, its own output as the next input (spec/qwen.md, section 4; spec/gemma4.md)."""

    def __init__(self, engine: TorchModel, context: int) -> None:
        self.engine, self.context = engine, context
        self._state: HeadState
        self._kept: Tensor  # the trunk's state at the position before the next token

    def begin(self, hidden: Tensor, prompt: Sequence[int], trunk: TrunkState) -> None:
        self._state = self.engine.head_state(trunk, self.context)
        if len(prompt) > 1:
            self.engine.follow(hidden[:-1], self._ids(prompt[1:]), self._state)
        self._kept = hidden[-1:]

    def draft(self, token: int, most: int) -> list[int]:
        decided, out, found = self._state.length, self._kept, []
        for _ in range(min(most, self.context - decided)):
            step = self.engine.chain if found else self.engine.head
            out = step(out, self._ids([token]), self._state)
            token = int(self.engine.head_logits(out[-1]).argmax())
            found.append(token)
        self._state.length = decided  # entries that rest on drafts are written again from the trunk's states
        return found

    def accept(self, hidden: Tensor, tokens: Sequence[int]) -> None:
        room = self.context - self._state.length
        before = torch.cat([self._kept, hidden[:-1]])
        self.engine.follow(before[:room], self._ids(tokens[:room]), self._state)
        self._kept = hidden[-1:]

    def _ids(self, tokens: Sequence[int]) -> Tensor:
        return torch.tensor(list(tokens), device=self.engine.device)


class ScriptedDrafter:
    """Guesses from a text that is known, wrong where told: to exercise every way of rejecting.

    script: what follows the prompt. wrong: whether the draft for that place of the script is spoilt.
    """

    def __init__(self, script: Sequence[int], wrong: Callable[[int], bool], vocabulary: int) -> None:
        self.script, self.wrong, self.vocabulary = script, wrong, vocabulary
        self.place = 0

    def begin(self, hidden: Tensor, prompt: Sequence[int], trunk: TrunkState) -> None:  # noqa: ARG002
        self.place = 0

    def draft(self, token: int, most: int) -> list[int]:  # noqa: ARG002
        ahead = range(self.place + 1, min(self.place + 1 + most, len(self.script)))
        return [(self.script[i] + self.wrong(i)) % self.vocabulary for i in ahead]

    def accept(self, hidden: Tensor, tokens: Sequence[int]) -> None:  # noqa: ARG002
        self.place += len(tokens)


def gumbel(seed: int, position: int, size: int) -> np.ndarray:
    """Noise [size], float64, that depends on nothing else: argmax(logits / T + noise) draws from softmax(logits / T)."""
    bits = np.random.Philox(key=[seed, 0], counter=[0, 0, 0, position])
    return np.random.Generator(bits).gumbel(size=size)


def choose(row: Tensor, position: int, settings: Settings) -> int:
    """The token at a position from its logits [vocabulary], on the CPU in float32."""
    if settings.temperature == 0:
        return int(row.argmax())
    noise = torch.from_numpy(gumbel(settings.seed, position, len(row)))
    return int((row.double() / settings.temperature + noise).argmax())


def decode(
    engine: TorchModel, prompt: Sequence[int], settings: Settings, drafter: Drafter | None = None, drafts: int = 0
) -> Stream:
    """Continue a prompt of at least one token, with at most so many drafts a step; without a drafter plain decoding."""
    return _Run(engine, prompt, settings, drafter, drafts).whole()


def prepare_exact(engine: TorchModel, width: int, context: int) -> set[object]:
    """Make rows of the engine independent of where they stand among `width` on this machine; returns what was not."""
    engine.single_rows = engine.unstable(width, context)
    return engine.single_rows


class _Run:
    def __init__(
        self, engine: TorchModel, prompt: Sequence[int], settings: Settings, drafter: Drafter | None, drafts: int
    ) -> None:
        assert prompt
        assert not settings.width or drafts < settings.width
        self.engine, self.prompt, self.settings = engine, list(prompt), settings
        self.drafter, self.drafts = drafter, drafts
        self.state: TrunkState = engine.trunk_state(settings.context + settings.width)
        self.stream = Stream()

    def whole(self) -> Stream:
        stream = self.stream
        if len(self.prompt) >= self.settings.context:
            stream.ended = "context"
            return stream
        self._emit(self._prefill())
        while not stream.ended:
            self._step()
        return stream

    def _prefill(self) -> Tensor:
        """Evaluate the prompt; the logits of its last token."""
        width = self.settings.width or len(self.prompt)
        hidden, last = [], None
        for at in range(0, len(self.prompt), width):
            part = self.prompt[at : at + width]
            last = self._evaluate(part)
            self.engine.commit(self.state, len(part))
            hidden.append(last[: len(part)])
        assert last is not None
        logits = self.engine.logits(last)
        if self.drafter is not None:
            self.drafter.begin(torch.cat(hidden), self.prompt, self.state)
        return logits[len(hidden[-1]) - 1].cpu()

    def _step(self) -> None:
        stream = self.stream
        token = stream.tokens[-1]
        drafts = [] if self.drafter is None else self.drafter.draft(token, self._room())
        rows = [token, *drafts]
        before = len(stream.tokens)
        hidden = self._evaluate(rows)
        logits = self.engine.logits(hidden).cpu()
        accepted = 0
        for k in range(len(rows)):
            self._emit(logits[k])
            if k == len(drafts) or stream.tokens[-1] != drafts[k]:
                break
            accepted += 1
            if stream.ended:
                break
        count = len(stream.tokens) - before
        assert accepted <= len(drafts)
        assert accepted <= count <= accepted + 1
        stream.drafted.append(len(drafts))
        stream.accepted.append(accepted)
        decided = rows[:count]
        self.engine.commit(self.state, len(decided))
        if self.drafter is not None and not stream.ended:
            self.drafter.accept(hidden[: len(decided)], decided)

    def _room(self) -> int:
        """Drafts that can still be of use: what follows them is emitted too."""
        left = self.settings.tokens - len(self.stream.tokens)
        places = self.settings.context - self.state.length - 1
        return max(0, min(self.drafts, left - 1, places))

    def _evaluate(self, tokens: Sequence[int]) -> Tensor:
        """Hidden states of these tokens, and of what fills up the width."""
        rows = [*tokens, *[_DUMMY] * (self.settings.width - len(tokens))]
        return self.engine.trunk(torch.tensor(rows, device=self.engine.device), self.state)

    def _emit(self, row: Tensor) -> None:
        """Choose the next token by these logits, and see whether it is the last one."""
        stream, settings = self.stream, self.settings
        position = len(self.prompt) + len(stream.tokens)
        token = choose(row, position, settings)
        stream.tokens.append(token)
        stream.rows.append(row)
        if token in settings.stop:
            stream.ended = "stop"
        elif len(stream.tokens) >= settings.tokens:
            stream.ended = "limit"
        elif position >= settings.context:
            stream.ended = "context"
