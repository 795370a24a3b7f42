"""Mixes: which block type each tensor gets for a name like Q4_K_M (spec/quant.md, sections 9 to 11).

Trunks follow llama-quantize's table for a trunk-only file, so that a trunk has the same bytes with and without a head.
A head has a rule of its own: the mix's type, with the three most sensitive tensors one step up in `_M` mixes.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from quant.block import BlockType, block_type
from quant.errors import UnknownTypeError

Shape = tuple[int, ...]


@dataclass(frozen=True)
class Mix:
    """A recipe over tensors. type: what most tensors get; file_type: GGUF's number for it."""

    name: str
    type: str
    file_type: int


MIXES = {
    m.name: m
    for m in (
        Mix("F32", "F32", 0),
        Mix("F16", "F16", 1),
        Mix("BF16", "BF16", 32),
        Mix("Q8_0", "Q8_0", 7),
        Mix("Q6_K", "Q6_K", 18),
        Mix("Q5_K_M", "Q5_K", 17),
        Mix("Q5_K_S", "Q5_K", 16),
        Mix("Q5_1", "Q5_1", 9),
        Mix("Q5_0", "Q5_0", 8),
        Mix("Q4_K_M", "Q4_K", 15),
        Mix("Q4_K_S", "Q4_K", 14),
        Mix("Q4_1", "Q4_1", 3),
        Mix("Q4_0", "Q4_0", 2),
        Mix("IQ4_NL", "IQ4_NL", 25),
        Mix("IQ4_XS", "IQ4_XS", 30),
        Mix("Q3_K_L", "Q3_K", 13),
        Mix("Q3_K_M", "Q3_K", 12),
        Mix("Q3_K_S", "Q3_K", 11),
        Mix("Q2_K", "Q2_K", 10),
    )
}
_ALIASES = {"Q5_K": "Q5_K_M", "Q4_K": "Q4_K_M", "Q3_K": "Q3_K_M"}
FLOAT_TYPES = {"F32", "F16", "BF16"}
_IQ4 = {"IQ4_NL", "IQ4_XS"}
_FALLBACK = {
    "Q2_K": "Q4_0", "Q3_K": "Q4_0", "Q4_K": "Q5_0", "Q5_K": "Q5_1", "Q6_K": "Q8_0", "IQ4_XS": "IQ4_NL",
}  # fmt: skip
_ONE_STEP_UP = {"Q3_K": "Q4_K", "Q4_K": "Q5_K", "Q5_K": "Q6_K", "Q6_K": "Q8_0"}
_SENSITIVE_IN_HEAD = ("nextn.eh_proj", "attn_v.", "ffn_down")
# Names that llama-quantize never quantizes, of those that models here have.
_NEVER = ("_norm.weight", "ffn_gate_inp.weight", "ssm_conv1d")
_AS_STORED = "per_layer_model_proj"  # llama-quantize leaves it as the BF16 file has it


def mix(name: str) -> Mix:
    """The mix of that name, in any case. Raises UnknownTypeError."""
    upper = name.upper()
    found = MIXES.get(_ALIASES.get(upper, upper))
    if found is None:
        raise UnknownTypeError(f"no type or mix is called {name!r}; known: {', '.join(MIXES)}")
    return found


def is_quantizable(name: str, shape: Shape) -> bool:
    """Whether llama-quantize would touch this tensor; all others keep float32. shape: torch order."""
    dims = len(shape)
    while dims > 1 and shape[len(shape) - dims] == 1:  # leading ones in torch order are trailing in ggml's
        dims -= 1
    return dims > 1 and name.endswith("weight") and not any(part in name for part in _NEVER)


def fitting(kind: BlockType, row: int) -> BlockType:
    """The type itself, or what llama-quantize falls back to where rows of `row` values are not whole blocks."""
    while row % kind.block:
        narrower = _FALLBACK.get(kind.name, "F16")
        kind = block_type(narrower)
    return kind


@dataclass(frozen=True)
class TrunkFacts:
    """What the table asks of a model: its layers, experts, query heads per key/value head, and an importance matrix.

    The mere presence of a matrix counts, also for tensors that it has no entry for.
    """

    layers: int
    experts: int
    heads_per_kv_head: int
    has_importance: bool = False

    @property
    def is_mixtral_like(self) -> bool:
        """Exactly 8 experts: the table means Mixtral, but asks for just this."""
        return self.experts == 8


def trunk_types(recipe: Mix, tensors: Sequence[tuple[str, Shape]], facts: TrunkFacts) -> dict[str, BlockType]:
    """The type of every quantizable tensor of a trunk-only file, before overrides and row fallbacks.

    tensors: (GGUF name, shape in torch order), in any order.
    """
    names = sorted((n for n, shape in tensors if is_quantizable(n, shape)), key=lambda n: (_block(n), n))
    rows = {name: shape[-1] for name, shape in tensors}
    has_output = "output.weight" in rows
    values = [n for n in names if _is_value(n)]
    downs = [n for n in names if "ffn_down" in n]
    types: dict[str, BlockType] = {}
    for name in names:
        if name == "output.weight" or (name == "token_embd.weight" and not has_output):
            chosen = _output_type(recipe, rows[name])
        elif recipe.type in FLOAT_TYPES:
            chosen = recipe.type
        elif _AS_STORED in name:
            chosen = "BF16"
        elif _is_value(name):
            chosen = _value_type(recipe, values.index(name), len(values), facts)
        elif "attn_k.weight" in name and facts.is_mixtral_like:
            chosen = "Q8_0"
        elif "attn_output.weight" in name:
            chosen = _attention_output_type(recipe, facts)
        elif "ffn_down" in name:
            position = _block(name) if facts.experts > 1 else downs.index(name)
            chosen = _down_type(recipe, position, facts)
        else:
            chosen = recipe.type
        types[name] = block_type(chosen)
    return types


def head_types(recipe: Mix, tensors: Sequence[tuple[str, Shape]]) -> dict[str, BlockType]:
    """The type of every quantizable tensor of an MTP head, and of a sidecar's embedding and output."""
    raised = _ONE_STEP_UP.get(recipe.type, recipe.type) if recipe.name.endswith("_M") else recipe.type
    types: dict[str, BlockType] = {}
    for name, shape in tensors:
        if is_quantizable(name, shape):
            if name == "output.weight":
                chosen = _output_type(recipe, shape[-1])
            else:
                chosen = raised if any(part in name for part in _SENSITIVE_IN_HEAD) else recipe.type
            types[name] = block_type(chosen)
    return types


def _block(name: str) -> int:
    found = re.match(r"blk\.(\d+)\.", name)
    return int(found[1]) if found else -1


def _is_value(name: str) -> bool:
    return any(part in name for part in ("attn_qkv.weight", "attn_kv_b.weight", "attn_v.weight"))


def _more_bits(i: int, n: int) -> bool:
    """The first and last eighth, and every third in between."""
    return i < n // 8 or i >= 7 * n // 8 or (i - n // 8) % 3 == 2


def _output_type(recipe: Mix, row: int) -> str:
    if recipe.type in FLOAT_TYPES:
        return recipe.type
    if row % block_type(recipe.type).block or recipe.type == "Q8_0":
        return "Q8_0"
    return "Q6_K"


def _value_type(recipe: Mix, i: int, n: int, facts: TrunkFacts) -> str:
    grouped = facts.heads_per_kv_head >= 4
    if facts.is_mixtral_like:
        return "Q8_0"
    match recipe.name:
        case "Q2_K":
            return "Q4_K" if grouped else "Q3_K"
        case "Q3_K_M":
            return "Q5_K" if i < 2 else "Q4_K"
        case "Q3_K_L":
            return "Q5_K"
        case "IQ4_NL" | "IQ4_XS" if grouped:
            return "Q5_K"
        case "Q4_K_M" | "Q5_K_M" if _more_bits(i, n):
            return "Q6_K"
        case "Q4_K_S" if i < 4:
            return "Q5_K"
    return recipe.type


def _down_type(recipe: Mix, i: int, facts: TrunkFacts) -> str:
    first_eighth = i < facts.layers // 8
    match recipe.name:
        case "Q2_K":
            return "Q3_K"
        case "Q3_K_M":
            return "Q5_K" if i < facts.layers // 16 else "Q4_K"
        case "Q3_K_L":
            return "Q5_K"
        case "Q4_K_M" | "Q5_K_M" if _more_bits(i, facts.layers):
            return "Q6_K"
        case "Q4_K_S" if first_eighth:
            return "Q5_K"
        case "IQ4_NL" | "IQ4_XS" if first_eighth and not facts.has_importance:
            return "Q5_K"
        case "Q4_0" if first_eighth and facts.has_importance:
            return "Q4_1"
        case "Q5_0" if first_eighth and facts.has_importance:
            return "Q5_1"
    return recipe.type


def _attention_output_type(recipe: Mix, facts: TrunkFacts) -> str:
    if facts.is_mixtral_like:
        raised = {"Q2_K", "Q3_K_S", "Q3_K_M", "Q4_K_S", "Q4_K_M", *_IQ4}
        return "Q5_K" if recipe.name in raised else recipe.type
    return {"Q2_K": "Q3_K", "Q3_K_M": "Q4_K", "Q3_K_L": "Q5_K"}.get(recipe.name, recipe.type)
