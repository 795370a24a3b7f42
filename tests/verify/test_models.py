"""The torch engine against transformers: the trunk's logits and tokens, rows that stand for themselves, the head."""

from __future__ import annotations

import math
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import torch

from converter.model import read_model
from tests.conftest import EXAMPLE, checkpoint
from tests.oracles.transformers_model import greedy, prompt_ids, reference
from verify.models import base, opening
from verify.models.base import HeadState, TrunkState
from verify.models.module import _stacked, module_logits, module_of, state_dict
from verify.models.opening import open_model
from verify.models.qwen35 import Qwen35
from verify.models.weights import FileWeights, open_weights

KINDS = ("dense", "moe")
LENGTH = 160


@cache
def model(folder: Path) -> Qwen35:
    """The checkpoint itself, in float32."""
    return Qwen35(open_weights(folder))


def run(engine: Qwen35, ids: list[int], state: TrunkState, width: int) -> torch.Tensor:
    """Hidden states of a text, fed in pieces of `width` rows."""
    pieces = []
    for at in range(0, len(ids), width):
        rows = torch.tensor(ids[at : at + width])
        pieces.append(engine.trunk(rows, state))
        engine.commit(state, len(rows))
    return torch.cat(pieces)


@pytest.mark.parametrize("kind", KINDS)
def test_trunk_logits_are_those_of_transformers(kind: str) -> None:
    """From tensors in GGUF's layout: every transform of the trunk is undone by the formulas."""
    folder = checkpoint(kind)
    engine, oracle = model(folder), reference(folder)
    for ids in prompt_ids(folder)[:4]:
        ours = engine.logits(engine.trunk(torch.tensor(ids), engine.trunk_state(LENGTH)))
        with torch.inference_mode():
            theirs = oracle(input_ids=torch.tensor([ids])).logits[0]
        torch.testing.assert_close(ours, theirs, rtol=0, atol=2e-3)


@pytest.mark.parametrize("kind", KINDS)
def test_greedy_tokens_are_those_of_transformers(kind: str) -> None:
    """Token by token with a state, where transformers' margins decide."""
    folder = checkpoint(kind)
    engine = model(folder)
    for ids, (tokens, margins) in zip(prompt_ids(folder)[:4], greedy(folder, 32), strict=False):
        state = engine.trunk_state(LENGTH)
        hidden = run(engine, ids, state, len(ids))
        for expected, margin in zip(tokens, margins, strict=True):
            best = engine.logits(hidden[-1:]).argmax(-1)
            if margin < 1e-3:
                break
            assert best.item() == expected
            hidden = run(engine, [expected], state, 1)


@pytest.mark.parametrize("kind", KINDS)
def test_rows_are_taken_back_without_a_trace(kind: str) -> None:
    """After any rejection a row of the same width has the same bits as if nothing had been drafted."""
    engine = model(checkpoint(kind))
    ids = prompt_ids(checkpoint(kind))[0]
    plain, drafted = (engine.trunk_state(LENGTH) for _ in range(2))
    for state in (plain, drafted):
        run(engine, ids, state, len(ids))
    token, width, junk = 300, 4, [5, 1900, 7]
    for accepted in (0, 1, 2, 3, 0, 0, 2):
        right = [token + k for k in range(accepted + 1)]
        rows = right + junk[: width - len(right)]
        hidden = engine.trunk(torch.tensor(rows), drafted)
        engine.commit(drafted, len(right))
        for k, one in enumerate(right):
            alone = engine.trunk(torch.tensor([one, 0, 0, 0]), plain)
            engine.commit(plain, 1)
            # Where a row stands may change its bits (exact mode probes for that), what was rejected may not.
            torch.testing.assert_close(hidden[k], alone[0], rtol=0, atol=1e-4)
        again = [engine.trunk(torch.tensor([9, 9, 9, 9]), s) for s in (drafted, _copy(engine, drafted))]
        assert torch.equal(again[0], again[1])
        token += 11
    assert plain.length == drafted.length


def _copy(engine: Qwen35, state: TrunkState) -> TrunkState:
    """A state with room of the same size but nothing in it beyond what is decided."""
    copy = engine.trunk_state(LENGTH)
    copy.length = state.length
    for i, cache_ in state.attention.items():
        copy.attention[i].keys[: state.length] = cache_.keys[: state.length]
        copy.attention[i].values[: state.length] = cache_.values[: state.length]
    for i, recurrent in state.recurrent.items():
        copy.recurrent[i].conv, copy.recurrent[i].memory = recurrent.conv, recurrent.memory
    return copy


def test_head_predicts_what_the_engine_prints() -> None:
    """Candidates that llama.cpp lists for the first draft of this prompt: their shares among the ten best."""
    folder = checkpoint("dense")
    engine = model(folder)
    ids = prompt_ids(folder)[0]
    hidden = engine.trunk(torch.tensor(ids), engine.trunk_state(LENGTH))
    token = engine.logits(hidden[-1:]).argmax(-1)
    following = torch.cat([torch.tensor(ids[1:]), token])
    states = engine.head(hidden, following, engine.head_state(engine.trunk_state(1), LENGTH))
    best = engine.head_logits(states[-1]).topk(10)
    assert best.indices.tolist()[:3] == [677, 34, 506]
    assert best.values.softmax(-1).tolist()[:3] == pytest.approx([0.153, 0.141, 0.131], abs=6e-4)


@pytest.mark.parametrize("kind", KINDS)
def test_head_is_as_good_as_it_was_trained(kind: str) -> None:
    """First drafts hit what the trunk says next in about three of four (fixtures: 77 and 79 %)."""
    folder = checkpoint(kind)
    engine = model(folder)
    hits = total = 0
    for ids, (tokens, _) in zip(prompt_ids(folder)[:6], greedy(folder, 64), strict=False):
        text = ids + list(tokens)
        hidden = engine.trunk(torch.tensor(text), engine.trunk_state(len(text)), keep_rows=False)
        drafts = engine.head_logits(
            engine.head(hidden[:-1], torch.tensor(text[1:]), engine.head_state(engine.trunk_state(1), len(text)))
        )
        best = drafts.argmax(-1)[len(ids) - 1 : -1]  # drafted from the generated tokens' own places on
        hits += (best == torch.tensor(text[len(ids) + 1 :])).sum().item()
        total += len(best)
    assert 0.65 < hits / total < 0.9


def test_head_entries_may_be_taken_back() -> None:
    """Lowering the length makes the place free again."""
    engine = model(checkpoint("dense"))
    hidden = torch.randn(3, engine.sizes.hidden, generator=torch.Generator().manual_seed(1))
    tokens = torch.tensor([5, 6, 7])

    def first(state: HeadState) -> torch.Tensor:
        return engine.head(hidden[:1], tokens[:1], state)

    state = engine.head_state(engine.trunk_state(1), 8)
    fresh = first(state)
    engine.head(hidden[1:], tokens[1:], state)
    state.length = 0
    assert torch.equal(first(state), fresh)


@pytest.mark.parametrize("kind", KINDS)
def test_files_hold_the_same_model(kind: str, conversions) -> None:
    """A BF16 file gives the checkpoint's logits; Q8_0 is near, Q2_K further away."""
    folder = checkpoint(kind)
    ids = torch.tensor(prompt_ids(folder)[0])
    engine = model(folder)
    truth = engine.logits(engine.trunk(ids, engine.trunk_state(LENGTH))).log_softmax(-1)
    distance = {}
    for mix in ("BF16", "Q8_0", "Q2_K"):
        file = Qwen35(FileWeights(conversions(kind, "bundled") / f"{mix}.gguf"))
        assert file.has_head
        logs = file.logits(file.trunk(ids, file.trunk_state(LENGTH))).log_softmax(-1)
        distance[mix] = (truth.exp() * (truth - logs)).sum(-1).mean().item()
    assert math.isclose(distance["BF16"], 0, abs_tol=1e-6)
    assert distance["BF16"] < distance["Q8_0"] < 0.01 < distance["Q2_K"]


@pytest.mark.parametrize("mix", ["BF16", "Q8_0", "Q4_K_M", "Q5_0"])
@pytest.mark.parametrize("kind", KINDS)
def test_packed_weights_are_the_same_model(kind: str, mix: str, conversions) -> None:
    """Kept as stored and dequantized when used: every bit of trunk and head, in a fraction of the memory."""
    folder = checkpoint(kind)
    weights = FileWeights(conversions(kind, "bundled") / f"{mix}.gguf")
    ids = torch.tensor(prompt_ids(folder)[0])
    whole, packed = Qwen35(weights), Qwen35(weights, packed=True)
    assert packed.tensors.nbytes < 0.6 * whole.tensors.nbytes
    results = []
    for engine in (whole, packed):
        hidden = engine.trunk(ids, engine.trunk_state(LENGTH))
        drafted = engine.head(hidden[:-1], ids[1:], engine.head_state(engine.trunk_state(1), LENGTH))
        results.append((engine.logits(hidden), engine.head_logits(drafted)))
    assert torch.equal(results[0][0], results[1][0])
    assert torch.equal(results[0][1], results[1][1])


def test_weights_stay_packed_where_memory_is_short(monkeypatch) -> None:
    """The choice is made by the memory that is free."""
    assert open_model(EXAMPLE, None, "cpu").tensors.nbytes > 0
    monkeypatch.setattr(opening, "_SHARE_OF_MEMORY", 1e-6)
    asked = []
    load = base.load
    monkeypatch.setattr(base, "load", lambda *a, packed: (asked.append(packed), load(*a, packed=packed))[1])
    open_model(EXAMPLE, None, "cpu")
    assert asked == [True]


@pytest.mark.parametrize("kind", KINDS)
def test_modules_made_from_files(kind: str, conversions) -> None:
    """The inverse transforms give transformers' state dict: exact where the way back is, near where 1 was added."""
    source = read_model(checkpoint(kind))
    weights = FileWeights(conversions(kind, "bundled") / "BF16.gguf")
    module, oracle = module_of(weights, source), reference(checkpoint(kind))
    expected = dict(oracle.state_dict())
    found = state_dict(weights, source)
    names = {n: n.replace("model.", "model.language_model.", 1) if n not in expected else n for n in found}
    assert len(found) > 50
    for name, other in names.items():
        torch.testing.assert_close(found[name], expected[other], rtol=0, atol=1e-6)
    ids = torch.tensor(prompt_ids(checkpoint(kind))[0])
    with torch.inference_mode():
        theirs = oracle(input_ids=ids[None]).logits[0]
    torch.testing.assert_close(module_logits(module, ids), theirs, rtol=0, atol=1e-3)


def test_experts_stored_one_by_one() -> None:
    """Become the stacked tensors that transformers has."""
    made = {f"a.experts.{e}.{part}_proj.weight": np.full((2, 3), 10 * e + k, np.float32)
            for e in range(2) for k, part in enumerate(("gate", "up", "down"))}  # fmt: skip
    found = _stacked(made)
    assert found["a.experts.gate_up_proj"][:, :, 0].tolist() == [[0, 0, 1, 1], [10, 10, 11, 11]]
    assert found["a.experts.down_proj"].shape == (2, 2, 3)


@pytest.mark.gpu
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_on_a_gpu_logits_are_near(kind: str, packed: bool, conversions) -> None:
    """In bfloat16, whole or packed, as in float32 on the CPU."""
    weights = FileWeights(conversions(kind, "bundled") / "Q8_0.gguf")
    ids = torch.tensor(prompt_ids(checkpoint(kind))[6])
    truth = Qwen35(weights)
    engine = Qwen35(weights, device="cuda", dtype=torch.bfloat16, packed=packed)
    expected = truth.logits(truth.trunk(ids, truth.trunk_state(LENGTH))).log_softmax(-1)
    found = engine.logits(engine.trunk(ids.cuda(), engine.trunk_state(LENGTH))).log_softmax(-1).cpu()
    assert (expected.exp() * (expected - found)).sum(-1).mean().item() < 0.02
