"""Types, overrides, names and packagings: decided before a byte is written, the same every time."""

from __future__ import annotations

from pathlib import Path

import pytest

from converter import convert
from converter.errors import CheckpointError, ToolError, UnsupportedError, UsageError
from converter.plan import Plan
from converter.report import ConversionReport
from tests.checkpoints import Tensors, variant
from tests.conftest import EXAMPLE, checkpoint

OUT = Path("out")


def plan(out: str = "X.gguf", model: Path = EXAMPLE, **options: object) -> Plan:
    return dry(out, model, **options).plan


def dry(out: str = "X.gguf", model: Path = EXAMPLE, **options: object) -> ConversionReport:
    return convert(model, OUT / out, dry_run=True, **options)  # type: ignore[arg-type]  # tests pass options on


def types(plan: Plan, file: int = 0) -> dict[str, str]:
    return {t.entry.name: t.type.name for t in plan.files[file].tensors}


@pytest.mark.parametrize(
    ("options", "out", "expected"),
    [
        ({}, "X.gguf", ("Q4_K_M", "Q8_0")),
        ({}, "X-Q6_K.gguf", ("Q6_K", "Q8_0")),
        ({}, "x-q5_k_s.gguf", ("Q5_K_S", "Q8_0")),
        ({"types": ["F16"]}, "X.gguf", ("F16", "F16")),
        ({"types": ["BF16"]}, "X-Q8_0.gguf", ("BF16", "BF16")),
        ({"types": ["q4_k"], "mtp_type": "match"}, "X.gguf", ("Q4_K_M", "Q4_K_M")),
        ({"types": ["F32"], "mtp_type": "Q4_0"}, "X.gguf", ("F32", "Q4_0")),
    ],
)
def test_types_of_trunk_and_head(options: dict, out: str, expected: tuple[str, str]) -> None:
    """As asked, as the file's name says, or the defaults."""
    file = plan(out, **options).files[0]
    assert (file.mix, file.head_mix) == expected


def test_head_is_quantized_independently() -> None:
    """Norms stay F32, matrices get the head's type; `_M` mixes raise the three sensitive ones."""
    head = {n: t for n, t in types(plan(types=["F16"], mtp_type="Q4_K_M")).items() if n.startswith("blk.4.")}
    raised = {n for n, t in head.items() if t == "Q5_K"}
    assert raised == {"blk.4.nextn.eh_proj.weight", "blk.4.attn_v.weight", "blk.4.ffn_down.weight"}
    assert set(head.values()) == {"F32", "Q4_K", "Q5_K"}
    assert {n for n, t in head.items() if t == "F32"} == {n for n in head if "norm" in n}


def test_overrides_last_match_wins() -> None:
    """Searched anywhere in the GGUF name, trunk and head alike."""
    found = types(plan(types=["Q8_0"], tensor_types=["ffn_down=Q6_K", r"blk\.4\.ffn=F16", "^output=BF16"]))
    assert (found["blk.0.ffn_down.weight"], found["blk.4.ffn_down.weight"]) == ("Q6_K", "F16")
    assert (found["output.weight"], found["output_norm.weight"]) == ("BF16", "F32")


@pytest.mark.parametrize(
    ("option", "error", "code"),
    [
        ("nothing=Q8_0", UsageError, 2),
        ("attn_norm=Q8_0", UsageError, 2),  # norms stay F32
        ("ffn_down", UsageError, 2),
        ("=Q8_0", UsageError, 2),
        ("(=Q8_0", UsageError, 2),
        ("ffn_down=Q4_K_M", UsageError, 2),  # a mix is no type
        ("ffn_down=IQ2_XS", UnsupportedError, 4),
    ],
)
def test_overrides_that_cannot_be_meant(option: str, error: type[ToolError], code: int) -> None:
    """A pattern that matches nothing is an error, as is a type that is none."""
    with pytest.raises(error) as caught:
        plan(tensor_types=[option])
    assert caught.value.exit_code == code


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"types": ["Q9"]}, "Q9"),
        ({"types": ["Q8_0", "F16"]}, "{type}"),
        ({"types": ["Q8_0", "q8_0"], "out": "X-{type}.gguf"}, "twice"),
        ({"mtp_type": "Q9"}, "Q9"),
        ({"mtp": "sidecar", "types": ["Q8_0"], "mtp_type": "Q8_0", "out": "mtp-Q8_0.gguf"}, "same name"),
    ],
)
def test_usage_errors(options: dict, words: str) -> None:
    """Exit 2."""
    with pytest.raises(UsageError, match=words) as caught:
        plan(**options)
    assert caught.value.exit_code == 2


def test_sidecars_are_shared_by_trunks_of_several_types() -> None:
    """One head of one type is written once."""
    files = plan("N-{type}.gguf", types=["Q4_K_M", "Q5_K_M", "BF16"], mtp="sidecar").files
    assert [(f.path.name, f.kind) for f in files] == [
        ("N-Q4_K_M.gguf", "trunk"), ("mtp-N-Q8_0.gguf", "sidecar"), ("N-Q5_K_M.gguf", "trunk"),
        ("N-BF16.gguf", "trunk"), ("mtp-N-BF16.gguf", "sidecar"),
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("out", "expected"),
    [("N-Q4_K_M.gguf", "mtp-N-Q8_0.gguf"), ("N.gguf", "mtp-N-Q8_0.gguf"), ("n-q4_k_m.gguf", "mtp-n-Q8_0.gguf")],
)
def test_name_of_a_sidecar(out: str, expected: str) -> None:
    """mtp- in front, and the head's type."""
    assert plan(out, mtp="sidecar").files[1].path == OUT / expected


def test_head_only() -> None:
    """The sidecar alone, under the name given; --type is the head's then."""
    (file,) = plan("mtp-N.gguf", mtp="only").files
    assert (file.kind, file.mix, file.path) == ("sidecar", "Q8_0", OUT / "mtp-N.gguf")
    assert plan("mtp-N.gguf", mtp="only", types=["Q6_K"]).files[0].mix == "Q6_K"
    assert plan("mtp-N.gguf", mtp="only", mtp_type="F16").files[0].mix == "F16"
    assert {"token_embd.weight", "output_norm.weight", "output.weight"} <= types(plan("mtp-N.gguf", mtp="only")).keys()


def test_output_folder_gives_the_name(tmp_path: Path) -> None:
    """An existing folder as OUT: MODEL-TYPE.gguf in it."""
    report = convert(EXAMPLE, tmp_path, types=["Q8_0", "F16"], dry_run=True)
    assert [f.path for f in report.plan.files] == [tmp_path / f"tiny-qwen3.5-dense-{t}.gguf" for t in ("Q8_0", "F16")]


@pytest.mark.parametrize(
    ("out", "mtp", "words"), [("My-mtp-X.gguf", "bundled", "capitals"), ("X.gguf", "only", "prefix")]
)
def test_names_that_engines_misread(out: str, mtp: str, words: str) -> None:
    """S18: the prefix means sidecar to engines and front ends."""
    assert any(words in note for note in plan(out, mtp=mtp).notes)


@pytest.mark.parametrize("mtp", ["sidecar", "only"])
def test_no_head_to_pack(tmp_path: Path, mtp: str) -> None:
    """A model without head has no sidecar."""

    def headless(tensors: Tensors) -> Tensors:
        return {n: t for n, t in tensors.items() if not n.startswith("mtp.")}

    folder = variant(
        EXAMPLE, tmp_path, tensors=headless, config=lambda c: c["text_config"].pop("mtp_num_hidden_layers")
    )
    with pytest.raises(CheckpointError, match="no MTP head to put"):
        plan(model=folder, mtp=mtp)


def test_s16_block_count_and_head_count_are_a_pair() -> None:
    """S16: in every packaging."""
    pairs = {}
    for mtp, name in (("bundled", "bundled"), ("none", "trunk"), ("only", "sidecar")):
        keys = {k.key: k.value for k in plan(mtp=mtp).files[0].keys}
        recurrent = keys["qwen35.attention.recurrent_layers"]
        pairs[name] = (keys["qwen35.block_count"], keys.get("qwen35.nextn_predict_layers"), len(recurrent))
    assert pairs == {"bundled": (5, 1, 5), "trunk": (4, None, 4), "sidecar": (5, 1, 5)}


def test_fallbacks_are_those_of_llama_quantize(tmp_path: Path) -> None:
    """Rows of 224 values: no block of 256 fits, 32 does; 232: none does. The summary lists each."""

    def narrow(tensors: Tensors) -> Tensors:
        ffn = 224
        out = dict(tensors)
        for name, t in tensors.items():
            if name.startswith(("model.language_model", "mtp")) and ".mlp." in name:
                out[name] = t[:, :ffn] if "down" in name else t[:ffn]
        return out

    folder = variant(
        EXAMPLE, tmp_path / "m", tensors=narrow, config=lambda c: c["text_config"].update(intermediate_size=224)
    )
    report = dry(model=folder, types=["Q4_K_M"], mtp_type="match")
    found = types(report.plan)
    # From llama-quantize's table: Q4_K -> Q5_0, Q5_K -> Q5_1, Q6_K -> Q8_0.
    assert {found[f"blk.{i}.ffn_down.weight"] for i in range(4)} == {"Q5_0", "Q8_0"}
    assert found["blk.4.ffn_down.weight"] == "Q5_1"
    listed = report.as_json()["files"][0]["fallbacks"]
    assert {f["tensor"] for f in listed} == {f"blk.{i}.ffn_down.weight" for i in range(5)}
    assert "cannot hold" in report.as_text()
    assert types(plan(model=folder, types=["Q8_0"]))["blk.0.ffn_down.weight"] == "Q8_0"
    assert found["blk.0.ffn_up.weight"] == "Q4_K"


def test_fallback_files_decode(tmp_path: Path) -> None:
    """Rows of 232 values end as F16, and the file can be written."""

    def narrow(tensors: Tensors) -> Tensors:
        return {
            n: (t[:, :232] if "down" in n else t[:232]) if ".mlp." in n and "visual" not in n else t
            for n, t in tensors.items()
        }

    folder = variant(
        EXAMPLE, tmp_path / "m", tensors=narrow, config=lambda c: c["text_config"].update(intermediate_size=232)
    )
    report = convert(folder, tmp_path / "x.gguf", types=["Q4_K_M"])
    assert types(report.plan)["blk.0.ffn_down.weight"] == "F16"
    assert (tmp_path / "x.gguf").stat().st_size == report.plan.files[0].size


def test_plans_are_deterministic() -> None:
    """The digest names options and source, and nothing else."""
    one, two = plan(types=["Q4_K_M"]), plan(types=["Q4_K_M"])
    assert one.digest() == two.digest()
    assert plan(types=["Q4_K_S"]).digest() != one.digest()
    assert plan(types=["Q4_K_M"], tensor_types=["attn_q=F16"]).digest() != one.digest()


def test_head_is_a_suffix_of_a_bundled_file() -> None:
    """Trunk by block, then the head: a trunk-only file's data is a prefix."""
    bundled = [t.entry for t in plan().files[0].tensors]
    trunk = [t.entry for t in plan(mtp="none").files[0].tensors]
    assert bundled[: len(trunk)] == trunk


def test_mixes_with_eight_experts() -> None:
    """llama-quantize's table has special rows for 8 experts, which the MoE fixture has."""
    found = types(plan(model=checkpoint("moe"), types=["Q4_K_M"], mtp="none"))
    assert (found["blk.3.attn_k.weight"], found["blk.3.attn_output.weight"]) == ("Q8_0", "Q5_K")


def test_source_values_in_the_report() -> None:
    """Bytes by type add up to the file's, trunk and head apart."""
    summary = dry(types=["Q4_K_M"]).as_json()["files"][0]
    parts = summary["parts"]
    assert set(parts) == {"trunk", "head"}
    assert sum(t["tensors"] for p in parts.values() for t in p.values()) == 71
    assert sum(t["bytes"] for t in parts["head"].values()) == sum(
        t["bytes"] for t in summary["tensors"] if t["name"].startswith("blk.4.")
    )
