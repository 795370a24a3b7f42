"""The level engine: llama.cpp's drafts against our head's, and faults that only an engine shows."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import pytest

from tests.conftest import EXAMPLE, checkpoint
from tests.oracles.transformers_model import prompt_ids
from tests.verify.files import Parts
from verify import engine as level
from verify.engine import check_engine
from verify.engines.base import Completion, Run
from verify.engines.llama_cpp import DraftStep, Engine, draft_steps
from verify.models.opening import open_model
from verify.models.qwen35 import Qwen35
from verify.results import Verdict

pytest.importorskip("xllamacpp", reason="needs llama.cpp: pip install 'convert-mtp[llamacpp]'")


@pytest.mark.parametrize(("kind", "mix"), [("dense", "BF16"), ("dense", "Q4_K_M"), ("moe", "F16")])
def test_the_engine_drafts_what_our_head_does(conversions, kind: str, mix: str) -> None:
    """Every candidate's share, in steps of three drafts; states before the final norm would fit worse."""
    file = conversions(kind, "bundled") / f"{mix}.gguf"
    result = check_engine(file, None, prompt_ids(checkpoint(kind))[:3], 24, (3,), open_model(file, None, "cpu"))
    assert result.verdict in {Verdict.PASSED, Verdict.INCONCLUSIVE}, result.findings  # near-ties of rounded states
    found = result.data["candidates"]
    assert found["compared"] > 100
    assert found["mean"] < 0.012
    assert found["mean"] < 0.8 * found["mean_before_final_norm"]


def test_an_engine_that_feeds_other_states(conversions, monkeypatch, record_property) -> None:
    """Is found and named: here our side takes the states that the engine does not."""
    trunk = Qwen35.trunk
    monkeypatch.setattr(
        Qwen35, "trunk", lambda self, *a, final_norm=True, **o: trunk(self, *a, final_norm=not final_norm, **o)
    )
    file = conversions("dense", "bundled") / "BF16.gguf"
    result = check_engine(file, None, prompt_ids(EXAMPLE)[:3], 16, (3,), open_model(file, None, "cpu"))
    record_property("fault", "pre- instead of post-norm state")
    record_property("levels", "engine" if result.verdict is Verdict.FAILED else "")
    assert result.verdict is Verdict.FAILED
    assert "before the final norm" in result.findings[0].cause


def test_another_head_than_the_engine_has(conversions, tmp_path: Path) -> None:
    """Candidates are far away."""
    parts = Parts(conversions("dense", "bundled") / "BF16.gguf")
    parts["blk.4.nextn.eh_proj.weight"] = parts["blk.4.nextn.eh_proj.weight"][:, ::-1]
    other = open_model(parts.write(tmp_path / "x.gguf"), None, "cpu")
    result = check_engine(conversions("dense", "bundled") / "BF16.gguf", None, prompt_ids(EXAMPLE)[:2], 16, (2,), other)
    assert result.verdict is Verdict.FAILED
    assert "not those of the head" in result.findings[0].what


def test_steps_and_tokens_fit_each_other(conversions) -> None:
    """Each step begins where the one before ended; its counts are the engine's own."""
    file = conversions("dense", "bundled") / "BF16.gguf"
    answer, steps = draft_steps(Engine(str(file), None, 3), prompt_ids(EXAMPLE)[0], 24)
    lengths = [b.place - a.place for a, b in pairwise(steps)]
    assert all(1 <= length <= len(step.candidates) + 1 for length, step in zip(lengths, steps, strict=False))
    assert sum(lengths) - len(lengths) <= answer.accepted  # the last step's come on top
    assert answer.accepted <= sum(lengths) - len(lengths) + len(steps[-1].candidates)
    # drafts that reach past the last token are printed, but not counted
    assert answer.drafted <= sum(len(s.candidates) for s in steps) <= answer.drafted + 3


def answers(*tokens: tuple[int, ...], margins: tuple[float, ...] = ()) -> Run:
    return Run(tuple(Completion(t, 10, 5, 100.0, margins) for t in tokens), None, "an engine", 1.0)


def test_divergences_are_judged_by_the_engines_margins(monkeypatch) -> None:
    """A near-tie is inconclusive, anything else a mismatch; a shorter answer counts as one."""

    def run(engine: Engine, _requests) -> Run:
        if not engine.drafts:
            return answers((1, 2, 3), (4, 5, 6), (7, 8, 9), margins=(1.0, 0.01, 1.0))
        return answers((1, 3, 3), (4, 5, 7), (7, 8))

    monkeypatch.setattr(level, "run", run)
    result = check_engine(Path("x.gguf"), None, [[1]] * 3, 3, (2,))
    assert [f.verdict for f in result.findings] == [Verdict.INCONCLUSIVE, Verdict.FAILED, Verdict.FAILED]
    assert "prompt 0, token 1" in result.findings[0].where
    assert result.findings[2].found == "the end"


def test_an_engine_that_prints_no_candidates(monkeypatch, conversions) -> None:
    """Nothing compared is not a pass."""
    monkeypatch.setattr(level, "run", lambda *_a: answers((1, 2)))
    monkeypatch.setattr(level, "draft_steps", lambda *_a: (answers((1, 2)).completions[0], list[DraftStep]()))
    model = open_model(EXAMPLE, None, "cpu")
    file = conversions("dense", "bundled") / "Q8_0.gguf"
    result = check_engine(file, None, [[5, 6]], 2, (2,), model)
    assert result.verdict is Verdict.INCONCLUSIVE


def test_more_accepted_than_drafted(monkeypatch) -> None:
    """A bonus token counted as accepted is an error of the engine's counters."""

    def run(_engine: Engine, _requests) -> Run:
        return Run((Completion((1, 2, 3), 1, 2, 100.0),), None, "an engine", 1.0)

    monkeypatch.setattr(level, "run", run)
    result = check_engine(Path("x.gguf"), None, [[1]], 3, (1,))
    assert "more drafts accepted than drafted" in result.findings[0].what


@pytest.mark.parametrize(
    ("after", "before", "verdict"),
    [(0.0067, 0.0066, Verdict.PASSED), (0.0050, 0.0026, Verdict.FAILED), (0.0026, 0.0050, Verdict.PASSED),
     (0.05, 0.049, Verdict.FAILED)],
    ids=["noise", "the state before the norm", "the right one", "neither"],
)  # fmt: skip
def test_what_distances_say(monkeypatch, after: float, before: float, verdict: Verdict) -> None:
    """Rounding alone, as in a large model without any training, is no evidence for either state."""
    step = DraftStep(0, (((1, 0.5),),))
    answer = Completion((1,), 1, 0, 1.0)
    monkeypatch.setattr(level, "draft_steps", lambda *_: (answer, [step]))
    monkeypatch.setattr(level, "_distance", lambda *_, final_norm: after if final_norm else before)
    findings, data = level._candidates(object(), Engine("x"), [[1, 2]], 0.03)
    assert max((f.verdict for f in findings), default=Verdict.PASSED) is verdict
    assert data["compared"] == 1
