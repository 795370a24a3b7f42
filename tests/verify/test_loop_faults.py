"""Faults planted in the loop, the states and the head: identity and acceptance must find and name them."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.conftest import EXAMPLE, checkpoint
from tests.oracles.transformers_model import prompt_ids
from tests.verify.files import Change, Parts, noise
from tests.verify.mutants import mutated
from verify import decode as good_loop
from verify import identity
from verify.check import Options, verify
from verify.identity import EXACT, NATIVE, Plan, check_identity
from verify.models import base as good_base
from verify.models import qwen35 as good_engine
from verify.models.qwen35 import Qwen35
from verify.models.weights import open_weights
from verify.results import LevelResult, Verdict

TOKENS = 24


@cache
def engine() -> Qwen35:
    return Qwen35(open_weights(EXAMPLE))


class Roomy(Plan):
    """With places to spare: a loop that counts wrongly is to be found by what it says, not by running out of room."""

    @property
    def context(self) -> int:
        return 200


def plan(**options) -> Plan:
    usual = {"tokens": TOKENS, "drafts": (2,)} | options
    return Roomy(prompt_ids(EXAMPLE)[:3], **usual)


def accepted_tokens() -> frozenset[int]:
    """Tokens of good streams that were drafted and accepted, and not said before."""
    found = set()
    for prompt in prompt_ids(EXAMPLE)[:3]:
        how = good_loop.Settings(TOKENS, context=200)
        stream = good_loop.decode(engine(), prompt, how, good_loop.HeadDrafter(engine(), 200), 2)
        at = 1
        for accepted in stream.accepted:
            if accepted and stream.tokens[at] not in stream.tokens[:at]:
                found.add(stream.tokens[at])
                break
            at += accepted + 1
    return frozenset(found)


def mutated_engine(old: str, new: str) -> type[Qwen35]:
    """The model's class with one piece of its own source, or of what models share, exchanged."""
    if old in Path(str(good_engine.__file__)).read_text():
        return mutated(good_engine, old, new).Qwen35
    shared = mutated(good_base, old, new)
    return mutated(good_engine, "from verify.models.base import", f"from {shared.__name__} import").Qwen35


EMIT = "            self._emit(logits[k])\n"
COMMIT = "        self.engine.commit(self.state, len(decided))\n"
LOOP: dict[str, tuple[str, str, dict]] = {
    "first draft accepted unseen": (
        "stream.tokens[-1] != drafts[k]:", "(k > 0 and stream.tokens[-1] != drafts[k]):", {}),
    "draft emitted on trust": (
        EMIT, EMIT + "            stream.tokens[-1] = drafts[k] if k < len(drafts) else stream.tokens[-1]\n", {}),
    "bonus token dropped": (
        "        decided = rows[:count]\n",
        ("        decided = rows[:count]\n        if drafts and accepted == len(drafts) and not stream.ended:\n"
         "            stream.tokens.pop(), stream.rows.pop()\n"), {}),
    "stop token ignored inside a draft": (
        "            accepted += 1\n            if stream.ended:\n                break\n", "            accepted += 1\n",
        {"stop": None}),
    "logits of the row before": (EMIT, "            self._emit(logits[max(0, k - 1)])\n", {}),
    "noise keyed by step rather than position": (
        "position = len(self.prompt) + len(stream.tokens)\n", "position = len(self.prompt) + len(stream.drafted)\n",
        {"temperatures": (0.8,)}),
    "bonus counted as accepted": ("stream.accepted.append(accepted)", "stream.accepted.append(count)", {}),
    "rejected rows kept": (COMMIT, "        self.engine.commit(self.state, len(rows))\n", {}),
    "an accepted row lost": (COMMIT, "        self.engine.commit(self.state, max(1, len(decided) - 1))\n", {}),
    "width not fixed": ("*[_DUMMY] * (self.settings.width - len(tokens))", "", {}),
    "token limit overrun": (
        '        elif len(stream.tokens) >= settings.tokens:\n            stream.ended = "limit"\n',
        ('        elif len(stream.tokens) >= settings.tokens + (len(stream.drafted) < settings.tokens - 1):\n'
         '            stream.ended = "limit"\n'), {}),
}  # fmt: skip

STATE: dict[str, tuple[str, str]] = {
    "recurrent state not rolled back": (
        "recurrent.rows[rows - 1 if len(recurrent.rows) > 1 else 0]", "recurrent.rows[-1]"),
    "recurrent state rolled back too far": (
        "recurrent.rows[rows - 1 if len(recurrent.rows) > 1 else 0]", "recurrent.rows[max(0, rows - 2)]"),
    "conv state off by one": (
        "(window[:, t + 1 : t + s.kernel], memory)", "(window[:, max(t, 1) : max(t, 1) + s.kernel - 1], memory)"),
    "stale keys seen": ("[None, :] > last[:, None]", "[None, :] > last.max()"),
    "position off by one after the first row": (
        "        for i in range(self.sizes.layers):\n            normed",
        "        positions = positions + (positions > state.length)\n        for i in range(self.sizes.layers):\n            normed"),
    "keys of drafts not written": (
        "cache.keys[positions], cache.values[positions] = key, value",
        "cache.keys[positions[:1]], cache.values[positions[:1]] = key[:1], value[:1]"),
    "delta rule forgets to decay": (
        "memory = memory * decay[t, :, None, None]", "memory = memory * decay[max(0, t - 1), :, None, None]"),
}  # fmt: skip


def caught(result: LevelResult, record_property, fault: str) -> str:
    record_property("fault", fault)
    record_property("levels", "identity" if result.verdict is Verdict.FAILED else "")
    assert result.verdict is Verdict.FAILED, result.summary
    return " ".join(str(f) for f in result.findings)


@pytest.mark.parametrize("fault", LOOP)
def test_a_fault_in_the_loop(monkeypatch, record_property, fault: str) -> None:
    """Another token, other bits, or counts that cannot be."""
    old, new, options = LOOP[fault]
    if "stop" in options:
        options = {"stop": accepted_tokens()}
    broken = mutated(good_loop, old, new)
    monkeypatch.setattr(identity, "decode", broken.decode)
    if fault == "token limit overrun":  # plain decoding would overrun as well: here only the drafting run does
        monkeypatch.setattr(
            identity, "decode",
            lambda e, p, s, d=None, n=0: (broken if n else good_loop).decode(e, p, s, d, n),
        )  # fmt: skip
    said = caught(check_identity(engine(), plan(**options)), record_property, fault)
    if fault == "bonus counted as accepted":
        assert "more drafts accepted than drafted" in said
    if fault == "width not fixed":
        assert "logits differ" in said


@pytest.mark.parametrize("fault", STATE)
def test_a_fault_in_the_states(record_property, fault: str) -> None:
    """What a rejected draft leaves behind."""
    broken = mutated_engine(*STATE[fault])(open_weights(EXAMPLE))
    result = check_identity(broken, plan(drafts=(3,)))
    caught(result, record_property, fault)


def test_a_clean_run_is_identical() -> None:
    """Both modes, several temperatures; the largest difference is 0."""
    result = check_identity(engine(), plan(drafts=(1, 3), temperatures=(0.0, 0.7), modes=(EXACT, NATIVE)))
    assert result.verdict is Verdict.PASSED, result.findings
    assert result.data["largest_difference"] == 0
    assert result.data["identical"] == len(result.data["runs"]) == 2 * 2 * 2 * 3
    assert all(r["accepted"] <= r["drafted"] for r in result.data["runs"])


def test_a_model_that_is_not_deterministic(monkeypatch) -> None:
    """Is called so, with exit code 6; it is never a mismatch of drafts."""
    logits = Qwen35.logits
    source = torch.Generator().manual_seed(0)

    def shaky(self: Qwen35, hidden: torch.Tensor) -> torch.Tensor:
        result = logits(self, hidden)
        return result + torch.randn(result.shape, generator=source) * 1e-3

    monkeypatch.setattr(Qwen35, "logits", shaky)
    for mode in (EXACT, NATIVE):
        result = check_identity(engine(), plan(modes=(mode,)))
        assert result.verdict is Verdict.INCONCLUSIVE
        assert result.verdict.exit_code == 6
        assert "not deterministic" in str(result.findings[0])
        assert "token 0" in str(result.findings[0])
        assert result.data["runs"] == []


def test_a_fresh_process_that_decodes_otherwise() -> None:
    """The first control has two parts."""

    def fresh(how, prompt):
        stream = good_loop.decode(engine(), prompt, how)
        stream.rows[5] = stream.rows[5] + 1e-6
        return stream

    result = check_identity(engine(), plan(), fresh=fresh)
    assert result.verdict is Verdict.INCONCLUSIVE
    assert "token 5" in str(result.findings[0])
    assert "fresh process" in str(result.findings[0])


class Tilted(Qwen35):
    """Adds to some logits, as if rounding, where several rows are evaluated at once."""

    by = 0.0

    @torch.inference_mode()
    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        result = super().logits(hidden)
        if hidden.ndim > 1 and len(hidden) > 1:
            second = result.topk(2).indices[:, 1]
            result[torch.arange(len(result)), second] += self.by
        return result


@pytest.mark.parametrize(("by", "verdict"), [(3e-3, None), (8.0, Verdict.FAILED)])
def test_native_mode_tells_near_ties_from_mismatches(by: float, verdict: Verdict | None) -> None:
    """What rounding can do is inconclusive or nothing; more is a mismatch."""
    tilted = Tilted(open_weights(EXAMPLE))
    tilted.by = by
    result = check_identity(tilted, plan(modes=(NATIVE,), drafts=(1, 2), tokens=48))
    if verdict is None:
        assert result.verdict in {Verdict.PASSED, Verdict.INCONCLUSIVE}
        assert all("near-tie" in f.what for f in result.findings)
    else:
        assert result.verdict is verdict


# --- heads


def every(part: str, change) -> Change:
    def apply(file: Parts) -> None:
        for name in file.entries:
            if name.startswith("blk.4.") and (part in name):
                file[name] = change(file[name])

    return apply


HEADS: dict[str, tuple[Change, str, bool]] = {
    "zeroed": (every("", lambda x: x * 0 if x.ndim > 1 else x), "zero", True),
    "random": (every("", lambda x: noise(x) if x.ndim > 1 else x), "", True),
    "fc halves swapped": (every("eh_proj", lambda x: np.roll(x, 256, 1)), "halves", True),
    "norms not shifted": (every("norm", lambda x: x - 1), "lack their shift", True),
    "layer of the trunk instead": (
        lambda f: [f.__setitem__(n, f[n.replace("blk.4.", "blk.3.")]) for n in f.entries
                   if n.startswith("blk.4.") and "nextn" not in n], "", False),
    "fc columns permuted": (every("eh_proj", lambda x: x[:, ::-1]), "", False),
}  # fmt: skip


@pytest.mark.parametrize("fault", HEADS)
def test_a_head_that_guesses_badly(conversions, tmp_path: Path, record_property, fault: str) -> None:
    """Tokens are the same with it, so identity passes: acceptance tells, next to the source's own head."""
    change, words, alone = HEADS[fault]
    parts = Parts(conversions("dense", "bundled") / "Q8_0.gguf")
    change(parts)
    file = parts.write(tmp_path / "x.gguf")
    (tmp_path / "prompts.txt").write_text(
        "import os\nimport sys\n\nclass Message:\n\n    def test_\n\n    try:\n        import"
    )
    options = {"levels": ("acceptance",), "tokens": 32, "prompts": tmp_path / "prompts.txt", "drafts": (2,)}
    report = verify(file, Options(EXAMPLE, **options))
    said = report.as_text()
    record_property("fault", f"head: {fault}")
    record_property("levels", "acceptance" if report.exit_code else "")
    assert report.exit_code == 1, said
    assert words in said
    if alone and words:
        assert words in verify(file, Options(**options)).as_text()
    if fault == "fc halves swapped":
        identical = verify(
            file, Options(levels=("identity",), tokens=12, prompts=tmp_path / "prompts.txt", drafts=(2,))
        )
        assert identical.exit_code == 0


@pytest.mark.parametrize("kind", ["dense", "moe"])
def test_good_heads_are_as_good_as_their_source(conversions, kind: str) -> None:
    """In any type, also far below the trunk's."""
    for mix in ("F16", "Q4_K_M"):
        file = conversions(kind, "bundled") / f"{mix}.gguf"
        report = verify(file, Options(checkpoint(kind), levels=("acceptance",), tokens=24, drafts=(2,)))
        assert report.exit_code == 0, report.as_text()
        mine, theirs = (report.level("acceptance").data[k] for k in ("file", "source"))
        assert abs(mine[0][0] / mine[0][1] - theirs[0][0] / theirs[0][1]) < 0.1
