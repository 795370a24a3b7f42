"""Decoding with drafts: the tokens and the very logits of plain decoding, whatever is drafted, wherever it ends."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.conftest import checkpoint
from tests.oracles.transformers_model import greedy, prompt_ids
from verify.decode import (
    HeadDrafter,
    ScriptedDrafter,
    Settings,
    Stream,
    choose,
    decode,
    gumbel,
    prepare_exact,
)
from verify.models.qwen35 import Qwen35
from verify.models.weights import open_weights

KINDS = ("dense", "moe")
CONTEXT = 200


@cache
def model(folder: Path) -> Qwen35:
    return Qwen35(open_weights(folder))


@cache
def prompts(folder: Path) -> list[list[int]]:
    return prompt_ids(folder)


def exact(engine: Qwen35, n: int, tokens: int = 24, **options) -> Settings:
    """Settings of exact mode, the engine prepared for them."""
    found = Settings(tokens, n + 1, context=options.pop("context", CONTEXT), **options)
    prepare_exact(engine, n + 1, found.context)
    return found


def assert_equal(a: Stream, b: Stream) -> None:
    assert a.tokens == b.tokens
    assert a.ended == b.ended
    assert all(torch.equal(x, y) for x, y in zip(a.rows, b.rows, strict=True))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("n", [1, 2, 3, 5])
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_every_bit_is_that_of_plain_decoding(kind: str, n: int, temperature: float) -> None:
    """With the model's own head, greedy and sampled."""
    folder = checkpoint(kind)
    engine = model(folder)
    how = exact(engine, n, temperature=temperature, seed=3)
    for prompt in prompts(folder)[:2]:
        drafted = decode(engine, prompt, how, HeadDrafter(engine, CONTEXT), n)
        assert_equal(decode(engine, prompt, how), drafted)
        assert sum(drafted.accepted) > 0


@pytest.mark.parametrize("kind", KINDS)
def test_tokens_are_those_of_transformers(kind: str) -> None:
    """In exact mode as well, where transformers' margins decide."""
    folder = checkpoint(kind)
    engine = model(folder)
    how = exact(engine, 2, 32)
    for prompt, (tokens, margins) in zip(prompts(folder)[:3], greedy(folder, 32), strict=False):
        clear = next((i for i, m in enumerate(margins) if m < 1e-3), len(margins))
        assert decode(engine, prompt, how).tokens[:clear] == list(tokens[:clear])


@given(wrong=st.lists(st.booleans(), min_size=24, max_size=24), n=st.integers(1, 4))
@settings(max_examples=15, deadline=None)
def test_any_pattern_of_rejections(wrong: list[bool], n: int) -> None:
    """A drafter that is wrong wherever it likes: rollback at every depth, one after the other, on one engine."""
    folder = checkpoint("dense")
    engine, prompt = model(folder), prompts(folder)[0]
    how = exact(engine, n)
    plain = decode(engine, prompt, how)
    drafter = ScriptedDrafter(plain.tokens, lambda i: wrong[i], 2048)
    drafted = decode(engine, prompt, how, drafter, n)
    assert_equal(plain, drafted)
    for accepted, offered in zip(drafted.accepted, drafted.drafted, strict=True):
        assert accepted <= offered <= n
    assert_equal(plain, decode(engine, prompt, how, drafter, n))  # the same instance again


@pytest.mark.parametrize("kind", KINDS)
def test_a_perfect_and_a_useless_drafter(kind: str) -> None:
    """All accepted: one step yields n + 1 tokens. None: one token a step, and the text is the same."""
    folder = checkpoint(kind)
    engine, prompt, n = model(folder), prompts(folder)[1], 3
    how = exact(engine, n, 25)
    plain = decode(engine, prompt, how)
    right = decode(engine, prompt, how, ScriptedDrafter(plain.tokens, lambda _: False, 2048), n)
    assert_equal(plain, right)
    assert right.acceptance == 1
    assert len(right.drafted) == 6  # the first token comes with the prompt: 24 more, 4 a step
    wrong = decode(engine, prompt, how, ScriptedDrafter(plain.tokens, lambda _: True, 2048), n)
    assert_equal(plain, wrong)
    assert wrong.acceptance == 0
    assert len(wrong.drafted) == 24


def test_a_head_of_random_weights() -> None:
    """Drafts are nonsense, the text is not."""
    folder = checkpoint("dense")
    engine, prompt = model(folder), prompts(folder)[2]
    source = torch.Generator().manual_seed(0)
    noise = {
        n: torch.randn(engine.tensors.shape(n), generator=source) for n in engine.tensors if n.startswith("blk.4.")
    }
    how = exact(engine, 3)
    drafted = decode(engine, prompt, how, HeadDrafter(engine.with_tensors(noise), CONTEXT), 3)
    assert_equal(decode(engine, prompt, how), drafted)
    assert drafted.acceptance is not None
    assert drafted.acceptance < 0.1


@pytest.mark.parametrize("n", [1, 3])
def test_a_stop_token_inside_a_draft(n: int) -> None:
    """It is the last one, as in plain decoding, whether it was drafted or not."""
    folder = checkpoint("dense")
    engine = model(folder)
    for prompt in prompts(folder)[:3]:
        usual = decode(engine, prompt, exact(engine, n)).tokens
        for stop in sorted(set(usual))[:6]:
            how = exact(engine, n, stop=frozenset({stop}))
            plain = decode(engine, prompt, how)
            assert plain.ended == "stop"
            assert plain.tokens.index(stop) == len(plain.tokens) - 1
            for drafter in (HeadDrafter(engine, CONTEXT), ScriptedDrafter(usual, lambda _: False, 2048)):
                assert_equal(plain, decode(engine, prompt, how, drafter, n))


@pytest.mark.parametrize("tokens", [1, 2, 3])
def test_fewer_tokens_than_drafts(tokens: int) -> None:
    """Nothing is drafted that could not be used."""
    folder = checkpoint("dense")
    engine, prompt = model(folder), prompts(folder)[0]
    how = exact(engine, 4, tokens)
    drafted = decode(engine, prompt, how, HeadDrafter(engine, CONTEXT), 4)
    assert_equal(decode(engine, prompt, how), drafted)
    assert len(drafted.tokens) == tokens
    assert all(d < tokens for d in drafted.drafted)


@pytest.mark.parametrize("room", [1, 2, 5])
def test_the_end_of_the_context(room: int) -> None:
    """Both stop where the state is full; a prompt that fills it gives nothing."""
    folder = checkpoint("dense")
    engine, prompt = model(folder), prompts(folder)[0]
    how = exact(engine, 3, context=len(prompt) + room)
    plain = decode(engine, prompt, how)
    assert plain.ended == "context"
    assert len(plain.tokens) == room + 1
    assert_equal(plain, decode(engine, prompt, how, HeadDrafter(engine, how.context), 3))
    assert decode(engine, prompt, exact(engine, 3, context=len(prompt))).tokens == []


def test_a_prompt_of_one_token() -> None:
    """The head has nothing to begin with."""
    engine = model(checkpoint("dense"))
    how = exact(engine, 2)
    for token in (0, 5, 300):
        assert_equal(decode(engine, [token], how), decode(engine, [token], how, HeadDrafter(engine, CONTEXT), 2))


def test_prompts_do_not_remember_each_other() -> None:
    """A long one before a short one changes nothing."""
    folder = checkpoint("dense")
    engine = model(folder)
    how = exact(engine, 2)
    drafter = HeadDrafter(engine, CONTEXT)
    first = decode(engine, prompts(folder)[2], how, drafter, 2)
    decode(engine, prompts(folder)[6], how, drafter, 2)
    again = decode(engine, prompts(folder)[2], how, drafter, 2)
    assert_equal(first, again)
    assert first.accepted == again.accepted


@pytest.mark.parametrize("kind", KINDS)
def test_native_mode_differs_by_rounding_only(kind: str) -> None:
    """Evaluations as wide as they come: the same text but for near-ties, logits that are close."""
    folder = checkpoint(kind)
    engine = model(folder)
    engine.single_rows = set()
    for prompt in prompts(folder)[:2]:
        plain = decode(engine, prompt, Settings(24, context=CONTEXT))
        drafted = decode(engine, prompt, Settings(24, context=CONTEXT), HeadDrafter(engine, CONTEXT), 3)
        for a, b, x, y in zip(plain.rows, drafted.rows, plain.tokens, drafted.tokens, strict=True):
            torch.testing.assert_close(a, b, rtol=0, atol=1e-3)
            if x != y:
                assert a.topk(2).values.diff().abs().item() < 1e-3
                break


def test_noise_depends_on_seed_and_position_alone() -> None:
    """Same arguments, same bits; any other differs."""
    assert (gumbel(1, 2, 50) == gumbel(1, 2, 50)).all()
    assert (gumbel(1, 2, 50)[:20] == gumbel(1, 2, 20)).all()
    assert (gumbel(1, 2, 50) != gumbel(1, 3, 50)).all()
    assert (gumbel(1, 2, 50) != gumbel(2, 2, 50)).all()


def test_samples_follow_the_softmax() -> None:
    """Chi-square over 8 outcomes and 20,000 draws (seeds and positions), at two temperatures."""
    logits = torch.tensor([2.0, 1.0, 0.5, 0.0, -0.5, -1.0, 1.5, -2.0])
    for temperature in (0.7, 1.3):
        how = Settings(1, temperature=temperature)
        counts = np.zeros(8)
        for seed in range(200):
            for position in range(100):
                counts[choose(logits, position, Settings(1, temperature=temperature, seed=seed))] += 1
        expected = torch.softmax(logits.double() / temperature, -1).numpy() * counts.sum()
        chi_square = float(((counts - expected) ** 2 / expected).sum())
        assert chi_square < 24.3, how  # 99.9 % of 7 degrees of freedom


def test_streams_follow_the_model() -> None:
    """The first token that follows a prompt, sampled with drafts over many seeds, is distributed as the softmax says."""
    folder = checkpoint("dense")
    engine, prompt = model(folder), prompts(folder)[0]
    engine.single_rows = set()
    row = decode(engine, prompt, Settings(1, context=CONTEXT)).rows[0]
    share = torch.softmax(row.double(), -1)
    likely = share.topk(5).indices.tolist()
    counts = dict.fromkeys(likely, 0)
    # The prompt is evaluated once; each seed draws from the same logits, as the loop does.
    draws = 3000
    for seed in range(draws):
        token = choose(row, len(prompt), Settings(1, temperature=1.0, seed=seed))
        if token in counts:
            counts[token] += 1
    rest = draws - sum(counts.values())
    seen = [*counts.values(), rest]
    wanted = [float(share[t]) * draws for t in likely]
    wanted.append(draws - sum(wanted))
    assert sum((s - w) ** 2 / w for s, w in zip(seen, wanted, strict=True)) < 20.5  # 99.9 % of 5 degrees of freedom
    for seed in range(6):  # and the loop with drafts gives just these tokens
        how = Settings(2, temperature=1.0, seed=seed, context=CONTEXT)
        drafted = decode(engine, prompt, how, HeadDrafter(engine, CONTEXT), 1)
        assert drafted.tokens[0] == choose(row, len(prompt), how)


def test_acceptance_by_position() -> None:
    """Counted from steps."""
    stream = Stream(drafted=[3, 3, 2, 0], accepted=[3, 1, 0, 0])
    assert stream.acceptance == 0.5
    assert stream.by_position() == [(2, 3), (1, 3), (1, 2)]
    assert Stream().acceptance is None


def test_rows_that_move_are_evaluated_alone(monkeypatch) -> None:
    """A linear layer whose bits depend on the place is found by the probe, and exact mode is exact nevertheless."""
    from torch.nn import functional

    folder = checkpoint("dense")
    engine, prompt = Qwen35(open_weights(folder)), prompts(folder)[0]
    linear = functional.linear

    def uneven(x: torch.Tensor, matrix: torch.Tensor) -> torch.Tensor:
        result = linear(x, matrix)
        if matrix.shape == (768, 256) and x.ndim == 2 and len(x) > 1:
            result[1:] *= 1 + 2e-7  # another order of summation, as far as a row can tell
        return result

    monkeypatch.setattr("torch.nn.functional.linear", uneven)
    assert engine.unstable(3, CONTEXT) == {(768, 256)}
    how = Settings(24, 3, context=CONTEXT)

    def differ() -> bool:
        plain = decode(engine, prompt, how)
        drafted = decode(engine, prompt, how, HeadDrafter(engine, CONTEXT), 2)
        return any(not torch.equal(a, b) for a, b in zip(plain.rows, drafted.rows, strict=False))

    assert differ()
    prepare_exact(engine, 3, CONTEXT)
    assert not differ()


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["dense", "moe"])
def test_on_a_gpu_plain_and_drafted_logits_are_equal(kind: str) -> None:
    """Exact mode in bfloat16: every bit, with real drafts and with wrong ones."""
    engine = Qwen35(open_weights(checkpoint(kind)), device="cuda", dtype=torch.bfloat16)
    for prompt in prompts(checkpoint(kind))[:3]:
        how = exact(engine, 3)
        assert_equal(decode(engine, prompt, how), decode(engine, prompt, how, HeadDrafter(engine, CONTEXT), 3))
