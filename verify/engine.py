"""Level engine: the file in real llama.cpp, plain and with drafts, each in a child process of its own."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from converter.errors import EnvironmentFailure
from converter.gguf_model import open_gguf
from verify.engines.base import Completion, EngineError, Request, Run
from verify.engines.http import Server
from verify.engines.llama_cpp import DraftStep, Engine, draft_steps, run
from verify.results import Finding, LevelResult, Verdict

if TYPE_CHECKING:
    from verify.models.base import TorchModel

_NEAR_TIE = 0.05  # nats between the two best tokens below which the engine's own rounding may decide


def check_engine(
    file: Path,
    sidecar: Path | None,
    prompts: Sequence[Sequence[int]],
    tokens: int,
    drafts: Sequence[int],
    model: TorchModel | None = None,
) -> LevelResult:
    """Decode all prompts greedily in llama.cpp, in this machine's process; see `_compared`.

    drafts: none for a file without a head, which must then load and answer. model: the same file in torch, to compare the
    engine's draft candidates with its head's.
    """
    head = str(sidecar) if sidecar else None
    try:
        plain = run(Engine(str(file)), _requests(prompts, tokens, margins=True))
    except EngineError as error:
        return LevelResult("engine", "llama.cpp does not run the file", [Finding(str(error), "plain decoding")])
    runs: dict[str, Run] = {}
    failures: list[Finding] = []
    for n in drafts:
        try:
            runs[f"n = {n}"] = run(Engine(str(file), head, n), _requests(prompts, tokens))
        except EngineError as error:
            failures.append(Finding(str(error), f"n = {n}"))
    if not drafts:
        summary = f"{plain.engine} runs it; there is no head to draft with ({_rate(plain):,.0f} tok/s)"
        data = {"engine": plain.engine, "plain_tokens_per_s": _rate(plain), "runs": []}
        return LevelResult("engine", summary, data=data)
    result = _compared(plain, runs)
    result.findings += failures
    if model is not None and result.verdict is not Verdict.FAILED:
        limit = _CLOSE if _is_quantized(file) or (sidecar and _is_quantized(sidecar)) else _CLOSE_UNQUANTIZED
        found, candidates = _candidates(model, Engine(str(file), head, max(drafts)), prompts, limit)
        result.findings += found
        result.data["candidates"] = candidates
        result.summary += f"; its draft candidates are within {candidates['mean']:.4f} of our head's"
    return result


def check_servers(url: str, plain_url: str, prompts: Sequence[Sequence[int]], tokens: int) -> LevelResult:
    """The same with two servers of one model, the one at `url` with MTP and the other without.

    Raises EnvironmentFailure where one cannot be used, or where the first drafts nothing.
    """
    with_drafts = Server(url)
    plain = Server(plain_url).run(_requests(prompts, tokens, margins=True))
    if plain.drafted:
        raise EnvironmentFailure("the engine for plain decoding drafts", found=plain_url, hint="start it without MTP")
    found = with_drafts.run(_requests(prompts, tokens))
    if found.drafted == 0 or (found.drafted is None and with_drafts.counts() is None and "llama" in found.engine):
        raise EnvironmentFailure(
            "the engine drafts nothing: MTP is not active", found=f"{url} ({found.engine})",
            hint="llama-server --spec-type draft-mtp; vllm serve --speculative-config "
            '\'{"method": "mtp", "num_speculative_tokens": 2}\'',
        )  # fmt: skip
    return _compared(plain, {url: found})


def _requests(prompts: Sequence[Sequence[int]], tokens: int, *, margins: bool = False) -> list[Request]:
    return [Request(tuple(p), tokens, margins=margins) for p in prompts]


def _compared(plain: Run, runs: Mapping[str, Run]) -> LevelResult:
    """Tokens with drafts must be those without, or leave them at a near-tie."""
    findings: list[Finding] = []
    rows: list[dict[str, Any]] = []
    for name, found in runs.items():
        findings += _differences(plain.completions, found.completions, name)
        drafted, accepted = found.drafted, found.accepted
        if drafted is not None and accepted is not None and accepted > drafted:
            findings.append(Finding("more drafts accepted than drafted", name, found=f"{accepted} of {drafted}"))
        pairs = zip(plain.completions, found.completions, strict=True)
        rows.append({
            "run": name, "drafted": drafted, "accepted": accepted, "tokens_per_s": _rate(found),
            "by_position": list(found.counts.by_position) if found.counts else None,
            "identical": sum(a.tokens == b.tokens for a, b in pairs),
        })  # fmt: skip
    same = sum(r["identical"] for r in rows)
    words = ", ".join(f"{r['run']}: {_accepted(r)}, {r['tokens_per_s']:,.0f} tok/s" for r in rows)
    count = len(rows) * len(plain.completions)
    return LevelResult(
        "engine",
        f"{plain.engine}: {same} of {count} answers equal plain decoding ({_rate(plain):,.0f} tok/s); {words}",
        findings,
        {"engine": plain.engine, "plain_tokens_per_s": _rate(plain), "runs": rows},
    )


def _accepted(row: dict[str, Any]) -> str:
    if row["drafted"] is None:
        return "acceptance not reported"
    return f"{row['accepted']}/{row['drafted']} accepted"


def _rate(found: Run) -> float:
    """Median over answers, since the first ones are slower."""
    rates = sorted(a.tokens_per_s for a in found.completions)
    return rates[len(rates) // 2] if rates else 0.0


def _differences(plain: Sequence[Completion], found: Sequence[Completion], name: str) -> list[Finding]:
    findings = []
    for i, (a, b) in enumerate(zip(plain, found, strict=True)):
        if a.tokens == b.tokens:
            continue
        pairs = zip(a.tokens, b.tokens, strict=False)
        at = next((k for k, (x, y) in enumerate(pairs) if x != y), min(len(a.tokens), len(b.tokens)))
        margin = a.margins[at] if at < len(a.margins) else float("inf")
        near = margin < _NEAR_TIE
        what = f"the engine leaves plain decoding at a near-tie ({margin:.3f} nats)" if near else (
            "the engine's tokens with drafts are not those without"
        )  # fmt: skip
        ends = [str(t[at]) if at < len(t) else "the end" for t in (a.tokens, b.tokens)]
        findings.append(
            Finding(
                what, f"prompt {i}, token {at}, {name}", ends[0], ends[1],
                verdict=Verdict.INCONCLUSIVE if near else Verdict.FAILED,
            )
        )  # fmt: skip
    return findings


# --- what the engine drafts, against our head


def _candidates(
    model: TorchModel, engine: Engine, prompts: Sequence[Sequence[int]], limit: float
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
    # The two differ little, since the head norms its input again: which is clearly nearer decides. Of a head that knows
    # nothing all shares are alike, and neither is.
    if before < _NEARER * after:
        cause = "the engine feeds the head the state before the final norm (llama.cpp before June 2026 does)"
    elif after > limit:
        cause = ""
    else:
        return [], data
    finding = Finding(
        "the engine's drafts are not those of the head", "draft candidates", f"shares within {limit}",
        f"{after:.4f} on average, {before:.4f} by states before the final norm", cause,
    )  # fmt: skip
    return [finding], data


_PROMPTS, _TOKENS = 3, 16
# Of shares among the ten best, on average: with quantized weights the engine rounds activations too.
_CLOSE, _CLOSE_UNQUANTIZED = 0.03, 0.01
_NEARER = 0.8


def _is_quantized(file: Path) -> bool:
    return any(t.type.block > 1 for t in open_gguf(file).tensors)


def _distance(model: TorchModel, text: list[int], begin: int, steps: Sequence[DraftStep], *, final_norm: bool) -> float:
    """Sum of |share in the engine - share by our head| over all candidates."""
    import torch

    ids = torch.tensor(text, device=model.device)
    trunk = model.trunk_state(len(text))
    hidden = model.trunk(ids, trunk, keep_rows=False, final_norm=final_norm)
    longest = max((len(s.candidates) for s in steps), default=0)
    state = model.head_state(trunk, len(text) + longest)
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
                out = model.chain(out, torch.tensor([draft[0][0]], device=model.device), state)
        state.length = decided
    return total
