"""Qwen3.5, 3.6 and Qwen3-Next with their MTP head, in torch, from tensors in GGUF's layout (spec/qwen.md, sections 3 and 4).

Convolution and delta rule go one token at a time and keep the state after each, so that rows may be taken back.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor
from torch.nn import functional

from verify.models.base import (
    Change,
    HeadState,
    Keys,
    KeyValues,
    Recurrent,
    TorchModel,
    TrunkState,
    exchanged,
    frequencies,
    head_of,
    rms_norm,
    rolled,
    rotated,
    shifted,
)
from verify.models.tensors import load
from verify.models.weights import Weights


@dataclass(frozen=True)
class Sizes:
    """What the metadata says."""

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    rope_dim: int
    rope_base: float
    eps: float
    recurrent: tuple[bool, ...]
    k_heads: int
    v_heads: int
    state: int
    kernel: int
    experts_used: int

    @classmethod
    def of(cls, weights: Weights) -> Sizes:
        key = Keys(weights)
        blocks, heads = key["block_count"], weights.key("nextn_predict_layers", 0)
        layers, interval = blocks - heads, weights.key("full_attention_interval", 4)
        recurrent = weights.key("attention.recurrent_layers") or [(i + 1) % interval != 0 for i in range(layers)]
        return cls(
            layers=layers,
            hidden=key["embedding_length"],
            heads=key["attention.head_count"],
            kv_heads=key["attention.head_count_kv"],
            head_dim=key["attention.key_length"],
            rope_dim=key["rope.dimension_count"],
            rope_base=key["rope.freq_base"],
            eps=key["attention.layer_norm_rms_epsilon"],
            recurrent=tuple(recurrent[:layers]),
            k_heads=key["ssm.group_count"],
            v_heads=key["ssm.time_step_rank"],
            state=key["ssm.state_size"],
            kernel=key["ssm.conv_kernel"],
            experts_used=weights.key("expert_used_count", 0),
        )


class Qwen35(TorchModel):
    """The model with its weights on a device. Works on one sequence at a time."""

    def __init__(self, weights: Weights, **how: Any) -> None:
        self.sizes = Sizes.of(weights)
        super().__init__(weights, **how)

    @property
    def has_head(self) -> bool:
        return self._glue("eh_proj") in self.tensors

    def head_tensors(self) -> Collection[str]:
        return [name for name in self.tensors if name.startswith(f"blk.{self.sizes.layers}.")]

    @property
    def head_faults(self) -> Mapping[str, Change]:
        glue, norms = self._glue, [name for name in self.head_tensors() if "norm" in name]
        return {
            "the halves of eh_proj are exchanged": rolled(glue("eh_proj")),
            "the norms of embedding and state are exchanged": exchanged(glue("enorm"), glue("hnorm")),
            "the head's norms lack their shift by 1": shifted(norms, 1.0),
            "the head's norms are shifted by 1 twice": shifted(norms, -1.0),
        }

    def with_head(self, file: Path) -> Self:
        weights, names = head_of(file, f"blk.{self.sizes.layers}.")
        return self.with_tensors(load(weights, self.device, self.dtype, packed=False, names=names).whole())

    def attention_shapes(self) -> Collection[tuple[int, int]]:
        return [(self.sizes.heads, self.sizes.head_dim)]

    def trunk_state(self, length: int) -> TrunkState:
        s = self.sizes
        channels = 2 * s.k_heads * s.state + s.v_heads * s.state
        zeros = partial(torch.zeros, device=self.device)
        attention = {i: self._key_values(length, s.kv_heads, s.head_dim) for i in range(s.layers) if not s.recurrent[i]}
        recurrent = {
            i: Recurrent(zeros(channels, s.kernel - 1), zeros(s.v_heads, s.state, s.state))
            for i in range(s.layers)
            if s.recurrent[i]
        }
        return TrunkState(0, attention, recurrent)

    # --- trunk

    @torch.inference_mode()
    def trunk(self, tokens: Tensor, state: TrunkState, *, keep_rows: bool = True, final_norm: bool = True) -> Tensor:
        x = self.tensors.rows("token_embd.weight", tokens)
        positions = self._positions(state.length, len(tokens))
        for i in range(self.sizes.layers):
            normed = self._norm(x, f"blk.{i}.attn_norm.weight")
            if self.sizes.recurrent[i]:
                mixed = self._delta_net(i, normed, state.recurrent[i], keep_rows=keep_rows)
            else:
                mixed = self._attention(i, normed, positions, state.attention[i])
            x = x + mixed
            x = x + self._ffn(i, self._norm(x, f"blk.{i}.post_attention_norm.weight"))
        return self._norm(x, "output_norm.weight") if final_norm else x

    # --- head

    def _glue(self, name: str) -> str:
        return f"blk.{self.sizes.layers}.nextn.{name}.weight"

    def head_state(self, trunk: TrunkState, length: int) -> HeadState:  # noqa: ARG002  (the head has a cache of its own)
        s = self.sizes
        return HeadState(0, {s.layers: self._key_values(length, s.kv_heads, s.head_dim)})

    @torch.inference_mode()
    def head(self, hidden: Tensor, tokens: Tensor, state: HeadState) -> Tensor:
        i = self.sizes.layers
        own = self._glue("embed_tokens")
        embedded = self.tensors.rows(own if own in self.tensors else "token_embd.weight", tokens)
        both = [self._norm(embedded, self._glue("enorm")), self._norm(hidden, self._glue("hnorm"))]
        x = self._linear(self._glue("eh_proj"), torch.cat(both, dim=-1))
        positions = self._positions(state.length, len(tokens))
        x = x + self._attention(i, self._norm(x, f"blk.{i}.attn_norm.weight"), positions, state.attention[i])
        x = x + self._ffn(i, self._norm(x, f"blk.{i}.post_attention_norm.weight"))
        state.length += len(tokens)
        final = self._glue("shared_head_norm")
        return self._norm(x, final if final in self.tensors else "output_norm.weight")

    def chain(self, out: Tensor, token: Tensor, state: HeadState) -> Tensor:
        """As if `out` were the trunk's state: spec/qwen.md, section 4."""
        return self.head(out, token, state)

    @torch.inference_mode()
    def head_logits(self, out: Tensor) -> Tensor:
        own = self._glue("shared_head_head")
        return self._product(out, self.tensors[own]).float() if own in self.tensors else self.logits(out)

    # --- parts

    def _norm(self, x: Tensor, name: str) -> Tensor:
        return rms_norm(x, self.sizes.eps, self.tensors[name])

    def _attention(self, i: int, x: Tensor, positions: Tensor, cache: KeyValues) -> Tensor:
        """Gated attention of one layer, with entries written at `positions` [rows]."""
        s, rows = self.sizes, len(x)
        query, gate = self._linear(f"blk.{i}.attn_q.weight", x).view(rows, s.heads, 2, s.head_dim).unbind(2)
        key = self._linear(f"blk.{i}.attn_k.weight", x).view(rows, s.kv_heads, s.head_dim)
        value = self._linear(f"blk.{i}.attn_v.weight", x).view(rows, s.kv_heads, s.head_dim)
        query = rotated(self._norm(query, f"blk.{i}.attn_q_norm.weight"), positions, self._frequencies)
        key = rotated(self._norm(key, f"blk.{i}.attn_k_norm.weight"), positions, self._frequencies)
        cache.keys[positions], cache.values[positions] = key, value
        mixed = self._attended(query, positions, cache, s.head_dim**-0.5)
        return self._linear(f"blk.{i}.attn_output.weight", (mixed * torch.sigmoid(gate)).reshape(rows, -1))

    @cached_property
    def _frequencies(self) -> Tensor:
        return frequencies(self.sizes.rope_base, self.sizes.rope_dim, self.device)

    def _delta_net(self, i: int, x: Tensor, state: Recurrent, *, keep_rows: bool) -> Tensor:
        """The gated delta rule, token by token (spec/qwen.md, "Trunk forward, in formulas")."""
        s, rows = self.sizes, len(x)
        mixed = self._linear(f"blk.{i}.attn_qkv.weight", x).float()
        gate = self._linear(f"blk.{i}.attn_gate.weight", x).view(rows, s.v_heads, s.state)
        per_key = s.v_heads // s.k_heads
        grouped = f"blk.{i}.ssm_ba.weight" in self.tensors  # Qwen3-Next; elsewhere value heads are tiled
        if grouped:
            both = self._linear(f"blk.{i}.ssm_ba.weight", x).view(rows, s.k_heads, 2, per_key)
            beta, alpha = (part.reshape(rows, s.v_heads) for part in both.unbind(2))
        else:
            beta, alpha = (self._linear(f"blk.{i}.ssm_{name}.weight", x) for name in ("beta", "alpha"))
        beta = torch.sigmoid(beta.float())
        step = functional.softplus(alpha.float() + self.tensors[f"blk.{i}.ssm_dt.bias"])
        decay = torch.exp(self.tensors[f"blk.{i}.ssm_a"].flatten() * step)  # [rows, value heads]
        window = torch.cat([state.conv, mixed.T], dim=1)  # [channels, kernel - 1 + rows]
        seen = window.unfold(1, s.kernel, 1)  # [channels, rows, kernel]
        convolved = functional.silu((seen * self.tensors[f"blk.{i}.ssm_conv1d.weight"][:, None, :]).sum(-1)).T
        size = s.k_heads * s.state
        query, key = (
            _unit(part.reshape(rows, s.k_heads, s.state))
            for part in (convolved[:, :size], convolved[:, size : 2 * size])
        )
        query, key = (x.repeat_interleave(per_key, dim=1) if grouped else x.repeat(1, per_key, 1) for x in (query, key))
        query = query * s.state**-0.5
        value = convolved[:, 2 * size :].reshape(rows, s.v_heads, s.state)
        memory, outputs = state.memory, []
        state.rows = []
        for t in range(rows):
            memory = memory * decay[t, :, None, None]
            recalled = (memory * key[t, :, :, None]).sum(1)
            change = (value[t] - recalled) * beta[t, :, None]
            memory = memory + key[t, :, :, None] * change[:, None, :]
            outputs.append((memory * query[t, :, :, None]).sum(1))
            if keep_rows or t == rows - 1:
                state.rows.append((window[:, t + 1 : t + s.kernel], memory))
        normed = rms_norm(torch.stack(outputs), s.eps, self.tensors[f"blk.{i}.ssm_norm.weight"])
        gated = normed * functional.silu(gate.float())
        return self._linear(f"blk.{i}.ssm_out.weight", gated.reshape(rows, -1))

    def _ffn(self, i: int, x: Tensor) -> Tensor:
        if f"blk.{i}.ffn_gate_inp.weight" not in self.tensors:
            return self._swiglu(f"blk.{i}.ffn_{{}}.weight", x)
        routed = torch.stack([self._routed(i, row) for row in x])
        shared = self._swiglu(f"blk.{i}.ffn_{{}}_shexp.weight", x)
        return routed + torch.sigmoid(self._linear(f"blk.{i}.ffn_gate_inp_shexp.weight", x)) * shared

    def _swiglu(self, name: str, x: Tensor) -> Tensor:
        inner = functional.silu(self._linear(name.format("gate"), x)) * self._linear(name.format("up"), x)
        return self._linear(name.format("down"), inner)

    def _routed(self, i: int, row: Tensor) -> Tensor:
        """The experts of one row [hidden], weighted. Per row: a group's size would change the bits."""
        shares = self._linear(f"blk.{i}.ffn_gate_inp.weight", row[None])[0].float().softmax(dim=-1)
        best, experts = shares.topk(self.sizes.experts_used)
        shares = (best / best.sum()).to(self.dtype)
        names = [f"blk.{i}.ffn_{part}_exps.weight" for part in ("gate", "up", "down")]
        total = torch.zeros_like(row)
        for share, e in zip(shares, experts.tolist(), strict=True):
            gate, up, down = (self.tensors.rows(name, e) for name in names)
            inner = functional.silu(gate @ row) * (up @ row)
            if self.observer is not None:
                self.observer(f"blk.{i}.ffn_gate_exps.weight", row[None], e)
                self.observer(f"blk.{i}.ffn_up_exps.weight", row[None], e)
                self.observer(f"blk.{i}.ffn_down_exps.weight", inner[None], e)
            total = total + share * (down @ inner)
        return total


def _unit(x: Tensor) -> Tensor:
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + 1e-6)
