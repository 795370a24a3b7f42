"""What a step costs by the number of drafts, in steps of plain decoding: measured, fitted, and read off between.

A step of n > 0 drafts costs 1 + o + n·c + n·b + m·(t(n + 1) / t(1) - 1): o for drafting at all, c for a draft, b for a
row more to verify, and with experts m for those that more tokens touch, t(w) = N·(1 - (1 - k/N)^w) of N experts, k used.
Weights are read once per step whatever n is, so o, c and b are small on machines that memory limits.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from statistics import median

import numpy as np

from bench.store import Cost
from bench.summary import CellStats


@dataclass(frozen=True)
class CostModel:
    """step: cost by number of drafts, as measured; plain steps are 1. overhead, draft, width, expert: o, c, b, m."""

    step: Mapping[int, float]
    overhead: float
    draft: float
    width: float
    expert: float
    experts: int
    experts_used: int
    source: str

    def of(self, drafts: int) -> float:
        """Of a step with so many drafts: measured, or by the fit."""
        if drafts == 0:
            return 1.0
        return self.step.get(drafts) or self.fitted(drafts)

    def fitted(self, drafts: int) -> float:
        return (
            1 + self.overhead + drafts * (self.draft + self.width)
            + self.expert * (touched(self.experts, self.experts_used, drafts + 1) - 1)
        )  # fmt: skip

    def is_measured(self, drafts: int) -> bool:
        return drafts == 0 or drafts in self.step

    def speedup(self, by_position: Sequence[float], drafts: int) -> float:
        """Tokens of a step over its cost. by_position: share of steps that accept the first k drafts."""
        return (1 + sum(by_position[:drafts])) / self.of(drafts)


def touched(experts: int, used: int, width: int) -> float:
    """Experts that so many tokens touch on average, in units of what one does; 1 without experts."""
    if not experts or not used:
        return 1.0
    share = used / experts
    return (1 - (1 - share) ** width) / share


def from_costs(costs: Sequence[Cost]) -> CostModel | None:
    """By the engine's made-up acceptance: medians over runs. None without any."""
    if not costs:
        return None
    widths = sorted(set.intersection(*(set(c.step_s) for c in costs)) - {0})
    step = {n: median(c.step_s[n] / c.step_s[0] for c in costs) for n in widths}
    alone = [c.draft_s / c.step_s[0] for c in costs if c.draft_s is not None]
    return _fit(step, costs[0].experts, costs[0].experts_used, median(alone) if alone else None, "made-up acceptance")


def from_cells(cells: Sequence[CellStats], experts: int = 0, used: int = 0) -> CostModel | None:
    """Of engines that cannot make acceptance up: tokens of a step over the speedup they gave."""
    found: dict[int, list[float]] = {}
    for stats in cells:
        if stats.speedup and stats.tokens_per_step:
            found.setdefault(stats.cell.load.drafts, []).append(stats.tokens_per_step / stats.speedup.value)
    return _fit({n: median(v) for n, v in found.items()}, experts, used, None, "measured cells") if found else None


def _fit(step: Mapping[int, float], experts: int, used: int, draft: float | None, source: str) -> CostModel:
    """Least squares with no negative cost; what drafting alone costs is known or counted with the width."""
    widths = sorted(step)
    rest = np.array([step[n] - 1 for n in widths])
    columns = [np.ones(len(widths)), np.array(widths, float)]
    if experts:
        columns.append(np.array([touched(experts, used, n + 1) - 1 for n in widths]))
    weights = not_negative(np.stack(columns, axis=1), rest)
    overhead, slope = float(weights[0]), float(weights[1])
    expert = float(weights[2]) if experts else 0.0
    c = min(max(draft - overhead, 0.0), slope) if draft is not None else 0.0
    return CostModel(dict(step), overhead, c, slope - c, expert, experts, used, source)


def not_negative(matrix: np.ndarray, wanted: np.ndarray) -> np.ndarray:
    """Argmin |matrix x - wanted| over x >= 0, for few columns: the best subset whose solution has no negative part."""
    count = matrix.shape[1]
    best, least = np.zeros(count), float(np.square(wanted).sum())
    for size in range(1, count + 1):
        for chosen in combinations(range(count), size):
            part, *_ = np.linalg.lstsq(matrix[:, chosen], wanted, rcond=None)
            error = float(np.square(matrix[:, chosen] @ part - wanted).sum())
            if (part >= 0).all() and error < least:
                best, least = np.zeros(count), error
                best[list(chosen)] = part
    return best
