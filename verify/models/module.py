"""The trunk as transformers' own module, filled from a GGUF file: the oracle of our own step.

The file's tensors go back through the inverse transforms to the names and layout of the checkpoint.
"""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import torch

from converter.model import Model
from converter.rules import Role
from converter.transforms import backward
from verify.models.tensors import free_memory
from verify.models.weights import Weights

_COPIES = 3  # of all weights, in float32, are in memory while the module is filled
_EXPERTS = re.compile(r"(.*\.experts)\.(\d+)\.(gate|up|down)_proj\.weight")


def fits(weights: Weights) -> bool:
    """Whether a module of these weights can be made in the memory that is free."""
    return _COPIES * 4 * weights.count() < free_memory(torch.device("cpu"))


def state_dict(weights: Weights, source: Model) -> dict[str, torch.Tensor]:
    """The trunk's tensors under the names of the checkpoint, float32; experts stacked as transformers has them."""
    made: dict[str, np.ndarray] = {}
    for rule in source.rules:
        if rule.role is Role.MTP or not rule.sources:
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
    from transformers.utils import logging

    logging.disable_progress_bar()
    logging.set_verbosity_error()
    config = AutoConfig.from_pretrained(source.config.file.parent).get_text_config()
    state = state_dict(weights, source)
    if "lm_head.weight" not in state:
        state["lm_head.weight"] = state["model.embed_tokens.weight"]
    kind: Any = AutoModelForCausalLM._model_mapping[type(config)]  # noqa: SLF001  (no other way to ask for the class)
    module, told = kind.from_pretrained(
        None, config=config, state_dict=state, dtype=torch.float32, output_loading_info=True
    )
    lost = {k: sorted(v) for k, v in told.items() if v}
    if lost:
        raise RuntimeError(f"transformers' module does not take these tensors: {lost}")
    return module.eval()


@torch.inference_mode()
def module_logits(module: Any, tokens: torch.Tensor) -> torch.Tensor:
    """Logits [rows, vocabulary] of tokens [rows], float32."""
    return module(input_ids=tokens[None].cpu(), use_cache=False).logits[0].float()
