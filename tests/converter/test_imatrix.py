"""Importance matrices: both forms read alike, what is missing is said, what is wrong is refused."""

from __future__ import annotations

import struct
from pathlib import Path

import numpy as np
import pytest
from gguf import GGUFReader

from converter import convert
from converter.errors import InputError, ToolError
from converter.imatrix import read_imatrix, write_imatrix
from tests.conftest import EXAMPLE, shared


@pytest.mark.parametrize("kind", ["dense", "moe"])
def test_both_forms_say_the_same(kind: str) -> None:
    """The legacy file is of the same run: the same means, up to its own rounding."""
    new, old = (read_imatrix(shared(f"imatrix/{kind}.imatrix.{form}")) for form in ("gguf", "dat"))
    assert new.entries.keys() == old.entries.keys()
    for name, values in new.entries.items():
        np.testing.assert_allclose(values.reshape(-1), old.entries[name].reshape(-1), rtol=1e-5)
    assert (new.chunks, new.datasets) == (old.chunks, old.datasets) == (16, ("calib.txt",))


def test_written_matrices_read_back_and_in_the_reference_library(tmp_path: Path) -> None:
    """Sums and counts as llama-imatrix stores them; an expert that was never routed to weighs 1."""
    rng = np.random.default_rng(0)
    sums = {
        "blk.0.ffn_up.weight": (rng.random((1, 256)).astype(np.float32), np.array([512], np.float32)),
        "blk.0.ffn_up_exps.weight": (rng.random((3, 256)).astype(np.float32), np.array([5, 0, 7], np.float32)),
    }
    write_imatrix(tmp_path / "x.gguf", sums, "text.txt", 4, 128)
    matrix = read_imatrix(tmp_path / "x.gguf")
    for name, (total, counts) in sums.items():
        expected = np.where(counts[:, None] == 0, 1, total / np.maximum(counts[:, None], 1)).astype(np.float32)
        np.testing.assert_array_equal(matrix.entries[name], expected)
    reader = GGUFReader(tmp_path / "x.gguf")
    shapes = {t.name: t.shape.tolist() for t in reader.tensors}
    assert shapes["blk.0.ffn_up_exps.weight.in_sum2"] == [256, 3]
    assert shapes["blk.0.ffn_up_exps.weight.counts"] == [1, 3]
    assert reader.fields["imatrix.chunk_size"].contents() == 128


def test_s27_head_without_data_is_listed(tmp_path: Path) -> None:
    """S27: llama-imatrix records nothing for the head; which tensors, and that they go unweighted."""
    matrix = shared("imatrix/dense.imatrix.gguf")
    report = convert(EXAMPLE, tmp_path / "x.gguf", types=["Q4_K_M"], mtp_type="Q4_K_M", imatrix=matrix, dry_run=True)
    (note,) = (n for n in report.notes if "importance matrix" in n)
    assert "(8 of the MTP head)" in note
    assert "blk.4.nextn.eh_proj.weight" in note
    weighted = {t.entry.name for t in report.plan.files[0].tensors if t.weighted}
    assert "blk.0.ffn_down.weight" in weighted
    assert not [n for n in weighted if n.startswith("blk.4.")]
    assert report.plan.digest() != convert(EXAMPLE, tmp_path / "x.gguf", mtp_type="Q4_K_M", dry_run=True).plan.digest()


def test_matrix_of_another_model(tmp_path: Path) -> None:
    """Its width tells."""
    write_imatrix(
        tmp_path / "x.gguf", {"blk.0.ffn_up.weight": (np.ones((1, 99), np.float32), np.ones(1, np.float32))}, "t", 1, 1
    )
    with pytest.raises(InputError, match="another model") as caught:
        convert(EXAMPLE, tmp_path / "y.gguf", imatrix=tmp_path / "x.gguf")
    assert caught.value.tensor == "blk.0.ffn_up.weight"


def _legacy(*entries: tuple[str, int, list[float]]) -> bytes:
    raw = struct.pack("<i", len(entries))
    for name, calls, values in entries:
        raw += struct.pack("<i", len(name)) + name.encode() + struct.pack("<ii", calls, len(values))
        raw += struct.pack(f"<{len(values)}f", *values)
    return raw


@pytest.mark.parametrize(
    "raw",
    [b"", b"\1\0", _legacy(), _legacy(("a", 1, [1.0]))[:-2], _legacy(("a", 1, [float("nan")])), struct.pack("<ii", 5, -1),
     b"GGUF" + bytes(20)],
    ids=["empty", "short", "no entries", "cut off", "nan", "negative", "no gguf"],
)  # fmt: skip
def test_files_that_are_none(tmp_path: Path, raw: bytes) -> None:
    """Exit 3, with the file."""
    (tmp_path / "x.dat").write_bytes(raw)
    with pytest.raises(ToolError) as caught:
        read_imatrix(tmp_path / "x.dat")
    assert (caught.value.exit_code, caught.value.file) == (3, tmp_path / "x.dat")


def test_a_model_is_no_matrix(conversions) -> None:
    """A GGUF file of another kind."""
    with pytest.raises(InputError, match="no importance matrix"):
        read_imatrix(conversions("dense", "none") / "Q8_0.gguf")


def test_legacy_counts(tmp_path: Path) -> None:
    """Values are sums over calls; without calls they stand as they are."""
    (tmp_path / "x.dat").write_bytes(_legacy(("a", 4, [2.0, 8.0]), ("b", 0, [3.0])))
    entries = read_imatrix(tmp_path / "x.dat").entries
    assert (entries["a"].tolist(), entries["b"].tolist()) == ([[0.5, 2.0]], [[3.0]])
