"""The trunk as transformers' own module, filled from a GGUF file: the oracle of our own step.

The file's tensors go back through the inverse transforms to the names and layout of the checkpoint.
"""

from __future__ import annotations

import os
import re
from typing import Any

import numpy as np
import torch

from converter.model import Model
from converter.rules import Role
from converter.transforms import backward
from verify.models.weights import Weights

_COPIES = 3  # of all weights, in float32, are in memory while the module is filled
_EXPERTS = re.compile(r"(.*\.experts)\.(\d+)\.(gate|up|down)_proj\.weight")


def fits(weights: Weights) -> bool:
    """Whether a module of these weights can be made in the memory that is free."""
    free = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return _COPIES * 4 * weights.count() < free


def state_dict(weights: Weights, source: Model) -> dict[str, torch.Tensor]:
    """The trunk's tensors under the names of the checkpoint, float32; experts stacked as transformers has them."""
    made: dict[str, np.ndarray] = {}
    for rule in source.rules:
        if rule.role is Role.MTP:
            continue
        values = weights.tensor(rule.target)
        for k, name in enumerate(rule.sources):
            into = made.setdefault(name, np.zeros(rule.shape, np.float32))
            backward(values[k] if rule.is_stacked else values, rule.transforms, into)
    return {name: torch.from_numpy(x) for name, x in _stacked(made).items()}


def _stacked(made: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Experts that are stored one by one, as two tensors of all: gate over up, and down."""
    experts: dict[str, dict[str, dict[int, np.ndarray]]] = {}
    rest = {}
    for name, x in made.items():
        if found := _EXPERTS.fullmatch(name):
            experts.setdefault(found[1], {}).setdefault(found[3], {})[int(found[2])] = x
        else:
            rest[name] = x
    for prefix, parts in experts.items():
        gate, up, down = (np.stack([parts[k][e] for e in sorted(parts[k])]) for k in ("gate", "up", "down"))
        rest |= {f"{prefix}.gate_up_proj": np.concatenate([gate, up], axis=1), f"{prefix}.down_proj": down}
    return rest


def module_of(weights: Weights, source: Model) -> Any:
    """Transformers' causal language model of the source's config, with the weights of a file, in float32 on the CPU."""
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.from_pretrained(source.config.file.parent).get_text_config()
    with torch.device("meta"):
        module = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    state = state_dict(weights, source)
    if "lm_head.weight" not in state:
        state["lm_head.weight"] = state["model.embed_tokens.weight"]
    module.load_state_dict(state, strict=True, assign=True)
    _fill_buffers(module, config)
    return module.eval()


def _fill_buffers(module: Any, config: Any) -> None:
    """What is not in any state dict, the rotary tables, is made anew: on "meta" it has no values."""
    for name, part in list(module.named_modules()):
        if any(b.is_meta for b in part.buffers(recurse=False)):
            parent, _, child = name.rpartition(".")
            setattr(module.get_submodule(parent), child, type(part)(config=config))


@torch.inference_mode()
def module_logits(module: Any, tokens: torch.Tensor) -> torch.Tensor:
    """Logits [rows, vocabulary] of tokens [rows], float32."""
    return module(input_ids=tokens[None].cpu(), use_cache=False).logits[0].float()
