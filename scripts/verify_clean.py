"""No false alarms: many clean runs of the level identity over prompts x settings, all of which must pass.

    python scripts/verify_clean.py [MODEL ...] [--runs 1000] [--tokens 32] [--seed 0]

MODEL: GGUF files or model folders (default: the example). Each run decodes a prompt of random length from the bundled text
with a random number of drafts, temperature and seed, in exact mode (every bit) and native mode (near-ties are counted).
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from converter.gguf_model import is_gguf, open_gguf  # noqa: E402  (the script runs from a checkout too)
from verify.identity import EXACT, NATIVE, Plan, check_identity  # noqa: E402
from verify.models.opening import open_model  # noqa: E402
from verify.prompts import TEXT, bundled, tokenizer_of_file, tokenizer_of_folder  # noqa: E402
from verify.results import Verdict  # noqa: E402

EXAMPLE = ROOT / "examples" / "tiny-qwen3.5-dense"
PER_PLAN = 4  # prompts


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="*", type=Path, default=[EXAMPLE])
    parser.add_argument("--runs", type=int, default=1000, help="prompt x setting pairs, for all models together")
    parser.add_argument("--tokens", type=int, default=32)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    chance = random.Random(args.seed)
    done = ties = 0
    alarms: list[str] = []
    started = time.monotonic()
    engines = []
    for model in args.models:
        encode = tokenizer_of_file(open_gguf(model)) if is_gguf(model) else tokenizer_of_folder(model)
        engines.append((model, open_model(model, None, "cpu"), encode(bundled(TEXT))))
    while done < args.runs:
        model, engine, ids = engines[done // PER_PLAN % len(engines)]
        prompts = []
        for _ in range(PER_PLAN):
            at, length = chance.randrange(len(ids) - 64), chance.choice([1, 2, 3, 7, 16, 33, 60])
            prompts.append(ids[at : at + length])
        plan = Plan(
            prompts, args.tokens, (chance.randint(1, 5),), (chance.choice([0.0, 0.0, 0.3, 0.7, 1.2]),),
            (chance.choice([EXACT, EXACT, NATIVE]),), chance.randrange(2**31), frozenset({chance.choice(ids), chance.choice(ids)}),
        )  # fmt: skip
        result = check_identity(engine, plan)
        done += len(result.data["runs"])
        ties += sum(f.verdict is Verdict.INCONCLUSIVE for f in result.findings)
        alarms += [f"{model}: {f}" for f in result.findings if f.verdict is Verdict.FAILED]
        if not result.data["runs"]:
            alarms.append(f"{model}: {result.summary}")
            break
        print(f"\r{done} runs, {ties} near-ties, {len(alarms)} alarms", end="", file=sys.stderr)
    print(file=sys.stderr)
    print(
        f"{done} clean runs in {time.monotonic() - started:.0f} s: {ties} near-ties in native mode, {len(alarms)} false alarms"
    )
    print(*alarms[:20], sep="\n")
    return 1 if alarms else 0


if __name__ == "__main__":
    sys.exit(main())
