"""What measurements say, against worlds in which the truth is known."""

from __future__ import annotations

from dataclasses import replace

import pytest

from bench.cost import from_cells, from_costs, not_negative, touched
from bench.matrix import Cell
from bench.store import Record
from bench.summary import Results, expected_tokens, speedup
from tests.bench.world import PROMPTS, World

STEPS = {0: 0.010, 1: 0.012, 2: 0.014, 3: 0.016, 4: 0.018}
RATES = {"code": (0.85, 0.8, 0.75, 0.7), "creative": (0.45, 0.4, 0.35, 0.3)}


def results(world: World, runs: int = 3, drafts: tuple[int, ...] = (0, 1, 2, 3, 4)) -> Results:
    return Results([world.measure(t, n, r) for r in range(runs) for t in world.rates for n in drafts])


@pytest.mark.parametrize("task", RATES)
@pytest.mark.parametrize("drafts", [1, 2, 4])
def test_speedup_and_its_interval(task: str, drafts: int) -> None:
    """The true one lies inside, and the interval is no wider than it must be."""
    world = World(RATES, STEPS, noise=0.03)
    found = results(world).cells[Cell(world.load(drafts), task)].speedup
    assert found
    assert found.low * 0.99 < world.true_speedup(task, drafts) < found.high * 1.01
    assert found.high / found.low < 1.25


def test_runs_are_compared_in_pairs() -> None:
    """A machine that is three times slower in one round changes no speedup."""
    world = World(RATES, STEPS)

    def slow(record: Record) -> Record:
        return replace(record, decode_s=[3 * s for s in record.decode_s])

    drafted, plain = ([world.measure("code", n, r) for r in range(3)] for n in (2, 0))
    steady = speedup(drafted, plain)
    drifted = speedup([drafted[0], slow(drafted[1]), drafted[2]], [plain[0], slow(plain[1]), plain[2]])
    assert drifted.value == pytest.approx(steady.value, rel=0.03)


def test_acceptance_by_position_and_length() -> None:
    """Shares are those of the world; lengths add up to one."""
    world = World(RATES, STEPS)
    stats = results(world).cells[Cell(world.load(3), "code")]
    assert stats.by_position == pytest.approx([0.85, 0.85 * 0.8, 0.85 * 0.8 * 0.75], abs=0.04)
    assert sum(stats.lengths) == pytest.approx(1)
    assert stats.lengths[0] == pytest.approx(0.15, abs=0.04)
    assert stats.mean_accepted == pytest.approx(sum(k * p for k, p in enumerate(stats.lengths)))
    assert stats.acceptance == pytest.approx(stats.mean_accepted / 3)


def test_one_rate_gives_the_geometric_sum() -> None:
    """By adding up what every step gives."""
    assert expected_tokens(0.6, 3) == pytest.approx(1 + 0.6 + 0.36 + 0.216)
    assert expected_tokens(1.0, 3) == 4
    assert expected_tokens(0.0, 3) == 1


def test_texts_that_differ_are_counted() -> None:
    """And where the first one leaves."""
    world = World(RATES, STEPS)
    drafted, plain = world.measure("code", 2, 0), world.measure("code", 0, 0)
    tokens = [list(t) for t in drafted.tokens]
    tokens[1][17] = 99
    tokens[2][30] = 99
    stats = Results([plain, replace(drafted, tokens=tokens)]).cells[drafted.cell]
    assert stats.identical == (PROMPTS - 2, PROMPTS)
    assert stats.first == 17


def test_a_collapse_at_several_slots_is_flagged() -> None:
    """And stays a cell of its own."""
    world = World({"code": (0.001, 0.0)}, STEPS)
    records = [world.measure("code", n, 0, slots=2) for n in (0, 2)]
    stats = Results(records).cells[records[1].cell]
    assert stats.flags == ["acceptance collapsed at 2 slots"]
    alone = [world.measure("code", n, 0) for n in (0, 2)]
    assert not Results(alone).cells[alone[1].cell].flags


def test_a_cliff_is_flagged() -> None:
    """84 tok/s at n = 3, 6 at n = 4, as somebody saw."""
    world = World({"code": (0.9, 0.9, 0.9, 0.9)}, {**STEPS, 4: 0.3})
    found = results(world)
    flagged = {s.cell.load.drafts for s in found.cells.values() if any("cliff" in f for f in s.flags)}
    assert flagged == {4}


def test_a_changed_file_leaves_old_results_behind() -> None:
    world = World(RATES, STEPS)
    old, new = world.measure("code", 0, 0), replace(world.measure("code", 0, 1), files="g")
    assert Results([old, new]).records == [new]


def test_failed_cells_are_told_until_they_succeed() -> None:
    world = World(RATES, STEPS)
    record = world.measure("code", 2, 0)
    failed = Record(record.cell, 0, "f", failed="it died")
    assert Results([failed]).failed == {record.cell: "it died"}
    assert Results([failed, record]).failed == {}


# --- cost


def test_costs_are_fitted() -> None:
    """Overhead and slope of what was made; between and beyond they are read off the fit."""
    world = World(RATES, {0: 0.01, 1: 0.015, 2: 0.017, 4: 0.021})
    model = from_costs([world.cost()])
    assert model
    assert model.of(2) == pytest.approx(1.7)
    assert model.overhead == pytest.approx(0.3)
    assert model.draft + model.width == pytest.approx(0.2)
    assert model.of(3) == pytest.approx(1.9)
    assert model.is_measured(2)
    assert not model.is_measured(3)


def test_cost_of_drafting_apart() -> None:
    """One draft that is thrown away costs the overhead and the draft, but no wider row."""
    world = World(RATES, {0: 0.01, 1: 0.015, 2: 0.017, 3: 0.019})
    model = from_costs([replace(world.cost(), draft_s=0.0045)])
    assert model
    assert model.draft == pytest.approx(0.15)
    assert model.width == pytest.approx(0.05)


def test_experts_cost_by_how_many_are_touched() -> None:
    """Steps that grow as the experts of w tokens do, drawn at random, are explained by experts alone."""
    import random

    chance = random.Random(0)

    def drawn(width: int) -> float:
        counts = [len({e for _ in range(width) for e in chance.sample(range(64), 8)}) for _ in range(4000)]
        return sum(counts) / len(counts) / 8

    for width in (1, 2, 5):
        assert touched(64, 8, width) == pytest.approx(drawn(width), rel=0.01)
    world = World(RATES, {0: 0.01, **{n: 0.01 * (0.5 + 0.5 * drawn(n + 1)) for n in (1, 2, 3, 4)}})
    model = from_costs([replace(world.cost(), experts=64, experts_used=8)])
    assert model
    assert model.expert == pytest.approx(0.5, abs=0.05)
    assert model.overhead + model.draft + model.width < 0.05


def test_costs_without_made_up_acceptance() -> None:
    """From cells alone: tokens of a step over the speedup."""
    world = World(RATES, STEPS)
    model = from_cells(list(results(world).cells.values()))
    assert model
    for n in (1, 2, 3, 4):
        assert model.of(n) == pytest.approx(STEPS[n] / STEPS[0], rel=0.05)


def test_least_squares_without_negative_parts() -> None:
    """Where the free solution has one, the best of the others."""
    import numpy as np

    matrix = np.array([[1.0, 1.0], [1.0, 2.0], [1.0, 3.0]])
    assert not_negative(matrix, np.array([3.0, 2.0, 1.0])).tolist() == pytest.approx([2.0, 0.0])
    assert not_negative(matrix, np.array([-1.0, -1.0, -2.0])).tolist() == [0.0, 0.0]
