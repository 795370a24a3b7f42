"""Gemma 4 and its assistant in torch: transformers' own classes are the oracle; faults that only this family can have."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from converter import convert
from converter.errors import CheckpointError
from converter.imatrix import read_imatrix
from converter.model import read_model
from tests.conftest import EXAMPLE, script
from tests.oracles import transformers_model as reference
from tests.verify.files import Change, Parts, values
from tests.verify.mutants import mutated
from verify.calibrate import calibrate
from verify.check import Options, verify
from verify.decode import HeadDrafter, ScriptedDrafter, Settings, decode, prepare_exact
from verify.engine import check_engine
from verify.logits import check_logits
from verify.models import gemma4 as good
from verify.models.gemma4 import Gemma4
from verify.models.module import module_logits, module_of
from verify.models.opening import open_model
from verify.models.weights import PairedWeights, open_weights
from verify.results import Verdict


@pytest.fixture(scope="module")
def random_models(target: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("random")
    return {kind: script("tiny_gemma4").make(kind, folder / kind, target) for kind in ("moe", "per-layer")}


@pytest.fixture(scope="module")
def text(target: Path) -> torch.Tensor:
    """Three windows long."""
    ids = reference.prompt_ids(target)
    return torch.tensor((ids[6] + ids[8] + ids[0]) * 2)


@pytest.mark.parametrize("kind", ["trained", "moe", "per-layer"])
def test_trunk_logits_are_those_of_transformers(target: Path, random_models, text: torch.Tensor, kind: str) -> None:
    """Sliding and full attention, keys as values, softcap, experts, embeddings by layer, shared keys and values."""
    folder = target if kind == "trained" else random_models[kind]
    engine = open_model(folder, None, "cpu")
    with torch.inference_mode():
        expected = reference.reference(folder)(input_ids=text[None]).logits[0]
    found = engine.logits(engine.trunk(text, engine.trunk_state(len(text) + 9)))
    torch.testing.assert_close(found, expected, rtol=0, atol=2e-3)


@pytest.mark.parametrize(("length", "tolerance"), [(20, 1e-4), (100, 0.1)])
def test_drafts_are_those_of_transformers(target: Path, assistant: Path, length: int, tolerance: float) -> None:
    """Three drafts in a row, all at one position.

    Beyond the window transformers lets the assistant see two entries more than the target's own rule gives, and
    llama.cpp does not: there the logits are only near.
    """
    from transformers.models.gemma4_assistant.modeling_gemma4_assistant import Gemma4AssistantForCausalLM

    oracle, drafter = reference.reference(target), Gemma4AssistantForCausalLM.from_pretrained(assistant).float().eval()
    engine = open_model(target, assistant, "cpu")
    ids = torch.tensor((reference.prompt_ids(target)[6] * 4)[:length])
    trunk = engine.trunk_state(length + 5)
    hidden = engine.trunk(ids, trunk)
    engine.commit(trunk, length)
    state = engine.head_state(trunk, length + 5)
    engine.follow(hidden[:-1], ids[1:], state)
    with torch.inference_mode():
        theirs = oracle(input_ids=ids[None], output_hidden_states=True, return_shared_kv_states=True)
    token, their_hidden, out = theirs.logits[0, -1:].argmax(-1), theirs.hidden_states[-1][:, -1:], hidden[-1:]
    for step in (engine.head, engine.chain, engine.chain):
        with torch.inference_mode():
            embedded = oracle.get_input_embeddings()(token[None])
            expected = drafter(
                inputs_embeds=torch.cat([embedded, their_hidden], -1), position_ids=torch.tensor([[length]]),
                attention_mask=torch.ones(1, length + 1, dtype=torch.long), shared_kv_states=theirs.shared_kv_states,
                use_cache=False,
            )  # fmt: skip
        out = step(out, token, state)
        found = engine.head_logits(out)
        torch.testing.assert_close(found, expected.logits[0], rtol=0, atol=tolerance)
        token, their_hidden = expected.logits[0].argmax(-1), expected.last_hidden_state
        assert found.argmax(-1) == token


def test_assisted_decoding_is_as_good_as_transformers(target: Path, assistant: Path) -> None:
    """The same text as plain decoding, and first drafts hit as often as the fixture was measured to (81 %)."""
    engine = open_model(target, assistant, "cpu")
    drafted = accepted = 0
    for ids, (tokens, margins) in zip(reference.prompt_ids(target)[:5], reference.greedy(target, 48), strict=False):
        stream = decode(engine, ids, Settings(48, context=120), HeadDrafter(engine, 120), 1)
        first = next((k for k in range(48) if stream.tokens[k] != tokens[k]), None)
        assert first is None or margins[first] < 1e-3
        drafted, accepted = drafted + sum(stream.drafted), accepted + sum(stream.accepted)
    assert 0.7 < accepted / drafted < 0.95


@pytest.mark.parametrize("kind", ["moe", "per-layer"])
def test_rejected_drafts_leave_no_trace(random_models, target: Path, kind: str) -> None:
    """Exact mode, every third draft wrong, beyond the window: every bit of plain decoding."""
    engine = open_model(random_models[kind], None, "cpu")
    ids, width, context = reference.prompt_ids(target)[0], 4, 80
    prepare_exact(engine, width, context)
    how = Settings(40, width, context=context)
    plain = decode(engine, ids, how)
    drafter = ScriptedDrafter(plain.tokens, lambda place: place % 3 == 0, 2048)
    drafted = decode(engine, ids, how, drafter, 3)
    assert 0 < sum(drafted.accepted) < sum(drafted.drafted)
    assert drafted.tokens == plain.tokens
    assert all(torch.equal(a, b) for a, b in zip(plain.rows, drafted.rows, strict=True))


def test_a_pair_of_folders(target: Path, assistant: Path, tmp_path: Path) -> None:
    """The source itself, with its assistant's own checkpoint; one of another model is refused."""
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("import os\nimport sys\n")
    options = {"prompts": prompts, "tokens": 12, "drafts": (2,)}
    report = verify(target, Options(assistant=assistant, levels=("identity", "acceptance"), mode="both", **options))
    assert [r.verdict for r in report.levels] == [Verdict.PASSED, Verdict.PASSED], report.as_text()
    assert report.level("identity").data["largest_difference"] == 0
    with pytest.raises(CheckpointError, match="no drafter for that model"):
        verify(target, Options(assistant=EXAMPLE, **options))


def test_another_drafter_for_a_model_that_is_open(target: Path, assistant: Path, tmp_path: Path) -> None:
    """bench-mtp tries several heads on one trunk: the same drafts as of a pair that was opened as such."""
    convert(target, tmp_path / "m-Q8_0.gguf", assistant=assistant)
    trunk, head = tmp_path / "m-Q8_0.gguf", tmp_path / "mtp-m-Q8_0.gguf"
    alone = open_model(trunk, None, "cpu")
    assert not alone.has_head
    ids, how = reference.prompt_ids(target)[0], Settings(16, context=60)
    streams = [
        decode(engine, ids, how, HeadDrafter(engine, 60), 2)
        for engine in (alone.with_head(head), open_model(trunk, head, "cpu"))
    ]
    assert streams[0].accepted == streams[1].accepted
    assert sum(streams[0].accepted)


def test_calibration(target: Path, tmp_path: Path) -> None:
    """All matrices of the target that multiply, and a conversion with them."""
    found = calibrate(target, tmp_path / "i.gguf", chunks=2, chunk_size=128)
    assert found.head_entries == 0
    entries = set(read_imatrix(tmp_path / "i.gguf").entries)
    assert {"blk.0.attn_q.weight", "blk.5.ffn_down.weight"} <= entries
    convert(target, tmp_path / "x-Q4_K_M.gguf", imatrix=tmp_path / "i.gguf")


# --- faults in the formulas: transformers' module, or the engine's candidates, tell


TRUNK: dict[str, tuple[str, str, str]] = {
    "missing embedding scale": (
        "tokens) * math.sqrt(self.sizes.hidden)", "tokens)", "trained"),
    "softcap dropped": ("torch.tanh(logits / cap) * cap if cap else logits", "logits", "trained"),
    "wrong shared layer": ("return max(i for i in", "return min(i for i in", "per-layer"),
    "window one too wide": ("window = s.window -", "window = s.window + 1 -", "trained"),
    "values not normed": ("rms_norm(value, s.eps)", "value", "trained"),
    "all dimensions of full layers rotate": ("pace if sliding or factors not in self.tensors else", "pace if True else", "trained"),
    "layer scale dropped": (' * self.tensors[f"{prefix}layer_output_scale.weight"]', "", "per-layer"),
    "experts' scales dropped": (' * self.tensors[f"{prefix}ffn_down_exps.scale"][experts]', "", "moe"),
    "router input not scaled": (" * s.hidden**-0.5).to(self.dtype)", ").to(self.dtype)", "moe"),
    "identity of tokens not scaled": (" * math.sqrt(s.per_layer)", "", "per-layer"),
}  # fmt: skip


@pytest.mark.parametrize("fault", TRUNK)
def test_a_fault_in_the_trunk(target: Path, random_models, text: torch.Tensor, record_property, fault: str) -> None:
    """Level logits compares our step with transformers' module of the same weights."""
    old, new, kind = TRUNK[fault]
    folder = target if kind == "trained" else random_models[kind]
    weights = open_weights(folder)
    module = module_of(weights, read_model(folder))
    results = {}
    for name, engine in (("good", Gemma4(weights)), ("broken", mutated(good, old, new).Gemma4(weights))):
        results[name] = check_logits(engine, engine, text.tolist(), 16, lambda ids: module_logits(module, ids))
    record_property("fault", fault)
    record_property("levels", "logits" if results["broken"].verdict is Verdict.FAILED else "")
    assert results["good"].verdict is Verdict.PASSED
    assert "transformers' own module gives other logits" in results["broken"].findings[0].what


DRAFTER: dict[str, tuple[str, str]] = {
    "wrong shared layer of the drafter": (
        "self.sizes.owner(sliding=sliding) for sliding", "self.sizes.sliding.index(sliding) for sliding"),
    "drafter's embeddings not scaled": (
        "torch.cat([self._embedded(tokens), hidden", "torch.cat([self._embedded(tokens) / 16, hidden"),
    "position moves on while drafting": (
        'hidden = self._linear(f"{DRAFTER_PREFIX}nextn.post_projection.weight", out)\n',
        'hidden = self._linear(f"{DRAFTER_PREFIX}nextn.post_projection.weight", out)\n        state.length += 1\n'),
}  # fmt: skip


@pytest.mark.parametrize("fault", DRAFTER)
def test_a_fault_in_the_drafter(target: Path, assistant: Path, tmp_path: Path, record_property, fault: str) -> None:
    """The engine's draft candidates are not those of this model."""
    pytest.importorskip("xllamacpp", reason="needs llama.cpp: pip install 'convert-mtp[llamacpp]'")
    convert(target, tmp_path / "F16.gguf", assistant=assistant, mtp_type="match")
    file, head = tmp_path / "F16.gguf", tmp_path / "mtp-F16.gguf"
    weights = PairedWeights(open_weights(file), open_weights(head))
    prompts = reference.prompt_ids(target)[:2]
    clean = check_engine(file, head, prompts, 12, (3,), Gemma4(weights))
    assert clean.data["candidates"]["mean"] < 0.003
    result = check_engine(file, head, prompts, 12, (3,), mutated(good, *DRAFTER[fault]).Gemma4(weights))
    record_property("fault", fault)
    record_property("levels", "engine" if result.verdict is Verdict.FAILED else "")
    assert any("not those of the head" in f.what for f in result.findings), result.data["candidates"]


# --- faults in the files


A = "gemma4"
TARGET_FILE: dict[str, tuple[Change, str, str]] = {
    "softcap key missing": (lambda f: f.keys.pop(f"{A}.final_logit_softcapping"), "structure", "softcapping"),
    "softcap key wrong": (lambda f: f.set(f"{A}.final_logit_softcapping", 50.0), "structure", "softcapping"),
    "shared layers": (lambda f: f.set(f"{A}.attention.shared_kv_layers", 2), "structure", "shared_kv_layers"),
    "sliding pattern": (
        lambda f: f.set(f"{A}.attention.sliding_window_pattern", [True, False, True, True, True, False]), "structure",
        "sliding_window_pattern"),
    "sliding window": (lambda f: f.set(f"{A}.attention.sliding_window", 32), "structure", "sliding_window"),
    "RoPE base of sliding layers": (lambda f: f.set(f"{A}.rope.freq_base_swa", 1e6), "structure", "freq_base_swa"),
    "embedding scaled in the file": (values("token_embd.weight", lambda x: x * 16), "fidelity", "token_embd"),
    "norm with 1 added": (values("blk.2.attn_norm.weight", lambda x: x + 1), "fidelity", "blk.2.attn_norm"),
    "frequency factors of ones": (values("rope_freqs.weight", np.ones_like), "fidelity", "rope_freqs"),
    "layer scale": (values("blk.1.layer_output_scale.weight", lambda x: x / 2), "fidelity", "layer_output_scale"),
    "begin token not added": (lambda f: f.set("tokenizer.ggml.add_bos_token", value=False), "structure", "add_bos_token"),
}  # fmt: skip


@pytest.fixture(scope="module")
def pair(target: Path, assistant: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    out = tmp_path_factory.mktemp("pair")
    convert(target, out / "Q8_0.gguf", assistant=assistant)
    return out / "Q8_0.gguf", out / "mtp-Q8_0.gguf"


@pytest.mark.parametrize("fault", TARGET_FILE)
def test_a_fault_in_the_file(pair, target: Path, tmp_path: Path, record_property, fault: str) -> None:
    change, level, words = TARGET_FILE[fault]
    parts = Parts(pair[0])
    change(parts)
    report = verify(parts.write(tmp_path / "x.gguf"), Options(target, levels=("structure", "fidelity")))
    found = {r.level for r in report.levels if r.verdict is Verdict.FAILED}
    record_property("fault", f"gemma: {fault}")
    record_property("levels", ",".join(sorted(found)))
    assert level in found
    assert words in " ".join(str(f) for f in report.level(level).findings)


HEADS: dict[str, tuple[Change, str]] = {
    "halves of pre_projection swapped": (values("nextn.pre_projection.weight", lambda x: np.roll(x, 256, 1)), "halves"),
    "norms with 1 added": (
        lambda f: [f.__setitem__(n, f[n] + 1) for n in f.entries if "norm" in n], "draft 2"),
    "zeroed": (lambda f: [f.__setitem__(n, f[n] * 0) for n in f.entries if len(f.entries[n].ne) > 1], "zero"),
    "post_projection lost": (values("nextn.post_projection.weight", lambda x: x * 0), "draft 2"),
}  # fmt: skip


@pytest.mark.parametrize("fault", HEADS)
def test_a_drafter_that_guesses_badly(
    pair, target: Path, assistant: Path, tmp_path: Path, record_property, fault: str
) -> None:
    """Next to the source's own; the last fault leaves first drafts as they are, and shows at the second."""
    change, words = HEADS[fault]
    parts = Parts(pair[1])
    change(parts)
    (tmp_path / "prompts.txt").write_text("import os\nimport sys\n\nclass Message:\n\n    try:\n        import")
    report = verify(
        pair[0],
        Options(
            target, parts.write(tmp_path / "mtp-x.gguf"), assistant, levels=("acceptance",), tokens=32, drafts=(2,),
            prompts=tmp_path / "prompts.txt",
        ),
    )  # fmt: skip
    record_property("fault", f"gemma drafter: {fault}")
    record_property("levels", "acceptance" if report.exit_code else "")
    assert report.exit_code == 1, report.as_text()
    assert words in report.as_text()


def test_a_broken_target_is_a_finding(pair, assistant: Path, tmp_path: Path) -> None:
    """Also where an assistant is given that might be compared with it."""
    (tmp_path / "x.gguf").write_bytes(pair[0].read_bytes()[:-1000])
    report = verify(tmp_path / "x.gguf", Options(assistant=assistant))
    assert report.exit_code == 1
    assert [r.level for r in report.levels] == ["structure"]


# --- bench-mtp


@pytest.mark.parametrize("engine", ["llama.cpp", "torch"])
def test_bench_with_a_drafter(pair, assistant: Path, tmp_path: Path, engine: str) -> None:
    """The drafter's own file, and others that are made from its checkpoint."""
    from bench.cli import bench_main
    from bench.store import Store
    from bench.summary import Results

    if engine == "llama.cpp":
        pytest.importorskip("xllamacpp", reason="needs llama.cpp: pip install 'convert-mtp[llamacpp]'")
    for name, heads in (
        ("own", ["--sidecar", str(pair[1])]),
        ("made", ["--source", str(assistant), "--mtp-types", "Q4_0"]),
    ):
        out = tmp_path / name
        small = [
            "--drafts",
            "0,1",
            "--tasks",
            "code",
            "--prompts",
            "2",
            "--tokens",
            "16",
            "--runs",
            "1",
            "--threads",
            "1",
            "--no-costs",
            "--quiet",
        ]
        assert bench_main([str(pair[0]), *heads, "--engine", engine, "-o", str(out), *small]) == 0
        found = Results(Store(out)).drafting
        assert found
        assert all(stats.acceptance is not None and stats.acceptance > 0.4 for stats in found)
