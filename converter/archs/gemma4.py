"""Gemma 4 (dense, experts, per-layer embeddings) and its assistant, a drafter in a checkpoint of its own.

Source: spec/gemma4.md; llama.cpp src/models/gemma4.cpp and gemma4-assistant.cpp for what the loader asks for. Norms
multiply by their weight as it stands: no + 1, unlike earlier Gemmas.
"""

from __future__ import annotations

import re
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

from converter.config import Config
from converter.errors import CheckpointError, ConfigError
from converter.gguf_file import KeyValue, ValueType, array, f32, u32
from converter.rules import Architecture, Drop, Rule, Table

SLIDING, FULL = "sliding_attention", "full_attention"
_NEVER_ROTATED = 1e30  # a frequency factor that leaves a pair of dimensions as it is


@dataclass(frozen=True)
class Sizes:
    """The numbers of one config, checked; what differs between kinds of layers is by layer."""

    layers: int
    kinds: tuple[str, ...]
    hidden: int
    vocabulary: int
    heads: int
    head_dims: tuple[int, ...]
    kv_heads: tuple[int, ...]
    ffn: tuple[int, ...]
    shared: int
    key_is_value: bool
    experts: int
    expert_ffn: int
    per_layer: int
    per_layer_vocabulary: int

    def owns_cache(self, i: int) -> bool:
        """Whether a layer has keys and values; the last `shared` layers read another's."""
        return i < self.layers - self.shared

    def last(self, values: tuple[int, ...], kind: str) -> int | None:
        """The value of the last layer of a kind."""
        return next((v for v, k in zip(reversed(values), reversed(self.kinds), strict=True) if k == kind), None)


def canonical(name: str) -> str:
    """One spelling for the prefixes that wrappers and exports use."""
    name = name.replace("language_model.", "")
    if name.startswith(("layers.", "embed_tokens", "norm.", "per_layer_")):
        name = f"model.{name}"
    return re.sub(r"(\.experts\.(?:gate_up|down)_proj)\.weight$", r"\1", name)


def _sizes(config: Config) -> Sizes:
    layers = config.integer("num_hidden_layers")
    kinds = config.get("layer_types")
    if not isinstance(kinds, list) or len(kinds) != layers or any(k not in {SLIDING, FULL} for k in kinds):
        raise ConfigError(
            'config.json: "layer_types" has a wrong value', config.file,
            expected=f"{layers} entries (num_hidden_layers), each {SLIDING} or {FULL}", found=repr(kinds)[:200],
        )  # fmt: skip
    head_dim, kv_heads = config.integer("head_dim"), config.integer("num_key_value_heads")
    full_dim = config.integer("global_head_dim", head_dim)
    full_kv_heads = config.integer("num_global_key_value_heads", kv_heads)
    shared = config.integer("num_kv_shared_layers", 0, least=0)
    ffn, wide = config.integer("intermediate_size"), config.flag("use_double_wide_mlp", default=False)
    if shared > layers:
        raise ConfigError(
            "more layers share keys and values than there are", config.file, expected=f"at most {layers}", found=shared
        )
    experts = config.integer("num_experts") if config.flag("enable_moe_block", default=False) else 0
    per_layer = config.integer("hidden_size_per_layer_input", 0, least=0)
    return Sizes(
        layers=layers,
        kinds=tuple(kinds),
        hidden=config.integer("hidden_size"),
        vocabulary=config.integer("vocab_size"),
        heads=config.integer("num_attention_heads"),
        head_dims=_by_layer(config, kinds, "head_dim", head_dim, full_dim),
        kv_heads=_by_layer(config, kinds, "num_key_value_heads", kv_heads, full_kv_heads),
        ffn=tuple(2 * ffn if wide and i >= layers - shared else ffn for i in range(layers)),
        shared=shared,
        key_is_value=config.flag("attention_k_eq_v", default=False),
        experts=experts,
        expert_ffn=config.integer("moe_intermediate_size") if experts else 0,
        per_layer=per_layer,
        per_layer_vocabulary=config.integer("vocab_size_per_layer_input") if per_layer else 0,
    )


def _by_layer(config: Config, kinds: list[str], key: str, sliding: int, full: int) -> tuple[int, ...]:
    """A number of every layer: by its kind, or as per_layer_config has it."""
    own = config.get("per_layer_config", {})
    found = []
    for i, kind in enumerate(kinds):
        entry: Any = own.get(str(i), {}) if isinstance(own, dict) else {}
        value = entry.get(key) if isinstance(entry, dict) else None
        found.append(value if type(value) is int and value > 0 else full if kind == FULL else sliding)
    return tuple(found)


def _table(config: Config, names: Collection[str]) -> Table:
    s = _sizes(config)
    rules = [
        *_rope_factors(config, s),
        Rule("token_embd.weight", ("model.embed_tokens.weight",), (s.vocabulary, s.hidden)),
        *_per_layer_embedding(s),
    ]
    for i in range(s.layers):
        rules += _layer(s, i)
    rules.append(Rule("output_norm.weight", ("model.norm.weight",), (s.hidden,)))
    tied = config.flag("tie_word_embeddings", default=True)
    if not tied or "lm_head.weight" in names:
        copy_of = "token_embd.weight" if tied else None
        rules.append(Rule("output.weight", ("lm_head.weight",), (s.vocabulary, s.hidden), duplicates=copy_of))
    return Table(
        rules, _drops(s), s.layers, 0, s.experts, s.heads // s.kv_heads[0], s.vocabulary,
        optional={"lm_head.weight"}, metadata=lambda _heads: _metadata(config, s),
    )  # fmt: skip


def _assistant_table(config: Config, names: Collection[str]) -> Table:
    s, target = _sizes(config), config.integer("backbone_hidden_size")
    trunk = _table(config, names)
    rules = [
        *trunk.rules,
        Rule("nextn.pre_projection.weight", ("pre_projection.weight",), (s.hidden, 2 * target)),
        Rule("nextn.post_projection.weight", ("post_projection.weight",), (target, s.hidden)),
    ]

    def metadata(_heads: int) -> list[KeyValue]:
        own = [u32("embedding_length_out", target), u32("nextn_predict_layers", s.layers)]
        return [*_metadata(config, s), *own]

    ordered = Drop("masked_embedding.*", "ordered embeddings of the drafter: engines score the whole vocabulary")
    return Table(
        rules, [*trunk.drops, ordered], s.layers, 0, 0, trunk.heads_per_kv_head, s.vocabulary,
        optional=trunk.optional, metadata=metadata,
    )  # fmt: skip


def _rope_factors(config: Config, s: Sizes) -> list[Rule]:
    """Proportional rotary positions of the full layers, made: ones for what rotates, a huge factor for the rest."""
    if FULL not in s.kinds:
        return []
    dim = s.last(s.head_dims, FULL)
    assert dim is not None
    partial = config.section("rope_parameters").section(FULL).number("partial_rotary_factor", 1.0)
    rotated = int(dim * partial / 2)
    return [
        Rule("rope_freqs.weight", (), (dim // 2,), made=(1.0,) * rotated + (_NEVER_ROTATED,) * (dim // 2 - rotated))
    ]


def _per_layer_embedding(s: Sizes) -> list[Rule]:
    if not s.per_layer:
        return []
    width = s.layers * s.per_layer
    return [
        Rule(
            "per_layer_token_embd.weight", ("model.embed_tokens_per_layer.weight",), (s.per_layer_vocabulary, width)
        ),
        Rule("per_layer_model_proj.weight", ("model.per_layer_model_projection.weight",), (width, s.hidden)),
        Rule("per_layer_proj_norm.weight", ("model.per_layer_projection_norm.weight",), (s.per_layer,)),
    ]  # fmt: skip


def _layer(s: Sizes, i: int) -> list[Rule]:
    source, dim, kv, ffn = f"model.layers.{i}", s.head_dims[i], s.kv_heads[i], s.ffn[i]

    def rule(target: str, name: str, *shape: int) -> Rule:
        return Rule(f"blk.{i}.{target}", (f"{source}.{name}",), shape)

    rules = [
        rule("attn_norm.weight", "input_layernorm.weight", s.hidden),
        rule("attn_q.weight", "self_attn.q_proj.weight", s.heads * dim, s.hidden),
        rule("attn_q_norm.weight", "self_attn.q_norm.weight", dim),
        rule("attn_output.weight", "self_attn.o_proj.weight", s.hidden, s.heads * dim),
        rule("post_attention_norm.weight", "post_attention_layernorm.weight", s.hidden),
        rule("ffn_norm.weight", "pre_feedforward_layernorm.weight", s.hidden),
        rule("ffn_gate.weight", "mlp.gate_proj.weight", ffn, s.hidden),
        rule("ffn_up.weight", "mlp.up_proj.weight", ffn, s.hidden),
        rule("ffn_down.weight", "mlp.down_proj.weight", s.hidden, ffn),
        rule("post_ffw_norm.weight", "post_feedforward_layernorm.weight", s.hidden),
        rule("layer_output_scale.weight", "layer_scalar", 1),
    ]
    if s.owns_cache(i):
        rules += [
            rule("attn_k.weight", "self_attn.k_proj.weight", kv * dim, s.hidden),
            rule("attn_k_norm.weight", "self_attn.k_norm.weight", dim),
        ]
        if not (s.key_is_value and s.kinds[i] == FULL):
            rules.append(rule("attn_v.weight", "self_attn.v_proj.weight", kv * dim, s.hidden))
    if s.experts:
        rules += [
            rule("ffn_gate_inp.weight", "router.proj.weight", s.experts, s.hidden),
            rule("ffn_gate_inp.scale", "router.scale", s.hidden),
            rule("ffn_down_exps.scale", "router.per_expert_scale", s.experts),
            rule("ffn_gate_up_exps.weight", "experts.gate_up_proj", s.experts, 2 * s.expert_ffn, s.hidden),
            rule("ffn_down_exps.weight", "experts.down_proj", s.experts, s.hidden, s.expert_ffn),
            rule("pre_ffw_norm_2.weight", "pre_feedforward_layernorm_2.weight", s.hidden),
            rule("post_ffw_norm_1.weight", "post_feedforward_layernorm_1.weight", s.hidden),
            rule("post_ffw_norm_2.weight", "post_feedforward_layernorm_2.weight", s.hidden),
        ]
    if s.per_layer:
        rules += [
            rule("inp_gate.weight", "per_layer_input_gate.weight", s.per_layer, s.hidden),
            rule("proj.weight", "per_layer_projection.weight", s.hidden, s.per_layer),
            rule("post_norm.weight", "post_per_layer_input_norm.weight", s.hidden),
        ]
    return rules


def _drops(s: Sizes) -> list[Drop]:
    towers = "vision and audio towers: go into a separate mmproj file"
    drops = [
        Drop(f"model.{part}.*", towers)
        for part in ("vision_tower", "audio_tower", "embed_vision", "embed_audio", "vision_embedder")
    ]
    drops.append(Drop("*.rotary_emb.*", "rotary cache: computed by the engine"))
    reader = "keys and values of layers that read another layer's"
    for i in range(s.layers - s.shared, s.layers):
        drops += [Drop(f"model.layers.{i}.self_attn.{n}.weight", reader) for n in ("k_proj", "v_proj", "k_norm")]
    return drops


def _metadata(config: Config, s: Sizes) -> list[KeyValue]:
    """The architecture's own keys (spec/gemma4.md, "Keys")."""
    rope = config.section("rope_parameters")
    full, sliding = rope.section(FULL), rope.section(SLIDING)
    head_dim = config.integer("head_dim")
    full_dim = s.last(s.head_dims, FULL) or head_dim
    swa_dim = s.last(s.head_dims, SLIDING) or head_dim
    same_ffn, same_kv = len(set(s.ffn)) == 1, len(set(s.kv_heads)) == 1
    keys = [
        u32("block_count", s.layers),
        u32("context_length", config.integer("max_position_embeddings")),
        u32("embedding_length", s.hidden),
        u32("feed_forward_length", s.ffn[0])
        if same_ffn
        else array("feed_forward_length", ValueType.INT32, list(s.ffn)),
        u32("attention.head_count", s.heads),
        u32("attention.head_count_kv", s.kv_heads[0])
        if same_kv
        else array("attention.head_count_kv", ValueType.INT32, list(s.kv_heads)),
        f32("rope.freq_base", full.number("rope_theta")),
        f32("rope.freq_base_swa", sliding.number("rope_theta")),
        f32("attention.layer_norm_rms_epsilon", config.number("rms_norm_eps")),
        u32("attention.key_length", full_dim),
        u32("attention.value_length", full_dim),
    ]
    if s.experts:
        keys += [
            u32("expert_count", s.experts),
            u32("expert_used_count", config.integer("top_k_experts")),
            u32("expert_feed_forward_length", s.expert_ffn),
        ]
    if config.get("final_logit_softcapping") is not None:
        keys.append(f32("final_logit_softcapping", config.number("final_logit_softcapping")))
    return [
        *keys,
        u32("attention.sliding_window", config.integer("sliding_window")),
        u32("attention.shared_kv_layers", s.shared),
        u32("embedding_length_per_layer_input", s.per_layer),
        array("attention.sliding_window_pattern", ValueType.BOOL, [k == SLIDING for k in s.kinds]),
        u32("attention.key_length_swa", swa_dim),
        u32("attention.value_length_swa", swa_dim),
        u32("rope.dimension_count", full_dim),
        u32("rope.dimension_count_swa", int(swa_dim * sliding.number("partial_rotary_factor", 1.0))),
    ]


def check_pair(drafter: Config, target: Config) -> None:
    """Raise CheckpointError where a drafter was not made for a target: it reads the target's states and its cache."""
    d, t = _sizes(drafter), _sizes(target)
    pairs: list[tuple[str, object, object]] = [
        ("hidden size", t.hidden, drafter.integer("backbone_hidden_size")),
        ("vocabulary size", t.vocabulary, d.vocabulary),
        ("sliding window", target.integer("sliding_window"), drafter.integer("sliding_window")),
    ]
    for kind in dict.fromkeys(d.kinds):
        owners = Sizes(**{**vars(t), "kinds": t.kinds[: t.layers - t.shared], "layers": t.layers - t.shared})
        count = len(owners.kinds)
        if kind not in owners.kinds:
            pairs.append((f"layers of kind {kind} that own a cache", "none", "needed"))
            continue
        pairs += [
            (f"head size of {kind}", owners.last(t.head_dims[:count], kind), d.last(d.head_dims, kind)),
            (f"key/value heads of {kind}", owners.last(t.kv_heads[:count], kind), d.last(d.kv_heads, kind)),
        ]
    for what, wanted, found in pairs:
        if wanted != found:
            raise CheckpointError(
                f"this drafter does not belong to the target: {what}", drafter.file, expected=f"{wanted} ({target.file})",
                found=found, hint="take the assistant of the same model",
            )  # fmt: skip


ARCHITECTURES = (
    Architecture(
        "gemma4",
        ("Gemma4ForConditionalGeneration", "Gemma4ForCausalLM", "Gemma4UnifiedForConditionalGeneration"),
        canonical, _table, head_input="the trunk's state after its final norm", most_head_layers=0, tokenizer="gemma4",
    ),
    Architecture(
        "gemma4-assistant", ("Gemma4AssistantForCausalLM", "Gemma4UnifiedAssistantForCausalLM"), canonical,
        _assistant_table, head_input="the target's state after its final norm, and its keys and values",
        most_head_layers=0, tokenizer="gemma4", drafts_for="gemma4", check_pair=check_pair,
    ),
)  # fmt: skip
