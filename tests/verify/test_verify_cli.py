"""verify-mtp as people use it: levels, verdicts, exit codes, reports; and what it says when it cannot."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from converter import convert
from tests.conftest import EXAMPLE, checkpoint
from tests.verify.files import Parts
from verify import verify
from verify.cli import main
from verify.results import LEVELS

QUICK = ["--tokens", "12", "--text-tokens", "300", "--drafts", "2", "--quiet"]


@pytest.fixture
def prompts(tmp_path: Path) -> str:
    file = tmp_path / "prompts.txt"
    file.write_text("import os\nimport sys\n\nclass Message:\n    def\n")
    return str(file)


def run(capsys, *arguments: object) -> tuple[int, dict]:
    code = main([*map(str, arguments), "--json"])
    return code, json.loads(capsys.readouterr().out)


@pytest.mark.parametrize("kind", ["dense", "moe"])
def test_all_levels_of_a_good_file(conversions, tmp_path: Path, capsys, prompts: str, kind: str) -> None:
    """Exit 0; every level has evidence; the page holds it all without a script or a link to elsewhere."""
    pytest.importorskip("xllamacpp", reason="needs llama.cpp: pip install 'convert-mtp[llamacpp]'")
    file = conversions(kind, "bundled") / "Q4_K_M.gguf"
    code, report = run(
        capsys, file, "--source", checkpoint(kind), "--engine", "llama.cpp", "--mode", "both", "--prompts", prompts,
        "--temperature", "0,0.7", "--report", tmp_path / "report", *QUICK,
    )  # fmt: skip
    assert code == report["exit_code"] == 0, report
    assert [level["level"] for level in report["levels"]] == list(LEVELS)
    assert {level["verdict"] for level in report["levels"]} == {"passed"}
    data = {level["level"]: level["data"] for level in report["levels"]}
    assert data["identity"]["largest_difference"] == 0
    assert len(data["identity"]["runs"]) == 2 * 2 * 2
    assert data["logits"]["kld_from_transformers"] < 1e-6
    assert 0 <= data["logits"]["kld_median"] <= data["logits"]["kld_mean"] < data["logits"]["kld_999"]
    assert data["acceptance"]["file"][0][0] > 0
    assert data["engine"]["runs"][0]["accepted"] > 0
    assert report["unseen"] == []
    assert json.loads((tmp_path / "report" / "report.json").read_text())["levels"] == report["levels"]
    page = (tmp_path / "report" / "report.html").read_text()
    assert page.count("<svg") == 4
    assert not re.search(r"<script|<link|<img|src=|href=['\"]http", page)
    for level in report["levels"]:
        assert level["level"].capitalize() in page


def test_transformers_contradicts(conversions, tmp_path: Path) -> None:
    """Our step computes with the file's metadata, the module with the source's config: where they differ it shows."""
    parts = Parts(conversions("dense", "bundled") / "BF16.gguf")
    parts.set("qwen35.rope.freq_base", 500.0)
    file = parts.write(tmp_path / "x.gguf")
    report = verify(file, source=EXAMPLE, levels=["logits"], text_tokens=256)
    assert any("transformers' own module" in f.what for f in report.level("logits").findings)


def test_without_a_source(conversions, capsys, prompts: str) -> None:
    """What needs none runs, and what cannot be seen is said."""
    code, report = run(capsys, conversions("dense", "bundled") / "Q8_0.gguf", "--prompts", prompts, *QUICK)
    assert code == 0
    verdicts = {level["level"]: level["verdict"] for level in report["levels"]}
    assert verdicts == {
        "structure": "passed", "fidelity": "skipped", "logits": "skipped", "identity": "passed", "acceptance": "passed",
    }  # fmt: skip
    assert "without --source" in report["unseen"][0]


def test_a_model_folder(capsys, prompts: str) -> None:
    """The reference itself."""
    code, report = run(capsys, EXAMPLE, "--prompts", prompts, *QUICK)
    assert code == 0
    assert report["levels"][3]["verdict"] == "passed"


def test_trunk_and_sidecar(conversions, capsys, prompts: str) -> None:
    """Checked together, each against the source; alone neither drafts."""
    folder = conversions("dense", "sidecar")
    trunk, sidecar = folder / "Q4_K_M.gguf", folder / "mtp-Q8_0.gguf"
    options = ["--source", EXAMPLE, "--prompts", prompts, *QUICK]
    code, report = run(capsys, trunk, "--sidecar", sidecar, *options)
    assert code == 0, report
    assert "sidecar" in report["levels"][1]["summary"]
    assert report["levels"][4]["data"]["file"][0][0] > 0
    code, report = run(capsys, sidecar, *options)
    assert code == 0
    assert "--sidecar" in report["levels"][3]["summary"]
    code, report = run(capsys, trunk, *options)
    assert (code, report["levels"][3]["verdict"]) == (0, "skipped")


def test_a_sidecar_that_is_damaged(conversions, tmp_path: Path, capsys) -> None:
    """Is found through the trunk's command line."""
    parts = Parts(conversions("dense", "sidecar") / "mtp-Q8_0.gguf")
    parts.flip("blk.4.attn_k.weight", 300, 6)
    sidecar = parts.write(tmp_path / "mtp-x.gguf")
    trunk = conversions("dense", "sidecar") / "Q4_K_M.gguf"
    code, report = run(capsys, trunk, "--sidecar", sidecar, "--source", EXAMPLE, "--level", "fidelity", *QUICK)
    assert code == 1
    assert "blk.4.attn_k.weight" in report["levels"][0]["findings"][0]["where"]


def test_parts_of_a_split_file(tmp_path: Path, capsys, prompts: str) -> None:
    """Any part, or the folder."""
    convert(EXAMPLE, tmp_path / "parts" / "m.gguf", types=["Q8_0"], split_max_size=2_000_000)
    for given in (max((tmp_path / "parts").iterdir()), tmp_path / "parts"):
        code, report = run(
            capsys, given, "--source", EXAMPLE, "--level", "structure,fidelity,identity", "--prompts", prompts, *QUICK
        )
        assert code == 0, report


def test_a_failure_has_exit_code_1_and_names(conversions, tmp_path: Path, capsys) -> None:
    """On the terminal as in JSON."""
    parts = Parts(conversions("dense", "bundled") / "Q8_0.gguf")
    parts["blk.0.attn_norm.weight"] = parts["blk.0.attn_norm.weight"] - 1
    file = parts.write(tmp_path / "x.gguf")
    code = main([str(file), "--source", str(EXAMPLE), "--level", "fidelity,logits", *QUICK])
    out = capsys.readouterr().out
    assert code == 1
    assert "x.gguf: failed" in out
    assert "blk.0.attn_norm.weight" in out
    assert "1 is missing" in out


def test_logits_reveal_what_a_wrong_key_does(conversions, tmp_path: Path, capsys) -> None:
    """A file with another RoPE base has the right weights and the wrong distributions."""
    parts = Parts(conversions("dense", "bundled") / "BF16.gguf")
    parts.set("qwen35.rope.freq_base", 10.0)
    file = parts.write(tmp_path / "x.gguf")
    code, report = run(capsys, file, "--source", EXAMPLE, "--level", "fidelity,logits", *QUICK)
    assert code == 1
    assert [level["verdict"] for level in report["levels"]] == ["passed", "failed"]


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (["nowhere.gguf"], 3, "no such file"),
        (["{file}", "--level", "taste"], 2, "no such level"),
        (["{file}", "--level", "engine"], 2, "--engine"),
        (["{file}", "--drafts", "0-3"], 2, "out of range"),
        (["{file}", "--source", "nowhere"], 3, "no such folder"),
        (["{file}", "--device", "cuda"], 5, "no CUDA device"),
        (["{file}", "--prompts", "nowhere.txt"], 5, "nowhere.txt"),
        (["{file}", "--prompts", "{empty}"], 3, "no prompts"),
    ],
)
def test_what_cannot_be_done(conversions, tmp_path: Path, monkeypatch, capsys, arguments, code, words) -> None:
    """One message, and the documented exit code."""
    import torch

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    (tmp_path / "empty.txt").write_text("\n\n")
    known = {"file": conversions("dense", "bundled") / "Q8_0.gguf", "empty": tmp_path / "empty.txt"}
    assert main(QUICK + [a.format(**known) for a in arguments]) == code
    assert words in capsys.readouterr().err


def test_a_file_that_llama_cpp_refuses(conversions, tmp_path: Path, capsys, prompts: str) -> None:
    """Its child dies; the level fails with what it said."""
    pytest.importorskip("xllamacpp", reason="needs llama.cpp: pip install 'convert-mtp[llamacpp]'")
    parts = Parts(conversions("dense", "bundled") / "Q8_0.gguf")
    parts.remove("blk.4.attn_q.weight")
    file = parts.write(tmp_path / "x.gguf")
    code, report = run(capsys, file, "--level", "engine", "--engine", "llama.cpp", "--prompts", prompts, *QUICK)
    assert code == 1
    assert "llama.cpp does not run" in report["levels"][0]["findings"][0]["what"]


@pytest.mark.parametrize("fault", ["missing", "shape"])
def test_a_file_that_cannot_be_run(conversions, tmp_path: Path, capsys, prompts: str, fault: str) -> None:
    """Without a source it shows when it is run: a finding with the reason, no traceback."""
    from dataclasses import replace

    parts = Parts(conversions("dense", "bundled") / "Q8_0.gguf")
    if fault == "missing":
        parts.remove("blk.2.ssm_a")
    else:
        entry = parts.entries["blk.0.ffn_up.weight"]
        parts.entries[entry.name] = replace(entry, ne=(entry.ne[1], entry.ne[0]))
    code, report = run(capsys, parts.write(tmp_path / "x.gguf"), "--level", "identity", "--prompts", prompts, *QUICK)
    assert code == 1
    said = report["levels"][0]["findings"][0]["what"]
    assert ("blk.2.ssm_a" if fault == "missing" else "do not fit together") in said
