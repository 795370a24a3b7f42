"""Files that were made with an importance matrix: their very bytes are asked for when the matrix is given."""

from __future__ import annotations

from pathlib import Path

import gguf
import pytest

from converter import convert
from tests.conftest import EXAMPLE, checkpoint, shared
from verify import cli
from verify.check import Options, verify
from verify.results import Verdict


def matrix(kind: str) -> Path:
    return shared("imatrix") / f"{kind}.imatrix.gguf"


@pytest.mark.parametrize("kind", ["dense", "moe"])
@pytest.mark.parametrize("mix", ["Q4_K_M", "IQ4_XS"])
def test_every_byte(kind: str, mix: str, tmp_path: Path) -> None:
    """With the matrix all tensors are equal, experts too; without it the file is one of another recipe, not damaged."""
    file = tmp_path / f"x-{mix}.gguf"
    convert(checkpoint(kind), file, imatrix=matrix(kind))
    known, unknown = (
        verify(file, Options(checkpoint(kind), levels=("fidelity",), imatrix=imatrix))
        for imatrix in (matrix(kind), None)
    )
    tensors = known.level("fidelity").data["tensors"]
    assert known.verdict is Verdict.PASSED
    assert len(tensors) > 50
    assert not any(t["different"] for t in tensors)
    assert unknown.verdict is Verdict.PASSED
    assert "another recipe" in unknown.level("fidelity").summary


def test_damage_is_damage(tmp_path: Path) -> None:
    """A block of a weighted tensor that was overwritten is found as such, which without the matrix it could not be."""
    file = tmp_path / "x-Q4_K_M.gguf"
    convert(EXAMPLE, file, imatrix=matrix("dense"))
    tensor = next(t for t in gguf.GGUFReader(file).tensors if t.name == "blk.1.ffn_gate.weight")
    with file.open("r+b") as opened:
        opened.seek(tensor.data_offset + 144 * 7 + 20)  # quants of the eighth block of 144 bytes
        byte = opened.read(1)
        opened.seek(-1, 1)
        opened.write(bytes([byte[0] ^ 0x11]))
    found = verify(file, Options(EXAMPLE, levels=("fidelity",), imatrix=matrix("dense")))
    (finding,) = found.level("fidelity").findings
    assert finding.where == tensor.name
    assert "damaged" in finding.what
    assert finding.found.startswith("1 of")


def test_the_head_has_its_own(tmp_path: Path) -> None:
    """Recorded by calibrate-mtp."""
    from verify.calibrate import calibrate

    calibrate(EXAMPLE, tmp_path / "head.gguf", chunks=1, chunk_size=64)
    file = tmp_path / "x-Q4_K_M.gguf"
    convert(EXAMPLE, file, mtp_type="match", mtp_imatrix=tmp_path / "head.gguf")
    options = Options(EXAMPLE, levels=("fidelity",), mtp_imatrix=tmp_path / "head.gguf")
    assert verify(file, options).level("fidelity").summary.startswith("71 of 71")
    assert not verify(file, Options(EXAMPLE, levels=("fidelity",))).level("fidelity").summary.startswith("71 of 71")


def test_wrong_matrices(tmp_path: Path, capsys) -> None:
    """One of another model, and one without the source, are refused."""
    file = tmp_path / "x-Q4_K_M.gguf"
    convert(EXAMPLE, file)
    arguments = [str(file), "--quiet", "--level", "fidelity"]
    assert cli.main([*arguments, "--source", str(EXAMPLE), "--imatrix", str(EXAMPLE / "config.json")]) == 3
    assert cli.main([*arguments, "--imatrix", str(matrix("dense"))]) == 2
    assert "--source" in capsys.readouterr().err
