"""Level acceptance: how often the head guesses right, by draft position, against the source's own head.

All heads are judged on one pass of the trunk: its states do not depend on them. At every place of its own greedy text
each head drafts n tokens, and a draft counts as accepted when it and all before it are what the trunk says. Text cannot
reveal a dead head, since drafts do not change it; this can.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from verify.decode import Settings, decode
from verify.models.base import TorchModel, TrunkState
from verify.results import Finding, LevelResult

_COLLAPSED = 0.5  # of what the source's head reaches at the first draft
_SIGMAS = 4.0  # a difference counts when it is larger than chance makes it
_DEAD = 0.02


@dataclass(frozen=True)
class Text:
    """A greedy text: ids [length], the trunk's states [length, hidden] and its state after them, where drafts begin."""

    ids: Tensor
    hidden: Tensor
    trunk: TrunkState
    begin: int


def greedy_texts(engine: TorchModel, prompts: Sequence[Sequence[int]], tokens: int) -> list[Text]:
    """Continue the prompts, and evaluate the trunk over prompt and answer once."""
    texts = []
    for prompt in prompts:
        settings = Settings(tokens, context=len(prompt) + tokens + 1)
        ids = torch.tensor([*prompt, *decode(engine, prompt, settings).tokens], device=engine.device)
        state = engine.trunk_state(len(ids))
        texts.append(Text(ids, engine.trunk(ids, state, keep_rows=False), state, len(prompt)))
    return texts


def accepted_by_position(head: TorchModel, texts: Sequence[Text], drafts: int) -> list[tuple[int, int]]:
    """(accepted, drafted) for draft positions 1 … drafts, cumulative: all before it were right too."""
    counts = [[0, 0] for _ in range(drafts)]
    for text in texts:
        ids, hidden, count = text.ids, text.hidden, len(text.ids)
        state = head.head_state(text.trunk, count + drafts)
        head.follow(hidden[: text.begin - 1], ids[1 : text.begin], state)
        for place in range(text.begin, count - 1):
            # Drafting after token `place`: its entry pairs it with the trunk's state before it.
            out = head.head(hidden[place - 1 : place], ids[place : place + 1], state)
            length, token = state.length, int(head.head_logits(out[-1]).argmax())
            for k in range(drafts):
                if place + 1 + k >= count:
                    break
                counts[k][1] += 1
                if token != int(ids[place + 1 + k]):
                    for later in range(k + 1, min(drafts, count - place - 1)):
                        counts[later][1] += 1
                    break
                counts[k][0] += 1
                if k + 1 < drafts:
                    out = head.chain(out, ids[place + 1 + k : place + 2 + k], state)
                    token = int(head.head_logits(out[-1]).argmax())
            state.length = length
    return [(a, d) for a, d in counts]


def check_acceptance(
    engine: TorchModel, reference: TorchModel | None, prompts: Sequence[Sequence[int]], tokens: int, drafts: int
) -> LevelResult:
    """Judge the file's head on the file's trunk, next to the source's head where there is one."""
    if not engine.has_head:
        return LevelResult("acceptance", "there is no head", skipped=True)
    texts = greedy_texts(engine, prompts, tokens)
    mine = accepted_by_position(engine, texts, drafts)
    theirs = accepted_by_position(reference, texts, drafts) if reference is not None and reference.has_head else None
    findings: list[Finding] = []
    bound = theirs[0] if theirs else None
    if _is_collapsed(mine[0], bound):
        findings.append(
            Finding(
                "acceptance has collapsed: the head guesses hardly anything", "first draft",
                f"about {_rate(bound):.0%}, as the source's own head" if bound else "more than chance",
                f"{_rate(mine[0]):.0%}", likeliest_cause(engine, texts, mine[0]),
            )
        )  # fmt: skip
    elif theirs and (worse := [k for k in range(drafts) if _sigmas(mine[k], theirs[k]) < -_SIGMAS]):
        k = worse[0]
        findings.append(
            Finding(
                "acceptance is lower than the source's own head's", f"draft {k + 1}", f"{_rate(theirs[k]):.1%}",
                f"{_rate(mine[k]):.1%}", likeliest_cause(engine, texts, mine[0]),
            )
        )  # fmt: skip
    elif bound is None and (cause := likeliest_cause(engine, texts, mine[0])):
        findings.append(
            Finding(
                "the head guesses better when it is changed", "first draft", found=f"{_rate(mine[0]):.0%}", cause=cause
            )
        )
    words = ", ".join(f"{_rate(m):.0%}" for m in mine)
    summary = f"drafts 1 to {drafts} accepted: {words}"
    if theirs:
        summary += f"; the source's own head: {', '.join(f'{_rate(t):.0%}' for t in theirs)}"
    return LevelResult("acceptance", summary, findings, {"file": mine, "source": theirs, "prompts": len(prompts)})


def _rate(count: tuple[int, int]) -> float:
    return count[0] / count[1] if count[1] else 0.0


def _is_collapsed(mine: tuple[int, int], bound: tuple[int, int] | None) -> bool:
    if bound is None:
        return _rate(mine) < _DEAD
    return _rate(mine) < _COLLAPSED * _rate(bound) and _sigmas(mine, bound) < -_SIGMAS


def _sigmas(mine: tuple[int, int], bound: tuple[int, int]) -> float:
    """The difference of two rates in standard errors (pooled)."""
    pooled = (mine[0] + bound[0]) / max(1, mine[1] + bound[1])
    error = math.sqrt(max(pooled * (1 - pooled), 1e-9) * (1 / max(1, mine[1]) + 1 / max(1, bound[1])))
    return (_rate(mine) - _rate(bound)) / error


def likeliest_cause(engine: TorchModel, texts: Sequence[Text], mine: tuple[int, int]) -> str:
    """The change to the head that makes it guess much better, if one of the usual ones does."""
    tensors = engine.tensors
    matrices = [n for n in engine.head_tensors() if len(tensors.shape(n)) > 1]
    if not any(bool(tensors[n].any()) for n in matrices):
        return "all weights of the head are zero"
    best, cause = max(0.1, 1.25 * _rate(mine)), ""
    for words, change in engine.head_faults.items():
        changed = engine.with_tensors(change(tensors))
        rate = _rate(accepted_by_position(changed, texts[:3], 1)[0])
        if rate > best:
            best, cause = rate, words
    return cause
