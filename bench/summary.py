"""From single measurements to what they say: medians, speedups with intervals, acceptance, and what is odd about them."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise
from statistics import median

import numpy as np

from bench.matrix import Cell
from bench.store import Cost, HeadScore, Record

_RESAMPLES = 1000
_COLLAPSED = 0.01  # acceptance below which several slots have broken drafting
_CLIFF = 0.6  # of the speed at one draft less
_NEAR = 0.95  # how much of a distribution an interval holds


@dataclass(frozen=True)
class Interval:
    """An estimate, and where the true value lies with 95 % confidence."""

    value: float
    low: float
    high: float


@dataclass
class CellStats:
    """One cell over all its runs.

    tokens_per_s: of decoding, median over runs, with the smallest and the largest. speedup: decoding time of plain over
    this one's, by prompts in pairs; None for plain or without a baseline. by_position: share of steps that accepted the
    first k drafts. lengths: share of steps that accepted 0, 1, … drafts. identical: answers equal to plain's, of how
    many; first: the earliest place where one is not.
    """

    cell: Cell
    runs: int
    engine_build: str
    tokens_per_s: Interval
    throughput: float
    prompt_per_s: float
    seconds: float
    speedup: Interval | None = None
    prompt_ratio: float | None = None
    acceptance: float | None = None
    mean_accepted: float | None = None
    by_position: list[float] = field(default_factory=list)
    lengths: list[float] = field(default_factory=list)
    drafted: int | None = None
    peak_bytes: int | None = None
    identical: tuple[int, int] | None = None
    first: int | None = None
    flags: list[str] = field(default_factory=list)

    @property
    def tokens_per_step(self) -> float | None:
        """One, and what was accepted."""
        return None if self.mean_accepted is None else 1 + self.mean_accepted


class Results:
    """All of a folder, summed up."""

    def __init__(self, items: Iterable[Record | Cost | HeadScore]) -> None:
        self.records: list[Record] = []
        self.costs: list[Cost] = []
        self.scores: list[HeadScore] = []
        self.failed: dict[Cell, str] = {}
        latest: dict[str, str] = {}  # a file that was changed leaves results that no longer count
        for item in items:
            if isinstance(item, Cost):
                self.costs.append(item)
            elif isinstance(item, HeadScore):
                self.scores.append(item)
            elif item.failed:
                self.failed[item.cell] = item.failed
            else:
                self.records.append(item)
                latest[item.cell.load.file] = item.files
        self.records = [r for r in self.records if r.files == latest[r.cell.load.file]]
        self.costs = [c for c in self.costs if c.files == latest.get(c.file, c.files)]
        self.scores = [s for s in self.scores if s.files == latest.get(s.file, s.files)]
        for record in self.records:
            self.failed.pop(record.cell, None)

    @cached_property
    def cells(self) -> dict[Cell, CellStats]:
        """In the order of measuring."""
        by_cell: dict[Cell, list[Record]] = {}
        for record in self.records:
            by_cell.setdefault(record.cell, []).append(record)
        found = {cell: _stats(cell, records, by_cell.get(cell.plain, [])) for cell, records in by_cell.items()}
        _flag_cliffs(found)
        return found

    @cached_property
    def drafting(self) -> list[CellStats]:
        return [s for s in self.cells.values() if s.cell.load.drafts]


def _stats(cell: Cell, records: Sequence[Record], plain: Sequence[Record]) -> CellStats:
    speeds = [_total(r) / sum(r.decode_s) for r in records]
    prompt_s = sum(sum(r.prompt_s) for r in records)
    stats = CellStats(
        cell, len(records), records[-1].engine_build, Interval(median(speeds), min(speeds), max(speeds)),
        median(_total(r) / r.wall_s for r in records), sum(sum(r.prompt_n) for r in records) / max(prompt_s, 1e-12),
        median(sum(r.seconds) / len(r.seconds) for r in records),
    )  # fmt: skip
    stats.peak_bytes = max((r.peak_bytes for r in records if r.peak_bytes), default=None)
    if cell.load.drafts:
        _add_acceptance(stats, records)
        if plain:
            stats.speedup = speedup(records, plain)
            theirs = sum(sum(r.prompt_n) for r in plain) / max(sum(sum(r.prompt_s) for r in plain), 1e-12)
            stats.prompt_ratio = stats.prompt_per_s / theirs
            _compare(stats, records, plain)
    return stats


def _total(record: Record) -> int:
    return sum(len(t) for t in record.tokens)


def _add_acceptance(stats: CellStats, records: Sequence[Record]) -> None:
    known = [r for r in records if r.accepted is not None]
    if not known:
        return
    accepted = sum(r.accepted or 0 for r in known)
    steps = sum(r.steps or 0 for r in known)
    if all(r.drafted is not None for r in known):
        stats.drafted = sum(r.drafted or 0 for r in known)
        stats.acceptance = accepted / stats.drafted if stats.drafted else 0.0
    stats.mean_accepted = accepted / steps if steps else 0.0
    if steps and all(r.by_position for r in known):
        width = max(len(r.by_position) for r in known)
        counts = [sum(r.by_position[k] if k < len(r.by_position) else 0 for r in known) for k in range(width)]
        stats.by_position = [c / steps for c in counts]
        reached = [steps, *counts, 0]
        stats.lengths = [(a - b) / steps for a, b in pairwise(reached)]
    if stats.cell.load.slots > 1 and stats.acceptance is not None and stats.acceptance < _COLLAPSED:
        stats.flags.append(f"acceptance collapsed at {stats.cell.load.slots} slots")


def speedup(records: Sequence[Record], plain: Sequence[Record]) -> Interval:
    """Time of plain decoding over that with drafts, same prompts, runs in pairs; bootstrap over prompts and runs."""
    base = {r.run: r for r in plain}
    pairs = [(r, base[r.run]) for r in records if r.run in base] or [(r, plain[0]) for r in records]
    # per token, since an answer may end early
    mine = np.array([_per_token(r) for r, _ in pairs])
    theirs = np.array([_per_token(p) for _, p in pairs])
    value = float(theirs.sum() / mine.sum())
    source = np.random.default_rng(0)
    runs, prompts = mine.shape
    which_run = source.integers(runs, size=(_RESAMPLES, runs, 1))
    which_prompt = source.integers(prompts, size=(_RESAMPLES, 1, prompts))
    drawn = theirs[which_run, which_prompt].sum((1, 2)) / mine[which_run, which_prompt].sum((1, 2))
    low, high = np.quantile(drawn, [(1 - _NEAR) / 2, (1 + _NEAR) / 2])
    return Interval(value, float(low), float(high))


def _per_token(record: Record) -> list[float]:
    return [s / max(1, len(t)) for s, t in zip(record.decode_s, record.tokens, strict=True)]


def _compare(stats: CellStats, records: Sequence[Record], plain: Sequence[Record]) -> None:
    base = plain[0].tokens
    same = places = 0
    for record in records:
        for mine, theirs in zip(record.tokens, base, strict=True):
            places += 1
            if mine == theirs:
                same += 1
                continue
            at = next(
                (k for k, (a, b) in enumerate(zip(mine, theirs, strict=False)) if a != b), min(len(mine), len(theirs))
            )
            stats.first = at if stats.first is None else min(stats.first, at)
    stats.identical = same, places


def _flag_cliffs(cells: dict[Cell, CellStats]) -> None:
    """One draft more that costs a large part of the speed."""
    from dataclasses import replace

    for cell, stats in cells.items():
        if cell.load.drafts > 1:
            before = cells.get(replace(cell, load=replace(cell.load, drafts=cell.load.drafts - 1)))
            if before and stats.tokens_per_s.value < _CLIFF * before.tokens_per_s.value:
                words = f"{before.tokens_per_s.value:,.0f} tok/s at n = {cell.load.drafts - 1}, "
                stats.flags.append(f"cliff: {words}{stats.tokens_per_s.value:,.0f} at n = {cell.load.drafts}")


def expected_tokens(rate: float, drafts: int) -> float:
    """Tokens of a step where every draft is accepted at one rate after those before: (1 - a^(n+1)) / (1 - a)."""
    return drafts + 1.0 if math.isclose(rate, 1.0) else (1 - rate ** (drafts + 1)) / (1 - rate)
