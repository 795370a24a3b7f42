"""Heads that are announced or not, complete or not, packed or not: what the table makes of each."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from converter import convert
from converter.errors import CheckpointError, ConfigError, ToolError, UnsupportedError
from converter.gguf_file import read_gguf
from converter.model import read_model
from tests.checkpoints import Tensors, clone, edit_json, load, read_index, save, variant, write_index
from tests.conftest import EXAMPLE, checkpoint
from tests.oracles.gguf_files import tensor_digests

CONV = "model.language_model.layers.0.linear_attn.conv1d.weight"


def convert_q8(folder: Path, out: Path, **options: str):
    return convert(folder, out, types=["Q8_0"], **options)


def refused(folder: Path, *words: str, error: type[ToolError] = CheckpointError, **options: bool) -> ToolError:
    """Reading the model fails, and the message holds all these words."""
    with pytest.raises(error) as caught:
        read_model(folder, **options)
    for word in words:
        assert word in str(caught.value)
    return caught.value


def drop(prefix: str):
    return lambda tensors: {n: t for n, t in tensors.items() if not n.startswith(prefix)}


def no_key(config: dict) -> None:
    config["text_config"].pop("mtp_num_hidden_layers")


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory):
    """Digests of the whole checkpoint's bundled Q8_0 file."""
    file = tmp_path_factory.mktemp("reference") / "Q8_0.gguf"
    convert(EXAMPLE, file)
    return tensor_digests(file)


@pytest.mark.parametrize("shards", [1, 3])
@pytest.mark.parametrize("index", [True, False])
def test_any_number_of_shards(tmp_path: Path, reference, shards: int, index: bool) -> None:
    """One or several shards, with or without index: the same file."""
    folder = variant(EXAMPLE, tmp_path / "model", shards=shards, index=index)
    convert_q8(folder, tmp_path / "out.gguf")
    assert tensor_digests(tmp_path / "out.gguf") == reference


def test_text_only_layout(tmp_path: Path, reference) -> None:
    """Qwen3_5ForCausalLM: flat config, names without the wrapper's prefix, no vision tower."""

    def flat(config: dict) -> None:
        text = config.pop("text_config")
        config.clear()
        config.update(text, architectures=["Qwen3_5ForCausalLM"])

    def rename(tensors: Tensors) -> Tensors:
        kept = {n: t for n, t in tensors.items() if "visual" not in n}
        return {n.replace("language_model.", ""): t for n, t in kept.items()}

    folder = variant(EXAMPLE, tmp_path / "model", tensors=rename, config=flat)
    convert_q8(folder, tmp_path / "out.gguf")
    assert tensor_digests(tmp_path / "out.gguf") == reference


@pytest.mark.parametrize("prefix", ["model.mtp.", "language_model.mtp.", "model.language_model.mtp."])
def test_prefixes_of_the_head(tmp_path: Path, reference, prefix: str) -> None:
    """The head's spellings are one."""

    def rename(tensors: Tensors) -> Tensors:
        return {n.replace("mtp.", prefix) if n.startswith("mtp.") else n: t for n, t in tensors.items()}

    folder = variant(EXAMPLE, tmp_path / "model", tensors=rename)
    convert_q8(folder, tmp_path / "out.gguf")
    assert tensor_digests(tmp_path / "out.gguf") == reference


def test_s1_head_that_the_config_does_not_announce(tmp_path: Path, reference) -> None:
    """S1: the count comes from the tensors, one line says so, and the pair of keys is right."""
    folder = variant(EXAMPLE, tmp_path / "model", config=no_key)
    report = convert_q8(folder, tmp_path / "out.gguf")
    assert tensor_digests(tmp_path / "out.gguf") == reference
    assert sum("does not announce" in note for note in report.notes) == 1
    header = read_gguf(tmp_path / "out.gguf")
    assert (header.get("qwen35.block_count"), header.get("qwen35.nextn_predict_layers")) == (5, 1)
    assert sum(t.name.startswith("blk.4.") for t in header.tensors) == 15


@pytest.mark.parametrize("key", ["mtp_num_hidden_layers", "num_nextn_predict_layers"])
def test_s2_promised_head_that_is_not_there(tmp_path: Path, key: str) -> None:
    """S2, S5: which key promises what, what was found, and both ways out."""

    def promise(config: dict) -> None:
        no_key(config)
        config["text_config"][key] = 1

    folder = variant(EXAMPLE, tmp_path / "model", tensors=drop("mtp."), config=promise)
    error = refused(folder, key, "1 layer", "0 tensors", "--no-mtp", "original repository", "quantizing tool")
    assert error.exit_code == 3
    convert_q8(folder, tmp_path / "out.gguf", mtp="none")
    header = read_gguf(tmp_path / "out.gguf")
    assert header.get("qwen35.block_count") == 4
    assert header.get("qwen35.nextn_predict_layers") is None
    assert len(header.get("qwen35.attention.recurrent_layers")) == 4


def test_s5_quantized_upstream_without_its_head(tmp_path: Path) -> None:
    """S5: a packed trunk and a promise; first the head, then, with --no-mtp, what the packed weights are."""

    def pack(tensors: Tensors) -> Tensors:
        kept = drop("mtp.")(tensors)
        for name in [n for n in kept if n.endswith("_proj.weight") and "visual" not in n]:
            base = name.removesuffix("weight")
            rows, columns = kept.pop(name).shape
            kept[f"{base}qweight"] = torch.zeros(columns // 8, rows, dtype=torch.int32)
            kept[f"{base}scales"] = torch.ones(columns // 32, rows)
        return kept

    folder = variant(
        EXAMPLE, tmp_path, tensors=pack, config=lambda c: c.update(quantization_config={"quant_method": "gptq"})
    )
    refused(folder, "promises an MTP head", "quantizing tool", "original repository")
    refused(folder, "the trunk is not complete", "quantized (gptq)", "original checkpoint", with_head=False)


def test_s2_honest_headless_checkpoint(tmp_path: Path) -> None:
    """S2: neither key nor tensors is no error; one line says that there is no head."""
    folder = variant(EXAMPLE, tmp_path / "model", tensors=drop("mtp."), config=no_key)
    report = convert_q8(folder, tmp_path / "out.gguf")
    assert any("no MTP head" in note for note in report.notes)
    assert read_gguf(tmp_path / "out.gguf").get("qwen35.block_count") == 4


def test_s2_the_hint_works(tmp_path: Path, reference) -> None:
    """S2: copying the original's shards with mtp.* into an indexed folder puts the head back."""
    folder = variant(EXAMPLE, tmp_path / "model", tensors=drop("mtp."), shards=2)
    with pytest.raises(CheckpointError, match="promises"):
        read_model(folder)
    head = {f for n, f in read_index(EXAMPLE).items() if n.startswith("mtp.")}
    for file in head:
        (folder / file).write_bytes((EXAMPLE / file).read_bytes())
    convert_q8(folder, tmp_path / "out.gguf")
    assert tensor_digests(tmp_path / "out.gguf") == reference


def test_s3_layer_that_the_config_forgot(tmp_path: Path) -> None:
    """S3: a GLM-style head under model.layers.N is named, with what the config says; never a mapping error."""

    def glm_style(tensors: Tensors) -> Tensors:
        renamed = {"mtp.fc.weight": "model.language_model.layers.4.eh_proj.weight"}
        return {renamed.get(n, n): t for n, t in drop("mtp.layers")(tensors).items()}

    folder = variant(EXAMPLE, tmp_path / "model", tensors=glm_style, config=no_key)
    refused(folder, "MTP head is not complete", "mtp.fc.weight")


@pytest.mark.parametrize("mode", ["listed", "no index", "forgotten"])
def test_s4_head_in_its_own_file(tmp_path: Path, reference, mode: str) -> None:
    """S4: mtp.safetensors is found however it is (not) listed; forgotten by the index it is named in a note."""
    from safetensors.torch import save_file

    folder = variant(EXAMPLE, tmp_path / "model", tensors=drop("mtp."), shards=2 if mode != "no index" else 1)
    head = {n: t for n, t in load(EXAMPLE).items() if n.startswith("mtp.")}
    save_file(head, folder / "mtp.safetensors")
    if mode == "listed":
        write_index(folder, read_index(folder) | dict.fromkeys(head, "mtp.safetensors"))
    report = convert_q8(folder, tmp_path / "out.gguf")
    assert tensor_digests(tmp_path / "out.gguf") == reference
    said = [note for note in report.notes if "mtp.safetensors" in note and "not in the index: included" in note]
    assert len(said) == (mode == "forgotten")


def test_index_that_forgot_a_trunk_shard(tmp_path: Path, reference) -> None:
    """The table needs them, the folder has them: included, and said."""
    folder = clone(EXAMPLE, tmp_path / "model")
    index = read_index(folder)
    lost = min(index.values())
    write_index(folder, {n: f for n, f in index.items() if f != lost})
    report = convert_q8(folder, tmp_path / "out.gguf")
    assert tensor_digests(tmp_path / "out.gguf") == reference
    assert any(lost in note and "included" in note for note in report.notes)


def test_lost_trunk_layers(tmp_path: Path) -> None:
    """A checkpoint without index that lost a layer: judged by the table."""
    folder = variant(EXAMPLE, tmp_path / "model", tensors=drop("model.language_model.layers.2."))
    refused(folder, "the trunk is not complete", "model.layers.2.")


@pytest.mark.parametrize("name", ["mtp.fc.weight", "mtp.norm.weight", "mtp.layers.0.self_attn.q_proj.weight"])
def test_incomplete_head(tmp_path: Path, name: str) -> None:
    """One tensor of the head missing: named, with the way out; --no-mtp converts."""
    folder = variant(EXAMPLE, tmp_path / "model", tensors=drop(name))
    refused(folder, "the MTP head is not complete", name, "--no-mtp")
    assert read_model(folder, with_head=False).table.trunk_layers == 4


def test_head_layers_with_a_gap(tmp_path: Path) -> None:
    """mtp.layers.1 without mtp.layers.0."""

    def shift(tensors: Tensors) -> Tensors:
        return {n.replace("mtp.layers.0", "mtp.layers.1"): t for n, t in tensors.items()}

    refused(variant(EXAMPLE, tmp_path / "model", tensors=shift), "the MTP head is not complete", "mtp.layers.0.")


def test_config_and_weights_count_different_heads(tmp_path: Path) -> None:
    """Announced 2, found 1."""
    folder = variant(EXAMPLE, tmp_path, config=lambda c: c["text_config"].update(mtp_num_hidden_layers=2))
    refused(folder, "disagree about the MTP head", "2 layer", "1 layer")


def test_head_of_two_layers_warns(tmp_path: Path) -> None:
    """More layers than the engine's graph runs: converted, and said."""

    def double(tensors: Tensors) -> None:
        second = {
            n.replace("layers.0", "layers.1"): t.clone() for n, t in tensors.items() if n.startswith("mtp.layers.0.")
        }
        tensors.update(second)

    folder = variant(
        EXAMPLE, tmp_path / "model", tensors=double, config=lambda c: c["text_config"].update(mtp_num_hidden_layers=2)
    )
    report = convert_q8(folder, tmp_path / "out.gguf")
    assert any("2 layers; engines run only 1" in note for note in report.notes)
    assert read_gguf(tmp_path / "out.gguf").get("qwen35.block_count") == 6


def test_s6_packed_and_separate_experts_are_one(tmp_path: Path) -> None:
    """S6: both layouts of trunk and head give the same file."""
    source = checkpoint("moe")

    def split(tensors: Tensors) -> Tensors:
        out: Tensors = {}
        for name, t in tensors.items():
            base = name.rsplit(".", 1)[0]
            if name.endswith("experts.gate_up_proj"):
                for e in range(len(t)):
                    out[f"{base}.{e}.gate_proj.weight"], out[f"{base}.{e}.up_proj.weight"] = t[e].chunk(2)
            elif name.endswith("experts.down_proj"):
                out |= {f"{base}.{e}.down_proj.weight": t[e] for e in range(len(t))}
            else:
                out[name] = t
        return out

    def only_head(tensors: Tensors) -> Tensors:
        return split({n: t for n, t in tensors.items() if n.startswith("mtp.")}) | drop("mtp.")(tensors)

    convert(source, tmp_path / "packed.gguf", types=["Q4_K_M"], name="X")
    for layout in (split, only_head):
        folder = variant(source, tmp_path / layout.__name__, tensors=layout)
        convert(folder, tmp_path / f"{layout.__name__}.gguf", types=["Q4_K_M"], name="X")
        assert (tmp_path / f"{layout.__name__}.gguf").read_bytes() == (tmp_path / "packed.gguf").read_bytes()


def test_s6_one_expert_missing(tmp_path: Path) -> None:
    """All must be there."""
    source = checkpoint("moe")

    def split(tensors: Tensors) -> Tensors:
        name = "mtp.layers.0.mlp.experts.down_proj"
        down = tensors.pop(name)
        gate_up = tensors.pop("mtp.layers.0.mlp.experts.gate_up_proj")
        base = name.rsplit(".", 1)[0]
        for e in range(7):
            tensors[f"{base}.{e}.gate_proj.weight"], tensors[f"{base}.{e}.up_proj.weight"] = gate_up[e].chunk(2)
            tensors[f"{base}.{e}.down_proj.weight"] = down[e]
        return tensors

    refused(variant(source, tmp_path / "model", tensors=split), "the MTP head is not complete: 3 of its", "experts.7.")


def test_s7_all_seven_head_norms_are_shifted(conversions) -> None:
    """S7: stored + 1, the gated norm as it is; compared with the source, read by the reference library."""
    from gguf import GGUFReader

    source = load(EXAMPLE)
    written = {t.name: t.data for t in GGUFReader(conversions("dense", "bundled") / "BF16.gguf").tensors}
    names = {
        "nextn.enorm": "mtp.pre_fc_norm_embedding", "nextn.hnorm": "mtp.pre_fc_norm_hidden",
        "nextn.shared_head_norm": "mtp.norm", "attn_norm": "mtp.layers.0.input_layernorm",
        "post_attention_norm": "mtp.layers.0.post_attention_layernorm",
        "attn_q_norm": "mtp.layers.0.self_attn.q_norm", "attn_k_norm": "mtp.layers.0.self_attn.k_norm",
    }  # fmt: skip
    for target, name in names.items():
        assert (written[f"blk.4.{target}.weight"] == (source[f"{name}.weight"].float() + 1).numpy()).all()
    gated = source["model.language_model.layers.0.linear_attn.norm.weight"].float().numpy()
    assert (written["blk.0.ssm_norm.weight"] == gated).all()


def test_s8_norms_that_were_shifted_before(tmp_path: Path) -> None:
    """S8: an MLX conversion shows by its transposed convolution; it is refused, not shifted again."""

    def mlx(tensors: Tensors) -> None:
        for name in list(tensors):
            if name.endswith("conv1d.weight"):
                tensors[name] = tensors[name].transpose(1, 2)
            elif name.endswith("norm.weight") and "linear_attn.norm" not in name:
                tensors[name] = tensors[name] + 1

    folder = variant(EXAMPLE, tmp_path, tensors=mlx)
    error = refused(folder, "layout of an already converted", "[512, 4, 1]", "[512, 1, 4]", CONV)
    assert error.exit_code == 3


def test_s9_columns_of_eh_proj_keep_their_order(conversions) -> None:
    """S9: embedding first, then the trunk's state, as upstream; the engine test proves that this decodes."""
    from gguf import GGUFReader

    file = GGUFReader(conversions("dense", "bundled") / "F32.gguf")
    written = next(t for t in file.tensors if t.name == "blk.4.nextn.eh_proj.weight").data
    # The head is converted to the trunk's type where that keeps more bits: F32 here.
    assert (written == load(EXAMPLE)["mtp.fc.weight"].float().numpy()).all()


def test_s10_the_state_that_feeds_the_head_is_recorded() -> None:
    """S10: a choice of the architecture, in report and inspection."""
    report = convert(EXAMPLE, EXAMPLE / "never-written-Q8_0.gguf", dry_run=True)
    assert report.as_json()["head_input"] == "the trunk's state after its final norm"


@pytest.mark.parametrize("own", ["equal", "different"])
def test_s13_own_embedding_and_output_of_the_head(tmp_path: Path, own: str) -> None:
    """S13: copies of the trunk's are not stored twice; others are kept under the engine's names."""

    def add(tensors: Tensors) -> None:
        change = 0 if own == "equal" else 1
        tensors["mtp.embed_tokens.weight"] = tensors["model.language_model.embed_tokens.weight"] + change
        tensors["mtp.lm_head.weight"] = tensors["lm_head.weight"] + change

    report = convert_q8(variant(EXAMPLE, tmp_path / "model", tensors=add), tmp_path / "out.gguf")
    names = {t.name for t in read_gguf(tmp_path / "out.gguf").tensors}
    stored = {"blk.4.nextn.embed_tokens.weight", "blk.4.nextn.shared_head_head.weight"}
    assert stored & names == (set() if own == "equal" else stored)
    word = "not stored twice" if own == "equal" else "stored as blk.4.nextn"
    assert sum(word in note for note in report.notes) == 2


@pytest.mark.parametrize("stored", ["nothing", "copy", "other", "ghost"])
def test_s13_tied_output(tmp_path: Path, stored: str) -> None:
    """S13: no output tensor for a tied model, unless it stores one that differs; a ghost in the index is tolerated."""

    def tie(tensors: Tensors) -> None:
        head = tensors.pop("lm_head.weight")
        if stored == "copy":
            tensors["lm_head.weight"] = tensors["model.language_model.embed_tokens.weight"].clone()
        elif stored == "other":
            tensors["lm_head.weight"] = head

    folder = variant(
        EXAMPLE, tmp_path / "model", tensors=tie, shards=2,
        config=lambda c: (c.update(tie_word_embeddings=True), c["text_config"].update(tie_word_embeddings=True)),
    )  # fmt: skip
    if stored == "ghost":
        index = read_index(folder)
        write_index(folder, index | {"lm_head.weight": min(index.values())})
    report = convert_q8(folder, tmp_path / "out.gguf")
    names = {t.name for t in read_gguf(tmp_path / "out.gguf").tensors}
    assert ("output.weight" in names) == (stored == "other")
    assert any("lm_head.weight" in note for note in report.notes) == (stored in {"copy", "other"})


def test_untied_model_without_output(tmp_path: Path) -> None:
    """Without the tie a missing lm_head is an error."""
    refused(variant(EXAMPLE, tmp_path, tensors=drop("lm_head")), "the trunk is not complete", "lm_head.weight")


def test_tensor_that_no_rule_names(tmp_path: Path) -> None:
    """Exit 3, and which."""
    folder = variant(EXAMPLE, tmp_path, tensors=lambda t: t.update({"model.mystery.weight": torch.zeros(2)}))
    error = refused(folder, "no rule", "model.mystery.weight", "model.safetensors")
    assert error.exit_code == 3


def test_layer_beyond_the_configs_count(tmp_path: Path) -> None:
    """A layer that num_hidden_layers does not count is not skipped."""

    def fewer(config: dict) -> None:
        config["text_config"].update(num_hidden_layers=3, layer_types=["linear_attention"] * 3)

    refused(variant(EXAMPLE, tmp_path, config=fewer), "no rule", "layers.3.", "3 trunk layers")


def test_wrong_shape(tmp_path: Path) -> None:
    """Which tensor, what it should be, what it is."""
    folder = variant(EXAMPLE, tmp_path, tensors=lambda t: t.update({"lm_head.weight": t["lm_head.weight"][:-1]}))
    refused(folder, "lm_head.weight", "[2048, 256]", "[2047, 256]", "wrong shape")


@pytest.mark.parametrize(("dtype", "error"), [(torch.int32, CheckpointError), (torch.float8_e4m3fn, UnsupportedError)])
def test_wrong_dtype(tmp_path: Path, dtype: torch.dtype, error: type[ToolError]) -> None:
    """Packed or 8-bit weights: what was found and what can be read."""
    name = "model.language_model.layers.0.mlp.up_proj.weight"
    folder = variant(EXAMPLE, tmp_path, tensors=lambda t: t.update({name: t[name].float().to(dtype)}))
    refused(folder, name, "BF16, F16, F32", error=error)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_other_float_dtypes(tmp_path: Path, reference, dtype: torch.dtype) -> None:
    """F32 and F16 shards of the same values give the same file (the fixture's values fit float16 but for a few)."""

    def recast(tensors: Tensors) -> Tensors:
        fits = {n: (t.to(dtype).to(t.dtype) == t).all() for n, t in tensors.items()}
        return {n: t.to(dtype) if fits[n] else t for n, t in tensors.items()}

    folder = variant(EXAMPLE, tmp_path / "model", tensors=recast)
    assert sum(t.dtype == dtype for t in load(folder).values()) > 20
    convert_q8(folder, tmp_path / "out.gguf")
    assert tensor_digests(tmp_path / "out.gguf") == reference


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("name", ["model.language_model.layers.1.linear_attn.out_proj.weight", "mtp.norm.weight"])
def test_s30_not_finite(tmp_path: Path, name: str, value: float) -> None:
    """S30: tensor and index in the source, and no output."""

    def poison(tensors: Tensors) -> None:
        t = tensors[name]
        t.view(-1)[131] = value

    folder = variant(EXAMPLE, tmp_path / "model", tensors=poison)
    with pytest.raises(CheckpointError) as caught:
        convert(folder, tmp_path / "out.gguf", types=["Q4_K_M"])
    assert (caught.value.exit_code, caught.value.tensor) == (3, name)
    assert f"at index {[0, 131] if 'out_proj' in name else [131]}" in str(caught.value)
    assert [f.name for f in tmp_path.iterdir()] == ["model"]


def test_s30_index_is_that_of_the_source(tmp_path: Path) -> None:
    """S30: rows that are reordered and experts that are unpacked are traced back."""
    name = "model.language_model.layers.1.mlp.experts.gate_up_proj"

    def poison(tensors: Tensors) -> None:
        tensors[name][5, 300, 17] = float("nan")

    folder = variant(checkpoint("moe"), tmp_path / "model", tensors=poison)
    with pytest.raises(CheckpointError, match=r"at index \[5, 300, 17\]"):
        convert_q8(folder, tmp_path / "out.gguf")
    qkv = "model.language_model.layers.0.linear_attn.in_proj_qkv.weight"

    def poison_head(tensors: Tensors) -> None:
        tensors[qkv][256 + 64 + 3, 200] = float("inf")  # second value head: moved by the tiling

    folder = variant(EXAMPLE, tmp_path / "dense", tensors=poison_head)
    with pytest.raises(CheckpointError, match=r"at index \[323, 200\]"):
        convert_q8(folder, tmp_path / "out.gguf")


def test_s30_dead_expert_is_reported(tmp_path: Path) -> None:
    """S30: an expert of zeros is allowed and named."""

    def kill(tensors: Tensors) -> None:
        tensors["model.language_model.layers.2.mlp.experts.down_proj"][3] = 0

    folder = variant(checkpoint("moe"), tmp_path / "model", tensors=kill)
    report = convert_q8(folder, tmp_path / "out.gguf")
    dead = [note for note in report.notes if "are zero" in note]
    assert dead == ["blk.2.ffn_down_exps.weight: all weights of expert 3 are zero"]


@pytest.mark.parametrize(
    "key", ["num_hidden_layers", "hidden_size", "linear_num_key_heads", "rms_norm_eps", "vocab_size"]
)
def test_missing_config_key(tmp_path: Path, key: str) -> None:
    """Named, with the file."""
    folder = variant(EXAMPLE, tmp_path / "model", config=lambda c: c["text_config"].pop(key))
    with pytest.raises(ConfigError, match=key) as caught:
        convert_q8(folder, tmp_path / "out.gguf")
    assert (caught.value.exit_code, caught.value.file) == (3, folder / "config.json")


@pytest.mark.parametrize(
    ("key", "value"),
    [("num_hidden_layers", "4"), ("hidden_size", 0), ("head_dim", 1.5), ("tie_word_embeddings", "no"),
     ("layer_types", ["linear_attention"] * 3), ("layer_types", "linear"), ("linear_num_value_heads", 3),
     ("num_key_value_heads", 3), ("mtp_num_hidden_layers", -1)],
)  # fmt: skip
def test_wrong_config_value(tmp_path: Path, key: str, value: object) -> None:
    """Key, expected and found."""
    folder = variant(EXAMPLE, tmp_path, config=lambda c: c["text_config"].update({key: value}))
    refused(folder, "config.json", error=ConfigError)


def test_config_and_weights_disagree_about_a_layer(tmp_path: Path) -> None:
    """layer_types says full attention, the weights are linear."""
    kinds = ["full_attention", "linear_attention", "linear_attention", "full_attention"]
    folder = variant(EXAMPLE, tmp_path, config=lambda c: c["text_config"].update(layer_types=kinds))
    refused(folder, "disagree about layer 0", "full_attention", "linear_attention", error=ConfigError)


def test_layer_types_are_seen_in_the_weights_when_the_config_lost_them(tmp_path: Path, reference) -> None:
    """A config re-saved by other tools."""

    def lose(config: dict) -> None:
        config["text_config"].pop("layer_types")
        config["text_config"].pop("full_attention_interval")

    folder = variant(EXAMPLE, tmp_path / "model", config=lose)
    convert_q8(folder, tmp_path / "out.gguf")
    assert tensor_digests(tmp_path / "out.gguf") == reference
    recurrent = read_gguf(tmp_path / "out.gguf").get("qwen35.attention.recurrent_layers")
    assert recurrent == [True, True, True, False, False]


def test_unknown_architecture(tmp_path: Path) -> None:
    """Exit 4, with what is known."""
    folder = variant(EXAMPLE, tmp_path, config=lambda c: c.update(architectures=["LlamaForCausalLM"]))
    error = refused(folder, "LlamaForCausalLM", "Qwen3_5ForCausalLM", error=UnsupportedError)
    assert error.exit_code == 4


def test_text_configs_architecture_wins(tmp_path: Path) -> None:
    """A nested architectures list is the one that counts."""
    folder = variant(EXAMPLE, tmp_path, config=lambda c: c["text_config"].update(architectures=["OtherForCausalLM"]))
    refused(folder, "OtherForCausalLM", error=UnsupportedError)


@pytest.mark.parametrize("damage", ["missing", "not json", "list", "no architectures"])
def test_bad_config_file(tmp_path: Path, damage: str) -> None:
    """Each is exit 3 and names the file."""
    folder = clone(EXAMPLE, tmp_path)
    file = folder / "config.json"
    if damage == "missing":
        file.unlink()
    elif damage == "no architectures":
        edit_json(file, lambda c: c.pop("architectures"))
    else:
        file.write_text("{" if damage == "not json" else json.dumps([1]))
    assert refused(folder, error=ToolError).exit_code == 3


def test_same_tensor_under_two_prefixes(tmp_path: Path) -> None:
    """Both spellings at once mean that files of two exports are mixed."""
    folder = variant(EXAMPLE, tmp_path, tensors=lambda t: t.update({"model.mtp.fc.weight": t["mtp.fc.weight"].clone()}))
    refused(folder, "two tensors mean the same thing", "mtp.fc.weight")


def test_vision_tower_is_left_out_by_name(tmp_path: Path) -> None:
    """S41: counted and said; without it nothing changes."""
    vision = [n for n in load(EXAMPLE) if "visual" in n]
    model = read_model(EXAMPLE)
    assert f"left out {len(vision)} tensors: vision tower" in "\n".join(model.notes)
    folder = variant(EXAMPLE, tmp_path, tensors=drop("model.visual"))
    assert read_model(folder).dropped == {}


def test_saved_without_change_is_read_the_same(tmp_path: Path) -> None:
    """The helper itself: load and save change nothing."""
    save(tmp_path, load(EXAMPLE), 2)
    assert load(tmp_path).keys() == load(EXAMPLE).keys()
