"""Convert the small trained checkpoint beside this file and decode with it in llama.cpp, plain and with its MTP head."""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

from converter import convert
from verify.engines.base import Completion
from verify.engines.llama_cpp import Engine, complete, tokenize

MODEL = Path(__file__).parent / "tiny-qwen3.5-dense"
TYPES = ("BF16", "Q8_0", "Q4_K_M")
TOKENS, DRAFTS = 96, 3
PROMPTS = (
    "import os\nimport sys\n\ndef main(argv):\n    ",
    "class Message:\n    def __init__(self, policy=None):\n        ",
    "    def __eq__(self, other):\n        if not isinstance(other, type(self)):\n            return NotImplemented\n        ",
    "import unittest\nfrom test import support\n\nclass TestCase(unittest.TestCase):\n    def setUp(self):\n        ",
)


def main() -> int:
    """Returns 0 when every answer with drafts equals the plain one, up to near ties."""
    with tempfile.TemporaryDirectory() as folder:
        print(f"Converting {MODEL.name} to {', '.join(TYPES)}, head bundled ...\n")
        report = convert(MODEL, Path(folder) / "tiny-{type}.gguf", types=TYPES)
        print(report.as_text(), "\n")
        print(f"Decoding {len(PROMPTS)} prompts of code in llama.cpp, {TOKENS} tokens each, drafts n = {DRAFTS}:\n")
        print("type     same tokens   acceptance   plain tok/s   MTP tok/s")
        results = [compare(file.mix, str(file.path)) for file in report.plan.files]
        print(
            "\n(Speed is that of a toy: a trunk of 4 layers costs hardly more than its head. Real models gain 1.5-3x.)"
        )
    return 0 if all(results) else 1


def compare(mix: str, file: str) -> bool:
    """One row of the table; whether the answers are the same but for near ties."""
    prompts = tokenize(Engine(file), PROMPTS)
    plain = complete(Engine(file), prompts, TOKENS, margins=True)
    drafted = complete(Engine(file, drafts=DRAFTS), prompts, TOKENS)
    accepted = sum(a.accepted for a in drafted) / sum(a.drafted for a in drafted)
    leaves = [at for a, b in zip(plain, drafted, strict=True) if (at := divergence(a, b)) is not None]
    speeds = [len(PROMPTS) / sum(1 / a.tokens_per_s for a in answers) for answers in (plain, drafted)]
    same = f"{len(PROMPTS) - len(leaves)} of {len(PROMPTS)}"
    print(f"{mix:8} {same:13} {accepted:10.0%}   {speeds[0]:11,.0f}   {speeds[1]:9,.0f}")
    for at, margin in leaves:
        print(f"         one leaves at token {at}: a near tie, the two best tokens are {margin:.3f} nats apart")
    return all(margin < NEAR_TIE for _, margin in leaves)


NEAR_TIE = 0.05


def divergence(plain: Completion, drafted: Completion) -> tuple[int, float] | None:
    """Where the drafted answer leaves the plain one, and by how much the plain choice was ahead there."""
    for i, (a, b) in enumerate(zip(plain.tokens, drafted.tokens, strict=True)):
        if a != b:
            return i, plain.margins[i]
    return None


if __name__ == "__main__":
    sys.exit(main())
