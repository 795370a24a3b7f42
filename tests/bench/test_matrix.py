"""Which cells there are, in which order, and how they survive a kill."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import pytest

from bench.matrix import OWN, PLAIN, Axes, Cell, Load, rounds
from bench.store import Cost, HeadScore, Record, Store
from converter.errors import InputError, UsageError
from tests.bench.world import World

AXES = Axes(["llama.cpp"], ["a", "b"], ["Q8_0", "F16"], [0, 1, 2], ["code"], p_mins=[0.0, 0.75], slots=[1, 2])


def test_every_setting_has_a_baseline() -> None:
    """Plain loads are there once per engine, file and slots; a draft of 0 is plain decoding."""
    loads = AXES.loads()
    assert len(loads) == len(set(loads)) == 2 * 2 + 2 * 2 * 2 * 2 * 2
    assert all(load.plain in loads for load in loads)
    assert {load.head for load in loads if not load.drafts} == {PLAIN}


def test_cells_are_the_product_of_what_is_asked() -> None:
    axes = Axes([], [], [], [], ["code", "creative"], temperatures=[0.0, 0.7], contexts=[0, 512])
    assert len(axes.cells(Load("llama.cpp", "a"))) == 8


def test_rounds_run_everything_once_in_another_order_each_time() -> None:
    order = list(rounds(AXES.loads(), 3, seed=1))
    assert Counter(order).most_common(1)[0][1] == 1
    by_run = [[load for r, load in order if r == run] for run in range(3)]
    assert all(set(b) == set(AXES.loads()) for b in by_run)
    assert by_run[0] != by_run[1] != by_run[2]
    assert order == list(rounds(AXES.loads(), 3, seed=1))


def test_results_come_back_as_they_were(tmp_path: Path) -> None:
    world = World({"code": [0.8, 0.6]}, {0: 1.0, 2: 1.3})
    items = [world.measure("code", 2, 0), world.cost(), HeadScore("a", OWN, "code", "f", [(3, 4), (1, 4)])]
    store = Store(tmp_path / "r")
    store.begin({"tokens": 8})
    for item in items:
        store.append(item)
    assert list(Store(tmp_path / "r")) == items
    assert isinstance(items[0], Record)
    assert isinstance(items[1], Cost)


def test_a_torn_line_is_not_a_result(tmp_path: Path) -> None:
    """What a kill left of the last line is dropped when measuring goes on, and not read before."""
    world = World({"code": [0.8]}, {0: 1.0, 1: 1.3})
    store = Store(tmp_path)
    store.begin({"tokens": 8})
    store.append(world.cost())
    with store.file.open("a") as file:
        file.write('{"kind":"cell","engi')
    assert len(list(store)) == 1
    store.begin({"tokens": 8})
    store.append(world.cost(1))
    assert [item.run for item in store if isinstance(item, Cost)] == [0, 1]


def test_other_settings_are_refused(tmp_path: Path) -> None:
    Store(tmp_path).begin({"tokens": 8})
    with pytest.raises(UsageError, match="another setting of tokens"):
        Store(tmp_path).begin({"tokens": 9})


@pytest.mark.parametrize("line", ["{}", "[]", "nonsense", '{"kind": "cell"}', '{"kind": "other"}'])
def test_lines_of_others_are_refused(tmp_path: Path, line: str) -> None:
    Store(tmp_path).file.write_text(line + "\n")
    with pytest.raises(InputError, match="line 1"):
        list(Store(tmp_path))


def test_a_folder_without_results(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="no results"):
        list(Store(tmp_path))


def test_cells_are_flat_objects() -> None:
    cell = Cell(Load("torch", "a", "Q8_0", 2, 0.75, 2), "code", 0.7, 512)
    assert Cell.of(json.loads(json.dumps(cell.as_json()))) == cell
