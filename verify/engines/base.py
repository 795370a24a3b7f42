"""What all engines are asked, and what they answer."""

from __future__ import annotations

from dataclasses import dataclass

from converter.errors import ToolError


class EngineError(ToolError):
    """The engine refused the file or died of it: the file is not fit for use."""

    exit_code = 1


@dataclass(frozen=True)
class Request:
    """One answer that is wanted. margins: also ln p(best) - ln p(second) for each token, where the engine has them."""

    prompt: tuple[int, ...]
    tokens: int
    temperature: float = 0.0
    seed: int = 0
    ignore_eos: bool = True
    margins: bool = False


@dataclass(frozen=True)
class Completion:
    """One answer: token ids, what the engine says of drafts (None: nothing), and speeds in tokens a second.

    tokens_per_s: of decoding. prompt_per_s: of the prompt. seconds: the whole request, as its sender saw it.
    """

    tokens: tuple[int, ...]
    drafted: int | None
    accepted: int | None
    tokens_per_s: float
    margins: tuple[float, ...] = ()
    prompt_tokens: int = 0
    prompt_per_s: float = 0.0
    seconds: float = 0.0


@dataclass(frozen=True)
class DraftCounts:
    """What an engine has counted: steps with drafts, tokens drafted and accepted, accepted by draft position."""

    steps: int
    drafted: int
    accepted: int
    by_position: tuple[int, ...] = ()

    def __sub__(self, earlier: DraftCounts) -> DraftCounts:
        before = (*earlier.by_position, *[0] * len(self.by_position))
        return DraftCounts(
            self.steps - earlier.steps,
            self.drafted - earlier.drafted,
            self.accepted - earlier.accepted,
            tuple(now - then for now, then in zip(self.by_position, before, strict=False)),
        )


@dataclass(frozen=True)
class Run:
    """Answers in the order of their requests. engine: name and build. seconds: of all. peak_bytes: of its process."""

    completions: tuple[Completion, ...]
    counts: DraftCounts | None
    engine: str
    seconds: float
    peak_bytes: int | None = None

    @property
    def drafted(self) -> int | None:
        return self.counts.drafted if self.counts else _sum(c.drafted for c in self.completions)

    @property
    def accepted(self) -> int | None:
        return self.counts.accepted if self.counts else _sum(c.accepted for c in self.completions)


def _sum(values) -> int | None:  # noqa: ANN001
    known = [v for v in values if v is not None]
    return sum(known) if known else None
