"""Conversions equal what the reference converter and llama-quantize make, tensor by tensor."""

from __future__ import annotations

import pytest

from converter import convert
from tests.conftest import MIXES, checkpoint, shared
from tests.oracles import gguf_files

KINDS = ("dense", "moe")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("mix", [m for m in MIXES if m != "F32"])
def test_trunk_equals_the_reference(conversions, kind: str, mix: str) -> None:
    """Type, shape and bytes of every tensor of a trunk-only file, for every mix."""
    table = shared(f"expected/{kind}-trunk-{mix}.json")
    file = conversions(kind, "none") / f"{mix}.gguf"
    assert gguf_files.tensor_digests(file) == gguf_files.expected_digests(table)


@pytest.mark.parametrize("kind", KINDS)
def test_bundled_equals_the_reference(conversions, kind: str) -> None:
    """A bundled BF16 file: head included."""
    table = shared(f"expected/{kind}-bundled-BF16.json")
    file = conversions(kind, "bundled") / "BF16.gguf"
    assert gguf_files.tensor_digests(file) == gguf_files.expected_digests(table)


@pytest.mark.parametrize("kind", KINDS)
def test_sidecar_equals_the_reference(conversions, kind: str) -> None:
    """A BF16 sidecar: head, embedding, norm and output."""
    table = shared(f"expected/{kind}-sidecar-BF16.json")
    file = conversions(kind, "sidecar") / "mtp-BF16.gguf"
    assert gguf_files.tensor_digests(file) == gguf_files.expected_digests(table)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("packaging", "name"), [("none", "trunk"), ("bundled", "bundled"), ("sidecar", "sidecar")])
def test_metadata_equals_the_reference(conversions, kind: str, packaging: str, name: str) -> None:
    """Every key of the BF16 files in type and value; of ours, only keys under `mtp.` may come on top."""
    expected = gguf_files.expected_metadata(shared(f"expected/{kind}-{name}-BF16.json"))
    file = conversions(kind, packaging) / ("mtp-BF16.gguf" if packaging == "sidecar" else "BF16.gguf")
    found = gguf_files.metadata(file)
    assert {k: v for k, v in found.items() if not k.startswith("mtp.")} == expected


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("mix", MIXES)
def test_trunk_is_the_same_with_and_without_head(conversions, kind: str, mix: str) -> None:
    """Types and bytes of the trunk do not depend on the packaging."""
    bundled = gguf_files.tensor_digests(conversions(kind, "bundled") / f"{mix}.gguf")
    trunk = gguf_files.tensor_digests(conversions(kind, "none") / f"{mix}.gguf")
    assert trunk.items() <= bundled.items()
    assert {name.split(".")[1] for name in bundled.keys() - trunk.keys()} == {"4"}


@pytest.mark.parametrize("kind", KINDS)
def test_f32_holds_the_values_of_bf16(conversions, kind: str) -> None:
    """An F32 file, read by the reference library, holds the BF16 file's values."""
    from gguf import GGUFReader
    from gguf.quants import dequantize

    wide = {t.name: t for t in GGUFReader(conversions(kind, "none") / "F32.gguf").tensors}
    for tensor in GGUFReader(conversions(kind, "none") / "BF16.gguf").tensors:
        values = dequantize(tensor.data, tensor.tensor_type)
        assert (wide[tensor.name].data.reshape(values.shape) == values).all()


IMATRIX_MIXES = ("Q2_K", "Q3_K_M", "Q4_0", "Q4_K_M", "Q5_K_M", "Q6_K", "Q8_0", "IQ4_XS")


@pytest.mark.parametrize(("kind", "form"), [("dense", "gguf"), ("moe", "gguf"), ("dense", "dat")])
def test_weighted_trunk_equals_the_reference(tmp_path, kind: str, form: str) -> None:
    """With an importance matrix: every tensor, and what the metadata says of it.

    The tables were made from the GGUF form; the legacy form of the MoE run is rounded differently (mean times calls).
    """
    tables = {mix: shared(f"expected/{kind}-trunk-{mix}-imatrix.json") for mix in IMATRIX_MIXES}
    matrix = shared(f"imatrix/{kind}.imatrix.{form}")
    report = convert(checkpoint(kind), tmp_path / "{type}.gguf", types=IMATRIX_MIXES, mtp="none", imatrix=matrix)
    for mix, table in tables.items():
        assert gguf_files.tensor_digests(tmp_path / f"{mix}.gguf") == gguf_files.expected_digests(table), mix
        if form == "gguf":
            found = gguf_files.metadata(tmp_path / f"{mix}.gguf")
            expected = gguf_files.expected_metadata(table)
            assert {k: v for k, v in found.items() if "imatrix" in k} == {
                k: v for k, v in expected.items() if "imatrix" in k
            }
    (note,) = (n for n in report.notes if "importance matrix" in n)
    assert "MTP head" not in note
    assert "token_embd.weight" in note
    assert "ffn_up" not in note
