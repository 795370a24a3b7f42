"""Qwen3-Next: fused projections split, transformers' tokens in llama.cpp, rejected drafts change nothing."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from converter import convert
from converter.errors import UnsupportedError
from converter.gguf_file import read_gguf
from converter.heads import inspect
from converter.transforms import GroupParts, backward, forward
from tests.checkpoints import edit_json, load
from tests.conftest import EXAMPLE, script
from tests.oracles import transformers_model as reference
from tests.verify.files import Parts
from verify import verify
from verify.engines.llama_cpp import Engine, complete
from verify.models.opening import open_model


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random checkpoint with a head, experts one by one."""
    return script("tiny_qwen3next").make(tmp_path_factory.mktemp("qwen3next") / "model", EXAMPLE)


@pytest.fixture(scope="module")
def file(folder: Path) -> Path:
    convert(folder, folder.parent / "F32.gguf")
    return folder.parent / "F32.gguf"


def test_llama_cpp_gives_the_tokens_of_transformers(folder: Path, file: Path) -> None:
    """Plain, and with a random head whose drafts are nearly all rejected: the engine goes back every time."""
    pytest.importorskip("xllamacpp", reason="needs llama.cpp: pip install 'convert-mtp[llamacpp]'")
    ids = reference.prompt_ids(EXAMPLE)
    expected = [tokens for tokens, _ in reference.greedy(folder, 24)]
    assert [c.tokens for c in complete(Engine(str(file)), ids, 24)] == expected
    drafted = complete(Engine(str(file), drafts=2), ids, 24)
    assert [c.tokens for c in drafted] == expected
    assert all(c.drafted for c in drafted)


def test_fused_projections_are_split_as_transformers_splits_them(folder: Path, file: Path) -> None:
    """Each of q, k, v and z for a row of ones at a time: by transformers' own reordering of the fused product."""
    from transformers import AutoConfig
    from transformers.models.qwen3_next.modeling_qwen3_next import Qwen3NextGatedDeltaNet

    net = Qwen3NextGatedDeltaNet(AutoConfig.from_pretrained(folder), 0)
    fused = load(folder)["model.layers.0.linear_attn.in_proj_qkvz.weight"].float()
    x = torch.randn(1, 3, fused.shape[1], generator=torch.Generator().manual_seed(0))
    parts = net.fix_query_key_value_ordering(x @ fused.T, torch.zeros(1, 3, 2 * net.num_v_heads))[:4]
    query, key, value, z = (p.reshape(3, -1) for p in parts)
    ours = Parts(file)
    qkv, gate = (torch.from_numpy(ours[f"blk.0.{n}.weight"]) for n in ("attn_qkv", "attn_gate"))
    torch.testing.assert_close(x[0] @ qkv.T, torch.cat([query, key, value], dim=-1), rtol=0, atol=1e-5)
    torch.testing.assert_close(x[0] @ gate.T, z, rtol=0, atol=1e-5)


def test_torch_gives_the_logits_of_transformers(folder: Path, file: Path) -> None:
    """Value heads grouped by key head, from the file and from the folder."""
    ids = torch.tensor(reference.prompt_ids(EXAMPLE)[6])
    with torch.inference_mode():
        expected = reference.reference(folder)(input_ids=ids[None]).logits[0]
    for path in (file, folder):
        engine = open_model(path, None, "cpu")
        found = engine.logits(engine.trunk(ids, engine.trunk_state(len(ids))))
        torch.testing.assert_close(found, expected, rtol=0, atol=2e-3)


def test_all_levels(folder: Path, file: Path, tmp_path: Path) -> None:
    """Exact to the bit with a head of random weights, whose drafts are rejected; transformers' module agrees."""
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("import os\nimport sys\n\nclass Message:\n    def\n")
    report = verify(file, source=folder, prompts=prompts, tokens=12, drafts=(1, 3), mode="both", text_tokens=256)
    verdicts = {r.level: r.verdict.name for r in report.levels}
    assert {k: v for k, v in verdicts.items() if k != "acceptance"} == {
        "structure": "PASSED", "fidelity": "PASSED", "logits": "PASSED", "identity": "PASSED",
    }  # fmt: skip
    assert report.level("identity").data["largest_difference"] == 0
    assert report.level("logits").data["kld_from_transformers"] < 1e-5


def test_group_parts_can_be_put_back() -> None:
    """Two rules share one source; together they are all of it."""
    source = np.arange(2 * (3 + 3 + 4 + 4) * 5, dtype=np.float32).reshape(-1, 5)
    into = np.full_like(source, -1)
    for chosen in ((0, 1, 2), (3,)):
        steps = (GroupParts(2, (3, 3, 4, 4), chosen),)
        backward(forward(source, steps), steps, into)
    np.testing.assert_array_equal(into, source)


def test_metadata_and_packaging(folder: Path, file: Path, tmp_path: Path) -> None:
    """No rotary sections, which only Qwen3.5 has; the head is found though no config announces it."""
    keys = read_gguf(file).keys
    assert keys["general.architecture"].value == "qwen3next"
    assert "qwen3next.rope.dimension_sections" not in keys
    assert list(keys["qwen3next.attention.recurrent_layers"].value) == [True, True, True, False, False]
    assert inspect(file).can_draft
    convert(folder, tmp_path / "x-Q4_K_M.gguf", mtp="sidecar")
    assert inspect(tmp_path / "mtp-x-Q8_0.gguf").kind == "sidecar"
    pytest.importorskip("xllamacpp", reason="needs llama.cpp: pip install 'convert-mtp[llamacpp]'")
    engine = Engine(str(tmp_path / "x-Q4_K_M.gguf"), str(tmp_path / "mtp-x-Q8_0.gguf"), 2)
    assert complete(engine, [[5, 6, 7]], 8)[0].drafted


def test_layers_without_experts_are_refused(tmp_path: Path) -> None:
    """The engine has experts everywhere."""
    other = script("tiny_qwen3next").make(tmp_path / "m", EXAMPLE)
    edit_json(other / "config.json", lambda c: c.update(mlp_only_layers=[1]))
    with pytest.raises(UnsupportedError, match="without experts"):
        convert(other, tmp_path / "x.gguf")


# --- a trained one (scripts/fixtures/train_qwen3next.py)

TRAINED = Path(__file__).parents[1] / "fixtures" / "tiny-qwen3-next"


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("trained")
    convert(TRAINED, out / "{type}.gguf", types=["BF16", "Q4_K_M"])
    return out


@pytest.mark.parametrize("mix", ["BF16", "Q4_K_M"])
def test_a_trained_head_drafts(trained: Path, mix: str) -> None:
    """At least half of the first drafts are accepted, and no token changes but at near-ties.

    Next to transformers in float32 an engine that keeps keys in float16 may choose another expert: ties are wider there.
    """
    pytest.importorskip("xllamacpp", reason="needs llama.cpp: pip install 'convert-mtp[llamacpp]'")
    ids = reference.prompt_ids(TRAINED)
    file = str(trained / f"{mix}.gguf")
    plain, drafted = complete(Engine(file), ids, 48, margins=True), complete(Engine(file, None, 1), ids, 48)
    for a, b in zip(plain, drafted, strict=True):
        first = next((k for k in range(48) if a.tokens[k] != b.tokens[k]), None)
        assert first is None or a.margins[first] < 0.05
    assert sum(c.accepted or 0 for c in drafted) / sum(c.drafted or 0 for c in drafted) >= 0.5
    if mix == "BF16":
        for answer, (tokens, margins) in zip(plain, reference.greedy(TRAINED, 48), strict=True):
            first = next((k for k in range(48) if answer.tokens[k] != tokens[k]), None)
            assert first is None or margins[first] < 0.1


def test_a_trained_head_at_all_levels(trained: Path, tmp_path: Path) -> None:
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("import os\nimport sys\n\nclass Message:\n    def\n")
    report = verify(
        trained / "Q4_K_M.gguf", source=TRAINED, prompts=prompts, tokens=24, drafts=(2,), text_tokens=512
    )  # fmt: skip
    assert report.exit_code == 0, report.as_text()
    assert {r.level for r in report.levels if r.verdict.name == "PASSED"} == {
        "structure", "fidelity", "logits", "identity", "acceptance",
    }  # fmt: skip
