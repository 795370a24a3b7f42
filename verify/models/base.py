"""What models in torch have in common: weights on a device, linear layers whose rows stand for themselves, attention.

The form is that of exact mode (spec/exact-mode.md): keys and values lie in buffers of fixed length, attention runs over
all of it under a mask, experts are gathered per row. So what a row computes depends on no other row but through the
states, and rows may be taken back.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor
from torch.nn import functional

from converter.errors import GGUFError, UnsupportedError
from verify.models.tensors import Tensors, load
from verify.models.weights import Weights, open_weights

ATTENTION = "attention"

# Called for every matrix that multiplies: GGUF name, its input [rows, columns], and the expert where there are several.
Observer = Callable[[str, Tensor, int | None], None]
# Tensors of a head, changed as a faulty conversion would have them put right.
Change = Callable[[Tensors], dict[str, Tensor]]


@dataclass
class KeyValues:
    """Keys and values of one layer, [length, kv heads, head dim]; what stands beyond the last position is void."""

    keys: Tensor
    values: Tensor


@dataclass
class Recurrent:
    """State of one gated delta net.

    conv: the convolution's last inputs [channels, kernel - 1]. memory: [value heads, key dim, value dim]. rows: both as
    they were after each row of the last call.
    """

    conv: Tensor
    memory: Tensor
    rows: list[tuple[Tensor, Tensor]] = field(default_factory=list)


@dataclass
class TrunkState:
    """What the trunk remembers: `length` positions are decided. Layers may share their keys and values."""

    length: int
    attention: dict[int, KeyValues]
    recurrent: dict[int, Recurrent] = field(default_factory=dict)


@dataclass
class HeadState:
    """What the head knows of the text: pairs 0 ... length - 1 of (state at p, token at p + 1).

    attention: by layer of the head, its own keys and values or the trunk's.
    """

    length: int
    attention: Mapping[int, KeyValues]


class TorchModel(ABC):
    """A trunk, and what drafts for it, with their weights on a device. Works on one sequence at a time."""

    def __init__(
        self,
        weights: Weights,
        *,
        device: str = "cpu",
        dtype: torch.dtype = torch.float32,
        observer: Observer | None = None,
        packed: bool = False,
    ) -> None:
        self.device, self.dtype, self.observer = torch.device(device), dtype, observer
        # Shapes of matrices and attention that give a row other bits in other places: evaluated row by row.
        self.single_rows: set[object] = set()
        self.tensors = load(weights, self.device, dtype, packed=packed)

    def with_tensors(self, changed: Mapping[str, Tensor]) -> Self:
        """The same model with some tensors exchanged; the others are shared."""
        other = copy(self)
        other.tensors = self.tensors.changed(changed)
        return other

    # --- what a model says of itself

    @property
    @abstractmethod
    def has_head(self) -> bool:
        """Whether anything drafts."""

    @abstractmethod
    def head_tensors(self) -> Collection[str]:
        """Names of the tensors that only drafting needs."""

    @property
    @abstractmethod
    def head_faults(self) -> Mapping[str, Change]:
        """What a head's tensors may be wrong in, and the change that puts it right."""

    @abstractmethod
    def with_head(self, file: Path) -> Self:
        """The same trunk with what drafts in another file. Raises GGUFError where that is for no such trunk."""

    @abstractmethod
    def attention_shapes(self) -> Collection[tuple[int, int]]:
        """(heads, head dim) of queries, of all kinds of layers."""

    # --- trunk

    @abstractmethod
    def trunk_state(self, length: int) -> TrunkState:
        """An empty state with room for so many positions."""

    @abstractmethod
    def trunk(self, tokens: Tensor, state: TrunkState, *, keep_rows: bool = True, final_norm: bool = True) -> Tensor:
        """Hidden states [rows, hidden] of tokens [rows] at the state's next positions.

        Nothing is decided yet: `commit` says how many of the rows count. keep_rows: whether any number may be
        committed; without it all rows must be. final_norm: whether it has been applied.
        """

    @staticmethod
    def commit(state: TrunkState, rows: int) -> None:
        """Make the first `rows` of the last call's rows part of the sequence, and forget the others."""
        for recurrent in state.recurrent.values():
            if rows:
                recurrent.conv, recurrent.memory = recurrent.rows[rows - 1 if len(recurrent.rows) > 1 else 0]
            recurrent.rows = []
        state.length += rows

    @torch.inference_mode()
    def logits(self, hidden: Tensor) -> Tensor:
        """Logits [rows, vocabulary] in float32."""
        return self._product(hidden, self.tensors[self._output()]).float()

    # --- head

    @abstractmethod
    def head_state(self, trunk: TrunkState, length: int) -> HeadState:
        """A state with no pairs and room for so many, for the text that `trunk` is the state of."""

    @abstractmethod
    def head(self, hidden: Tensor, tokens: Tensor, state: HeadState) -> Tensor:
        """States [rows, width of the head] that predict the token after `tokens` [rows].

        hidden: for each token the trunk's state at the position before it. The pairs are written from state.length on
        and count at once; to take some back, lower it.
        """

    @abstractmethod
    def chain(self, out: Tensor, token: Tensor, state: HeadState) -> Tensor:
        """The state that predicts the token after a draft: `token` [1] was drafted from `out` [1, width of the head]."""

    def follow(self, hidden: Tensor, tokens: Tensor, state: HeadState) -> None:
        """The pairs of `head` for what is decided, without asking for a draft."""
        self.head(hidden, tokens, state)

    @abstractmethod
    def head_logits(self, out: Tensor) -> Tensor:
        """Logits [rows, vocabulary] of the head's states, in float32."""

    # --- parts

    def _output(self) -> str:
        return "output.weight" if "output.weight" in self.tensors else "token_embd.weight"

    def _key_values(self, length: int, kv_heads: int, head_dim: int) -> KeyValues:
        shape = (length, kv_heads, head_dim)
        return KeyValues(*(torch.zeros(shape, device=self.device, dtype=self.dtype) for _ in range(2)))

    def _positions(self, begin: int, rows: int) -> Tensor:
        return torch.arange(begin, begin + rows, device=self.device)

    def _linear(self, name: str, x: Tensor) -> Tensor:
        if self.observer is not None:
            self.observer(name, x, None)
        return self._product(x.to(self.dtype), self.tensors[name])

    def _product(self, x: Tensor, matrix: Tensor) -> Tensor:
        return self._by_rows(tuple(matrix.shape), lambda rows: functional.linear(rows, matrix), x)

    def _by_rows(self, kind: object, function: Callable[..., Tensor], *rows: Tensor) -> Tensor:
        """A function of rows, called once, or row by row where its kind needs it."""
        if kind not in self.single_rows or rows[0].ndim < 2:
            return function(*rows)
        return torch.cat([function(*(part[k : k + 1] for part in rows)) for k in range(len(rows[0]))])

    def _attended(
        self, query: Tensor, last: Tensor, cache: KeyValues, scale: float, window: int | None = None
    ) -> Tensor:
        """[rows, heads, head dim] of queries that see entries up to `last` [rows], and of a window only so many."""
        group = query.shape[1] // cache.keys.shape[1]
        keys, values = (c.repeat_interleave(group, dim=1).transpose(0, 1) for c in (cache.keys, cache.values))
        kind = ATTENTION, *query.shape[1:]
        return self._by_rows(kind, lambda q, at: self._attend(q, at, keys, values, scale, window), query, last)

    def _attend(
        self, query: Tensor, last: Tensor, keys: Tensor, values: Tensor, scale: float, window: int | None = None
    ) -> Tensor:
        """The same over keys and values [heads, length, head dim]."""
        scores = (query.transpose(0, 1) @ keys.transpose(1, 2)).float() * scale
        places = torch.arange(keys.shape[1], device=self.device)
        unseen = places[None, :] > last[:, None]
        if window is not None:
            unseen |= places[None, :] <= last[:, None] - window
        weights = scores.masked_fill(unseen, float("-inf")).softmax(dim=-1).to(self.dtype)  # [heads, rows, length]
        return (weights @ values).transpose(0, 1)

    def unstable(self, width: int, context: int, rounds: int = 4) -> set[object]:
        """What gives a row other bits when it stands elsewhere among `width` rows or beside others, on this machine.

        Shapes of matrices [out, in], and (ATTENTION, heads, head dim) over `context` positions.
        """
        source = torch.Generator().manual_seed(width)
        found = set[object]()

        def moves(function: Callable[[Tensor], Tensor], *shape: int) -> bool:
            for _ in range(rounds):
                row, results = self._random(source, *shape), []
                for place in range(width):
                    among = self._random(source, width, *shape)
                    among[place] = row
                    results.append(function(among)[place])
                if any(not torch.equal(results[0], other) for other in results[1:]):
                    return True
            return False

        for shape, name in {self.tensors.shape(n): n for n in self.tensors if self._multiplies(n)}.items():
            matrix = self.tensors[name]
            if moves(lambda x, matrix=matrix: functional.linear(x, matrix), shape[1]):
                found.add(shape)
        last = torch.full((width,), context - 1, device=self.device)
        for heads, head_dim in self.attention_shapes():
            keys, values = (self._random(source, heads, context, head_dim) for _ in range(2))
            if moves(lambda x, k=keys, v=values: self._attend(x, last, k, v, k.shape[-1] ** -0.5), heads, head_dim):
                found.add((ATTENTION, heads, head_dim))
        return found

    def _multiplies(self, name: str) -> bool:
        looked_up = ("embd" in name or "embed" in name) and name != self._output()
        return len(self.tensors.shape(name)) == 2 and not looked_up and "conv1d" not in name

    def _random(self, source: torch.Generator, *shape: int) -> Tensor:
        return torch.randn(shape, generator=source).to(self.device, self.dtype)


class Keys:
    """Metadata of the architecture that must be there. Raises UnsupportedError where positions are scaled."""

    def __init__(self, weights: Weights) -> None:
        self.weights = weights
        scaling = weights.key("rope.scaling.type")
        if scaling not in {None, "none"}:
            raise UnsupportedError("scaled rotary positions cannot be decoded here", weights.file, found=scaling)

    def __getitem__(self, name: str) -> Any:
        value = self.weights.key(name)
        if value is None:
            raise GGUFError("a metadata key is missing", self.weights.file, expected=name)
        return value


def rms_norm(x: Tensor, eps: float, weight: Tensor | None = None) -> Tensor:
    """RMS norm over the last axis, computed in float32, given in the dtype of x."""
    wide = x.float()
    normed = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return (normed if weight is None else normed * weight).to(x.dtype)


def rotated(x: Tensor, positions: Tensor, frequencies: Tensor) -> Tensor:
    """Rotary positions on the first elements of every head of x [rows, heads, head dim], halves paired.

    frequencies: radians per position [half of what rotates].
    """
    half = len(frequencies)
    angles = positions[:, None].float() * frequencies[None, :]
    cos, sin = angles.cos()[:, None, :], angles.sin()[:, None, :]
    a, b, rest = x[..., :half].float(), x[..., half : 2 * half].float(), x[..., 2 * half :]
    return torch.cat([(a * cos - b * sin).to(x.dtype), (b * cos + a * sin).to(x.dtype), rest], dim=-1)


def frequencies(base: float, dim: int, device: torch.device) -> Tensor:
    """Radians per position of the dim / 2 pairs."""
    half = dim // 2
    return base ** -(torch.arange(half, device=device, dtype=torch.float32) / half)


def rolled(name: str) -> Change:
    """The halves of a matrix's columns the other way round."""
    return lambda tensors: {name: tensors[name].roll(tensors[name].shape[1] // 2, 1)}


def exchanged(a: str, b: str) -> Change:
    return lambda tensors: {a: tensors[b], b: tensors[a]}


def shifted(names: Sequence[str], by: float) -> Change:
    return lambda tensors: {name: tensors[name] + by for name in names}


def head_of(file: Path, prefix: str) -> tuple[Weights, list[str]]:
    """A file's weights, and the names among them that begin with a prefix. Raises GGUFError where there are none."""
    weights = open_weights(file)
    names = [name for name in weights.names() if name.startswith(prefix)]
    if not names:
        raise GGUFError("this file has no head for that trunk", file, expected=f"tensors {prefix}*")
    return weights, names
