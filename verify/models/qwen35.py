"""Qwen3.5, 3.6 and Qwen3-Next with their MTP head, in torch, from tensors in GGUF's layout (spec/qwen.md, sections 3 and 4).

The form is that of exact mode (spec/exact-mode.md): keys and values lie in buffers of fixed length, attention runs over
all of it under a mask, convolution and delta rule go one token at a time and keep the state after each, experts are
gathered per row. So what a row computes depends on no other row but through the states, and rows may be taken back.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from copy import copy
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional

from converter.errors import GGUFError, UnsupportedError
from verify.models.tensors import load
from verify.models.weights import PairedWeights, Weights, open_weights

ATTENTION = "attention"

# Called for every matrix that multiplies: GGUF name, its input [rows, columns], and the expert where there are several.
Observer = Callable[[str, Tensor, int | None], None]


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
        def key(name: str) -> int:
            value = weights.key(name)
            if value is None:
                raise GGUFError("a metadata key is missing", weights.file, expected=name)
            return value

        scaling = weights.key("rope.scaling.type")
        if scaling not in {None, "none"}:
            raise UnsupportedError("scaled rotary positions cannot be decoded here", weights.file, found=scaling)
        blocks, heads = key("block_count"), weights.key("nextn_predict_layers", 0)
        layers, interval = blocks - heads, weights.key("full_attention_interval", 4)
        recurrent = weights.key("attention.recurrent_layers") or [(i + 1) % interval != 0 for i in range(layers)]
        return cls(
            layers=layers,
            hidden=key("embedding_length"),
            heads=key("attention.head_count"),
            kv_heads=key("attention.head_count_kv"),
            head_dim=key("attention.key_length"),
            rope_dim=key("rope.dimension_count"),
            rope_base=key("rope.freq_base"),
            eps=key("attention.layer_norm_rms_epsilon"),
            recurrent=tuple(recurrent[:layers]),
            k_heads=key("ssm.group_count"),
            v_heads=key("ssm.time_step_rank"),
            state=key("ssm.state_size"),
            kernel=key("ssm.conv_kernel"),
            experts_used=weights.key("expert_used_count", 0),
        )


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
    """What the trunk remembers: `length` positions are decided."""

    length: int
    attention: dict[int, KeyValues]
    recurrent: dict[int, Recurrent]


@dataclass
class HeadState:
    """What the head remembers: entries 0 ... length - 1, of the pairs (state at p, token at p + 1)."""

    length: int
    attention: KeyValues


def open_model(file: Path, sidecar: Path | None, device: str) -> Qwen35:
    """The model of a file or folder on a device, "cpu" in float32 or a CUDA device in bfloat16.

    Where its values would not fit the memory, matrices stay as they are stored and are dequantized when they multiply.
    """
    weights: Weights = open_weights(file)
    if sidecar is not None:
        weights = PairedWeights(weights, open_weights(sidecar))
    dtype = torch.float32 if device == "cpu" else torch.bfloat16
    return Qwen35(weights, device=device, dtype=dtype, packed=not _fits(weights, device, dtype))


def with_head(model: Qwen35, file: Path) -> Qwen35:
    """The same trunk with the head of another file, a sidecar or a bundled one."""
    block = f"blk.{model.sizes.layers}."
    weights = open_weights(file)
    names = [name for name in weights.names() if name.startswith(block)]
    if not names:
        raise GGUFError("this file has no head for that trunk", file, expected=f"tensors {block}*")
    return model.with_tensors(load(weights, model.device, model.dtype, packed=False, names=names).whole())


def _fits(weights: Weights, device: str, dtype: torch.dtype) -> bool:
    """Whether all values fit the device's free memory, with room for what is computed."""
    if device == "cpu":
        free = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    else:
        free = torch.cuda.mem_get_info(torch.device(device))[0]
    return weights.count() * dtype.itemsize < _SHARE_OF_MEMORY * free


_SHARE_OF_MEMORY = 0.8


class Qwen35:
    """The model with its weights on a device. Works on one sequence at a time."""

    def __init__(
        self,
        weights: Weights,
        *,
        device: str = "cpu",
        dtype: torch.dtype = torch.float32,
        observer: Observer | None = None,
        packed: bool = False,
    ) -> None:
        self.sizes = Sizes.of(weights)
        self.device, self.dtype, self.observer = torch.device(device), dtype, observer
        # Shapes of matrices that give a row other bits in other places, and ATTENTION: evaluated row by row.
        self.single_rows: set[object] = set()
        self.tensors = load(weights, self.device, dtype, packed=packed)

    def with_tensors(self, changed: Mapping[str, Tensor]) -> Qwen35:
        """The same model with some tensors exchanged; the others are shared."""
        other = copy(self)
        other.tensors = self.tensors.changed(changed)
        return other

    @property
    def has_head(self) -> bool:
        return self._glue("eh_proj") in self.tensors

    def trunk_state(self, length: int) -> TrunkState:
        """An empty state with room for so many positions."""
        s = self.sizes
        channels = 2 * s.k_heads * s.state + s.v_heads * s.state
        attention = {i: self._key_values(length) for i in range(s.layers) if not s.recurrent[i]}
        recurrent = {
            i: Recurrent(self._zeros(channels, s.kernel - 1), self._zeros(s.v_heads, s.state, s.state))
            for i in range(s.layers)
            if s.recurrent[i]
        }
        return TrunkState(0, attention, recurrent)

    def head_state(self, length: int) -> HeadState:
        return HeadState(0, self._key_values(length))

    def _key_values(self, length: int) -> KeyValues:
        shape = (length, self.sizes.kv_heads, self.sizes.head_dim)
        return KeyValues(*(torch.zeros(shape, device=self.device, dtype=self.dtype) for _ in range(2)))

    def _zeros(self, *shape: int) -> Tensor:
        return torch.zeros(shape, device=self.device)

    # --- trunk

    @torch.inference_mode()
    def trunk(self, tokens: Tensor, state: TrunkState, *, keep_rows: bool = True, final_norm: bool = True) -> Tensor:
        """Hidden states [rows, hidden] of tokens [rows] at the state's next positions.

        Nothing is decided yet: `commit` says how many of the rows count. keep_rows: whether any number may be
        committed; without it all rows must be. final_norm: whether it has been applied.
        """
        x = self._embedding("token_embd.weight", tokens)
        positions = torch.arange(state.length, state.length + len(tokens), device=self.device)
        for i in range(self.sizes.layers):
            normed = self._norm(x, f"blk.{i}.attn_norm.weight")
            if self.sizes.recurrent[i]:
                mixed = self._delta_net(i, normed, state.recurrent[i], keep_rows=keep_rows)
            else:
                mixed = self._attention(i, normed, positions, state.attention[i])
            x = x + mixed
            x = x + self._ffn(i, self._norm(x, f"blk.{i}.post_attention_norm.weight"))
        return self._norm(x, "output_norm.weight") if final_norm else x

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
        name = "output.weight" if "output.weight" in self.tensors else "token_embd.weight"
        return self._product(hidden, self.tensors[name]).float()

    # --- head

    def _glue(self, name: str) -> str:
        return f"blk.{self.sizes.layers}.nextn.{name}.weight"

    @torch.inference_mode()
    def head(self, hidden: Tensor, tokens: Tensor, state: HeadState) -> Tensor:
        """States [rows, hidden] that predict the token after `tokens` [rows].

        hidden: for each token the trunk's state at the position before it, or for chained drafts what this returned.
        Entries are written from state.length on and count at once; to take some back, lower it.
        """
        i = self.sizes.layers
        own = self._glue("embed_tokens")
        embedded = self._embedding(own if own in self.tensors else "token_embd.weight", tokens)
        both = [self._norm(embedded, self._glue("enorm")), self._norm(hidden, self._glue("hnorm"))]
        x = self._linear(self._glue("eh_proj"), torch.cat(both, dim=-1))
        positions = torch.arange(state.length, state.length + len(tokens), device=self.device)
        x = x + self._attention(i, self._norm(x, f"blk.{i}.attn_norm.weight"), positions, state.attention)
        x = x + self._ffn(i, self._norm(x, f"blk.{i}.post_attention_norm.weight"))
        state.length += len(tokens)
        final = self._glue("shared_head_norm")
        return self._norm(x, final if final in self.tensors else "output_norm.weight")

    @torch.inference_mode()
    def head_logits(self, hidden: Tensor) -> Tensor:
        """Logits [rows, vocabulary] of the head's states."""
        own = self._glue("shared_head_head")
        return self._product(hidden, self.tensors[own]).float() if own in self.tensors else self.logits(hidden)

    # --- parts

    def _embedding(self, name: str, tokens: Tensor) -> Tensor:
        return self.tensors.rows(name, tokens)

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

    def unstable(self, width: int, context: int, rounds: int = 4) -> set[object]:
        """What gives a row other bits when it stands elsewhere among `width` rows or beside others, on this machine.

        Shapes of matrices [out, in], and ATTENTION over `context` positions.
        """
        source = torch.Generator().manual_seed(width)
        s, found = self.sizes, set[object]()

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
        keys, values = (self._random(source, s.heads, context, s.head_dim) for _ in range(2))
        last = torch.full((width,), context - 1, device=self.device)
        if moves(lambda x: self._attend(x, last, keys, values), s.heads, s.head_dim):
            found.add(ATTENTION)
        return found

    def _multiplies(self, name: str) -> bool:
        return len(self.tensors.shape(name)) == 2 and "embd" not in name and "conv1d" not in name

    def _random(self, source: torch.Generator, *shape: int) -> Tensor:
        return torch.randn(shape, generator=source).to(self.device, self.dtype)

    def _norm(self, x: Tensor, name: str) -> Tensor:
        return _rms_norm(x, self.sizes.eps, self.tensors[name])

    def _attention(self, i: int, x: Tensor, positions: Tensor, cache: KeyValues) -> Tensor:
        """Gated attention of one layer, with entries written at `positions` [rows]."""
        s, rows = self.sizes, len(x)
        query, gate = self._linear(f"blk.{i}.attn_q.weight", x).view(rows, s.heads, 2, s.head_dim).unbind(2)
        key = self._linear(f"blk.{i}.attn_k.weight", x).view(rows, s.kv_heads, s.head_dim)
        value = self._linear(f"blk.{i}.attn_v.weight", x).view(rows, s.kv_heads, s.head_dim)
        query = self._rotated(self._norm(query, f"blk.{i}.attn_q_norm.weight"), positions)
        key = self._rotated(self._norm(key, f"blk.{i}.attn_k_norm.weight"), positions)
        cache.keys[positions], cache.values[positions] = key, value
        group = s.heads // s.kv_heads
        keys, values = (c.repeat_interleave(group, dim=1).transpose(0, 1) for c in (cache.keys, cache.values))
        mixed = self._by_rows(ATTENTION, lambda q, at: self._attend(q, at, keys, values), query, positions)
        return self._linear(f"blk.{i}.attn_output.weight", (mixed * torch.sigmoid(gate)).reshape(rows, -1))

    def _attend(self, query: Tensor, positions: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        """[rows, heads, head dim] of queries at `positions` over keys and values [heads, length, head dim]."""
        scores = (query.transpose(0, 1) @ keys.transpose(1, 2)).float() * self.sizes.head_dim**-0.5
        beyond = torch.arange(keys.shape[1], device=self.device)[None, :] > positions[:, None]
        weights = scores.masked_fill(beyond, float("-inf")).softmax(dim=-1).to(self.dtype)  # [heads, rows, length]
        return (weights @ values).transpose(0, 1)

    def _rotated(self, x: Tensor, positions: Tensor) -> Tensor:
        """Rotary positions on the first rope_dim elements of every head, halves paired."""
        half = self.sizes.rope_dim // 2
        steps = torch.arange(half, device=self.device, dtype=torch.float32) / half
        angles = positions[:, None].float() * (self.sizes.rope_base**-steps)[None, :]
        cos, sin = angles.cos()[:, None, :], angles.sin()[:, None, :]
        a, b, rest = x[..., :half].float(), x[..., half : 2 * half].float(), x[..., 2 * half :]
        return torch.cat([(a * cos - b * sin).to(x.dtype), (b * cos + a * sin).to(x.dtype), rest], dim=-1)

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
        normed = _rms_norm(torch.stack(outputs), s.eps, self.tensors[f"blk.{i}.ssm_norm.weight"])
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


def _rms_norm(x: Tensor, eps: float, weight: Tensor) -> Tensor:
    """RMS norm with weight, computed in float32, given in the dtype of x."""
    wide = x.float()
    return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps) * weight).to(x.dtype)


def _unit(x: Tensor) -> Tensor:
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + 1e-6)
