"""Transforms against torch's own reshapes, back again, and piece by piece."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from converter.archs import qwen35
from converter.config import Config
from converter.rules import Role
from converter.transforms import (
    AddOne,
    NegExp,
    Part,
    SqueezeMiddle,
    TileColumns,
    TileHeads,
    apply_values,
    backward,
    forward,
    matrix_shape,
    source_column,
    source_rows,
)
from tests.checkpoints import load
from tests.conftest import EXAMPLE, checkpoint

sizes = st.integers(1, 5)


def random(*shape: int) -> np.ndarray:
    return np.random.default_rng(0).standard_normal(shape).astype(np.float32)


@given(k=sizes, r=sizes, d=sizes, start=st.integers(0, 6))
@settings(deadline=None)
def test_tiling_rows_is_a_permutation_of_axes(k: int, r: int, d: int, start: int) -> None:
    """(k, r, d) to (r, k, d); rows before `start` stay."""
    x = random(start + k * r * d, 3)
    expected = torch.from_numpy(x[start:]).reshape(k, r, d, 3).permute(1, 0, 2, 3).reshape(-1, 3).numpy()
    np.testing.assert_array_equal(forward(x, (TileHeads(k, r, d, start),)), np.concatenate([x[:start], expected]))


@given(k=sizes, r=sizes, d=sizes)
@settings(deadline=None)
def test_tiling_columns_is_the_same_on_the_other_axis(k: int, r: int, d: int) -> None:
    """Columns of the output projection follow the rows of its input."""
    x = random(4, k * r * d)
    step = TileColumns(k, r, d)
    np.testing.assert_array_equal(forward(x, (step,)), forward(x.T, (TileHeads(k, r, d),)).T)
    for column in range(k * r * d):
        np.testing.assert_array_equal(forward(x, (step,))[:, column], x[:, source_column(column, (step,))])


def test_packed_projections_are_torch_chunks() -> None:
    """Gate and up are the halves along axis 1."""
    x = random(3, 10, 4)
    for i, half in enumerate(torch.from_numpy(x).chunk(2, dim=1)):
        np.testing.assert_array_equal(forward(x, (Part(i, 2),)), half.numpy())


def test_values() -> None:
    """+1, -exp and the squeezed convolution, as torch computes them."""
    x = random(6, 1, 4)
    np.testing.assert_array_equal(forward(x, (SqueezeMiddle(),)), torch.from_numpy(x).squeeze(1).numpy())
    np.testing.assert_array_equal(forward(x[:, 0, 0], (AddOne(),)), (torch.from_numpy(x[:, 0, 0]) + 1).numpy())
    expected = -torch.exp(torch.from_numpy(x[:, 0, 0]).double())
    np.testing.assert_array_equal(forward(x[:, 0, 0], (NegExp(),)), expected.float().numpy())


CHAINS = [
    (random(12), (TileHeads(2, 6, 1), NegExp())),
    (random(8 + 12, 1, 4), (TileHeads(2, 3, 2, 8), SqueezeMiddle())),
    (random(5, 12), (TileColumns(2, 3, 2),)),
    (random(8 + 12, 7), (TileHeads(3, 2, 2, 8),)),
    (random(9), (AddOne(),)),
]


@pytest.mark.parametrize(("x", "steps"), CHAINS)
def test_backward_undoes_forward(x: np.ndarray, steps: tuple) -> None:
    """To the bit where every step is exact, closely where one is not."""
    into = np.full_like(x, np.nan)
    backward(forward(x, steps), steps, into)
    if all(step.exact for step in steps):
        np.testing.assert_array_equal(into, x)
    else:
        np.testing.assert_allclose(into, x, rtol=1e-5, atol=1e-6)


def test_parts_come_back_together() -> None:
    """Two rules with complementary parts fill the source."""
    x = random(3, 10, 4)
    into = np.full_like(x, np.nan)
    for i in range(2):
        backward(forward(x, (Part(i, 2),)), (Part(i, 2),), into)
    np.testing.assert_array_equal(into, x)


@pytest.mark.parametrize(("x", "steps"), CHAINS)
@pytest.mark.parametrize("size", [1, 3])
def test_pieces_equal_the_whole(x: np.ndarray, steps: tuple, size: int) -> None:
    """Any cut by rows gives the rows of the whole."""
    whole = forward(x, steps)
    rows, length = matrix_shape(whole.shape)
    source = x.reshape(matrix_shape(x.shape))
    pieces = [
        apply_values(source[source_rows(np.arange(i, min(i + size, rows)), x.shape, steps)], steps)
        for i in range(0, rows, size)
    ]
    np.testing.assert_array_equal(np.concatenate(pieces).reshape(rows, length), whole.reshape(rows, length))


@pytest.mark.parametrize("kind", ["dense", "moe"])
def test_tables_use_every_row_of_every_source_once(kind: str) -> None:
    """No row of a used tensor is lost, none is stored twice."""
    folder = checkpoint(kind)
    architecture = qwen35.ARCHITECTURES[kind == "moe"]
    shapes = {architecture.canonical(n): tuple(t.shape) for n, t in load(folder).items()}
    table = architecture.table(Config.load(folder), shapes.keys())
    taken = {name: np.zeros(matrix_shape(shape)[0], int) for name, shape in shapes.items()}
    for rule in table.rules:
        per_source = matrix_shape(rule.target_shape)[0] // len(rule.sources)
        for name in rule.sources:
            assert shapes[name] == rule.shape
            taken[name][source_rows(np.arange(per_source), rule.shape, rule.transforms)] += 1
    counts = {name: set(rows.tolist()) for name, rows in taken.items() if "visual" not in name}
    assert counts == {name: {1} for name in counts}
    assert {r.role for r in table.rules} == set(Role)
    assert len({r.target for r in table.rules}) == len(table.rules)


def test_the_example_has_the_table_of_its_config() -> None:
    """15 tensors of a dense head."""
    names = {qwen35.canonical(n) for n in load(EXAMPLE)}
    table = qwen35.ARCHITECTURES[0].table(Config.load(EXAMPLE), names)
    assert sum(r.role is Role.MTP for r in table.rules) == 15
