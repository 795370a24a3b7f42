"""Level engine: the file in real llama.cpp, plain and with drafts, each in a child process of its own."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from verify.engines.llama_cpp import Completion, DraftStep, Engine, EngineError, complete, draft_steps
from verify.results import Finding, LevelResult, Verdict

if TYPE_CHECKING:
    from verify.models.qwen35 import Qwen35

_NEAR_TIE = 0.05  # nats between the two best tokens below which the engine's own rounding may decide


def check_engine(
    file: Path,
    sidecar: Path | None,
    prompts: Sequence[Sequence[int]],
    tokens: int,
    drafts: Sequence[int],
    model: Qwen35 | None = None,
) -> LevelResult:
    """Decode all prompts greedily; tokens with drafts must be those without, or leave them at a near-tie.

    model: the same file in torch, to compare the engine's draft candidates with its head's.
    """
    findings: list[Finding] = []
    rows: list[dict[str, Any]] = []
    try:
        plain = complete(Engine(str(file)), prompts, tokens, margins=True)
    except EngineError as error:
        return LevelResult("engine", "llama.cpp does not run the file", [Finding(str(error), "plain decoding")])
    for n in drafts:
        try:
            found = complete(Engine(str(file), str(sidecar) if sidecar else None, n), prompts, tokens)
        except EngineError as error:
            findings.append(Finding(str(error), f"n = {n}"))
            continue
        findings += _differences(plain, found, n)
        drafted, accepted = sum(a.drafted for a in found), sum(a.accepted for a in found)
        if accepted > drafted:
            findings.append(Finding("more drafts accepted than drafted", f"n = {n}", found=f"{accepted} of {drafted}"))
        rows.append({
            "drafts": n, "drafted": drafted, "accepted": accepted, "tokens_per_s": _rate(found),
            "identical": sum(a.tokens == b.tokens for a, b in zip(plain, found, strict=True)),
        })  # fmt: skip
    same = sum(r["identical"] for r in rows)
    words = ", ".join(
        f"n = {r['drafts']}: {r['accepted']}/{r['drafted']} accepted, {r['tokens_per_s']:,.0f} tok/s" for r in rows
    )
    data: dict[str, Any] = {"engine": "llama.cpp", "plain_tokens_per_s": _rate(plain), "runs": rows}
    if model is not None and not any(f.verdict is Verdict.FAILED for f in findings):
        found, data["candidates"] = _candidates(
            model, Engine(str(file), str(sidecar) if sidecar else None, max(drafts)), prompts
        )
        findings += found
    summary = f"{same} of {len(rows) * len(prompts)} answers equal plain decoding ({_rate(plain):,.0f} tok/s); {words}"
    if "candidates" in data:
        summary += f"; its draft candidates are within {data['candidates']['mean']:.4f} of our head's"
    return LevelResult("engine", summary, findings, data)


def _rate(answers: Sequence[Completion]) -> float:
    return sum(a.tokens_per_s for a in answers) / len(answers)


def _differences(plain: Sequence[Completion], found: Sequence[Completion], n: int) -> list[Finding]:
    findings = []
    for number, (a, b) in enumerate(zip(plain, found, strict=True)):
        first = next((i for i, (x, y) in enumerate(zip(a.tokens, b.tokens, strict=False)) if x != y), None)
        if first is None and len(a.tokens) == len(b.tokens):
            continue
        at = first if first is not None else min(len(a.tokens), len(b.tokens))
        margin = a.margins[at] if at < len(a.margins) else float("inf")
        near = margin < _NEAR_TIE
        expected, got = (str(t[at]) if at < len(t) else "the end" for t in (a.tokens, b.tokens))
        findings.append(
            Finding(
                "near-tie" if near else "mismatch: another token than plain decoding", f"n = {n}, prompt {number}, token {at}",
                expected, got, f"the two best are {margin:.4f} nats apart",
                Verdict.INCONCLUSIVE if near else Verdict.FAILED,
            )
        )  # fmt: skip
    return findings


# --- what the engine drafts, against our head


def _candidates(
    model: Qwen35, engine: Engine, prompts: Sequence[Sequence[int]]
) -> tuple[list[Finding], dict[str, float]]:
    """Mean distance of candidates' shares from our head's, fed with the state after the final norm, and before it.

    Acceptance alone cannot tell which of the two an engine feeds the head; the shares can.
    """
    totals = {True: 0.0, False: 0.0}
    count = 0
    for prompt in prompts[:_PROMPTS]:
        answer, steps = draft_steps(engine, prompt, _TOKENS)
        count += sum(len(draft) for step in steps for draft in step.candidates)
        for normed in totals:
            totals[normed] += _distance(model, [*prompt, *answer.tokens], len(prompt), steps, final_norm=normed)
    after, before = (totals[normed] / max(1, count) for normed in (True, False))
    data = {"compared": count, "mean": after, "mean_before_final_norm": before}
    if not count:
        return [
            Finding("the engine prints no draft candidates: nothing was compared", verdict=Verdict.INCONCLUSIVE)
        ], data
    if before < after:  # the two differ little, since the head norms its input again: which is nearer decides
        cause = "the engine feeds the head the state before the final norm (llama.cpp before June 2026 does)"
    elif after > _CLOSE:
        cause = ""
    else:
        return [], data
    finding = Finding(
        "the engine's drafts are not those of the head", "draft candidates", f"shares within {_CLOSE}",
        f"{after:.4f} on average, {before:.4f} by states before the final norm", cause,
    )  # fmt: skip
    return [finding], data


_PROMPTS, _TOKENS = 3, 16
_CLOSE = 0.03  # of shares among the ten best: K types round activations in the engine


def _distance(model: Qwen35, text: list[int], begin: int, steps: Sequence[DraftStep], *, final_norm: bool) -> float:
    """Sum of |share in the engine - share by our head| over all candidates."""
    import torch

    ids = torch.tensor(text, device=model.device)
    hidden = model.trunk(ids, model.trunk_state(len(text)), keep_rows=False, final_norm=final_norm)
    longest = max((len(s.candidates) for s in steps), default=0)
    state = model.head_state(len(text) + longest)
    total = 0.0
    for step in steps:
        place = begin + step.place
        first = state.length + 1
        out = model.head(hidden[first - 1 : place], ids[first : place + 1], state)[-1:]
        decided = state.length
        for draft in step.candidates:
            best = model.head_logits(out[-1]).topk(10)
            shares = dict(zip(best.indices.tolist(), best.values.softmax(-1).tolist(), strict=True))
            total += sum(abs(share - shares.get(token, 0.0)) for token, share in draft)
            if draft is not step.candidates[-1]:
                out = model.head(out, torch.tensor([draft[0][0]], device=model.device), state)
        state.length = decided
    return total
