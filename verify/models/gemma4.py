"""Gemma 4 and its assistant, a drafter that reads the target's cache, in torch, from tensors in GGUF's layout.

Source: spec/gemma4.md, "What the drafter computes"; transformers' gemma4 and gemma4_assistant are the oracle.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor
from torch.nn import functional

from converter.errors import GGUFError
from verify.models.base import (
    Change,
    HeadState,
    Keys,
    KeyValues,
    TorchModel,
    TrunkState,
    frequencies,
    head_of,
    rms_norm,
    rolled,
    rotated,
    shifted,
)
from verify.models.tensors import load
from verify.models.weights import DRAFTER_PREFIX, DrafterWeights, Weights

_SCALE = 1.0  # of attention: queries and keys are normed


@dataclass(frozen=True)
class Sizes:
    """What the metadata says; of every layer what differs between kinds of them."""

    layers: int
    hidden: int
    heads: int
    kv_heads: tuple[int, ...]
    sliding: tuple[bool, ...]
    head_dims: tuple[int, ...]
    rope: tuple[tuple[float, int], ...]  # base, dimensions
    window: int
    shared: int
    eps: float
    softcap: float
    per_layer: int
    experts_used: int

    @classmethod
    def of(cls, weights: Weights) -> Sizes:
        key = Keys(weights)
        layers, sliding = key["block_count"], tuple(key["attention.sliding_window_pattern"])
        if len(sliding) != layers:
            raise GGUFError(
                "attention.sliding_window_pattern has a wrong length", weights.file, expected=layers, found=len(sliding)
            )
        kv_heads = key["attention.head_count_kv"]

        def of_kind(name: str) -> tuple[Any, ...]:
            full, swa = key[name], key[f"{name}_swa"]
            return tuple(swa if s else full for s in sliding)

        return cls(
            layers=layers,
            hidden=key["embedding_length"],
            heads=key["attention.head_count"],
            kv_heads=tuple(kv_heads) if isinstance(kv_heads, list) else (kv_heads,) * layers,
            sliding=sliding,
            head_dims=of_kind("attention.key_length"),
            rope=tuple(zip(of_kind("rope.freq_base"), of_kind("rope.dimension_count"), strict=True)),
            window=key["attention.sliding_window"],
            shared=weights.key("attention.shared_kv_layers", 0),
            eps=key["attention.layer_norm_rms_epsilon"],
            softcap=weights.key("final_logit_softcapping", 0.0),
            per_layer=weights.key("embedding_length_per_layer_input", 0),
            experts_used=weights.key("expert_used_count", 0),
        )

    @property
    def owners(self) -> int:
        """Layers that have keys and values; those after them read the cache of the last of these of their own kind."""
        return self.layers - self.shared

    def owner(self, *, sliding: bool) -> int:
        """The last layer of a kind that has keys and values."""
        return max(i for i in range(self.owners) if self.sliding[i] == sliding)


@dataclass(frozen=True)
class Stack:
    """The layers of the target, or of its drafter.

    prefix: before the names of its tensors. ahead: positions from the last entry that a row sees to the row's own.
    paces: by layer, radians per position of the pairs that rotate.
    """

    sizes: Sizes
    prefix: str
    ahead: int
    paces: tuple[Tensor, ...]


class Gemma4(TorchModel):
    """A target, and its drafter where there is one: the drafter's tensors are named with a prefix."""

    def __init__(self, weights: Weights, **how: Any) -> None:
        self.sizes = Sizes.of(weights)
        drafter = DrafterWeights.within(weights)
        drafter_sizes = None if drafter is None else Sizes.of(drafter)
        super().__init__(weights, **how)
        self.target = self._stack(self.sizes, "", 0)
        self.drafter = self._drafter(drafter_sizes) if drafter_sizes else None

    @property
    def has_head(self) -> bool:
        return self.drafter is not None

    def head_tensors(self) -> Collection[str]:
        return [name for name in self.tensors if name.startswith(DRAFTER_PREFIX)]

    @property
    def head_faults(self) -> Mapping[str, Change]:
        norms = [name for name in self.head_tensors() if "norm" in name]
        return {
            "the halves of pre_projection are exchanged": rolled(f"{DRAFTER_PREFIX}nextn.pre_projection.weight"),
            "the drafter's norms have 1 too much, as those of earlier Gemmas need": shifted(norms, -1.0),
            "the drafter's norms lack 1": shifted(norms, 1.0),
        }

    def with_head(self, file: Path) -> Self:
        weights, _ = head_of(file, "nextn.")
        tensors = load(DrafterWeights(weights), self.device, self.dtype, packed=False)
        other = self.with_tensors(tensors.whole())
        other.drafter = other._drafter(Sizes.of(weights))  # noqa: SLF001  (of its own class)
        return other

    def attention_shapes(self) -> Collection[tuple[int, int]]:
        stacks = [stack.sizes for stack in (self.target, self.drafter) if stack]
        return sorted({(s.heads, dim) for s in stacks for dim in s.head_dims})

    def _drafter(self, sizes: Sizes) -> Stack:
        """Its rows stand one position after the last entry: the cache does not grow while drafting."""
        return self._stack(sizes, DRAFTER_PREFIX, 1)

    def _stack(self, s: Sizes, prefix: str, ahead: int) -> Stack:
        """With rotary factors divided out on full layers, where the file has some."""
        factors = f"{prefix}rope_freqs.weight"
        paces = []
        for rope, sliding in zip(s.rope, s.sliding, strict=True):
            pace = frequencies(*rope, self.device)
            paces.append(pace if sliding or factors not in self.tensors else pace / self.tensors[factors])
        return Stack(s, prefix, ahead, tuple(paces))

    # --- trunk

    def trunk_state(self, length: int) -> TrunkState:
        s = self.sizes
        attention: dict[int, KeyValues] = {}
        for i in range(s.layers):
            if i < s.owners:
                attention[i] = self._key_values(length, s.kv_heads[i], s.head_dims[i])
            else:
                attention[i] = attention[s.owner(sliding=s.sliding[i])]
        return TrunkState(0, attention)

    @torch.inference_mode()
    def trunk(self, tokens: Tensor, state: TrunkState, *, keep_rows: bool = True, final_norm: bool = True) -> Tensor:  # noqa: ARG002
        s = self.sizes
        x = self._embedded(tokens)
        by_layer = self._per_layer_inputs(tokens, x) if s.per_layer else None
        positions = self._positions(state.length, len(tokens))
        for i in range(s.layers):
            own = by_layer[:, i] if by_layer is not None else None
            x = self._layer(self.target, i, x, positions, state.attention[i], own)
        return self._norm(x, "output_norm.weight") if final_norm else x

    @torch.inference_mode()
    def logits(self, hidden: Tensor) -> Tensor:
        logits, cap = super().logits(hidden), self.sizes.softcap
        return torch.tanh(logits / cap) * cap if cap else logits

    # --- drafter

    def head_state(self, trunk: TrunkState, length: int) -> HeadState:  # noqa: ARG002  (the cache is the trunk's)
        assert self.drafter is not None
        owners = [self.sizes.owner(sliding=sliding) for sliding in self.drafter.sizes.sliding]
        return HeadState(0, {i: trunk.attention[owner] for i, owner in enumerate(owners)})

    @torch.inference_mode()
    def head(self, hidden: Tensor, tokens: Tensor, state: HeadState) -> Tensor:
        last = self._positions(state.length, len(tokens))
        state.length += len(tokens)
        return self._drafted(hidden, tokens, last, state)

    def follow(self, hidden: Tensor, tokens: Tensor, state: HeadState) -> None:  # noqa: ARG002
        """Nothing is computed: the trunk has written the cache."""
        state.length += len(tokens)

    @torch.inference_mode()
    def chain(self, out: Tensor, token: Tensor, state: HeadState) -> Tensor:
        """At the same position as the draft before."""
        hidden = self._linear(f"{DRAFTER_PREFIX}nextn.post_projection.weight", out)
        return self._drafted(hidden, token, self._positions(state.length - 1, 1), state)

    @torch.inference_mode()
    def head_logits(self, out: Tensor) -> Tensor:
        own = f"{DRAFTER_PREFIX}output.weight"
        name = own if own in self.tensors else f"{DRAFTER_PREFIX}token_embd.weight"
        return self._product(out, self.tensors[name]).float()

    def _drafted(self, hidden: Tensor, tokens: Tensor, last: Tensor, state: HeadState) -> Tensor:
        """Rows of the drafter, for tokens after the entries `last` [rows] of the cache."""
        assert self.drafter is not None
        both = torch.cat([self._embedded(tokens), hidden.to(self.dtype)], dim=-1)
        x = self._linear(f"{DRAFTER_PREFIX}nextn.pre_projection.weight", both)
        for i in range(self.drafter.sizes.layers):
            x = self._layer(self.drafter, i, x, last, state.attention[i])
        return self._norm(x, f"{DRAFTER_PREFIX}output_norm.weight")

    # --- parts

    def _norm(self, x: Tensor, name: str) -> Tensor:
        return rms_norm(x, self.sizes.eps, self.tensors[name])

    def _embedded(self, tokens: Tensor) -> Tensor:
        """Embeddings of the target's table, scaled."""
        return self.tensors.rows("token_embd.weight", tokens) * math.sqrt(self.sizes.hidden)

    def _per_layer_inputs(self, tokens: Tensor, embedded: Tensor) -> Tensor:
        """What is added in every layer [rows, layers, width]: of the token's identity and of its embedding."""
        s = self.sizes
        shape = len(tokens), s.layers, s.per_layer
        identity = self.tensors.rows("per_layer_token_embd.weight", tokens).view(shape) * math.sqrt(s.per_layer)
        context = self._linear("per_layer_model_proj.weight", embedded) * s.hidden**-0.5
        return (self._norm(context.view(shape), "per_layer_proj_norm.weight") + identity) * 2**-0.5

    def _layer(
        self, stack: Stack, i: int, x: Tensor, last: Tensor, cache: KeyValues, per_layer: Tensor | None = None
    ) -> Tensor:
        """One layer, for rows that see the cache up to `last` [rows]."""
        prefix = f"{stack.prefix}blk.{i}."
        normed = self._norm(x, f"{prefix}attn_norm.weight")
        mixed = self._attention(stack, i, prefix, normed, last, cache)
        x = x + self._norm(mixed, f"{prefix}post_attention_norm.weight")
        inner = self._gelu_product(f"{prefix}ffn_{{}}.weight", self._norm(x, f"{prefix}ffn_norm.weight"))
        if f"{prefix}ffn_gate_inp.weight" in self.tensors:
            experts = torch.stack([self._routed(prefix, row) for row in x])
            inner = self._norm(inner, f"{prefix}post_ffw_norm_1.weight") + self._norm(
                experts, f"{prefix}post_ffw_norm_2.weight"
            )
        x = x + self._norm(inner, f"{prefix}post_ffw_norm.weight")
        if per_layer is not None:
            gated = _gelu(self._linear(f"{prefix}inp_gate.weight", x)) * per_layer
            x = x + self._norm(self._linear(f"{prefix}proj.weight", gated), f"{prefix}post_norm.weight")
        return (x * self.tensors[f"{prefix}layer_output_scale.weight"]).to(self.dtype)

    def _attention(self, stack: Stack, i: int, prefix: str, x: Tensor, last: Tensor, cache: KeyValues) -> Tensor:
        """Attention of one layer; those that own a cache write the rows' entries."""
        s, rows, pace = stack.sizes, len(x), stack.paces[i]
        dim, positions = s.head_dims[i], last + stack.ahead
        query = self._linear(f"{prefix}attn_q.weight", x).view(rows, s.heads, dim)
        query = rotated(self._norm(query, f"{prefix}attn_q_norm.weight"), positions, pace)
        if i < s.owners:
            key = self._linear(f"{prefix}attn_k.weight", x).view(rows, s.kv_heads[i], dim)
            own = f"{prefix}attn_v.weight"
            value = self._linear(own, x).view(key.shape) if own in self.tensors else key
            cache.keys[positions] = rotated(self._norm(key, f"{prefix}attn_k_norm.weight"), positions, pace)
            cache.values[positions] = rms_norm(value, s.eps)
        window = s.window - stack.ahead if s.sliding[i] else None  # counted from the row's own position
        mixed = self._attended(query, last, cache, _SCALE, window)
        return self._linear(f"{prefix}attn_output.weight", mixed.reshape(rows, -1))

    def _gelu_product(self, name: str, x: Tensor) -> Tensor:
        inner = _gelu(self._linear(name.format("gate"), x)) * self._linear(name.format("up"), x)
        return self._linear(name.format("down"), inner)

    def _routed(self, prefix: str, row: Tensor) -> Tensor:
        """The experts of one row [hidden], weighted. Per row: a group's size would change the bits."""
        s = self.sizes
        scaled = (rms_norm(row, s.eps) * self.tensors[f"{prefix}ffn_gate_inp.scale"] * s.hidden**-0.5).to(self.dtype)
        shares = self._linear(f"{prefix}ffn_gate_inp.weight", scaled[None])[0].float().softmax(dim=-1)
        best, experts = shares.topk(s.experts_used)
        shares = best / best.sum() * self.tensors[f"{prefix}ffn_down_exps.scale"][experts]
        x = self._norm(row, f"{prefix}pre_ffw_norm_2.weight")
        both, down = f"{prefix}ffn_gate_up_exps.weight", f"{prefix}ffn_down_exps.weight"
        total = torch.zeros_like(row)
        for share, e in zip(shares.to(self.dtype), experts.tolist(), strict=True):
            gate, up = (self.tensors.rows(both, e) @ x).chunk(2)
            inner = _gelu(gate) * up
            if self.observer is not None:
                self.observer(both, x[None], e)
                self.observer(down, inner[None], e)
            total = total + share * (self.tensors.rows(down, e) @ inner)
        return total


def _gelu(x: Tensor) -> Tensor:
    return functional.gelu(x, approximate="tanh")
