"""Gemma 4 and its assistant: what the reference tools make of them, transformers' tokens, drafts in real llama.cpp."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from converter import convert
from converter.cli import convert_main
from converter.errors import CheckpointError, ConfigError, UnsupportedError, UsageError
from converter.gguf_file import read_gguf
from converter.gguf_model import open_gguf
from converter.heads import inspect
from tests.checkpoints import Tensors, edit_json, variant
from tests.conftest import EXAMPLE, script, shared
from tests.oracles import gguf_files
from tests.oracles import transformers_model as reference
from tests.verify.files import Parts
from verify import verify
from verify.engines.base import Completion
from verify.engines.llama_cpp import Engine, complete
from verify.prompts import tokenizer_of_file, tokenizer_of_folder

MIXES = ("BF16", "Q8_0", "Q6_K", "Q5_K_M", "Q4_K_M")
TOKENS = 64


@pytest.fixture(scope="module")
def pairs(target: Path, assistant: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Targets of all mixes, and drafters of the same."""
    out = tmp_path_factory.mktemp("gemma4")
    convert(target, out / "{type}.gguf", types=MIXES, assistant=assistant, mtp_type="match")
    return out


@pytest.mark.parametrize("mix", MIXES)
@pytest.mark.parametrize(("name", "prefix"), [("tiny-gemma4", ""), ("tiny-gemma4-assistant", "mtp-")])
def test_equals_the_reference(pairs: Path, name: str, prefix: str, mix: str) -> None:
    """Type, shape and bytes of every tensor, as llama.cpp's converter and llama-quantize make them."""
    table = shared(f"expected/{name}-{mix}.json")
    assert gguf_files.tensor_digests(pairs / f"{prefix}{mix}.gguf") == gguf_files.expected_digests(table)


@pytest.mark.parametrize(("name", "prefix"), [("tiny-gemma4", ""), ("tiny-gemma4-assistant", "mtp-")])
def test_metadata_equals_the_reference(pairs: Path, name: str, prefix: str) -> None:
    """Every key in type and value, the tokenizer's arrays included."""
    expected = gguf_files.expected_metadata(shared(f"expected/{name}-BF16.json"))
    assert gguf_files.metadata(pairs / f"{prefix}BF16.gguf") == expected


# --- in llama.cpp


@pytest.fixture(scope="module")
def decoded(pairs: Path, target: Path):
    """decoded(mix, drafts): ten prompts, each combination once."""
    pytest.importorskip("xllamacpp", reason="needs llama.cpp: pip install 'convert-mtp[llamacpp]'")
    made: dict[tuple[str, int], list[Completion]] = {}

    def get(mix: str, drafts: int) -> list[Completion]:
        if (mix, drafts) not in made:
            drafter = str(pairs / f"mtp-{mix}.gguf") if drafts else None
            engine = Engine(str(pairs / f"{mix}.gguf"), drafter, drafts)
            made[mix, drafts] = complete(engine, reference.prompt_ids(target), TOKENS, margins=not drafts)
        return made[mix, drafts]

    return get


def test_plain_decoding_gives_the_tokens_of_transformers(decoded, target: Path) -> None:
    """All ten prompts to the last token."""
    assert [c.tokens for c in decoded("BF16", 0)] == [tokens for tokens, _ in reference.greedy(target, TOKENS)]


@pytest.mark.parametrize("mix", MIXES)
@pytest.mark.parametrize(("drafts", "least"), [(1, 0.75), (3, 0.60)])
def test_the_assistant_drafts(decoded, mix: str, drafts: int, least: float) -> None:
    """No token changes but at near-ties, and as many drafts are accepted as with the reference conversion."""
    found, plain = decoded(mix, drafts), decoded(mix, 0)
    for a, b in zip(found, plain, strict=True):
        first = next((k for k in range(TOKENS) if a.tokens[k] != b.tokens[k]), None)
        assert first is None or b.margins[first] < 0.05
    assert sum(c.accepted or 0 for c in found) / sum(c.drafted or 0 for c in found) >= least


# --- packaging


def test_names_and_types(target: Path, assistant: Path, tmp_path: Path) -> None:
    """One drafter for both targets, in the type that heads have by default; types are chosen independently."""
    report = convert(target, tmp_path / "g-{type}.gguf", types=["Q4_K_M", "Q6_K"], assistant=assistant)
    assert [(f.path.name, f.kind, f.mix) for f in report.plan.files] == [
        ("g-Q4_K_M.gguf", "trunk", "Q4_K_M"), ("g-Q6_K.gguf", "trunk", "Q6_K"), ("mtp-g-Q8_0.gguf", "drafter", "Q8_0"),
    ]  # fmt: skip
    assert not any("--assistant" in note for note in report.notes)
    assert "drafter: " in report.as_text()


def test_the_drafter_alone(target: Path, assistant: Path, pairs: Path, tmp_path: Path) -> None:
    """From its own checkpoint, or with the target's: the same bytes."""
    convert(assistant, tmp_path / "mtp-a-Q8_0.gguf", target=target)
    convert(target, tmp_path / "mtp-b-Q8_0.gguf", assistant=assistant, mtp="only")
    expected = (pairs / "mtp-Q8_0.gguf").read_bytes()
    assert (tmp_path / "mtp-a-Q8_0.gguf").read_bytes() == (tmp_path / "mtp-b-Q8_0.gguf").read_bytes() == expected


def test_without_its_drafter_a_target_says_where_to_find_it(target: Path, tmp_path: Path) -> None:
    report = convert(target, tmp_path / "x.gguf")
    assert any("--assistant" in note for note in report.notes)


def test_a_run_that_was_cut_off_goes_on(target: Path, assistant: Path, pairs: Path, tmp_path: Path) -> None:
    """Both checkpoints in one journal, although their shards have the same names."""
    one = variant(target, tmp_path / "model")
    assert {f.name for f in one.glob("*.safetensors")} & {f.name for f in assistant.glob("*.safetensors")}

    def stop(done: int, total: int, _tensor: str) -> None:
        if done > total // 2:
            raise KeyboardInterrupt

    out = tmp_path / "BF16.gguf"
    with pytest.raises(KeyboardInterrupt):
        convert(one, out, assistant=assistant, progress=stop)
    assert not out.exists()
    report = convert(one, out, assistant=assistant)
    assert report.resumed_bytes > 0
    assert gguf_files.tensor_digests(out) == gguf_files.tensor_digests(pairs / "BF16.gguf")
    assert (tmp_path / "mtp-BF16.gguf").read_bytes() == (pairs / "mtp-BF16.gguf").read_bytes()


@pytest.mark.parametrize(
    ("change", "shapes", "words"),
    [
        (
            lambda c: c.update(backbone_hidden_size=512),
            {"pre_projection.weight": (128, 1024), "post_projection.weight": (512, 128)}, "hidden size",
        ),
        (lambda c: c["text_config"].update(sliding_window=128), {}, "sliding window"),
        (lambda c: c["text_config"]["per_layer_config"]["3"].update(num_key_value_heads=2), {}, "key/value heads of full"),
        (
            lambda c: c["text_config"]["per_layer_config"]["3"].update(head_dim=64),
            {"q_proj.weight": (256, 128), "q_norm.weight": (64,), "o_proj.weight": (128, 256)}, "head size of full",
        ),
    ],
)  # fmt: skip
def test_a_drafter_of_another_model(
    assistant: Path, target: Path, tmp_path: Path, change, shapes: dict[str, tuple[int, ...]], words: str
) -> None:
    """Exit 3 with both values, before anything is written."""

    def fit(tensors: Tensors) -> None:
        for name in tensors:
            part = name.rpartition("self_attn.")[2]
            if part in shapes and ("self_attn" not in name or "layers.3." in name):
                tensors[name] = torch.zeros(shapes[part], dtype=torch.bfloat16)

    other = variant(assistant, tmp_path / "a", config=change, tensors=fit)
    with pytest.raises(CheckpointError, match=f"does not belong to the target: .*{words}") as caught:
        convert(target, tmp_path / "x.gguf", assistant=other)
    assert caught.value.exit_code == 3
    assert caught.value.expected
    assert caught.value.found
    assert not list(tmp_path.glob("*.gguf*"))


def test_a_drafter_with_other_words(assistant: Path, target: Path, tmp_path: Path) -> None:
    """The first token that differs is named."""
    other = variant(assistant, tmp_path / "a")

    def rename(tokenizer: dict) -> None:
        vocab = tokenizer["model"]["vocab"]
        word = next(w for w, i in vocab.items() if i == 1000)
        vocab["\u2581zzyzx"] = vocab.pop(word)

    edit_json(other / "tokenizer.json", rename)
    with pytest.raises(CheckpointError, match="token 1000"):
        convert(target, tmp_path / "x.gguf", assistant=other)


def test_a_checkpoint_that_is_no_drafter(target: Path, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="no drafter for that model"):
        convert(target, tmp_path / "x.gguf", assistant=EXAMPLE)
    with pytest.raises(CheckpointError, match="no drafter for that model"):
        convert(EXAMPLE, tmp_path / "x.gguf", target=target)


def test_on_the_command_line(target: Path, assistant: Path, tmp_path: Path, capsys) -> None:
    out = tmp_path / "g-Q6_K.gguf"
    assert convert_main([str(target), str(out), "--assistant", str(assistant), "--mtp-type", "Q4_0", "--json"]) == 0
    files = json.loads(capsys.readouterr().out)["files"]
    assert [Path(f["path"]).name for f in files] == ["g-Q6_K.gguf", "mtp-g-Q4_0.gguf"]


def test_inspect_and_verify(pairs: Path, target: Path, assistant: Path, tmp_path: Path) -> None:
    """A drafter is told apart; all levels of target and drafter."""
    pytest.importorskip("xllamacpp", reason="needs llama.cpp: pip install 'convert-mtp[llamacpp]'")
    found = inspect(pairs / "mtp-Q8_0.gguf")
    assert (found.kind, found.drafts_for, found.can_draft, found.problems) == ("drafter", "gemma4", True, [])
    assert "-md" in found.as_text()
    assert inspect(assistant).drafts_for == "gemma4"
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("import os\nimport sys\n")
    report = verify(
        pairs / "Q4_K_M.gguf", source=target, sidecar=pairs / "mtp-Q8_0.gguf", assistant=assistant, engine="llama.cpp",
        prompts=prompts, tokens=16, drafts=(2,), text_tokens=256,
    )  # fmt: skip
    verdicts = {r.level: r.verdict.name for r in report.levels}
    assert verdicts == {
        "structure": "PASSED", "fidelity": "PASSED", "logits": "PASSED", "identity": "PASSED", "acceptance": "PASSED",
        "engine": "PASSED",
    }  # fmt: skip
    assert len(report.level("fidelity").data["tensors"]) == 85 + 49
    assert report.level("engine").data["candidates"]["mean"] < 0.01


def test_a_damaged_drafter_is_found(pairs: Path, target: Path, assistant: Path, tmp_path: Path) -> None:
    """Against its own source, not the target's."""
    parts = Parts(pairs / "mtp-Q8_0.gguf")
    parts.exchange("blk.0.ffn_gate.weight", "blk.0.ffn_up.weight")
    report = verify(
        pairs / "Q4_K_M.gguf", source=target, sidecar=parts.write(tmp_path / "mtp-x.gguf"), assistant=assistant,
        levels=["fidelity"],
    )  # fmt: skip
    assert {f.where for f in report.level("fidelity").findings} == {"blk.0.ffn_gate.weight", "blk.0.ffn_up.weight"}


def test_texts_are_cut_as_transformers_cuts_them(pairs: Path, target: Path) -> None:
    """By the file's vocabulary and by the folder's tokenizer, behind the begin token; unknown signs are spelt in bytes."""
    by_file, by_folder = tokenizer_of_file(open_gguf(pairs / "BF16.gguf")), tokenizer_of_folder(target)
    for text in (*reference.PROMPTS, "  two  spaces", "na\u00efve \u65e5\u672c", "x"):
        expected = reference.tokenizer(target)(text, add_special_tokens=False)["input_ids"]
        assert by_file(text) == by_folder(text) == [2, *expected]


def test_the_frequency_factors_are_made(pairs: Path) -> None:
    """A quarter of 64 pairs rotates, the others have a factor that stops them."""
    from gguf import GGUFReader

    (made,) = (t for t in GGUFReader(pairs / "BF16.gguf").tensors if t.name == "rope_freqs.weight")
    assert made.data.tolist() == [1.0] * 16 + [np.float32(1e30)] * 48


def test_suppressed_tokens_are_kept(target: Path, tmp_path: Path) -> None:
    """Of unified models; a list that is none is refused."""
    other = variant(target, tmp_path / "m")
    edit_json(other / "generation_config.json", lambda c: c.update(suppress_tokens=[5, 7]))
    convert(other, tmp_path / "x.gguf")
    assert list(read_gguf(tmp_path / "x.gguf").keys["tokenizer.ggml.suppress_tokens"].value) == [5, 7]


# --- shapes of Gemma 4 that have no trained fixture


@pytest.mark.parametrize(("kind", "tie", "least"), [("moe", 0.2, 0.4), ("per-layer", 0.02, 0.8)])
def test_random_checkpoints_give_the_tokens_of_transformers(
    target: Path, tmp_path: Path, kind: str, tie: float, least: float
) -> None:
    """Experts, and embeddings by layer with shared keys and values.

    Random models have near-ties, and engines keep keys and values in float16: where the tokens part, transformers'
    margin is small, and most never do.
    """
    pytest.importorskip("xllamacpp", reason="needs llama.cpp: pip install 'convert-mtp[llamacpp]'")
    folder = script("tiny_gemma4").make(kind, tmp_path / "model", target)
    convert(folder, tmp_path / "F32.gguf")
    ids = reference.prompt_ids(target)
    found = complete(Engine(str(tmp_path / "F32.gguf")), ids, 24)
    same = 0
    for (tokens, margins), answer in zip(reference.greedy(folder, 24), found, strict=True):
        first = next((k for k in range(24) if tokens[k] != answer.tokens[k]), 24)
        same += first
        assert first == 24 or margins[first] < tie
    assert same / (24 * len(ids)) > least


@pytest.mark.parametrize("kind", ["moe", "per-layer"])
@pytest.mark.parametrize("mix", ["Q4_K_M", "Q8_0"])
def test_random_checkpoints_load_quantized(target: Path, tmp_path: Path, kind: str, mix: str) -> None:
    """The per-layer projection keeps its precision, as in llama-quantize; the file runs."""
    pytest.importorskip("xllamacpp", reason="needs llama.cpp: pip install 'convert-mtp[llamacpp]'")
    folder = script("tiny_gemma4").make(kind, tmp_path / "model", target)
    convert(folder, tmp_path / f"{mix}.gguf")
    types = {t.name: t.type.name for t in read_gguf(tmp_path / f"{mix}.gguf").tensors}
    if kind == "per-layer":
        assert types["per_layer_model_proj.weight"] == "BF16"
    else:
        assert types["blk.0.ffn_gate_inp.weight"] == types["blk.0.ffn_down_exps.scale"] == "F32"
        assert types["blk.0.ffn_gate_up_exps.weight"] != "F32"
    assert len(complete(Engine(str(tmp_path / f"{mix}.gguf")), [[5, 6, 7]], 8)[0].tokens) == 8


def test_refusals(target: Path, tmp_path: Path) -> None:
    """Another tokenizer, and layers of an unknown kind."""
    other = variant(target, tmp_path / "a")
    edit_json(other / "tokenizer.json", lambda t: t.update(normalizer=None))
    with pytest.raises(UnsupportedError, match="Gemma 4's tokenizer"):
        convert(other, tmp_path / "x.gguf")
    with pytest.raises(ConfigError, match="layer_types"):
        convert(variant(target, tmp_path / "c", config=lambda c: c.update(layer_types=["x"] * 6)), tmp_path / "x.gguf")
    with pytest.raises(UsageError):
        convert(target, tmp_path / "x.gguf", types=["Q4_K_M", "Q8_0"])
