"""GGUF to GGUF: what comes out is what a conversion of the source gives in that packaging."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from converter import convert
from converter.cli import convert_main
from converter.errors import GGUFError, InputError, UsageError
from tests.conftest import EXAMPLE, ROOT, checkpoint
from tests.oracles.gguf_files import metadata, tensor_digests

KINDS = ("dense", "moe")


def names(folder: Path) -> list[str]:
    return sorted(f.name for f in folder.iterdir())


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("mix", ["Q8_0", "Q4_K_M"])
def test_joined_parts_are_the_unsplit_file(conversions, tmp_path: Path, kind: str, mix: str) -> None:
    """Byte for byte, from any part or the folder."""
    whole = conversions(kind, "bundled") / f"{mix}.gguf"
    convert(whole, tmp_path / "parts" / "m.gguf", split_max_size=900_000)
    parts = sorted((tmp_path / "parts").iterdir())
    assert len(parts) > 3
    for number, given in enumerate((parts[0], parts[-1], tmp_path / "parts")):
        convert(given, tmp_path / f"{number}.gguf")
        assert (tmp_path / f"{number}.gguf").read_bytes() == whole.read_bytes()


def test_split_of_a_file_is_the_split_conversion(conversions, tmp_path: Path) -> None:
    """Splitting afterwards or at once is the same."""
    whole = conversions("dense", "bundled") / "Q5_K_M.gguf"
    convert(whole, tmp_path / "after" / "m.gguf", split_max_tensors=13)
    convert(EXAMPLE, tmp_path / "at once" / "m.gguf", types=["Q5_K_M"], split_max_tensors=13)
    assert names(tmp_path / "after") == names(tmp_path / "at once")
    for name in names(tmp_path / "after"):
        assert (tmp_path / "after" / name).read_bytes() == (tmp_path / "at once" / name).read_bytes()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("packaging", ["sidecar", "only", "none"])
def test_the_head_taken_out_is_the_direct_conversion(tmp_path: Path, kind: str, packaging: str) -> None:
    """Trunk, sidecar, or both: where trunk and head have one type, to the byte."""
    bundled = tmp_path / "bundled.gguf"
    convert(checkpoint(kind), bundled, types=["Q8_0"], mtp_type="match")
    convert(bundled, tmp_path / "taken" / "m.gguf", mtp=packaging)
    convert(checkpoint(kind), tmp_path / "direct" / "m.gguf", types=["Q8_0"], mtp_type="match", mtp=packaging)
    assert names(tmp_path / "taken") == names(tmp_path / "direct")
    for name in names(tmp_path / "taken"):
        direct, taken = tmp_path / "direct" / name, tmp_path / "taken" / name
        assert metadata(taken) == metadata(direct)
        assert tensor_digests(taken) == tensor_digests(direct)
        assert taken.read_bytes() == direct.read_bytes()


def test_from_parts_to_parts_without_the_head(tmp_path: Path) -> None:
    """Split bundled file -> split trunk and a sidecar, whose engine gives the tokens of the bundled one."""
    pytest.importorskip("xllamacpp", reason="needs llama.cpp: pip install 'convert-mtp[llamacpp]'")
    from tests.oracles.transformers_model import prompt_ids
    from verify.engines.llama_cpp import Engine, complete

    convert(EXAMPLE, tmp_path / "m.gguf", types=["F16"], split_max_size=2_000_000)
    first = min(tmp_path.glob("m-*.gguf"))
    report = convert(first, tmp_path / "apart" / "t.gguf", mtp="sidecar", split_max_size=2_000_000)
    trunk = report.plan.files[0].path
    (sidecar,) = (f.path for f in report.plan.files if f.kind == "sidecar")
    assert "-00001-of-" in trunk.name
    prompts = prompt_ids(EXAMPLE)[:3]
    one = complete(Engine(str(first), None, 2), prompts, 32)
    two = complete(Engine(str(trunk), str(sidecar), 2), prompts, 32)
    assert [(a.tokens, a.accepted) for a in one] == [(a.tokens, a.accepted) for a in two]


def test_a_head_that_is_not_there(conversions, tmp_path: Path) -> None:
    """Nothing to take out of a trunk, no trunk to leave of a sidecar."""
    trunk = conversions("dense", "none") / "Q8_0.gguf"
    with pytest.raises(InputError, match="no MTP head beside a trunk"):
        convert(trunk, tmp_path / "x.gguf", mtp="sidecar")
    sidecar = conversions("dense", "sidecar") / "mtp-Q8_0.gguf"
    with pytest.raises(InputError, match="would be empty"):
        convert(sidecar, tmp_path / "x.gguf", mtp="none")
    assert names(tmp_path) == []


def test_options_that_would_quantize_again(conversions, tmp_path: Path, capsys) -> None:
    """Exit 2: from a finished file there is no way to another type."""
    source = conversions("dense", "bundled") / "Q8_0.gguf"
    for option in (["--type", "Q4_K_M"], ["--mtp-type", "F16"], ["--tensor-type", "a=F16"], ["--name", "x"]):
        assert convert_main([str(source), str(tmp_path / "x.gguf"), *option]) == 2
        assert "without quantizing" in capsys.readouterr().err
    with pytest.raises(UsageError):
        convert(source, tmp_path / "x.gguf", mtp_imatrix="auto")


def test_a_source_cut_short(conversions, tmp_path: Path) -> None:
    """Exit 3 with the file, nothing written."""
    cut = tmp_path / "cut.gguf"
    shutil.copyfile(conversions("dense", "bundled") / "Q8_0.gguf", cut)
    with cut.open("r+b") as file:
        file.truncate(cut.stat().st_size - 100)
    with pytest.raises(GGUFError) as caught:
        convert(cut, tmp_path / "out" / "x.gguf")
    assert caught.value.exit_code == 3
    assert str(cut) in str(caught.value)
    assert not (tmp_path / "out").exists()


def test_repacking_resumes(conversions, tmp_path: Path) -> None:
    """The same journal as for conversions: stopped half way by a full disk's stand-in, then whole."""
    source = conversions("dense", "bundled") / "F16.gguf"
    limit = f"import resource; resource.setrlimit(resource.RLIMIT_FSIZE, ({2_000_000},) * 2); "
    code = limit + "import sys; from converter.cli import convert_main; sys.exit(convert_main(sys.argv[1:]))"
    command = [sys.executable, "-c", code, str(source), str(tmp_path / "m.gguf")]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT)
    assert done.returncode == 5
    assert not (tmp_path / "m.gguf").exists()
    convert(source, tmp_path / "m.gguf")
    assert (tmp_path / "m.gguf").read_bytes() == source.read_bytes()
