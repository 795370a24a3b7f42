"""Qwen3-Next: the older sibling of Qwen3.5 MoE, with fused projections of the gated delta net, grouped by key head.

Source: spec/qwen.md, section 3; llama.cpp src/models/qwen3next.cpp. Value heads stay grouped: nothing is tiled.
"""

from __future__ import annotations

from converter.archs.qwen35 import Sizes, architecture
from converter.config import Config
from converter.errors import UnsupportedError
from converter.rules import Rule
from converter.transforms import GroupParts, NegExp, SqueezeMiddle, Transform


def _linear_attention(s: Sizes, source: str, block: int) -> list[Rule]:
    values = s.v_heads // s.k_heads * s.v_dim  # rows of a key head's values
    parts = (s.k_dim, s.k_dim, values, values)
    fused = (s.k_heads * sum(parts), s.hidden)

    def rule(target: str, name: str, shape: tuple[int, ...], *steps: Transform) -> Rule:
        return Rule(f"blk.{block}.{target}", (f"{source}.linear_attn.{name}",), shape, steps)

    return [
        rule("attn_qkv.weight", "in_proj_qkvz.weight", fused, GroupParts(s.k_heads, parts, (0, 1, 2))),
        rule("attn_gate.weight", "in_proj_qkvz.weight", fused, GroupParts(s.k_heads, parts, (3,))),
        rule("ssm_ba.weight", "in_proj_ba.weight", (2 * s.v_heads, s.hidden)),
        rule("ssm_conv1d.weight", "conv1d.weight", (s.keys + s.values, 1, s.kernel), SqueezeMiddle()),
        rule("ssm_a", "A_log", (s.v_heads,), NegExp()),
        rule("ssm_dt.bias", "dt_bias", (s.v_heads,)),
        rule("ssm_norm.weight", "norm.weight", (s.v_dim,)),
        rule("ssm_out.weight", "out_proj.weight", (s.hidden, s.values)),
    ]


def _check(config: Config) -> None:
    """The engine has experts in every layer."""
    dense, step = config.get("mlp_only_layers", []), config.integer("decoder_sparse_step", 1)
    if dense or step != 1:
        raise UnsupportedError(
            "layers without experts cannot be converted", config.file,
            expected="mlp_only_layers empty, decoder_sparse_step 1", found=f"{dense} and {step}",
        )  # fmt: skip


ARCHITECTURES = (
    architecture(
        "qwen3next", ("Qwen3NextForCausalLM",), moe=True, linear=_linear_attention, plain_rope=True, check=_check
    ),
)  # fmt: skip
