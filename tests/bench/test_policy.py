"""What is recommended: never a loss, the best within noise, honest about what was not measured."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bench import preset
from bench.policy import Policy, Query
from bench.store import Cost, Record
from bench.summary import Results
from converter.errors import InputError
from tests.bench.test_summary import RATES, STEPS
from tests.bench.world import World

DRAFTS = (1, 2, 3, 4)


def measured(world: World, *, without: tuple[str, int] | None = None, runs: int = 3) -> Results:
    items: list[Record | Cost] = [
        world.measure(t, n, r) for r in range(runs) for t in world.rates for n in (0, *DRAFTS) if (t, n) != without
    ]
    return Results([*items, world.cost()])


def worlds() -> st.SearchStrategy[World]:
    rate = st.floats(0.02, 0.98)
    costs = st.tuples(st.floats(0, 1.5), st.floats(0.01, 0.6))

    def make(rates: list[float], cost: tuple[float, float], seed: int) -> World:
        step = {n: 0.01 * (1 + (cost[0] + n * cost[1] if n else 0)) for n in (0, *DRAFTS)}
        falling = {"code": [rates[0] * 0.95**k for k in range(4)], "creative": [rates[1] * 0.9**k for k in range(4)]}
        return World(falling, step, noise=0.02, seed=seed)

    return st.builds(make, st.lists(rate, min_size=2, max_size=2), costs, st.integers(0, 1000))


@settings(max_examples=25, deadline=None)
@given(worlds(), st.sampled_from(["code", "creative"]))
def test_never_a_loss_and_the_best_within_noise(world: World, task: str) -> None:
    """In truth, not by the numbers that it was chosen by."""
    (found,) = Policy(measured(world)).recommend(Query(task))
    truth = {n: world.true_speedup(task, n) for n in DRAFTS}
    assert found.expected >= 1
    if found.on:
        assert truth[found.drafts] > 0.95
        assert truth[found.drafts] > 0.9 * max(truth.values())
    else:
        assert max(truth.values()) < 1.15


@settings(max_examples=25, deadline=None)
@given(worlds(), st.sampled_from(DRAFTS))
def test_held_out_cells_are_predicted(world: World, held_out: int) -> None:
    """A number of drafts that was not measured for the task is judged by cost and acceptance, and said to be."""
    results = measured(world, without=("code", held_out))
    (found,) = Policy(results).recommend(Query("code"))
    truth = {n: world.true_speedup("code", n) for n in DRAFTS}
    chosen = {c.load.drafts: c for c in found.others}
    if held_out < max(DRAFTS):
        assert not chosen[held_out].measured
        assert chosen[held_out].speedup.value == pytest.approx(truth[held_out], rel=0.15)
    assert found.expected >= 1
    if found.on:
        assert truth[found.drafts] > 0.88 * max(truth.values())
        assert truth[found.drafts] > 0.93


def test_fast_code_and_slow_prose() -> None:
    """Drafts for one task, none for the other."""
    world = World({"code": (0.85, 0.8, 0.75, 0.7), "creative": (0.1, 0.1, 0.1, 0.1)}, STEPS)
    policy = Policy(measured(world))
    assert policy.recommend(Query("code"))[0].on
    off = policy.recommend(Query("creative"))[0]
    assert not off.on
    assert off.drafts == 0
    assert off.expected == 1
    assert "plain decoding is fastest" in off.words


def test_s37_nothing_wins() -> None:
    """Slower at every n: off, also in the preset."""
    world = World(RATES, {0: 0.01, 1: 0.05, 2: 0.06, 3: 0.07, 4: 0.08})
    found = Policy(measured(world)).recommend(Query())
    assert not found[0].on
    assert "spec-type" not in preset.preset(found)


def test_within_noise_is_off() -> None:
    """A gain that the interval does not support is none."""
    world = World({"code": (0.55, 0.5, 0.4, 0.3)}, {0: 0.01, 1: 0.0153, 2: 0.019, 3: 0.023, 4: 0.03}, noise=0.2)
    (found,) = Policy(measured(world)).recommend(Query("code"))
    assert not found.on or found.best is None or found.best.speedup.low >= 1


def test_slow_prompts_count() -> None:
    """Drafts that halve prompt speed are worth it for long answers, and not for short ones to long prompts."""
    world = World({"code": (0.8, 0.7, 0.6, 0.5)}, STEPS, prompt_s=(0.0005, 0.001))
    records = [world.measure("code", n, r, context=4096) for r in range(2) for n in (0, 1, 2, 3)]
    policy = Policy(Results(records))
    long_answers = policy.recommend(Query("code", input_tokens=100, output_tokens=2000))[0]
    short_answers = policy.recommend(Query("code", input_tokens=16000, output_tokens=100))[0]
    assert long_answers.on
    assert not short_answers.on
    assert short_answers.best
    assert short_answers.best.decoding.value > 1 > short_answers.best.speedup.value


def test_a_task_that_was_not_measured_is_extrapolated() -> None:
    world = World(RATES, STEPS)
    (found,) = Policy(measured(world)).recommend(Query("poetry"))
    assert found.best
    assert not found.best.measured
    assert "poetry was not measured" in found.best.why
    assert found.as_json()["extrapolated"]


def test_a_temperature_that_was_not_measured_is_said() -> None:
    world = World(RATES, STEPS)
    (found,) = Policy(measured(world)).recommend(Query("code", temperature=0.7))
    assert any("0.7 was not measured" in note for note in found.notes)


def test_files_are_chosen_by_their_names() -> None:
    one, two = World(RATES, STEPS), World(RATES, STEPS, file="/m/x-F16.gguf")
    results = Results([w.measure("code", n, 0) for w in (one, two) for n in (0, 2)])
    assert len(Policy(results).recommend(Query())) == 2
    assert [r.file for r in Policy(results).recommend(Query(file="F16"))] == ["/m/x-F16.gguf"]
    with pytest.raises(InputError, match="nothing like that"):
        Policy(results).recommend(Query(file="Q2_K"))


def test_preset_and_policy_files(tmp_path: Path) -> None:
    """Sections named like files; p-min only where it is used."""
    world = World(RATES, STEPS)
    records = [world.measure("code", n, r) for r in range(2) for n in (0, 2)]
    stopping = [replace(r, cell=replace(r.cell, load=replace(r.cell.load, p_min=0.75))) for r in records if r.drafted]
    plain = [r for r in records if not r.drafted]
    found = Policy(Results(plain + stopping)).recommend(Query("code"))
    preset.write(found, tmp_path)
    lines = (tmp_path / "preset.ini").read_text().splitlines()
    assert lines[0] == "version = 1"
    assert "[x-Q4_K_M]" in lines
    assert "spec-draft-n-max = 2" in lines
    assert "spec-draft-p-min = 0.75" in lines
    policy = json.loads((tmp_path / "policy.json").read_text())
    assert policy["recommendations"][0]["drafts"] == 2
    assert policy["recommendations"][0]["expected_speedup"] > 1
