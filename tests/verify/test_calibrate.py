"""calibrate-mtp and --mtp-imatrix: sums equal what transformers' own modules see, entries are llama-imatrix's."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from gguf import GGUFReader

from converter import convert
from converter.errors import InputError
from converter.imatrix import read_imatrix, write_imatrix
from tests.checkpoints import clone
from tests.conftest import EXAMPLE, checkpoint, shared
from tests.oracles.transformers_model import reference, tokenizer
from verify.calibrate import calibrate, main

KINDS = ("dense", "moe")
CHUNKS, SIZE = 2, 64


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Python source that is long enough for several chunks."""
    file = tmp_path_factory.mktemp("text") / "text.py"
    file.write_text(Path(json.__file__).read_text())
    return file


@pytest.fixture(scope="module")
def calibrations(tmp_path_factory: pytest.TempPathFactory, text: Path):
    """calibrations(kind) is a small importance matrix of that checkpoint; made at first use."""
    made: dict[str, Path] = {}

    def get(kind: str) -> Path:
        if kind not in made:
            made[kind] = tmp_path_factory.mktemp(kind) / "imatrix.gguf"
            calibrate(checkpoint(kind), made[kind], text, chunks=CHUNKS, chunk_size=SIZE)
        return made[kind]

    return get


def linear_inputs(kind: str, text: Path) -> dict[str, np.ndarray]:
    """Sums of squared inputs of transformers' linears over the same chunks, under their module names."""
    folder = checkpoint(kind)
    model, sums, hooks = reference(folder), {}, []

    def hook(name: str):
        def add(_module: torch.nn.Module, args: tuple[torch.Tensor, ...]) -> None:
            squares = args[0].double().square().reshape(-1, args[0].shape[-1]).sum(0).numpy()
            sums[name] = sums.get(name, 0) + squares

        return add

    for name, module in model.named_modules():
        if isinstance(module, torch.nn.Linear):
            hooks.append(module.register_forward_pre_hook(hook(name.removeprefix("model."))))
    ids = tokenizer(folder)(text.read_text(), add_special_tokens=False)["input_ids"]
    with torch.inference_mode():
        for i in range(CHUNKS):
            model(input_ids=torch.tensor([ids[i * SIZE : (i + 1) * SIZE]]))
    for handle in hooks:
        handle.remove()
    return sums


@pytest.mark.parametrize("kind", KINDS)
def test_sums_are_those_that_transformers_sees(kind: str, calibrations, text: Path) -> None:
    """Every linear of the trunk; the delta net's output has its heads in the engine's order."""
    names = {
        "linear_attn.in_proj_qkv": "attn_qkv", "linear_attn.in_proj_z": "attn_gate", "linear_attn.in_proj_b": "ssm_beta",
        "linear_attn.in_proj_a": "ssm_alpha", "linear_attn.out_proj": "ssm_out", "self_attn.q_proj": "attn_q",
        "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v", "self_attn.o_proj": "attn_output",
        "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down",
        "mlp.shared_expert.gate_proj": "ffn_gate_shexp", "mlp.shared_expert.up_proj": "ffn_up_shexp",
        "mlp.shared_expert.down_proj": "ffn_down_shexp", "mlp.shared_expert_gate": "ffn_gate_inp_shexp",
    }  # fmt: skip
    reader = GGUFReader(calibrations(kind))
    ours = {t.name: t.data for t in reader.tensors}
    compared = 0
    for module, theirs in linear_inputs(kind, text).items():
        parts = module.split(".")
        if parts[0] != "layers":
            assert module == "lm_head"
            continue
        name = names[".".join(parts[2:])]
        tiled = theirs
        if name == "ssm_out":  # value heads 0 1 2 3 of key heads 0 0 1 1 are stored as 0 2 1 3
            tiled = theirs.reshape(2, 2, 64).transpose(1, 0, 2).reshape(-1)
        entry = f"blk.{parts[1]}.{name}.weight"
        np.testing.assert_allclose(ours[f"{entry}.in_sum2"].reshape(-1), tiled, rtol=2e-3, err_msg=entry)
        assert ours[f"{entry}.counts"].reshape(-1).tolist() == [CHUNKS * SIZE]
        compared += 1
    assert compared == {"dense": 3 * 8 + 7, "moe": 3 * 9 + 8}[kind]


@pytest.mark.parametrize("kind", KINDS)
def test_entries_are_those_of_llama_imatrix(kind: str, calibrations, conversions) -> None:
    """The same tensors of the trunk, of the same sizes; and the head's, which it leaves out."""
    ours, theirs = read_imatrix(calibrations(kind)), read_imatrix(shared(f"imatrix/{kind}.imatrix.gguf"))
    head = {n for n in ours.entries if n.startswith("blk.4.")}
    assert ours.entries.keys() - head == theirs.entries.keys()
    assert {n: ours.entries[n].shape for n in theirs.entries} == {n: v.shape for n, v in theirs.entries.items()}
    assert "blk.4.nextn.eh_proj.weight" in head
    matrices = {
        t.name
        for t in GGUFReader(conversions(kind, "bundled") / "BF16.gguf").tensors
        if t.name.startswith("blk.4.") and len(t.shape) > 1
    }
    assert head == {n for n in matrices if "nextn.embed" not in n and "shared_head_head" not in n}


def test_experts_are_counted_by_their_own_rows(calibrations) -> None:
    """Two experts a row; gate, up and down of one expert see the same rows."""
    ours = {t.name: t.data for t in GGUFReader(calibrations("moe")).tensors}
    for layer, rows in ((0, CHUNKS * SIZE), (4, CHUNKS * (SIZE - 1))):
        counts = ours[f"blk.{layer}.ffn_gate_exps.weight.counts"].reshape(-1)
        assert counts.sum() == 2 * rows
        assert counts.tolist() == ours[f"blk.{layer}.ffn_down_exps.weight.counts"].reshape(-1).tolist()


def test_head_is_weighted_and_the_trunk_stays(calibrations, tmp_path: Path) -> None:
    """--mtp-imatrix FILE: the head's bytes change, the trunk's mix and bytes do not, the file says by what."""
    plain, weighted = tmp_path / "plain.gguf", tmp_path / "weighted.gguf"
    convert(EXAMPLE, plain, types=["Q4_K_M"], mtp_type="Q4_K_M")
    report = convert(
        EXAMPLE, weighted, types=["Q4_K_M"], mtp_type="Q4_K_M", mtp_imatrix=calibrations("dense"), force=True
    )
    a, b = GGUFReader(plain), GGUFReader(weighted)
    changed = set()
    for one, other in zip(a.tensors, b.tensors, strict=True):
        assert (one.name, one.tensor_type) == (other.name, other.tensor_type)
        if one.data.tobytes() != other.data.tobytes():
            changed.add(one.name)
    assert changed == {t.entry.name for t in report.plan.files[0].tensors if t.weighted}
    assert changed
    assert all(n.startswith("blk.4.") for n in changed)
    assert b.fields["mtp.imatrix.file"].contents() == "imatrix.gguf"
    assert "quantize.imatrix.file" not in b.fields


def test_model_matrix_goes_first(calibrations, tmp_path: Path) -> None:
    """With --imatrix its own entries are used, and the head's from the other; nothing of the head is left unweighted."""
    report = convert(
        EXAMPLE, tmp_path / "x.gguf", types=["Q4_K_M"], mtp_type="Q4_K_M", dry_run=True,
        imatrix=shared("imatrix/dense.imatrix.gguf"), mtp_imatrix=calibrations("dense"),
    )  # fmt: skip
    weighted = {t.entry.name for t in report.plan.files[0].tensors if t.weighted}
    assert {"blk.0.ffn_down.weight", "blk.4.nextn.eh_proj.weight"} <= weighted
    without = "2 tensors have no entry in the importance matrix and are quantized without weights"
    assert [n for n in report.notes if "no entry" in n] == [f"{without}: output.weight, token_embd.weight"]


def test_auto_is_the_same_as_calibrating_oneself(tmp_path: Path) -> None:
    """--mtp-imatrix auto records, in a process of its own, what calibrate-mtp records."""
    calibrate(EXAMPLE, tmp_path / "own.gguf")
    for name, source in (("auto", "auto"), ("own", str(tmp_path / "own.gguf"))):
        convert(EXAMPLE, tmp_path / f"{name}-x.gguf", types=["Q4_K_M"], mtp_type="Q4_K_M", mtp_imatrix=source)
    auto, own = (
        {t.name: t.data.tobytes() for t in GGUFReader(tmp_path / f"{n}-x.gguf").tensors} for n in ("auto", "own")
    )
    assert auto == own


def test_command(tmp_path: Path, capfd: pytest.CaptureFixture[str], text: Path) -> None:
    """Result on stdout, in words or as JSON; the number of chunks is kept."""
    arguments = [str(EXAMPLE), str(text), "-o", str(tmp_path / "x.gguf"), "--chunks", "1", "--chunk-size", "32"]
    assert main([*arguments, "--json", "--quiet"]) == 0
    result = json.loads(capfd.readouterr().out)
    assert (result["entries"], result["head_entries"], result["chunks"], result["chunk_size"]) == (39, 8, 1, 32)
    assert main(arguments) == 0
    assert "39 tensors (8 of the MTP head), 1 chunks of 32 tokens" in capfd.readouterr().out
    matrix = read_imatrix(tmp_path / "x.gguf")
    assert (matrix.chunks, matrix.datasets) == (1, ("text.py",))


def test_unfit_input(tmp_path: Path, capfd: pytest.CaptureFixture[str], text: Path, conversions) -> None:
    """Each with an exit code, the file and a sentence; nothing is written."""
    out = tmp_path / "x.gguf"
    empty = tmp_path / "empty.txt"
    empty.write_text("")
    broken = clone(EXAMPLE, tmp_path / "broken")
    (broken / "tokenizer.json").write_text("{}")
    for arguments, code, words in (
        ([str(conversions("dense", "bundled") / "BF16.gguf"), str(text)], 2, "model folder"),
        ([str(EXAMPLE), str(empty)], 3, "too short"),
        ([str(EXAMPLE), str(tmp_path / "none.txt")], 5, "none.txt"),
        ([str(broken), str(text)], 3, "tokenizer.json"),
        ([str(EXAMPLE), str(text), "--chunk-size", "1"], 2, "--chunk-size"),
    ):
        assert main([*arguments, "-o", str(out), "--quiet"]) == code, arguments
        captured = capfd.readouterr()
        assert words in captured.err
        assert "Traceback" not in captured.err
        assert not out.exists()


def test_without_torch_auto_says_what_to_install(tmp_path: Path) -> None:
    """Exit 5 with the extra's name; a bare environment is played by modules that cannot be imported."""
    for name in ("torch", "tokenizers"):
        (tmp_path / f"{name}.py").write_text("raise ImportError('absent')")
    program = (
        f"import os, sys; sys.path.insert(0, {str(tmp_path)!r}); os.environ['PYTHONPATH'] = {str(tmp_path)!r}\n"
        "from converter.cli import convert_main\n"
        f"sys.exit(convert_main([{str(EXAMPLE)!r}, {str(tmp_path / 'x.gguf')!r}, '--mtp-imatrix', 'auto']))"
    )
    child = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert child.returncode == 5
    assert "convert-mtp[verify]" in child.stderr
    assert not (tmp_path / "x.gguf").exists()


def test_a_matrix_of_another_model_is_refused_for_the_head(tmp_path: Path) -> None:
    """A width that is not the tensor's names both, and the tensor."""
    matrix = tmp_path / "x.imatrix.gguf"
    ones = np.ones((1, 256), np.float32)
    write_imatrix(matrix, {"blk.4.nextn.eh_proj.weight": (ones, np.ones(1, np.float32))}, "x", 1, 64)
    with pytest.raises(InputError, match="another model") as caught:
        convert(EXAMPLE, tmp_path / "x.gguf", mtp_type="Q4_K", mtp_imatrix=matrix)
    assert caught.value.tensor == "blk.4.nextn.eh_proj.weight"
