"""Greedy decoding of the source checkpoint by transformers: the tokens that converted trunks must give."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import torch

PROMPTS = (
    "import os\nimport sys\n\ndef main(argv):\n    ",
    "class Message:\n    def __init__(self, policy=None):\n        ",
    "    def test_",
    "def read(self, size=-1):\n        if size < 0:\n            ",
    "    for name in sorted(names):\n        ",
    "    try:\n        import ",
    (
        'class Parser(object):\n    """A parser."""\n\n    def __init__(self, name, *, strict=True):\n        self.name = name\n'
        "        self.strict = strict\n\n    def parse(self, text):\n        "
    ),
    "import unittest\nfrom test import support\n\nclass TestCase(unittest.TestCase):\n    def setUp(self):\n        ",
    "def open(path, mode='r', encoding=None):\n    if not isinstance(path, str):\n        raise TypeError(",
    (
        "    def __eq__(self, other):\n        if not isinstance(other, type(self)):\n            return NotImplemented\n"
        "        return "
    ),
)


@cache
def tokenizer(folder: Path):
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(folder)


def prompt_ids(folder: Path) -> list[list[int]]:
    """PROMPTS as token ids."""
    return [tokenizer(folder)(text, add_special_tokens=False)["input_ids"] for text in PROMPTS]


@cache
def reference(folder: Path):
    """transformers' model in float32."""
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


@cache
def greedy(folder: Path, tokens: int) -> tuple[tuple[tuple[int, ...], tuple[float, ...]], ...]:
    """For every prompt the next tokens, in float32 and never ending early, and the margins of their logits."""
    model = reference(folder)
    answers = []
    for ids in prompt_ids(folder):
        prompt = torch.tensor([ids])
        out = model.generate(
            prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=tokens, min_new_tokens=tokens, do_sample=False,
            eos_token_id=None, pad_token_id=0, output_logits=True, return_dict_in_generate=True,
        )  # fmt: skip
        margins = [(top := step[0].topk(2).values)[0].item() - top[1].item() for step in out.logits]
        answers.append((tuple(out.sequences[0, len(ids) :].tolist()), tuple(margins)))
    return tuple(answers)
