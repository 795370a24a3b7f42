"""Qwen3.5 and 3.6, dense and MoE: gated delta net and full attention, an MTP head of one full-attention layer.

Source: spec/qwen.md; llama.cpp src/models/qwen35.cpp and qwen35moe.cpp for what the loader asks for.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection
from dataclasses import dataclass

from converter.config import Config
from converter.errors import ConfigError, UnsupportedError
from converter.gguf_file import KeyValue, ValueType, array, f32, text, u32
from converter.rules import Architecture, Drop, Role, Rule, Table
from converter.transforms import AddOne, NegExp, Part, SqueezeMiddle, TileColumns, TileHeads, Transform

LINEAR, FULL = "linear_attention", "full_attention"
_DEFAULT_SECTIONS = [11, 11, 10, 0]
_YARN = (
    ("yarn_ext_factor", ("extrapolation_factor",)),
    ("yarn_attn_factor", ("attention_factor", "attn_factor")),
    ("yarn_beta_fast", ("beta_fast",)),
    ("yarn_beta_slow", ("beta_slow",)),
)


@dataclass(frozen=True)
class Sizes:
    """The numbers of one config, checked; names as in spec/qwen.md, section 1."""

    layers: int
    kinds: tuple[str, ...]
    interval: int
    hidden: int
    vocabulary: int
    ffn: int
    experts: int
    shared_ffn: int
    heads: int
    kv_heads: int
    head_dim: int
    k_heads: int
    v_heads: int
    k_dim: int
    v_dim: int
    kernel: int
    plain_rope: bool

    @property
    def keys(self) -> int:
        """Rows of all queries and keys of a linear-attention projection."""
        return 2 * self.k_heads * self.k_dim

    @property
    def values(self) -> int:
        return self.v_heads * self.v_dim


LinearAttention = Callable[[Sizes, str, int], list[Rule]]  # of sizes, source prefix, block


def canonical(name: str) -> str:
    """One spelling for the prefixes that wrappers and exports use."""
    name = name.replace("language_model.", "")
    if name.startswith("model.mtp."):
        name = name.removeprefix("model.")
    if name.startswith(("layers.", "embed_tokens.", "norm.")):
        name = f"model.{name}"
    if name.startswith("visual."):
        name = f"model.{name}"
    return re.sub(r"(\.experts\.(?:gate_up|down)_proj)\.weight$", r"\1", name)


def _sizes(config: Config, names: Collection[str], *, moe: bool, plain_rope: bool) -> Sizes:
    layers = config.integer("num_hidden_layers")
    heads, hidden = config.integer("num_attention_heads"), config.integer("hidden_size")
    sizes = Sizes(
        layers=layers,
        kinds=_layer_kinds(config, names, layers),
        interval=config.integer("full_attention_interval", 4),
        hidden=hidden,
        vocabulary=config.integer("vocab_size"),
        ffn=config.integer("moe_intermediate_size" if moe else "intermediate_size"),
        experts=config.integer("num_experts") if moe else 0,
        shared_ffn=config.integer("shared_expert_intermediate_size") if moe else 0,
        heads=heads,
        kv_heads=config.integer("num_key_value_heads"),
        head_dim=config.integer("head_dim", max(1, hidden // heads)),
        k_heads=config.integer("linear_num_key_heads"),
        v_heads=config.integer("linear_num_value_heads"),
        k_dim=config.integer("linear_key_head_dim"),
        v_dim=config.integer("linear_value_head_dim"),
        kernel=config.integer("linear_conv_kernel_dim"),
        plain_rope=plain_rope,
    )
    if sizes.v_heads % sizes.k_heads:
        raise ConfigError(
            "value heads are not a multiple of key heads", config.file,
            expected=f"linear_num_value_heads divisible by {sizes.k_heads}", found=sizes.v_heads,
        )  # fmt: skip
    if sizes.k_dim != sizes.v_dim:
        raise UnsupportedError(
            "the engine has one size for linear key and value heads", config.file,
            expected="linear_key_head_dim = linear_value_head_dim", found=f"{sizes.k_dim} and {sizes.v_dim}",
        )  # fmt: skip
    if sizes.heads % sizes.kv_heads:
        raise ConfigError(
            "attention heads are not a multiple of key/value heads", config.file,
            expected=f"num_attention_heads divisible by {sizes.kv_heads}", found=sizes.heads,
        )  # fmt: skip
    return sizes


def _layer_kinds(config: Config, names: Collection[str], layers: int) -> tuple[str, ...]:
    """The kind of every trunk layer: what the tensors show, which the config must not contradict."""
    kinds = config.get("layer_types")
    interval = config.integer("full_attention_interval", 4)
    derived = [LINEAR if (i + 1) % interval else FULL for i in range(layers)]
    shown = {int(m[1]): m[2] for n in names if (m := re.match(r"model\.layers\.(\d+)\.(linear_attn|self_attn)\.", n))}
    seen = {i: LINEAR if block == "linear_attn" else FULL for i, block in shown.items()}
    if kinds is None:
        return tuple(seen.get(i, derived[i]) for i in range(layers))
    if not isinstance(kinds, list) or any(k not in {LINEAR, FULL} for k in kinds) or len(kinds) != layers:
        raise ConfigError(
            'config.json: "layer_types" has a wrong value', config.file,
            expected=f"{layers} entries (num_hidden_layers), each {LINEAR} or {FULL}",
            found=f"{len(kinds)} entries" if isinstance(kinds, list) else repr(kinds),
        )  # fmt: skip
    for i, kind in enumerate(kinds):
        if seen.get(i, kind) != kind:
            raise ConfigError(
                f"config.json and the weights disagree about layer {i}", config.file,
                tensor=f"model.layers.{i}.{shown[i]}.*", expected=f"{kind} (layer_types)", found=seen[i],
            )  # fmt: skip
    return tuple(kinds)


def _table(config: Config, names: Collection[str], *, moe: bool, linear: LinearAttention, plain_rope: bool) -> Table:
    s = _sizes(config, names, moe=moe, plain_rope=plain_rope)
    head_layers = 1 + max((int(m[1]) for n in names if (m := re.match(r"mtp\.layers\.(\d+)\.", n))), default=-1)
    if head_layers == 0 and any(n.startswith("mtp.") for n in names):
        head_layers = 1  # glue without its layer: the completeness check will name what is missing
    tied = config.flag("tie_word_embeddings", default=False)
    rules = [Rule("token_embd.weight", ("model.embed_tokens.weight",), (s.vocabulary, s.hidden), role=Role.SHARED)]
    for i in range(s.layers):
        rules += _layer(s, f"model.layers.{i}", i, names, linear if s.kinds[i] == LINEAR else None, Role.TRUNK)
    rules.append(_norm("output_norm.weight", "model.norm.weight", s.hidden, Role.SHARED))
    has_output = not tied or "lm_head.weight" in names
    if has_output:
        copy_of = "token_embd.weight" if tied else None
        rules.append(
            Rule("output.weight", ("lm_head.weight",), (s.vocabulary, s.hidden), role=Role.SHARED, duplicates=copy_of)
        )
    for k in range(head_layers):
        rules += _layer(s, f"mtp.layers.{k}", s.layers + k, names, None, Role.MTP)
    if head_layers:
        rules += _glue(s, names, "output.weight" if has_output else "token_embd.weight")
    drops = [
        Drop("model.visual.*", "vision tower: goes into a separate mmproj file"),
        Drop("*.rotary_emb.inv_freq", "rotary cache: computed by the engine"),
    ]
    return Table(
        rules, drops, s.layers, head_layers, s.experts, s.heads // s.kv_heads, s.vocabulary,
        optional={"lm_head.weight"} if tied else set(), metadata=lambda heads: _metadata(config, s, heads),
    )  # fmt: skip


def _norm(target: str, source: str, width: int, role: Role) -> Rule:
    return Rule(target, (source,), (width,), (AddOne(),), role)


def _layer(
    s: Sizes, source: str, block: int, names: Collection[str], linear: LinearAttention | None, role: Role
) -> list[Rule]:
    """linear: what makes a linear-attention layer, None for full attention."""
    rules = [
        _norm(f"blk.{block}.attn_norm.weight", f"{source}.input_layernorm.weight", s.hidden, role),
        *(linear(s, source, block) if linear is not None else _full_attention(s, source, block, role)),
        _norm(f"blk.{block}.post_attention_norm.weight", f"{source}.post_attention_layernorm.weight", s.hidden, role),
    ]
    return rules + (_experts(s, source, block, names, role) if s.experts else _dense_ffn(s, source, block, role))


def _full_attention(s: Sizes, source: str, block: int, role: Role) -> list[Rule]:
    def weight(target: str, name: str, rows: int, columns: int) -> Rule:
        return Rule(f"blk.{block}.{target}.weight", (f"{source}.self_attn.{name}.weight",), (rows, columns), role=role)

    def norm(target: str, name: str) -> Rule:
        return _norm(f"blk.{block}.{target}.weight", f"{source}.self_attn.{name}.weight", s.head_dim, role)

    return [
        # Per head the query's rows, then its gate's: the engine reads them interleaved like that.
        weight("attn_q", "q_proj", 2 * s.heads * s.head_dim, s.hidden),
        weight("attn_k", "k_proj", s.kv_heads * s.head_dim, s.hidden),
        weight("attn_v", "v_proj", s.kv_heads * s.head_dim, s.hidden),
        weight("attn_output", "o_proj", s.hidden, s.heads * s.head_dim),
        norm("attn_q_norm", "q_norm"),
        norm("attn_k_norm", "k_norm"),
    ]


def _linear_attention(s: Sizes, source: str, block: int) -> list[Rule]:
    per_k = s.v_heads // s.k_heads

    def tiled(dim: int, start: int = 0) -> tuple[Transform, ...]:
        return () if per_k == 1 else (TileHeads(s.k_heads, per_k, dim, start),)

    columns = () if per_k == 1 else (TileColumns(s.k_heads, per_k, s.v_dim),)
    channels = s.keys + s.values
    conv_story = "the convolution has the layout of an already converted (MLX) checkpoint, whose norms are shifted too"

    def rule(target: str, name: str, shape: tuple[int, ...], steps: tuple[Transform, ...]) -> Rule:
        return Rule(f"blk.{block}.{target}", (f"{source}.linear_attn.{name}",), shape, steps)

    def small(target: str, name: str, shape: tuple[int, ...], steps: tuple[Transform, ...]) -> Rule:
        return Rule(
            f"blk.{block}.{target}", (f"{source}.linear_attn.{name}",), shape, steps,
            known_wrong={(channels, s.kernel, 1): conv_story},
        )  # fmt: skip

    return [
        rule("attn_qkv.weight", "in_proj_qkv.weight", (channels, s.hidden), tiled(s.v_dim, s.keys)),
        rule("attn_gate.weight", "in_proj_z.weight", (s.values, s.hidden), tiled(s.v_dim)),
        rule("ssm_beta.weight", "in_proj_b.weight", (s.v_heads, s.hidden), tiled(1)),
        rule("ssm_alpha.weight", "in_proj_a.weight", (s.v_heads, s.hidden), tiled(1)),
        small(
            "ssm_conv1d.weight", "conv1d.weight", (channels, 1, s.kernel), (*tiled(s.v_dim, s.keys), SqueezeMiddle())
        ),
        small("ssm_a", "A_log", (s.v_heads,), (*tiled(1), NegExp())),
        small("ssm_dt.bias", "dt_bias", (s.v_heads,), tiled(1)),
        # The gated norm multiplies by its weight as it stands: no + 1.
        small("ssm_norm.weight", "norm.weight", (s.v_dim,), ()),
        rule("ssm_out.weight", "out_proj.weight", (s.hidden, s.values), columns),
    ]


def _dense_ffn(s: Sizes, source: str, block: int, role: Role) -> list[Rule]:
    return [
        Rule(f"blk.{block}.ffn_{part}.weight", (f"{source}.mlp.{part}_proj.weight",), shape, role=role)
        for part, shape in (("gate", (s.ffn, s.hidden)), ("up", (s.ffn, s.hidden)), ("down", (s.hidden, s.ffn)))
    ]


def _experts(s: Sizes, source: str, block: int, names: Collection[str], role: Role) -> list[Rule]:
    def rule(target: str, sources: tuple[str, ...], shape: tuple[int, ...], *steps: Transform) -> Rule:
        return Rule(f"blk.{block}.{target}.weight", tuple(f"{source}.mlp.{n}" for n in sources), shape, steps, role)

    def each(part: str) -> tuple[str, ...]:
        return tuple(f"experts.{e}.{part}_proj.weight" for e in range(s.experts))

    wide, narrow = (s.ffn, s.hidden), (s.hidden, s.ffn)
    if f"{source}.mlp.experts.0.gate_proj.weight" in names:
        routed = [
            rule(f"ffn_{part}_exps", each(part), shape)
            for part, shape in (("gate", wide), ("up", wide), ("down", narrow))
        ]
    else:
        packed = ("experts.gate_up_proj",)
        both = (s.experts, 2 * s.ffn, s.hidden)
        routed = [
            rule("ffn_gate_exps", packed, both, Part(0, 2)),
            rule("ffn_up_exps", packed, both, Part(1, 2)),
            rule("ffn_down_exps", ("experts.down_proj",), (s.experts, *narrow)),
        ]
    wide, narrow = (s.shared_ffn, s.hidden), (s.hidden, s.shared_ffn)
    return [
        rule("ffn_gate_inp", ("gate.weight",), (s.experts, s.hidden)),
        *routed,
        rule("ffn_gate_shexp", ("shared_expert.gate_proj.weight",), wide),
        rule("ffn_up_shexp", ("shared_expert.up_proj.weight",), wide),
        rule("ffn_down_shexp", ("shared_expert.down_proj.weight",), narrow),
        rule("ffn_gate_inp_shexp", ("shared_expert_gate.weight",), (1, s.hidden)),
    ]


def _glue(s: Sizes, names: Collection[str], trunk_output: str) -> list[Rule]:
    """What joins the head to the trunk; it sits on the head's first block."""

    def target(name: str) -> str:
        return f"blk.{s.layers}.nextn.{name}.weight"

    # Columns 0 ... hidden - 1 read the embedding, the others the trunk's state: as the engine has it.
    rules = [Rule(target("eh_proj"), ("mtp.fc.weight",), (s.hidden, 2 * s.hidden), role=Role.MTP)]
    rules += [
        _norm(target("enorm"), "mtp.pre_fc_norm_embedding.weight", s.hidden, Role.MTP),
        _norm(target("hnorm"), "mtp.pre_fc_norm_hidden.weight", s.hidden, Role.MTP),
        _norm(target("shared_head_norm"), "mtp.norm.weight", s.hidden, Role.MTP),
    ]
    # No published head owns these two; one that does keeps them unless they repeat the trunk's.
    for name, source, trunk in (
        ("embed_tokens", "mtp.embed_tokens.weight", "token_embd.weight"),
        ("shared_head_head", "mtp.lm_head.weight", trunk_output),
    ):
        if source in names:
            rules.append(Rule(target(name), (source,), (s.vocabulary, s.hidden), role=Role.MTP, duplicates=trunk))
    return rules


def _metadata(config: Config, s: Sizes, head_layers: int) -> list[KeyValue]:
    """The architecture's own keys, of a file that holds `head_layers` of the head (spec/qwen.md, section 5)."""
    rope = config.section("rope_parameters", "rope_scaling")
    partial = rope.number("partial_rotary_factor", config.number("partial_rotary_factor", 0.25))
    theta = rope.number("rope_theta") if rope.get("rope_theta") is not None else config.number("rope_theta")
    sections = rope.integers("mrope_section", [] if s.plain_rope else _DEFAULT_SECTIONS)[:4]
    recurrent = [kind == LINEAR for kind in s.kinds] + [False] * head_layers
    moe = s.experts > 0
    keys = [
        u32("block_count", s.layers + head_layers),
        u32("context_length", config.integer("max_position_embeddings")),
        u32("embedding_length", s.hidden),
    ]
    if config.get("intermediate_size") is not None:
        keys.append(u32("feed_forward_length", config.integer("intermediate_size")))
    keys += [
        u32("attention.head_count", s.heads),
        u32("attention.head_count_kv", s.kv_heads),
        *_rope_scaling(config, rope),
        *(
            [array("rope.dimension_sections", ValueType.INT32, sections + [0] * (4 - len(sections)))]
            if sections
            else []
        ),
        f32("rope.freq_base", theta),
        f32("attention.layer_norm_rms_epsilon", config.number("rms_norm_eps")),
    ]
    if moe:
        keys += [u32("expert_count", s.experts), u32("expert_used_count", config.integer("num_experts_per_tok"))]
    keys += [u32("attention.key_length", s.head_dim), u32("attention.value_length", s.head_dim)]
    if moe:
        keys += [u32("expert_feed_forward_length", s.ffn), u32("expert_shared_feed_forward_length", s.shared_ffn)]
    if head_layers:
        keys.append(u32("nextn_predict_layers", head_layers))
    return [
        *keys,
        u32("ssm.conv_kernel", s.kernel),
        u32("ssm.state_size", s.k_dim),
        u32("ssm.group_count", s.k_heads),
        u32("ssm.time_step_rank", s.v_heads),
        u32("ssm.inner_size", s.values),
        array("attention.recurrent_layers", ValueType.BOOL, recurrent),
        u32("full_attention_interval", s.interval),
        u32("rope.dimension_count", int(s.head_dim * partial)),
    ]


def _rope_scaling(config: Config, rope: Config) -> list[KeyValue]:
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind == "default":
        return []
    if kind not in {"linear", "yarn"}:
        raise UnsupportedError("unknown rope scaling", config.file, expected="default, linear or yarn", found=kind)
    keys = [text("rope.scaling.type", kind), f32("rope.scaling.factor", rope.number("factor"))]
    if kind == "yarn":
        original = config.integer("max_position_embeddings")
        keys.append(
            u32("rope.scaling.original_context_length", rope.integer("original_max_position_embeddings", original))
        )
        for key, spellings in _YARN:
            found = next((k for k in spellings if rope.get(k) is not None), None)
            if found:
                keys.append(f32(f"rope.scaling.{key}", rope.number(found)))
    return keys


def architecture(
    name: str,
    hf: tuple[str, ...],
    *,
    moe: bool,
    linear: LinearAttention | None = None,
    plain_rope: bool = False,
    check: Callable[[Config], None] = lambda _config: None,
) -> Architecture:
    """One of the family. linear: rules of a linear-attention layer. plain_rope: no sections unless the config has some.

    check: raises ToolError for a config that cannot be converted.
    """

    def table(config: Config, names: Collection[str]) -> Table:
        check(config)
        return _table(config, names, moe=moe, linear=linear or _linear_attention, plain_rope=plain_rope)

    return Architecture(
        name, hf, canonical, table, head_input="the trunk's state after its final norm", most_head_layers=1
    )


ARCHITECTURES = (
    architecture("qwen35", ("Qwen3_5ForConditionalGeneration", "Qwen3_5ForCausalLM"), moe=False),
    architecture("qwen35moe", ("Qwen3_5MoeForConditionalGeneration", "Qwen3_5MoeForCausalLM"), moe=True),
)
