"""Which drafts to use: measured cells decide where there are some, the cost model where there are none.

As a database's optimizer picks a plan, every candidate (head, number of drafts, p-min) gets an expected time for the
work at hand, prompt and answer, and the cheapest one wins, plain decoding among them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from math import exp, log
from statistics import fmean
from typing import Any

from bench.cost import CostModel, from_cells, from_costs
from bench.matrix import Load
from bench.summary import CellStats, Interval, Results
from converter.errors import InputError

SCHEMA = 1
_UNMEASURED = 0.1  # relative width that an interval of the cost model has at least


@dataclass(frozen=True)
class Query:
    """What decoding is for. None: whatever there is. task None: all tasks alike. file: part of a file's name.

    input_tokens, output_tokens: of a typical request; without, decoding alone counts.
    """

    task: str | None = None
    file: str | None = None
    temperature: float | None = None
    engine: str | None = None
    slots: int = 1
    input_tokens: int = 0
    output_tokens: int = 0


@dataclass(frozen=True)
class Candidate:
    """One way to draft. speedup: of a whole request over plain decoding; decoding: of its tokens alone."""

    load: Load
    speedup: Interval
    decoding: Interval
    measured: bool
    why: str


@dataclass(frozen=True)
class Recommendation:
    """on: whether to draft at all. best: the winner, also where it is not worth it."""

    query: Query
    engine: str
    file: str
    on: bool
    best: Candidate | None
    others: Sequence[Candidate]
    words: str
    notes: Sequence[str] = field(default_factory=tuple)

    @property
    def drafts(self) -> int:
        return self.best.load.drafts if self.on and self.best else 0

    @property
    def expected(self) -> float:
        """Speedup of what is recommended; never below 1, since plain decoding may be."""
        return self.best.speedup.value if self.on and self.best else 1.0

    def as_json(self) -> dict[str, Any]:
        best = self.best
        return {
            "schema": SCHEMA, "engine": self.engine, "file": self.file, "task": self.query.task,
            "temperature": self.query.temperature, "slots": self.query.slots,
            "input_tokens": self.query.input_tokens, "output_tokens": self.query.output_tokens, "on": self.on,
            "drafts": self.drafts, "p_min": best.load.p_min if self.on and best else None,
            "head": best.load.head if self.on and best else None, "expected_speedup": self.expected,
            "interval": [best.speedup.low, best.speedup.high] if self.on and best else None,
            "extrapolated": bool(best and not best.measured), "why": self.words, "notes": list(self.notes),
            "candidates": [_candidate_json(c) for c in self.others],
        }  # fmt: skip

    def as_text(self) -> str:
        lines = [f"{self.file} in {self.engine}: {self.words}"]
        if self.on and self.best:
            lines.append(f"  llama.cpp: {options(self.best.load)}")
        for c in self.others[:8]:
            mark = "measured" if c.measured else c.why
            lines.append(f"  {_short(c.load):32} {_words(c.speedup)}  {mark}")
        lines += [f"  note: {note}" for note in self.notes]
        return "\n".join(lines)


def _candidate_json(candidate: Candidate) -> dict[str, Any]:
    load, found = candidate.load, candidate.speedup
    return {
        "head": load.head, "drafts": load.drafts, "p_min": load.p_min, "speedup": found.value,
        "interval": [found.low, found.high], "decoding": candidate.decoding.value, "measured": candidate.measured,
    }  # fmt: skip


def _short(load: Load) -> str:
    return f"n = {load.drafts}, {load.head} head" + (f", p-min {load.p_min:g}" if load.p_min else "")


def _words(found: Interval) -> str:
    return f"{found.value:.2f}x ({found.low:.2f}-{found.high:.2f})"


def options(load: Load) -> str:
    """Of llama.cpp's command line."""
    words = f"--spec-type draft-mtp --spec-draft-n-max {load.drafts}"
    return words + (f" --spec-draft-p-min {load.p_min:g}" if load.p_min else "")


class Policy:
    """Answers queries from results."""

    def __init__(self, results: Results) -> None:
        self.results = results

    def recommend(self, query: Query) -> list[Recommendation]:
        """One for each file and engine that the query leaves open. Raises InputError where nothing fits."""
        loads = [c.load for c in self.results.cells]
        pairs = dict.fromkeys((x.engine, x.file) for x in loads if _fits(x, query))
        if not pairs:
            known = sorted({f"{x.engine}, {x.file}" for x in loads})
            raise InputError("nothing like that was measured", expected="; ".join(known) or "results", found=str(query))
        return [self._recommend(query, engine, file) for engine, file in pairs]

    def _recommend(self, query: Query, engine: str, file: str) -> Recommendation:
        mine = [s for s in self.results.cells.values() if (s.cell.load.engine, s.cell.load.file) == (engine, file)]
        notes: list[str] = []
        query = replace(query, temperature=_nearest_temperature(query, mine, notes))
        candidates = [
            c for load in dict.fromkeys(s.cell.load for s in mine if s.cell.load.drafts)
            if load.slots == query.slots and (c := self._candidate(query, load, mine)) is not None
        ]  # fmt: skip
        candidates += self._unmeasured(query, mine, candidates)
        candidates.sort(key=lambda c: -c.speedup.value)
        notes += sorted({flag for s in mine for flag in s.flags if s.cell.load.slots == query.slots})
        best = candidates[0] if candidates else None
        if best is None:
            return Recommendation(
                query,
                engine,
                file,
                on=False,
                best=None,
                others=(),
                words="off: nothing with drafts was measured",
                notes=notes,
            )
        on = best.speedup.value > 1 and best.speedup.low >= 1
        if on:
            words = f"on, {_short(best.load)}: {_words(best.speedup)} expected" + (
                "" if best.measured else f", {best.why}"
            )
        elif best.speedup.value > 1:
            words = f"off: the best, {_short(best.load)}, is within noise of plain decoding, {_words(best.speedup)}"
        else:
            words = f"off: plain decoding is fastest; the best, {_short(best.load)}, gives {_words(best.speedup)}"
        return Recommendation(query, engine, file, on=on, best=best, others=candidates, words=words, notes=notes)

    # --- candidates

    def _candidate(self, query: Query, load: Load, mine: Sequence[CellStats]) -> Candidate | None:
        """Measured for this task and temperature, else by the cost model."""
        cells = [s for s in mine if s.cell.load == load and s.speedup and s.cell.temperature == query.temperature]
        asked = [s for s in cells if query.task is None or s.cell.task == query.task]
        if asked:
            near = _nearest_context(asked, query.input_tokens)
            asked = [s for s in asked if s.cell.context == near]
            decoding = _mean([s.speedup for s in asked if s.speedup])
            return self._of(query, load, decoding, mine, measured=True, why="measured")
        if any(s.cell.task == query.task for s in mine) or query.task is None:
            rates = _rates([s for s in mine if s.cell.load == load and s.by_position and _about(s, query)])
        else:
            rates = _rates([s for s in mine if s.cell.load == load and s.by_position])
        model = self.cost(load, mine)
        if model is None or rates is None:
            return None
        return self._predicted(query, load, model, rates, mine, f"extrapolated: {query.task} was not measured so")

    def _unmeasured(self, query: Query, mine: Sequence[CellStats], known: Sequence[Candidate]) -> list[Candidate]:
        """Fewer drafts than the most that were measured: what the longest run's positions say of them."""
        found: list[Candidate] = []
        by_head: dict[tuple[str, float], list[CellStats]] = {}
        for s in mine:
            if s.cell.load.drafts and s.by_position and s.cell.load.slots == query.slots:
                by_head.setdefault((s.cell.load.head, s.cell.load.p_min), []).append(s)
        for stats in by_head.values():
            longest = max(s.cell.load.drafts for s in stats)
            rows = [s for s in stats if s.cell.load.drafts == longest and _about(s, query)]
            rates, model = _rates(rows), self.cost(stats[0].cell.load, mine)
            if rates is None or model is None:
                continue
            for n in range(1, longest):
                load = replace(stats[0].cell.load, drafts=n)
                if not any(c.load == load for c in known):
                    found.append(
                        self._predicted(query, load, model, rates, mine, f"extrapolated: n = {n} was not measured")
                    )
        return found

    def _predicted(
        self, query: Query, load: Load, model: CostModel, rates: Sequence[float], mine: Sequence[CellStats], why: str
    ) -> Candidate:  # fmt: skip
        value = model.speedup(rates, load.drafts)
        found = Interval(value, value * (1 - _UNMEASURED), value * (1 + _UNMEASURED))
        return self._of(query, load, found, mine, measured=False, why=why)

    def _of(
        self, query: Query, load: Load, decoding: Interval, mine: Sequence[CellStats], *, measured: bool, why: str
    ) -> Candidate:
        whole = decoding
        if query.input_tokens and query.output_tokens:
            whole = Interval(
                *(self._whole(query, load, v, mine) for v in (decoding.value, decoding.low, decoding.high))
            )
        return Candidate(load, whole, decoding, measured, why)

    def _whole(self, query: Query, load: Load, decoding: float, mine: Sequence[CellStats]) -> float:
        """Speedup of prompt and answer together: drafting slows prompts, since the head reads them too."""
        plain = _prompt_speed([s for s in mine if s.cell.load == load.plain], query.input_tokens)
        drafting = _prompt_speed([s for s in mine if s.cell.load == load], query.input_tokens)
        base = [s for s in mine if s.cell.load == load.plain]
        if plain is None or not base:
            return decoding
        drafting = drafting or plain
        per_token = fmean(1 / s.tokens_per_s.value for s in base)
        before = query.input_tokens / plain + query.output_tokens * per_token
        after = query.input_tokens / drafting + query.output_tokens * per_token / decoding
        return before / after

    def cost(self, load: Load, mine: Sequence[CellStats]) -> CostModel | None:
        """Of that file and head: by made-up acceptance where it was measured, else by the cells."""
        costs = [
            c for c in self.results.costs if (c.file, c.head) == (load.file, load.head) and c.engine == load.engine
        ]
        if costs and load.slots == 1 and not load.p_min:
            return from_costs(costs)
        alike = [
            s for s in mine if s.cell.load.head == load.head and s.cell.load.p_min == load.p_min
            and s.cell.load.slots == load.slots
        ]  # fmt: skip
        experts = (costs[0].experts, costs[0].experts_used) if costs else (0, 0)
        return from_cells(alike, *experts)


def _fits(load: Load, query: Query) -> bool:
    named = query.file is None or query.file in load.file.rpartition("/")[2]
    return named and query.engine in {None, load.engine} and load.slots == query.slots


def _about(stats: CellStats, query: Query) -> bool:
    return (query.task is None or stats.cell.task == query.task) and stats.cell.temperature == query.temperature


def _nearest_temperature(query: Query, mine: Sequence[CellStats], notes: list[str]) -> float:
    """The measured one that is nearest; the lowest where none is asked for."""
    known = sorted({s.cell.temperature for s in mine})
    if query.temperature is None:
        return known[0]
    wanted = query.temperature
    best = min(known, key=lambda t: abs(t - wanted))
    if best != wanted:
        notes.append(f"temperature {wanted:g} was not measured; {best:g} is the nearest")
    return best


def _mean(found: Sequence[Interval]) -> Interval:
    """Of tasks that weigh the same: geometric means."""
    return Interval(*(exp(fmean(log(getattr(i, part)) for i in found)) for part in ("value", "low", "high")))


def _rates(stats: Sequence[CellStats]) -> list[float] | None:
    """Mean share of steps that accept the first k drafts."""
    rows = [s.by_position for s in stats if s.by_position]
    return [fmean(column) for column in zip(*rows, strict=False)] if rows else None


def _prompt_speed(stats: Sequence[CellStats], tokens: int) -> float | None:
    """Prompt tokens a second at the context that is nearest in ratio."""
    if not stats:
        return None
    nearest = _nearest_context(stats, tokens)
    return fmean(s.prompt_per_s for s in stats if s.cell.context == nearest)


def _nearest_context(stats: Sequence[CellStats], tokens: int) -> int:
    """By ratio, since that is how speed falls."""
    return min({s.cell.context for s in stats}, key=lambda c: abs(log(max(c, 1) / max(tokens, 1))))
