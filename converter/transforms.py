"""Tensor algebra between the Hugging Face layout and GGUF's, one small value per step, streamable by rows.

A tensor is seen as a matrix: all axes but the last are rows (a vector is a column: n rows of 1). A step may move rows
(`rows`), change values inside a row (`values`), or change the shape; `unvalues` undoes `values`, and moved rows go
back by scattering over `rows`. `exact` says whether the way back gives the same bits.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

Shape = tuple[int, ...]
IndexArray = np.ndarray  # int64 [rows]
Matrix = np.ndarray  # float32 [rows, row length]


def matrix_shape(shape: Shape) -> tuple[int, int]:
    """(rows, row length) of a tensor seen as a matrix."""
    return (shape[0], 1) if len(shape) == 1 else (math.prod(shape[:-1]), shape[-1])


@dataclass(frozen=True)
class Transform:
    """The identity; subclasses replace what they change."""

    exact: ClassVar[bool] = True

    def shape(self, shape: Shape) -> Shape:
        """Shape after the step."""
        return shape

    def rows(self, rows: IndexArray, shape: Shape) -> IndexArray:  # noqa: ARG002
        """For rows after the step the rows before it; `shape` is the one before."""
        return rows

    def columns(self, columns: IndexArray) -> IndexArray:
        """For columns after the step the columns before it: where `values` moves them."""
        return columns

    def values(self, x: Matrix) -> Matrix:
        """The step on some rows, float32."""
        return x

    def unvalues(self, y: Matrix) -> Matrix:
        """The inverse of `values`."""
        return y


@dataclass(frozen=True)
class AddOne(Transform):
    """w + 1: norms that multiply by 1 + w upstream and by w in the engine."""

    exact: ClassVar[bool] = False  # 1 + w loses the low bits of small w

    def values(self, x: Matrix) -> Matrix:
        return x + np.float32(1)

    def unvalues(self, y: Matrix) -> Matrix:
        return y - np.float32(1)


@dataclass(frozen=True)
class NegExp(Transform):
    """-exp(x): the decay of the delta rule is stored as a logarithm upstream.

    Evaluated in float64 and rounded once, so that every machine gives the same float32.
    """

    exact: ClassVar[bool] = False

    def values(self, x: Matrix) -> Matrix:
        return (-np.exp(x.astype(np.float64))).astype(np.float32)

    def unvalues(self, y: Matrix) -> Matrix:
        return np.log(-y.astype(np.float64)).astype(np.float32)


@dataclass(frozen=True)
class SqueezeMiddle(Transform):
    """(channels, 1, kernel) to (channels, kernel): the convolution is depthwise."""

    def shape(self, shape: Shape) -> Shape:
        channels, one, kernel = shape
        assert one == 1, shape
        return channels, kernel


@dataclass(frozen=True)
class TileHeads(Transform):
    """Value heads grouped by key head, (k_heads, per_k, dim), to tiled, (per_k, k_heads, dim), along the rows.

    Rows before `start` stay. Source: spec/qwen.md, section 3, "Tiling".
    """

    k_heads: int
    per_k: int
    dim: int
    start: int = 0

    def rows(self, rows: IndexArray, shape: Shape) -> IndexArray:  # noqa: ARG002
        moved = self.start + _grouped_index(rows - self.start, self.k_heads, self.per_k, self.dim)
        return np.where(rows < self.start, rows, moved)


@dataclass(frozen=True)
class TileColumns(Transform):
    """TileHeads along the columns: for the projection that reads the heads."""

    k_heads: int
    per_k: int
    dim: int

    def columns(self, columns: IndexArray) -> IndexArray:
        return _grouped_index(columns, self.k_heads, self.per_k, self.dim)

    def values(self, x: Matrix) -> Matrix:
        return np.take(x, self.columns(np.arange(x.shape[1])), axis=1)

    def unvalues(self, y: Matrix) -> Matrix:
        return np.take(y, _grouped_index(np.arange(y.shape[1]), self.per_k, self.k_heads, self.dim), axis=1)


def _grouped_index(tiled: np.ndarray, k_heads: int, per_k: int, dim: int) -> np.ndarray:
    head, element = np.divmod(tiled, dim)
    return (head % k_heads * per_k + head // k_heads) * dim + element


@dataclass(frozen=True)
class Part(Transform):
    """Part `index` of `of` equal parts along axis 1 of (experts, rows, columns): packed gate and up projections."""

    index: int
    of: int

    def shape(self, shape: Shape) -> Shape:
        experts, rows, columns = shape
        return experts, rows // self.of, columns

    def rows(self, rows: IndexArray, shape: Shape) -> IndexArray:
        part = shape[1] // self.of
        expert, row = np.divmod(rows, part)
        return expert * shape[1] + self.index * part + row


@dataclass(frozen=True)
class GroupParts(Transform):
    """Some parts of every group of rows: all groups' first chosen part, then all groups' second, and so on.

    Rows are `groups` groups, each of parts of these sizes. Source: spec/qwen.md, section 3, "in_proj_qkvz".
    """

    groups: int
    sizes: tuple[int, ...]
    chosen: tuple[int, ...]

    def shape(self, shape: Shape) -> Shape:
        return self.groups * sum(self.sizes[c] for c in self.chosen), *shape[1:]

    def rows(self, rows: IndexArray, shape: Shape) -> IndexArray:  # noqa: ARG002
        found, begin = np.empty_like(rows), 0
        for c in self.chosen:
            inside = (rows >= begin) & (rows < begin + self.groups * self.sizes[c])
            group, row = np.divmod(rows[inside] - begin, self.sizes[c])
            found[inside] = group * sum(self.sizes) + sum(self.sizes[:c]) + row
            begin += self.groups * self.sizes[c]
        return found


def target_shape(shape: Shape, steps: Sequence[Transform]) -> Shape:
    """Shape of a source tensor after all steps."""
    for step in steps:
        shape = step.shape(shape)
    return shape


def source_rows(rows: IndexArray, shape: Shape, steps: Sequence[Transform]) -> IndexArray:
    """For rows of the result the rows of the source tensor, whose shape is given."""
    shapes = [shape]
    for step in steps:
        shapes.append(step.shape(shapes[-1]))
    for step, before in zip(reversed(steps), reversed(shapes[:-1]), strict=True):
        rows = step.rows(rows, before)
    return rows


def source_column(column: int, steps: Sequence[Transform]) -> int:
    """For a column of the result the column of the source tensor."""
    at = np.array([column])
    for step in reversed(steps):
        at = step.columns(at)
    return int(at[0])


def apply_values(x: Matrix, steps: Sequence[Transform]) -> Matrix:
    """The value side of all steps on rows that stand in target order already."""
    for step in steps:
        x = step.values(x)
    return x


def forward(x: np.ndarray, steps: Sequence[Transform]) -> np.ndarray:
    """All steps on a whole tensor, float32."""
    shape = target_shape(x.shape, steps)
    rows = source_rows(np.arange(matrix_shape(shape)[0]), x.shape, steps)
    return apply_values(x.reshape(matrix_shape(x.shape))[rows], steps).reshape(shape)


def backward(y: np.ndarray, steps: Sequence[Transform], into: np.ndarray) -> None:
    """Put the inverse of all steps where it belongs in `into`, an array of the source's shape."""
    values = y.reshape(matrix_shape(y.shape))
    for step in reversed(steps):
        values = step.unvalues(values)
    rows = source_rows(np.arange(len(values)), into.shape, steps)
    into.reshape(matrix_shape(into.shape))[rows] = values
