"""Level identity: decoding with drafts gives the tokens of plain decoding, greedy and sampled.

Exact mode: every logit of both runs must be equal in every bit. Native mode: evaluations as wide as engines make them; a
divergence is judged by the margin between the two best logits against the noise between the two ways of evaluating.
Controls come first: plain decoding must repeat itself, and the drafting loop without drafts must be plain decoding.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import torch

from verify.decode import Drafter, HeadDrafter, Settings, Stream, choose, decode, gumbel, prepare_exact
from verify.models.base import TorchModel
from verify.results import Finding, LevelResult, Verdict

EXACT, NATIVE = "exact", "native"
_NOISE_FACTOR = 4.0  # a near-tie is closer than so many times the largest noise seen
_LEAST_NOISE = 1e-6


@dataclass(frozen=True)
class Plan:
    """What to run. drafts: numbers of drafts; modes: EXACT, NATIVE; stop: tokens that end a text."""

    prompts: Sequence[Sequence[int]]
    tokens: int = 64
    drafts: Sequence[int] = (1, 2, 3)
    temperatures: Sequence[float] = (0.0,)
    modes: Sequence[str] = (EXACT,)
    seed: int = 0
    stop: frozenset[int] = frozenset()

    @property
    def context(self) -> int:
        return max(map(len, self.prompts)) + self.tokens + 1


@dataclass
class Comparison:
    """Two runs of one prompt. first: the first token that differs, None for none. difference: the largest of logits."""

    mode: str
    drafts: int
    temperature: float
    prompt: int
    tokens: int
    first: int | None
    difference: float
    drafted: int
    accepted: int
    plain_token: int | None = None
    drafted_token: int | None = None
    margin: float | None = None
    at_divergence: float = 0.0

    def as_json(self) -> dict[str, object]:
        return vars(self)


@dataclass
class Outcome:
    """All comparisons, and what was evaluated row by row to make them exact."""

    comparisons: list[Comparison] = field(default_factory=list)
    findings: list[Finding] = field(default_factory=list)
    row_by_row: set[str] = field(default_factory=set)
    margins: list[float] = field(default_factory=list)  # of the tokens of plain decoding, greedy


MakeDrafter = Callable[[TorchModel, int], Drafter]


def check_identity(
    engine: TorchModel,
    plan: Plan,
    make_drafter: MakeDrafter = HeadDrafter,
    fresh: Callable[[Settings, Sequence[int]], Stream] | None = None,
) -> LevelResult:
    """Run all prompts, with and without drafts.

    make_drafter: who drafts, the model's head. fresh: decodes one prompt in a new process, for the first control.
    """
    outcome = Outcome()
    for mode in plan.modes:
        for temperature in plan.temperatures:
            run = _exact if mode == EXACT else _native
            # A process of its own is asked once per mode: what differs there does so at any temperature.
            run(
                engine, plan, temperature, make_drafter, fresh if temperature == plan.temperatures[0] else None, outcome
            )
    return _result(plan, outcome)


def _exact(
    engine: TorchModel, plan: Plan, temperature: float, make: MakeDrafter,
    fresh: Callable[[Settings, Sequence[int]], Stream] | None, outcome: Outcome,
) -> None:  # fmt: skip
    for n in plan.drafts:
        settings = _settings(plan, temperature, n + 1)
        unstable = prepare_exact(engine, n + 1, plan.context)
        outcome.row_by_row |= {str(kind) for kind in unstable}
        for number, prompt in enumerate(plan.prompts):
            plain = decode(engine, prompt, settings)
            asked = fresh if n == plan.drafts[0] else None
            _note_margins(plain, temperature, n == plan.drafts[0], outcome)
            if number == 0 and not _controls(engine, prompt, settings, plain, make, asked, outcome):
                return
            drafted = decode(engine, prompt, settings, make(engine, plan.context), n)
            outcome.comparisons.append(_compare(EXACT, n, settings, number, prompt, plain, drafted))
            outcome.findings += list(_exact_findings(outcome.comparisons[-1], drafted))
    engine.single_rows = set()


def _native(
    engine: TorchModel, plan: Plan, temperature: float, make: MakeDrafter,
    fresh: Callable[[Settings, Sequence[int]], Stream] | None, outcome: Outcome,
) -> None:  # fmt: skip
    settings = _settings(plan, temperature, 0)
    found: list[Comparison] = []
    for number, prompt in enumerate(plan.prompts):
        plain = decode(engine, prompt, settings)
        _note_margins(plain, temperature, EXACT not in plan.modes, outcome)
        if number == 0 and not _controls(engine, prompt, settings, plain, make, fresh, outcome):
            return
        for n in plan.drafts:
            drafted = decode(engine, prompt, settings, make(engine, plan.context), n)
            found.append(_compare(NATIVE, n, settings, number, prompt, plain, drafted))
            outcome.findings += list(_impossible(found[-1], drafted))
    outcome.comparisons += found
    outcome.findings += list(_native_findings(found))


def _settings(plan: Plan, temperature: float, width: int) -> Settings:
    return Settings(plan.tokens, width, temperature, plan.seed, plan.stop, plan.context)


def _note_margins(plain: Stream, temperature: float, first: bool, outcome: Outcome) -> None:
    if first and temperature == 0:
        best = [row.topk(2).values for row in plain.rows]
        outcome.margins += [round(float(b[0] - b[1]), 4) for b in best]


def _controls(
    engine: TorchModel, prompt: Sequence[int], settings: Settings, plain: Stream, make: MakeDrafter,
    fresh: Callable[[Settings, Sequence[int]], Stream] | None, outcome: Outcome,
) -> bool:  # fmt: skip
    """Plain decoding again, in this process and a fresh one, and the drafting loop with no drafts."""
    runs = [("plain decoding again", decode(engine, prompt, settings))]
    if fresh is not None:
        runs.append(("plain decoding in a fresh process", fresh(settings, prompt)))
    for what, again in runs:
        at = _first_difference(plain, again)
        if at is not None:
            outcome.findings.append(
                Finding(
                    "not deterministic: plain decoding does not repeat itself", f"token {at}", "the same logits", what,
                    verdict=Verdict.INCONCLUSIVE,
                )
            )  # fmt: skip
            return False
    at = _first_difference(plain, decode(engine, prompt, settings, make(engine, settings.context), 0))
    if at is not None:
        outcome.findings.append(
            Finding("the drafting loop differs from plain decoding even without a draft", f"token {at}")
        )
        return False
    return True


def _first_difference(a: Stream, b: Stream) -> int | None:
    """The first token or logits row, to the bit, that differs."""
    for i, (x, y) in enumerate(zip(a.rows, b.rows, strict=False)):
        if a.tokens[i] != b.tokens[i] or not torch.equal(x, y):
            return i
    return None if len(a.tokens) == len(b.tokens) else min(len(a.tokens), len(b.tokens))


def _compare(
    mode: str, n: int, settings: Settings, number: int, prompt: Sequence[int], plain: Stream, drafted: Stream
) -> Comparison:
    pairs = zip(plain.tokens, drafted.tokens, strict=False)
    first = next((i for i, (a, b) in enumerate(pairs) if a != b), None)
    if first is None and len(plain.tokens) != len(drafted.tokens):
        first = min(len(plain.tokens), len(drafted.tokens))
    shared = first + 1 if first is not None else len(plain.tokens)
    differences = [_distance(a, b) for a, b in zip(plain.rows[:shared], drafted.rows[:shared], strict=False)]
    result = Comparison(
        mode, n, settings.temperature, number, len(plain.tokens), first, max(differences, default=0.0),
        sum(drafted.drafted), sum(drafted.accepted),
    )  # fmt: skip
    if first is not None:
        result.at_divergence = differences[first] if first < len(differences) else float("inf")
        result.difference = max(differences[:first], default=0.0)
        result.plain_token = plain.tokens[first] if first < len(plain.tokens) else None
        result.drafted_token = drafted.tokens[first] if first < len(drafted.tokens) else None
        if first < len(plain.rows):
            result.margin = _margin(plain.rows[first], len(prompt) + first, settings)
    return result


def _distance(a: torch.Tensor, b: torch.Tensor) -> float:
    distance = (a - b).abs().max().item()
    return distance if distance == distance else float("inf")  # noqa: PLR0124  (NaN)


def _margin(row: torch.Tensor, position: int, settings: Settings) -> float:
    """How far the chosen token is ahead of the next, in units of logits."""
    score = row.double()
    if settings.temperature:
        score = score + settings.temperature * torch.from_numpy(gumbel(settings.seed, position, len(row)))
    best = score.topk(2).values
    assert choose(row, position, settings) == int(score.argmax()) or best[0] - best[1] < _LEAST_NOISE
    return (best[0] - best[1]).item()


def _impossible(comparison: Comparison, drafted: Stream) -> Iterator[Finding]:
    """Counts that no run can have."""
    emitted = 1 + sum(a + 1 for a in drafted.accepted)
    if any(a > d for a, d in zip(drafted.accepted, drafted.drafted, strict=True)):
        yield Finding("more drafts accepted than drafted", _where(comparison))
    if not len(drafted.tokens) <= emitted <= len(drafted.tokens) + 1:
        yield Finding(
            "accepted drafts do not add up to the tokens", _where(comparison), str(len(drafted.tokens)), str(emitted)
        )


def _exact_findings(comparison: Comparison, drafted: Stream) -> Iterator[Finding]:
    yield from _impossible(comparison, drafted)
    if comparison.first is not None:
        yield Finding(
            "mismatch: another token than plain decoding", f"{_where(comparison)}, token {comparison.first}",
            str(comparison.plain_token), str(comparison.drafted_token),
        )  # fmt: skip
    elif comparison.difference:
        yield Finding("logits differ from plain decoding's", _where(comparison), "0", f"{comparison.difference:.3g}")


def _native_findings(found: Sequence[Comparison]) -> Iterator[Finding]:
    """Near-ties and mismatches, told apart by the noise of everything before a divergence."""
    noise = max([_LEAST_NOISE, *(c.difference for c in found)])
    places: dict[int, set[int]] = defaultdict(set)
    for c in found:
        if c.first is not None:
            places[c.prompt].add(c.first)
    for c in found:
        if c.first is None:
            continue
        near = c.margin is not None and c.margin <= _NOISE_FACTOR * noise and c.at_divergence <= _NOISE_FACTOR * noise
        moves = len(places[c.prompt]) > 1
        yield Finding(
            "near-tie" if near else "mismatch: another token than plain decoding", f"{_where(c)}, token {c.first}",
            str(c.plain_token), str(c.drafted_token),
            f"margin {_number(c.margin)}, noise {noise:.3g}, here {c.at_divergence:.3g}; "
            + ("the place moves with the number of drafts, as a defect does" if moves else "at one place"),
            Verdict.INCONCLUSIVE if near else Verdict.FAILED,
        )  # fmt: skip


def _number(value: float | None) -> str:
    return "unknown" if value is None else f"{value:.3g}"


def _where(c: Comparison) -> str:
    warm = f", temperature {c.temperature:g}" if c.temperature else ""
    return f"{c.mode}, n = {c.drafts}{warm}, prompt {c.prompt}"


def _result(plan: Plan, outcome: Outcome) -> LevelResult:
    done = outcome.comparisons
    identical = sum(c.first is None for c in done)
    largest = max((c.difference for c in done if c.mode == EXACT), default=0.0)
    summary = f"{identical} of {len(done)} runs with drafts give plain decoding's tokens"
    if any(c.mode == EXACT for c in done):
        summary += f"; largest difference of logits in exact mode {largest:g}"
    if outcome.findings and not done:
        summary = "the controls failed: nothing was compared"
    data = {
        "largest_difference": largest, "identical": identical, "runs": [c.as_json() for c in done],
        "evaluated_row_by_row": sorted(outcome.row_by_row), "margins": outcome.margins,
        "tokens": plan.tokens, "prompts": len(plan.prompts),
    }  # fmt: skip
    return LevelResult("identity", summary, outcome.findings, data)
