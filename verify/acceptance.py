"""Level acceptance: how often the head guesses right, by draft position, against the source's own head.

All heads are judged on one pass of the trunk: its states do not depend on them. At every place of its own greedy text
each head drafts n tokens, and a draft counts as accepted when it and all before it are what the trunk says. Text cannot
reveal a dead head, since drafts do not change it; this can.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from verify.decode import Settings, decode
from verify.models.qwen35 import Qwen35
from verify.models.tensors import Tensors
from verify.results import Finding, LevelResult

_COLLAPSED = 0.5  # of what the source's head reaches at the first draft
_SIGMAS = 4.0  # a difference counts when it is larger than chance makes it
_DEAD = 0.02


@dataclass(frozen=True)
class Texts:
    """Greedy texts of a trunk: token ids [length], states [length, hidden], places where drafting begins."""

    ids: Sequence[Tensor]
    hidden: Sequence[Tensor]
    begins: Sequence[int]


def greedy_texts(engine: Qwen35, prompts: Sequence[Sequence[int]], tokens: int) -> Texts:
    """Continue the prompts, and evaluate the trunk over prompt and answer once."""
    ids, hidden = [], []
    for prompt in prompts:
        settings = Settings(tokens, context=len(prompt) + tokens + 1)
        text = torch.tensor([*prompt, *decode(engine, prompt, settings).tokens], device=engine.device)
        ids.append(text)
        hidden.append(engine.trunk(text, engine.trunk_state(len(text)), keep_rows=False))
    return Texts(ids, hidden, [len(p) for p in prompts])


def accepted_by_position(head: Qwen35, texts: Texts, drafts: int) -> list[tuple[int, int]]:
    """(accepted, drafted) for draft positions 1 … drafts, cumulative: all before it were right too."""
    counts = [[0, 0] for _ in range(drafts)]
    for ids, hidden, begin in zip(texts.ids, texts.hidden, texts.begins, strict=True):
        count = len(ids)
        state = head.head_state(count + drafts)
        for place in range(1, count - 1):
            # Drafting after token `place`: its entry pairs it with the trunk's state before it.
            out = head.head(hidden[place - 1 : place], ids[place : place + 1], state)
            if place < begin:
                continue
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
                    out = head.head(out, ids[place + 1 + k : place + 2 + k], state)
                    token = int(head.head_logits(out[-1]).argmax())
            state.length = length
    return [(a, d) for a, d in counts]


def check_acceptance(
    engine: Qwen35, reference: Qwen35 | None, prompts: Sequence[Sequence[int]], tokens: int, drafts: int
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
    elif bound and _sigmas(mine[0], bound) < -_SIGMAS:
        findings.append(
            Finding(
                "acceptance is lower than the source's own head's",
                "first draft",
                f"{_rate(bound):.1%}",
                f"{_rate(mine[0]):.1%}",
            )
        )
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


# --- what may be wrong with a head

Change = Callable[[Tensors, str], dict[str, Tensor]]


def _swapped(tensors: Tensors, glue: str) -> dict[str, Tensor]:
    name = f"{glue}eh_proj.weight"
    return {name: tensors[name].roll(tensors[name].shape[1] // 2, 1)}


def _exchanged(tensors: Tensors, glue: str) -> dict[str, Tensor]:
    a, b = f"{glue}enorm.weight", f"{glue}hnorm.weight"
    return {a: tensors[b], b: tensors[a]}


def _shifted(by: float) -> Change:
    def change(tensors: Tensors, glue: str) -> dict[str, Tensor]:
        block = glue.removesuffix("nextn.")
        return {n: tensors[n] + by for n in tensors if n.startswith(block) and "norm" in n}

    return change


_CHANGES: dict[str, Change] = {
    "the halves of eh_proj are exchanged": _swapped,
    "the norms of embedding and state are exchanged": _exchanged,
    "the head's norms lack their shift by 1": _shifted(1.0),
    "the head's norms are shifted by 1 twice": _shifted(-1.0),
}


def likeliest_cause(engine: Qwen35, texts: Texts, mine: tuple[int, int]) -> str:
    """The change to the head that makes it guess much better, if one of the usual ones does."""
    glue = f"blk.{engine.sizes.layers}.nextn."
    tensors = engine.tensors
    matrices = [n for n in tensors if n.startswith(glue.removesuffix("nextn.")) and len(tensors.shape(n)) > 1]
    if not any(bool(tensors[n].any()) for n in matrices):
        return "all weights of the head are zero"
    some = replace(texts, ids=texts.ids[:3], hidden=texts.hidden[:3], begins=texts.begins[:3])
    best, cause = max(0.1, 1.25 * _rate(mine)), ""
    for words, change in _CHANGES.items():
        changed = engine.with_tensors(change(tensors, glue))
        rate = _rate(accepted_by_position(changed, some, 1)[0])
        if rate > best:
            best, cause = rate, words
    return cause
