"""Level engine: the file in real llama.cpp, plain and with drafts, each in a child process of its own."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from verify.engines.llama_cpp import Completion, Engine, EngineError, complete
from verify.results import Finding, LevelResult, Verdict

_NEAR_TIE = 0.05  # nats between the two best tokens below which the engine's own rounding may decide


def check_engine(
    file: Path, sidecar: Path | None, prompts: Sequence[Sequence[int]], tokens: int, drafts: Sequence[int]
) -> LevelResult:
    """Decode all prompts greedily; tokens with drafts must be those without, or leave them at a near-tie."""
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
    summary = f"{same} of {len(rows) * len(prompts)} answers equal plain decoding ({_rate(plain):,.0f} tok/s); {words}"
    return LevelResult(
        "engine", summary, findings, {"engine": "llama.cpp", "plain_tokens_per_s": _rate(plain), "runs": rows}
    )


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
