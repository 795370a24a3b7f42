"""A made-up machine and head: steps are drawn one by one, times are added up, so that what is true is known."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from bench.matrix import OWN, Cell, Load
from bench.store import Cost, Record

TOKENS, PROMPTS = 200, 6
ENGINE = "llama.cpp"


@dataclass
class World:
    """rates: by task, the chance that draft k is right when those before it are. step_s: seconds of a step of n drafts.

    prompt_s: seconds of a prompt token, plain and with drafts. noise: relative, of every prompt's time.
    """

    rates: Mapping[str, Sequence[float]]
    step_s: Mapping[int, float]
    noise: float = 0.0
    prompt_s: tuple[float, float] = (1e-4, 1e-4)
    file: str = "/m/x-Q4_K_M.gguf"
    engine: str = ENGINE
    seed: int = 0
    records: list[Record] = field(default_factory=list)

    def load(self, drafts: int, slots: int = 1) -> Load:
        return (
            Load(self.engine, self.file, OWN, drafts, slots=slots)
            if drafts
            else Load(self.engine, self.file, slots=slots)
        )

    def measure(self, task: str, drafts: int, run: int, context: int = 0, slots: int = 1) -> Record:
        """One cell, by simulation."""
        chance = random.Random(f"{self.seed}/{task}/{drafts}/{run}")
        decode_s, steps, drafted, accepted, by_position = [], 0, 0, 0, [0] * drafts
        for _ in range(PROMPTS):
            made, seconds = 0, 0.0
            while made < TOKENS:
                right = 0
                while right < drafts and chance.random() < self.rates[task][right]:
                    right += 1
                made += right + 1
                seconds += self.step_s[drafts]
                steps, drafted, accepted = steps + 1, drafted + drafts, accepted + right
                for k in range(right):
                    by_position[k] += 1
            decode_s.append(seconds * TOKENS / made * (1 + self.noise * chance.uniform(-1, 1)))
        prompt = (context or 20) * self.prompt_s[drafts > 0]
        seconds = [d + prompt for d in decode_s]
        return Record(
            Cell(self.load(drafts, slots), task, 0.0, context), run, "f", "an engine b1", [[run] * TOKENS] * PROMPTS, decode_s,
            [prompt] * PROMPTS, [context or 20] * PROMPTS, seconds, sum(seconds), steps if drafts else 0, drafted, accepted,
            by_position if drafts else [], 10**8,
        )  # fmt: skip

    def cost(self, run: int = 0) -> Cost:
        """What made-up acceptance would show."""
        return Cost(self.engine, self.file, OWN, run, "f", dict(self.step_s), None)

    def true_speedup(self, task: str, drafts: int) -> float:
        """By a long simulation of another seed."""
        chance = random.Random(99)
        made = 0
        for _ in range(20_000):
            right = 0
            while right < drafts and chance.random() < self.rates[task][right]:
                right += 1
            made += right + 1
        return made / 20_000 * self.step_s[0] / self.step_s[drafts]
