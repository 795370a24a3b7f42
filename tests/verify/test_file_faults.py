"""The verifier's own test: small changes to a good file must be found by the level that should, and named."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from converter.gguf_file import u32
from tests.conftest import checkpoint
from tests.verify.files import Change, Parts, noise, values
from verify.check import Options, verify
from verify.results import Verdict

A, HEAD = "qwen35", "blk.4"
FULL = "blk.3"  # the trunk's layer with full attention


def heads(count: int, dim: int, order: list[int]) -> Callable[[np.ndarray], np.ndarray]:
    """Blocks of rows in another order."""
    return lambda x: x.reshape(count, dim, -1)[order].reshape(x.shape)


def untiled(x: np.ndarray) -> np.ndarray:
    """Value heads as the source has them: grouped by key head (2 key heads, 2 value heads each)."""
    return x.reshape(2, 2, -1, x.shape[-1]).transpose(1, 0, 2, 3).reshape(x.shape)


def another_head(file: Parts) -> None:
    for name in file.entries:
        if name.startswith(HEAD):
            file[name] = 1 + noise(file[name]) if "norm" in name else noise(file[name])


def no_head_weights(file: Parts) -> None:
    for name in file.entries:
        if name.startswith(HEAD) and "norm" not in name:
            file[name] = np.zeros_like(file[name])


def shorter(key: str) -> Change:
    return lambda file: file.set(key, file.keys[key].value[:-1])


def moved_block(file: Parts) -> None:
    """Two quantization blocks change places."""
    name = "blk.0.ffn_up.weight"
    size = file.entries[name].type.nbytes
    data = file.data[name]
    file.data[name] = data[size : 2 * size] + data[:size] + data[2 * size :]


def wider(file: Parts) -> None:
    """The same bytes under another shape."""
    entry = file.entries["blk.0.ffn_up.weight"]
    file.entries[entry.name] = replace(entry, ne=(entry.ne[1], entry.ne[0]))


def twice(file: Parts) -> None:
    """The convolution's taps the other way round in time."""
    file["blk.0.ssm_conv1d.weight"] = file["blk.0.ssm_conv1d.weight"][:, ::-1]


def unnamed(file: Parts) -> None:
    extra = file.entries["output_norm.weight"]
    file.entries["blk.0.extra.weight"] = replace(extra, name="blk.0.extra.weight")
    file.data["blk.0.extra.weight"] = file.data[extra.name]


# fault -> (change, level that must find it, words in what is said)
FAULTS: dict[str, tuple[Change, str, str]] = {
    "norm shift missing": (values("blk.0.attn_norm.weight", lambda x: x - 1), "fidelity", "1 is missing"),
    "norm shift doubled": (values(f"{HEAD}.nextn.hnorm.weight", lambda x: x + 1), "fidelity", "1 too much"),
    "fc halves swapped": (values(f"{HEAD}.nextn.eh_proj.weight", lambda x: np.roll(x, 256, 1)), "fidelity", "halves"),
    "embedding norm and hidden norm exchanged": (
        lambda f: f.exchange(f"{HEAD}.nextn.enorm.weight", f"{HEAD}.nextn.hnorm.weight"), "fidelity", "nextn.enorm"),
    "head of another checkpoint": (another_head, "fidelity", "nextn.eh_proj"),
    "head tensors zeroed": (no_head_weights, "fidelity", "all zeros"),
    "one bit of one scale": (lambda f: f.flip("blk.1.ffn_gate.weight", 144 * 7), "fidelity", "damaged"),
    "one bit of one weight": (lambda f: f.flip("blk.1.ffn_gate.weight", 144 * 9 + 100, 5), "fidelity", "damaged"),
    "one bit of a norm": (lambda f: f.flip("output_norm.weight", 41, 3), "fidelity", "output_norm"),
    "a block moved": (moved_block, "fidelity", "ffn_up"),
    "gate and up exchanged": (lambda f: f.exchange("blk.2.ffn_gate.weight", "blk.2.ffn_up.weight"), "fidelity", "ffn_gate"),
    "layers exchanged": (lambda f: f.exchange("blk.0.attn_norm.weight", "blk.1.attn_norm.weight"), "fidelity", "attn_norm"),
    "query heads permuted": (values(f"{FULL}.attn_q.weight", heads(4, 128, [1, 0, 2, 3])), "fidelity", "attn_q"),
    "key heads permuted": (values(f"{FULL}.attn_k.weight", heads(2, 64, [1, 0])), "fidelity", "another order"),
    "query and gate not interleaved": (
        values(f"{FULL}.attn_q.weight", lambda x: x.reshape(4, 2, 64, -1).transpose(1, 0, 2, 3).reshape(x.shape)),
        "fidelity", "attn_q"),
    "value heads not reordered": (values("blk.0.attn_gate.weight", untiled), "fidelity", "another order"),
    "output columns not reordered": (
        values("blk.0.ssm_out.weight", lambda x: untiled(x.T).T), "fidelity", "ssm_out"),
    "alpha and beta exchanged": (lambda f: f.exchange("blk.0.ssm_alpha.weight", "blk.0.ssm_beta.weight"), "fidelity", "ssm_alpha"),
    "decay still a logarithm": (values("blk.1.ssm_a", lambda x: np.log(-x)), "fidelity", "ssm_a"),
    "decay's sign": (values("blk.1.ssm_a", lambda x: -x), "fidelity", "sign"),
    "convolution reversed": (twice, "fidelity", "ssm_conv1d"),
    "embedding one row off": (values("token_embd.weight", lambda x: np.roll(x, 1, 0)), "fidelity", "token_embd"),
    "head untied or tied wrongly": (lambda f: f.__setitem__("output.weight", f["token_embd.weight"]), "fidelity", "output.weight"),
    "not a number": (lambda f: f.data.update({"output_norm.weight": b"\0\0\xc0\x7f" + f.data["output_norm.weight"][4:]}),
                     "fidelity", "output_norm"),
    "RoPE base": (lambda f: f.set(f"{A}.rope.freq_base", 1e6), "structure", "rope.freq_base"),
    "RoPE sections": (lambda f: f.set(f"{A}.rope.dimension_sections", [8, 0, 0, 0]), "structure", "dimension_sections"),
    "RoPE dimensions": (lambda f: f.set(f"{A}.rope.dimension_count", 64), "structure", "dimension_count"),
    "wrong eps": (lambda f: f.set(f"{A}.attention.layer_norm_rms_epsilon", 1e-5), "structure", "epsilon"),
    "missing key": (lambda f: f.keys.pop(f"{A}.full_attention_interval"), "structure", "full_attention_interval"),
    "key of another type": (
        lambda f: f.keys.update({f"{A}.rope.freq_base": u32(f"{A}.rope.freq_base", 10_000_000)}), "structure", "freq_base"),
    "recurrent layers": (
        lambda f: f.set(f"{A}.attention.recurrent_layers", [True, True, False, True, False]), "structure", "recurrent_layers"),
    "nextn_predict_layers wrong": (lambda f: f.set(f"{A}.nextn_predict_layers", 2), "structure", "head"),
    "nextn_predict_layers missing": (lambda f: f.keys.pop(f"{A}.nextn_predict_layers"), "structure", "nextn"),
    "block_count wrong": (lambda f: f.set(f"{A}.block_count", 4), "structure", "block_count"),
    "vocabulary off by one": (shorter("tokenizer.ggml.tokens"), "structure", "tokens"),
    "token kinds off by one": (shorter("tokenizer.ggml.token_type"), "structure", "token_type"),
    "merge list cut": (shorter("tokenizer.ggml.merges"), "structure", "merges"),
    "special id wrong": (lambda f: f.set("tokenizer.ggml.eos_token_id", 7), "structure", "eos_token_id"),
    "two tokens exchanged": (
        lambda f: f.set("tokenizer.ggml.tokens", [*f.keys["tokenizer.ggml.tokens"].value[1::-1], *f.keys["tokenizer.ggml.tokens"].value[2:]]),
        "structure", "tokens[0]"),
    "pre-tokenizer": (lambda f: f.set("tokenizer.ggml.pre", "gpt-2"), "structure", "tokenizer.ggml.pre"),
    "chat template lost": (lambda f: f.keys.pop("tokenizer.chat_template"), "structure", "chat_template"),
    "head tensor missing": (lambda f: f.remove(f"{HEAD}.nextn.eh_proj.weight"), "structure", "eh_proj"),
    "trunk tensor missing": (lambda f: f.remove("blk.2.ssm_a"), "structure", "ssm_a"),
    "tensor of nobody": (unnamed, "structure", "extra"),
    "wrong shape": (wider, "structure", "ffn_up"),
}  # fmt: skip


@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_is_found_and_named(conversions, tmp_path: Path, record_property, fault: str) -> None:
    """By the level that should, with the tensor or key, and exit code 1."""
    change, level, words = FAULTS[fault]
    parts = Parts(conversions("dense", "bundled") / "Q4_K_M.gguf")
    change(parts)
    report = verify(parts.write(tmp_path / "x.gguf"), Options(checkpoint("dense"), levels=("structure", "fidelity")))
    found = {r.level for r in report.levels if r.verdict is Verdict.FAILED}
    record_property("fault", fault)
    record_property("levels", ",".join(sorted(found)))
    assert level in found
    assert report.exit_code == 1
    said = " ".join(str(f) for f in report.level(level).findings)
    assert words in said


EXPERTS: dict[str, tuple[Change, str]] = {
    "experts permuted": (values("blk.1.ffn_up_exps.weight", lambda x: x[[1, 0, *range(2, 8)]]), "ffn_up_exps"),
    "router rows permuted": (values("blk.1.ffn_gate_inp.weight", lambda x: x[::-1]), "ffn_gate_inp"),
    "packed gate and up exchanged": (
        lambda f: f.exchange("blk.4.ffn_gate_exps.weight", "blk.4.ffn_up_exps.weight"), "blk.4.ffn_gate_exps"),
    "an expert zeroed": (
        values("blk.2.ffn_down_exps.weight", lambda x: x * (np.arange(8) != 3)[:, None, None]), "ffn_down_exps"),
    "experts used": (lambda f: f.set("qwen35moe.expert_used_count", 1), "expert_used_count"),
}  # fmt: skip


@pytest.mark.parametrize("fault", EXPERTS)
def test_a_planted_fault_among_experts(conversions, tmp_path: Path, record_property, fault: str) -> None:
    """The same for what only mixtures of experts have."""
    change, words = EXPERTS[fault]
    parts = Parts(conversions("moe", "bundled") / "Q4_K_M.gguf")
    change(parts)
    report = verify(parts.write(tmp_path / "x.gguf"), Options(checkpoint("moe"), levels=("structure", "fidelity")))
    record_property("fault", fault)
    record_property("levels", ",".join(r.level for r in report.levels if r.verdict is Verdict.FAILED))
    assert report.exit_code == 1
    assert words in " ".join(str(f) for r in report.levels for f in r.findings)


BROKEN: dict[str, Callable[[bytes], bytes]] = {
    "tensor truncated": lambda raw: raw[:-1000],
    "magic": lambda raw: b"GGUX" + raw[4:],
    "version": lambda raw: raw[:4] + b"\x09" + raw[5:],
    "more tensors announced": lambda raw: raw[:8] + (10**6).to_bytes(8, "little") + raw[16:],
    "header cut": lambda raw: raw[:5000],
    "metadata duplicated": lambda raw: raw.replace(b"qwen35.context_length", b"qwen35.rope.freq_base"),
    "tensor named twice": lambda raw: raw.replace(b"blk.0.ffn_up.weight", b"blk.1.ffn_up.weight"),
}


@pytest.mark.parametrize("fault", BROKEN)
def test_a_file_that_cannot_be_read(conversions, tmp_path: Path, record_property, fault: str) -> None:
    """Structure fails, nothing else runs, and there is no traceback."""
    file = tmp_path / "x.gguf"
    file.write_bytes(BROKEN[fault]((conversions("dense", "bundled") / "Q4_K_M.gguf").read_bytes()))
    for options in (Options(checkpoint("dense")), Options()):
        report = verify(file, options)
        record_property("fault", fault)
        record_property("levels", ",".join(r.level for r in report.levels))
        assert report.exit_code == 1
        assert [r.level for r in report.levels] == ["structure"]


@pytest.mark.parametrize("kind", ["dense", "moe"])
@pytest.mark.parametrize("packaging", ["bundled", "sidecar", "none"])
def test_good_files_give_no_alarm(conversions, kind: str, packaging: str) -> None:
    """All mixes in all packagings have the very bytes of their source."""
    files = sorted(conversions(kind, packaging).glob("*.gguf"))
    chosen = [f for f in files if f.stem.removeprefix("mtp-") in {"F16", "Q4_K_M", "Q8_0", "IQ4_XS", "Q2_K", "Q3_K_L"}]
    assert len(chosen) >= 6
    for file in chosen:
        report = verify(file, Options(checkpoint(kind), levels=("structure", "fidelity")))
        assert report.exit_code == 0, report.as_text()
        assert report.level("fidelity").data["tensors"]
        assert not any(t["different"] for t in report.level("fidelity").data["tensors"])


def test_a_file_of_another_recipe_is_no_damage(tmp_path: Path) -> None:
    """With an importance matrix the bytes are others, the errors little more."""
    from converter import convert
    from tests.conftest import shared

    matrix = shared("imatrix") / "dense.imatrix.gguf"
    convert(checkpoint("dense"), tmp_path / "x.gguf", types=["Q4_K_M"], imatrix=matrix)
    report = verify(tmp_path / "x.gguf", Options(checkpoint("dense"), levels=("structure", "fidelity")))
    assert report.exit_code == 0, report.as_text()
    assert "of another recipe" in report.level("fidelity").summary
    parts = Parts(tmp_path / "x.gguf")
    parts["blk.1.ffn_gate.weight"] = np.roll(parts["blk.1.ffn_gate.weight"], 1, 0)
    report = verify(parts.write(tmp_path / "y.gguf"), Options(checkpoint("dense"), levels=("fidelity",)))
    assert report.exit_code == 1
    assert "blk.1.ffn_gate" in str(report.level("fidelity").findings[0])


def test_another_model_altogether(conversions) -> None:
    """A dense file against the MoE checkpoint."""
    file = conversions("dense", "bundled") / "F16.gguf"
    report = verify(file, Options(checkpoint("moe"), levels=("structure", "fidelity")))
    assert report.exit_code == 1
    assert "general.architecture" in report.as_text()
