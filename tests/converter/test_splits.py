"""Files in parts: as llama.cpp names and reads them, with the tensors of the whole."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from converter import convert
from converter.cli import convert_main, inspect_main
from converter.errors import GGUFError, InputError, UsageError
from converter.gguf_model import open_gguf
from converter.splits import parse_size
from tests.checkpoints import clone
from tests.conftest import EXAMPLE
from tests.oracles.gguf_files import metadata, tensor_digests

SIZE = 2_000_000


@pytest.fixture(scope="module")
def parts(tmp_path_factory) -> Path:
    """The example in Q8_0, bundled, in parts of 2 MB: the folder that holds them and nothing else."""
    folder = tmp_path_factory.mktemp("parts")
    convert(EXAMPLE, folder / "m.gguf", types=["Q8_0"], mtp_type="match", split_max_size=SIZE)
    return folder


def names(folder: Path) -> list[str]:
    return sorted(f.name for f in folder.iterdir())


def test_names_and_keys_are_those_of_the_convention(parts: Path) -> None:
    """NAME-00001-of-0000N.gguf; the first has all metadata, the others only their number."""
    found = names(parts)
    count = len(found)
    assert count > 3
    assert found == [f"m-{i:05d}-of-{count:05d}.gguf" for i in range(1, count + 1)]
    total = sum(len(tensor_digests(parts / name)) for name in found)
    for number, name in enumerate(found):
        keys = metadata(parts / name)
        own = {key: keys.pop(key) for key in list(keys) if key.startswith("split.")}
        assert own == {
            "split.no": {"type": ["UINT16"], "value": number},
            "split.count": {"type": ["UINT16"], "value": count},
            "split.tensors.count": {"type": ["INT32"], "value": total},
        }
        assert bool(keys) == (number == 0)


def test_parts_together_are_the_whole(parts: Path, tmp_path: Path) -> None:
    """Each tensor once, type and bytes as in one file, in its order; no part is larger than allowed."""
    convert(EXAMPLE, tmp_path / "m.gguf", types=["Q8_0"], mtp_type="match")
    together: dict[str, object] = {}
    for file in sorted(parts.iterdir()):
        of_part = tensor_digests(file)
        assert not together.keys() & of_part.keys()
        together |= of_part
        assert of_part
        data = file.stat().st_size - open_gguf(file).parts[int(file.name[2:7]) - 1].data_start
        assert data <= SIZE
    whole = tensor_digests(tmp_path / "m.gguf")
    assert together == whole
    assert list(together) == list(whole)
    first = {k: v for k, v in metadata(min(parts.iterdir())).items() if not k.startswith("split.")}
    assert first == metadata(tmp_path / "m.gguf")


@pytest.mark.parametrize("limit", [1, 7, 40])
def test_limit_of_tensors(tmp_path: Path, limit: int) -> None:
    """All parts but the last are full."""
    report = convert(EXAMPLE, tmp_path / "m.gguf", types=["Q8_0"], split_max_tensors=limit)
    counts = [len(tensor_digests(f.path)) for f in report.plan.files]
    assert counts[:-1] == [limit] * (len(counts) - 1)
    assert 0 < counts[-1] <= limit


def test_a_limit_that_nothing_reaches_leaves_one_file(tmp_path: Path) -> None:
    """Without a number in its name."""
    convert(EXAMPLE, tmp_path / "m.gguf", split_max_size=10**9, split_max_tensors=1000)
    assert names(tmp_path) == ["m.gguf"]
    assert not any(key.startswith("split.") for key in metadata(tmp_path / "m.gguf"))


def test_a_tensor_larger_than_the_limit(tmp_path: Path) -> None:
    """Gets a part of its own, and a note."""
    report = convert(EXAMPLE, tmp_path / "m.gguf", types=["F16"], split_max_size=100_000, dry_run=True)
    (note,) = (n for n in report.notes if "larger than --split-max-size" in n)
    assert "token_embd.weight" in note
    (alone,) = (f for f in report.plan.files if any(t.entry.name == "token_embd.weight" for t in f.tensors))
    assert len(alone.tensors) == 1


def test_several_types_and_sidecars(tmp_path: Path) -> None:
    """Each trunk is split by its own size; a sidecar stays whole, since engines look for the head in one file."""
    report = convert(
        EXAMPLE, tmp_path / "m-{type}.gguf", types=["F16", "Q4_K_M"], mtp="sidecar", split_max_size=1_500_000
    )
    found = names(tmp_path)
    counts = {t: sum(name.startswith(f"m-{t}-0") for name in found) for t in ("F16", "Q4_K_M")}
    assert counts["F16"] > counts["Q4_K_M"] > 1
    assert [name for name in found if name.startswith("mtp-")] == ["mtp-m-F16.gguf", "mtp-m-Q8_0.gguf"]
    assert sum(counts.values()) + 2 == len(found)
    assert any("sidecars are not split" in note for note in report.notes)


@pytest.mark.parametrize("drafts", [0, 2])
@pytest.mark.parametrize("packaging", ["bundled", "sidecar"])
def test_llama_cpp_loads_the_first_part(tmp_path: Path, drafts: int, packaging: str) -> None:
    """Head in the last part, or beside: the tokens of the whole file, and as many drafts accepted."""
    pytest.importorskip("xllamacpp", reason="needs llama.cpp: pip install 'convert-mtp[llamacpp]'")
    from tests.oracles.transformers_model import prompt_ids
    from verify.engines.llama_cpp import Engine, complete

    prompts = prompt_ids(EXAMPLE)[:3]
    answers = []
    for folder, limit in ((tmp_path / "whole", None), (tmp_path / "parts", SIZE)):
        report = convert(EXAMPLE, folder / "m.gguf", types=["F16"], mtp=packaging, split_max_size=limit)
        sidecar = next((str(f.path) for f in report.plan.files if f.kind == "sidecar"), None)
        engine = Engine(str(report.plan.files[0].path), sidecar if drafts else None, drafts)
        answers.append([(a.tokens, a.drafted, a.accepted) for a in complete(engine, prompts, 32)])
    assert len(names(tmp_path / "parts")) > 3
    assert answers[0] == answers[1]
    assert all(bool(drafted) == bool(drafts) for _, drafted, _ in answers[1])


def test_any_part_or_the_folder_names_the_model(parts: Path, capsys) -> None:
    """inspect-mtp takes what people have at hand."""
    reports = []
    for path in (min(parts.iterdir()), max(parts.iterdir()), parts):
        assert inspect_main([str(path), "--json"]) == 0
        reports.append(json.loads(capsys.readouterr().out))
    assert reports[0] == reports[1] == reports[2]
    assert reports[0]["kind"] == "bundled"
    assert reports[0]["head_layers"] == 1
    assert reports[0]["can_draft"]
    assert reports[0]["draft"]["command"].startswith(f"llama-server -m {min(parts.iterdir())}")


def test_damaged_sets_are_refused(parts: Path, tmp_path: Path) -> None:
    """A part that is missing, renamed, of another model, or not there at all."""
    found = names(parts)
    lost = clone(parts, tmp_path / "lost")
    (lost / found[1]).unlink()
    with pytest.raises(GGUFError, match=r"1 of the \d parts are missing") as caught:
        open_gguf(lost / found[0])
    assert found[1] in str(caught.value)

    renamed = clone(parts, tmp_path / "renamed")
    (renamed / found[0]).rename(renamed / "model.gguf")
    with pytest.raises(GGUFError, match="its name does not say which"):
        open_gguf(renamed / "model.gguf")

    swapped = clone(parts, tmp_path / "swapped")
    (swapped / found[1]).rename(swapped / "aside")
    (swapped / found[2]).rename(swapped / found[1])
    (swapped / "aside").rename(swapped / found[2])
    with pytest.raises(GGUFError, match="does not belong where its name puts it"):
        open_gguf(swapped / found[0])

    (tmp_path / "two").mkdir()
    for name in ("a.gguf", "b.gguf"):
        (tmp_path / "two" / name).write_bytes(b"GGUF")
    with pytest.raises(InputError, match="more than one GGUF model"):
        open_gguf(tmp_path / "two")


def test_parts_of_different_models(parts: Path, tmp_path: Path) -> None:
    """Same numbers, other tensors."""
    found = names(parts)
    mixed = clone(parts, tmp_path / "mixed")
    report = convert(EXAMPLE, tmp_path / "x.gguf", types=["Q8_0"], dry_run=True)
    tensors = len(report.plan.files[0].tensors)
    limit = -(-tensors // len(found))
    convert(EXAMPLE, tmp_path / "other" / "m.gguf", types=["Q8_0"], split_max_tensors=limit)
    assert names(tmp_path / "other") == found
    shutil.copyfile(tmp_path / "other" / found[1], mixed / found[1])
    with pytest.raises(GGUFError, match="not of one model"):
        open_gguf(mixed / found[0])


@pytest.mark.parametrize(
    ("written", "size"), [("4G", 4 * 10**9), ("500M", 5 * 10**8), ("7K", 7000), ("123", 123), ("4GB", 4 * 10**9), ("2g", 2 * 10**9)]
)  # fmt: skip
def test_sizes(written: str, size: int) -> None:
    """Decimal units, as llama.cpp's own tool has them."""
    assert parse_size(written) == size


@pytest.mark.parametrize("written", ["", "0", "G", "-1", "1.5G", "4T", "many"])
def test_sizes_that_are_none(written: str, capsys) -> None:
    """Exit 2 before anything else."""
    with pytest.raises(UsageError):
        parse_size(written)
    with pytest.raises(SystemExit) as caught:
        convert_main(["m", "out.gguf", f"--split-max-size={written}"])
    assert caught.value.code == 2
    assert "a number with K, M or G" in capsys.readouterr().err
