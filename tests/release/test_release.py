"""Releases of the example: what is in the folder, what it says, and what a second run does."""

from __future__ import annotations

import configparser
import html.parser
import json
import os
import re
import signal
import subprocess
import sys
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest
from gguf import GGUFReader

from converter import convert
from converter.execute import Work
from release import cli
from tests.bench.world import World
from tests.checkpoints import clone, variant
from tests.conftest import EXAMPLE, shared
from tests.oracles.discovery import by_tag, mains, sidecars
from tests.release.conftest import BARE, NAME, Release, begin
from verify.check import Options, verify

BUNDLED = {f"bundled/{NAME}-MTP-{t}.gguf" for t in ("Q4_K_M", "Q8_0")}
TRUNKS = {f"trunk/{NAME}-{t}.gguf" for t in ("Q4_K_M", "Q8_0")}
HEADS = {f"trunk/mtp-{NAME}-{t}.gguf" for t in ("Q8_0", "Q4_0")}
WORDS = {"README.md", "report.html", "results.json", "provenance.json", "SHA256SUMS"}
PICTURES = {f"plots/{n}.{k}" for n in ("quality", "acceptance", "speed") for k in ("svg", "png")}


def results(release: Release) -> dict:
    return json.loads((release.repository / "results.json").read_text())


def test_everything_is_there(made: Release) -> None:
    """All files, nothing half done, and what another program makes of the sums."""
    assert made.code == 0
    assert made.files() == BUNDLED | TRUNKS | HEADS | WORDS | PICTURES
    assert made.files(made.presets) == {"preset.ini", "README.md"}
    done = subprocess.run(
        ["sha256sum", "-c", "SHA256SUMS"], cwd=made.repository, capture_output=True, text=True, check=True
    )
    assert done.stdout.count(": OK") == len(made.files()) - 1


def test_engines_pair_what_belongs_together(made: Release) -> None:
    """By the names as they lie there."""
    files = sorted(made.files())
    assert set(mains(files)) == BUNDLED | TRUNKS
    assert all(sidecars(files, f) == [] for f in BUNDLED)
    assert all(set(sidecars(files, f)) == HEADS for f in TRUNKS)
    assert by_tag(files, "Q4_K_M")[0] in BUNDLED
    heads = {f: GGUFReader(made.repository / f).fields.get("qwen35.nextn_predict_layers") for f in BUNDLED | TRUNKS}
    assert {f for f, field in heads.items() if field and field.contents() > 0} == BUNDLED


def test_tensors_are_those_of_convert(made: Release, tmp_path) -> None:
    """One pass to all packagings gives what single conversions give."""
    convert(EXAMPLE, tmp_path / "bundled-{type}.gguf", types=["Q4_K_M", "Q8_0"])
    convert(EXAMPLE, tmp_path / "trunk-{type}.gguf", types=["Q4_K_M", "Q8_0"], mtp="none")
    convert(EXAMPLE, tmp_path / "sidecar-{type}.gguf", types=["Q8_0", "Q4_0"], mtp="only")
    for name in BUNDLED | TRUNKS | HEADS:
        kind = "sidecar" if name in HEADS else name.partition("/")[0]
        alone = GGUFReader(tmp_path / f"{kind}-{name.rpartition('-')[2]}")
        released = GGUFReader(made.repository / name)
        assert [(t.name, t.tensor_type, bytes(t.data)) for t in released.tensors] == [
            (t.name, t.tensor_type, bytes(t.data)) for t in alone.tensors
        ]


def test_provenance_in_file_and_folder(made: Release) -> None:
    """Source hashes as sha256sum gives them, options, and the type of every tensor; the same in the file's metadata."""
    names = [f.name for f in EXAMPLE.iterdir() if f.suffix in {".json", ".safetensors", ".jinja"}]
    sums = subprocess.run(["sha256sum", *names], cwd=EXAMPLE, capture_output=True, text=True, check=True).stdout
    expected = {line.split("  ")[1]: line.split("  ")[0] for line in sums.splitlines()}
    told = json.loads((made.repository / "provenance.json").read_text())
    assert told["sources"]["model"]["sha256"] == expected
    assert set(told["files"]) == BUNDLED | TRUNKS | HEADS
    for name, facts in told["files"].items():
        reader = GGUFReader(made.repository / name)
        assert facts["tensor_types"] == {t.name: t.tensor_type.name for t in reader.tensors}
        assert sorted(reader.fields["mtp.source.sha256"].contents()) == sorted(f"{s}  {n}" for n, s in expected.items())
        assert reader.fields["mtp.source"].contents() == NAME
        options = json.loads(reader.fields["mtp.options"].contents())
        assert (options["packaging"], options["type"]) == (facts["kind"], facts["type"])
        digest = subprocess.run(
            ["sha256sum", made.repository / name], capture_output=True, text=True, check=True
        ).stdout
        assert facts["sha256"][name] == digest.split()[0]


def test_figures_are_those_of_verify(made: Release) -> None:
    """KL divergence, top-1, perplexity and acceptance of a file, next to a run of the verifier by itself."""
    file = f"bundled/{NAME}-MTP-Q4_K_M.gguf"
    (row,) = (f for f in results(made)["files"] if f["file"] == file)
    options = Options(EXAMPLE, levels=("logits", "acceptance"), drafts=(1, 2), tokens=12, text_tokens=128,
                      prompts=made.recipe.parent / "prompts.txt")  # fmt: skip
    report = verify(made.repository / file, options)
    logits, acceptance = (report.level(n).data for n in ("logits", "acceptance"))
    assert row["kld_mean"] == pytest.approx(logits["kld_mean"], rel=1e-6)
    assert (row["top1"], row["perplexity"]) == pytest.approx((logits["top1"], logits["perplexity"]))
    assert row["acceptance"] == [a / d for a, d in acceptance["file"]]
    assert 0 < row["kld_mean"] < 0.1
    assert row["bytes"] == (made.repository / file).stat().st_size


def test_every_file_was_loaded_in_the_engine(made: Release) -> None:
    """Each packaging, and the card names the build."""
    from importlib.metadata import version

    for row in results(made)["files"]:
        engine = [level for level in row["levels"] if level["level"] == "engine"]
        assert engine
        assert all(level["verdict"] == "passed" for level in engine)
        assert version("xllamacpp") in row["engine"]
    assert version("xllamacpp") in (made.repository / "README.md").read_text()


def test_the_card_as_the_hub_reads_it(made: Release) -> None:
    """Front matter, a row for every file with its figures, links that lead somewhere, commands with files that exist."""
    from huggingface_hub import ModelCard

    card = ModelCard.load(made.repository / "README.md")
    data = card.data.to_dict()
    assert (data["license"], data["base_model"], data["base_model_relation"]) == ("apache-2.0", "Org/Tiny", "quantized")
    assert {"gguf", "mtp", "llama.cpp"} <= set(data["tags"])
    assert (data["pipeline_tag"], data["library_name"], data["language"]) == ("text-generation", "gguf", ["en"])
    links = re.findall(r"\]\((?!http)([^)]+)\)", card.content)
    assert {x for x in links if x.endswith(".gguf")} == BUNDLED | TRUNKS | HEADS
    assert all((made.repository / link).is_file() for link in links)
    for row in results(made)["files"]:
        (line,) = (x for x in card.content.splitlines() if f"]({row['file']})" in x)
        assert ", ".join(f"{s:.0%}" for s in row["acceptance"]) in line
        assert "identical" in line
        if row["kind"] != "sidecar":
            assert f"{row['kld_mean']:.2g}" in line
            assert f"{row['top1']:.1%}" in line
            assert f"{row['perplexity']:.3f}" in line
    commands = re.findall(r"^(?:llama-server|FROM|vllm|lms).*$", card.content, re.MULTILINE)
    assert {c.split()[0] for c in commands} == {"llama-server", "FROM", "vllm", "lms"}
    named = {word.removeprefix("./") for c in commands for word in c.split() if word.endswith(".gguf")}
    assert named
    assert named <= BUNDLED | TRUNKS | HEADS
    assert not any("-md" in c for c in commands if "bundled/" in c)
    assert "/tmp" not in card.content


def test_pictures(made: Release) -> None:
    """PNGs of a size to look at, SVGs that are XML, the same bytes for the same figures."""
    for name in PICTURES:
        data = (made.repository / name).read_bytes()
        if name.endswith("png"):
            width, height = (int.from_bytes(data[i : i + 4], "big") for i in (16, 20))
            assert data.startswith(b"\x89PNG")
            assert 600 < width < 1600
            assert 150 < height < 1600
        else:
            assert "Q4_K_M" in "".join(ET.fromstring(data).itertext())


def test_the_page_needs_nothing_else(made: Release) -> None:
    """Well-formed, all files on it, no address of anything to load."""
    page = (made.repository / "report.html").read_text()
    html.parser.HTMLParser().feed(page)
    assert all(Path(f).stem in page for f in BUNDLED | TRUNKS | HEADS)
    assert not re.search(r"(src|href)=['\"]?(http|//|/)", page.replace("xlink:href", ""))
    assert not re.search(r"\bnan\b|None|\('", page)


def test_nothing_of_this_machine(made: Release) -> None:
    """What is published names no folder here."""
    for name in WORDS | {n for n in PICTURES if n.endswith("svg")}:
        text = (made.repository / name).read_text()
        assert str(made.out.parent) not in text, name
        assert str(EXAMPLE.parent) not in text, name


def test_presets(made: Release) -> None:
    """What is measured decides; a section for every bundled file, none of a sidecar."""
    ini = configparser.ConfigParser()
    text = (made.presets / "preset.ini").read_text()
    assert text.startswith("version = 1\n")
    ini.read_string("[top]\n" + text)
    sections = {s: dict(ini[s]) for s in ini.sections() if s != "top"}
    assert set(sections) == {Path(f).stem for f in BUNDLED}
    rows = {Path(f["file"]).stem: f["recommended"] for f in results(made)["files"]}
    for name, keys in sections.items():
        assert Path(keys["model"]).is_file()
        assert ("spec-type" in keys) == rows[name]["on"]
        assert "model-draft" not in keys


def test_drafts_that_pay(bare: Release, monkeypatch) -> None:
    """Where drafts were faster, card, report and preset say how many; each by task too."""
    from bench.report import BenchReport
    from bench.summary import Results
    from release import run
    from release.measure import Measured

    def measured(_origin, _recipe, files, repository, _work, _progress):
        paths = {str(repository / f.first): f for f in files if f.kind == "bundled"}
        world = World(
            {"code": [0.9, 0.8], "creative": [0.2, 0.1]}, {0: 0.01, 1: 0.012, 2: 0.0125}, file=next(iter(paths))
        )
        records = [world.measure(task, n, 0) for task in ("code", "creative") for n in (0, 1, 2)]
        return Measured(BenchReport(Results(records)), paths, ["code", "creative"])

    monkeypatch.setattr(run, "measure_release", measured)
    assert bare.run() == 0
    row = next(f for f in results(bare)["files"] if f["kind"] == "bundled")
    assert (row["recommended_by_task"]["code"]["on"], row["recommended_by_task"]["code"]["drafts"]) == (True, 2)
    assert row["recommended_by_task"]["creative"]["on"] is False
    drafts, speedup = (row["recommended"][k] for k in ("drafts", "expected_speedup"))
    assert speedup > 1
    card = (bare.repository / "README.md").read_text()
    assert card.count(f"n = {drafts}, {speedup:.2f}x") == 2  # bundled and trunk-only, of the same trunk
    assert re.search(r"^\| Q4_K_M \| n = 2, 2\.\d\dx \| off \|$", card, re.MULTILINE)
    assert f"-m bundled/{NAME}-MTP-Q4_K_M.gguf --spec-type draft-mtp --spec-draft-n-max {drafts}\n" in card
    assert f"spec-type = draft-mtp\nspec-draft-n-max = {drafts}\n" in (bare.presets / "preset.ini").read_text()
    page = (bare.repository / "report.html").read_text()
    assert f"n = {drafts}, {speedup:.2f}x" in page


def test_a_repository_in_presets_and_card(bare: Release, capsys) -> None:
    """With a repository commands and presets name it, and nothing of this machine."""
    bare.recipe.write_text(bare.recipe.read_text() + '[card]\nrepository = "user/tiny"\n')
    assert bare.run() == 0
    text = (bare.presets / "preset.ini").read_text()
    assert f"hf = user/tiny:Q4_K_M\nhf-file = bundled/{NAME}-MTP-Q4_K_M.gguf" in text
    assert "spec-draft-n-max = 3" in text  # not measured: the engine's own default
    assert str(bare.out) not in text
    card = (bare.repository / "README.md").read_text()
    assert f"-hf user/tiny -hff bundled/{NAME}-MTP-Q4_K_M.gguf" in card
    assert "not measured" in card
    assert "Not run for this release: logits, identity, acceptance." in card
    assert "card.license" in capsys.readouterr().out


def test_a_second_run_does_nothing(made: Release, counted) -> None:
    """No file is converted, verified, measured or written again."""
    before = {f: (made.repository / f).stat().st_mtime_ns for f in made.files()}
    cells = sorted(made.out.glob("work/bench/*/cells.jsonl"))
    lines = [f.read_text() for f in cells]
    assert made.run() == 0
    assert counted == {"converted": [], "verified": []}
    assert [f.read_text() for f in cells] == lines
    assert len(lines) == 1
    assert {f: (made.repository / f).stat().st_mtime_ns for f in made.files()} == before


def test_only_what_changed(bare: Release, counted) -> None:
    """A type more is made alone; one that goes leaves the repository, and comes back without being made again."""
    bare.change('types = ["Q4_K_M"]', 'types = ["Q4_K_M", "Q5_0"]')
    assert bare.run() == 0
    assert counted["converted"] == [f"{NAME}-MTP-Q5_0.gguf", f"{NAME}-Q5_0.gguf"]
    assert not any("Q4_K_M" in v for v in counted["verified"])
    assert len(bare.ggufs()) == 5
    counted["converted"].clear()
    bare.change('types = ["Q4_K_M", "Q5_0"]', 'types = ["Q5_0"]')
    assert bare.run() == 0
    assert bare.ggufs() == {f"bundled/{NAME}-MTP-Q5_0.gguf", f"trunk/{NAME}-Q5_0.gguf", f"trunk/mtp-{NAME}-Q8_0.gguf"}
    assert "Q4_K_M" not in (bare.repository / "SHA256SUMS").read_text()
    bare.change('types = ["Q5_0"]', 'types = ["Q4_K_M"]')
    assert bare.run() == 0
    assert counted["converted"] == []
    assert any("Q4_K_M" in f for f in bare.ggufs())


def test_options_that_change_bytes_make_new_files(bare: Release, counted) -> None:
    """Under the same names."""
    before = (bare.repository / f"bundled/{NAME}-MTP-Q4_K_M.gguf").read_bytes()
    bare.change('types = ["Q4_K_M"]', 'types = ["Q4_K_M"]\ntensor_types = ["ffn_down=Q8_0"]')
    assert bare.run() == 0
    assert len(counted["converted"]) == 3
    after = GGUFReader(bare.repository / f"bundled/{NAME}-MTP-Q4_K_M.gguf")
    assert {t.tensor_type.name for t in after.tensors if "ffn_down" in t.name} == {"Q8_0"}
    assert (bare.repository / f"bundled/{NAME}-MTP-Q4_K_M.gguf").read_bytes() != before


def test_a_file_that_rots_is_made_again(bare: Release, counted) -> None:
    """Bytes that are not those that were made are noticed by their hash."""
    file = bare.repository / f"trunk/{NAME}-Q4_K_M.gguf"
    good = file.read_bytes()
    file.write_bytes(good[:-100] + bytes(100))
    assert bare.run() == 0
    assert counted["converted"] == [f"{NAME}-Q4_K_M.gguf"]
    assert file.read_bytes() == good


def test_a_file_that_fails_stays_apart(bare: Release, spoil, capsys) -> None:
    """With its reason; exit code 1; the others are published, and neither card, sums nor presets know the bad one."""
    bad = f"bundled/{NAME}-MTP-Q5_0.gguf"
    spoil(f"{NAME}-MTP-Q5_0.gguf", "blk.0.ffn_up.weight")
    bare.change('types = ["Q4_K_M"]', 'types = ["Q4_K_M", "Q5_0"]')
    assert bare.run("--push", "user/never") == 1
    told = capsys.readouterr().out
    assert f"not published: {bad}" in told
    assert "blk.0.ffn_up.weight" in told
    assert bad not in bare.ggufs()
    assert f"trunk/{NAME}-Q5_0.gguf" in bare.ggufs()
    assert bare.files(bare.out / "failed") == {
        bad,
        bad.replace(".gguf", ".reason.txt"),
        bad.replace(".gguf", ".report.json"),
    }
    assert "blk.0.ffn_up.weight" in (bare.out / "failed" / bad.replace(".gguf", ".reason.txt")).read_text()
    for name in ("SHA256SUMS", "provenance.json"):
        assert bad not in (bare.repository / name).read_text()
    assert f"]({bad})" not in (bare.repository / "README.md").read_text()
    assert "not published because verification failed" in (bare.repository / "README.md").read_text()
    assert Path(bad).stem not in (bare.presets / "preset.ini").read_text()
    (row,) = (f for f in results(bare)["files"] if f["file"] == bad)
    assert (row["published"], row["verdict"]) == (False, "failed")


def test_a_failed_file_may_be_made_again(bare: Release, spoil, monkeypatch) -> None:
    """When it is deleted; then nothing of the failure is left."""
    from release import run

    bad = f"{NAME}-Q5_0.gguf"
    spoil(bad, "blk.0.ffn_up.weight")
    bare.change('types = ["Q4_K_M"]', 'types = ["Q5_0"]')
    assert bare.run() == 1
    monkeypatch.undo()
    assert run.run_plan.__module__ == "converter.run"
    (bare.out / "failed/trunk" / bad).unlink()
    assert bare.run() == 0
    assert not (bare.out / "failed").exists()
    assert f"trunk/{bad}" in bare.ggufs()


def test_a_bad_sidecar_takes_no_trunk_with_it(bare: Release, spoil) -> None:
    """Trunk-only files are good without; the card then offers no sidecar."""
    spoil(f"mtp-{NAME}-Q4_0.gguf", "blk.4.nextn.eh_proj.weight")
    bare.change('sidecars = ["Q8_0"]', 'sidecars = ["Q4_0"]')
    assert bare.run() == 1
    assert bare.ggufs() == {f"bundled/{NAME}-MTP-Q4_K_M.gguf", f"trunk/{NAME}-Q4_K_M.gguf"}
    assert "-md" not in (bare.repository / "README.md").read_text()


def test_nothing_passes(tmp_path, spoil, capsys) -> None:
    """No repository is written."""
    release = begin(tmp_path, BARE.replace("[verify]", 'packagings = ["bundled"]\n[verify]'))
    spoil(f"{NAME}-MTP-Q4_K_M.gguf", "output_norm.weight")
    assert release.run() == 1
    assert "nothing to publish" in capsys.readouterr().out
    assert not release.repository.exists()
    assert not release.presets.exists()


def test_nothing_passes_any_more(bare: Release, spoil) -> None:
    """Of an earlier release nothing is left that tells of it, and its files wait in the folder of the runs."""
    for file in bare.ggufs():
        spoil(Path(file).name, "output_norm.weight")
    earlier = bare.ggufs()
    bare.change('types = ["Q4_K_M"]', 'types = ["Q4_K_M"]\ntensor_types = ["output.weight=F16"]')
    assert bare.run() == 1
    assert not bare.repository.exists()
    assert not bare.presets.exists()
    assert bare.ggufs(bare.out / "failed") == earlier


def test_a_folder_in_the_making_has_no_card(bare: Release, monkeypatch) -> None:
    """From the first file that is moved until everything is written there are neither card nor sums."""
    from release import run

    def interrupted(*_arguments):
        raise KeyboardInterrupt

    bare.change('types = ["Q4_K_M"]', 'types = ["Q5_0"]')
    with monkeypatch.context() as context:
        context.setattr(run, "measure_release", interrupted)
        assert bare.run() == 130
    assert f"bundled/{NAME}-MTP-Q5_0.gguf" in bare.ggufs()
    assert not {"README.md", "SHA256SUMS"} & bare.files()
    assert bare.run() == 0
    assert {"README.md", "SHA256SUMS"} <= bare.files()


def test_logits_are_judged_once_for_a_trunk(made: Release) -> None:
    """Trunk-only files have the figures of the bundled one of their type, whose tensors they share."""
    rows = {(f["kind"], f["type"]): f for f in results(made)["files"]}
    for kind in ("Q4_K_M", "Q8_0"):
        bundled, trunk = rows["bundled", kind], rows["trunk", kind]
        assert trunk["kld_mean"] == bundled["kld_mean"] > 0
        assert "logits" in {level["level"] for level in bundled["levels"]}
        assert "logits" not in {level["level"] for level in trunk["levels"]}
        files = [GGUFReader(made.repository / r["file"]) for r in (bundled, trunk)]
        data = [{t.name: bytes(t.data) for t in reader.tensors} for reader in files]
        assert data[1].items() <= data[0].items()


def test_a_conversion_that_was_cut_off_goes_on(tmp_path, monkeypatch) -> None:
    """No chunk is done twice, and no file has its name before it is whole."""
    release = begin(tmp_path, BARE)
    original, chunks = Work.run, []

    def counted(self, chunk):
        if len(chunks) == 30:
            raise KeyboardInterrupt
        result = original(self, chunk)
        chunks.append(chunk.key)
        return result

    with monkeypatch.context() as patch:
        patch.setattr(Work, "run", counted)
        assert release.run("--workers", "1") == 130
    assert release.ggufs(release.out) == set()
    again: list[object] = []
    monkeypatch.setattr(Work, "run", lambda self, chunk: (again.append(chunk.key), original(self, chunk))[1])
    assert release.run() == 0
    assert len(again) > 20
    assert not set(again) & set(chunks)


def test_killed_and_continued(tmp_path, counted) -> None:
    """After kill -9 during verification what was converted and verified is not done again."""
    release = begin(tmp_path, BARE)
    command = [sys.executable, "-m", "release.cli", str(EXAMPLE), str(release.out), "--recipe", str(release.recipe)]
    with subprocess.Popen(
        command, stderr=subprocess.PIPE, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"}
    ) as child:
        assert child.stderr
        for line in child.stderr:
            if line.startswith(f"{NAME}-Q4_K_M: structure"):  # the second file: the first is done
                child.send_signal(signal.SIGKILL)
                break
    assert not release.repository.exists()
    assert release.run() == 0
    assert counted["converted"] == []
    assert f"{NAME}-MTP-Q4_K_M.gguf" not in counted["verified"]
    assert len(counted["verified"]) >= 3
    assert len(release.ggufs()) == 3


def test_a_split_file_cut_off_between_its_parts(tmp_path, counted) -> None:
    """Parts that lie in two folders are one file again."""
    release = begin(tmp_path, BARE.replace("[verify]", 'split_max_size = "1M"\npackagings = ["bundled"]\n[verify]'))
    assert release.run() == 0
    parts = sorted(release.ggufs())
    assert len(parts) > 2
    counted["converted"].clear()
    back = release.out / "work/files" / parts[0]
    (release.repository / parts[0]).rename(back)
    assert release.run() == 0
    assert counted["converted"] == []
    assert sorted(release.ggufs()) == parts
    assert f"]({parts[0]}) … {len(parts)} parts" in (release.repository / "README.md").read_text()
    assert "takes no files in parts" in (release.repository / "README.md").read_text()


def test_one_run_at_a_time(bare: Release, capsys) -> None:
    """The second one says so."""
    import fcntl

    with (bare.out / "work/lock").open() as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert bare.run() == 5
    assert "another run" in capsys.readouterr().err


def test_dry_run(bare: Release, capsys) -> None:
    """Names, sizes and what is there already; nothing is made."""
    bare.change('types = ["Q4_K_M"]', 'types = ["Q4_K_M", "Q2_K"]')
    before = bare.files()
    assert bare.run("--dry-run", "--json") == 0
    told = json.loads(capsys.readouterr().out)
    assert {f["file"]: f["made"] for f in told["files"]} == {
        f"bundled/{NAME}-MTP-Q4_K_M.gguf": True, f"bundled/{NAME}-MTP-Q2_K.gguf": False,
        f"trunk/{NAME}-Q4_K_M.gguf": True, f"trunk/{NAME}-Q2_K.gguf": False, f"trunk/mtp-{NAME}-Q8_0.gguf": True,
    }  # fmt: skip
    assert bare.files() == before


def test_near_ties_can_be_refused(bare: Release, monkeypatch) -> None:
    """They are published with a word on the card, or stay apart."""
    from release import check
    from verify.results import Finding, Verdict

    verify = check.verify

    def uncertain(file, options, notify):
        report = verify(file, options, notify)
        tie = Finding("leaves plain decoding at a near-tie", "prompt 0", verdict=Verdict.INCONCLUSIVE)
        report.levels[-1].findings.append(tie)
        return report

    monkeypatch.setattr(check, "verify", uncertain)
    for entry in (bare.out / "work/checks").iterdir():
        entry.unlink()
    assert bare.run() == 0
    assert "identical but for near-ties" in (bare.repository / "README.md").read_text()
    bare.change('levels = ["structure", "fidelity"]', 'levels = ["structure", "fidelity"]\nnear_ties = "refuse"')
    assert bare.run() == 1
    assert "near-tie" in (bare.out / f"failed/bundled/{NAME}-MTP-Q4_K_M.reason.txt").read_text()


def test_a_model_without_a_head(tmp_path, capsys) -> None:
    """Is refused with the ways out."""

    def without_head(tensors):
        return {k: v for k, v in tensors.items() if not k.startswith("mtp.")}

    def silent(config):
        for part in (config, config.get("text_config", {})):
            part.pop("mtp_num_hidden_layers", None)

    model = variant(EXAMPLE, tmp_path / "headless", tensors=without_head, config=silent)
    release = begin(tmp_path, BARE)
    assert cli.main([str(model), str(release.out), "--recipe", str(release.recipe), "--quiet"]) == 3
    told = capsys.readouterr().err
    assert "no MTP head to release" in told
    assert "assistant" in told


def test_importance(tmp_path, counted) -> None:
    """A matrix for the trunk, the head's recorded once; both are named in the file, whose very bytes are verified."""
    matrix = shared("imatrix") / "dense.imatrix.gguf"
    more = f'head = "match"\nimatrix = "{matrix}"\nmtp_imatrix = "auto"\npackagings = ["bundled"]\n[verify]'
    release = begin(tmp_path, BARE.replace("[verify]", more))
    assert release.run() == 0
    assert release.run() == 0
    assert len(counted["converted"]) == 1
    (name,) = release.ggufs()
    fields = GGUFReader(release.repository / name).fields
    assert {"quantize.imatrix.file", "mtp.imatrix.file"} <= set(fields)
    assert set(json.loads(fields["mtp.options"].contents())) >= {"imatrix_sha256", "mtp_imatrix_sha256"}
    card = (release.repository / "README.md").read_text()
    assert "- imatrix" in card
    assert "by the importance matrix" in card
    (row,) = results(release)["files"]
    assert next(x for x in row["levels"] if x["level"] == "fidelity")["summary"].startswith("71 of 71 tensors")
    assert str(matrix.parent) not in (release.repository / "provenance.json").read_text()


def test_a_warning_of_the_conversion_stands_on_the_card(tmp_path) -> None:
    """A model without a chat template makes front ends fall back to another format: users of the files must know."""
    model = clone(EXAMPLE, tmp_path / "bald")
    (model / "chat_template.jinja").unlink()
    release = begin(tmp_path, BARE)
    assert cli.main([str(model), str(release.out), "--recipe", str(release.recipe), "--quiet"]) == 0
    card = (release.out / "bald-MTP-GGUF" / "README.md").read_text()
    assert "no chat template" in card.partition("## Notes")[2]


def test_what_is_missing_is_said_before_hours_of_work(tmp_path, monkeypatch, capsys) -> None:
    """An engine, or torch where the recipe names its levels."""
    from importlib.metadata import PackageNotFoundError

    from release import check

    release = begin(tmp_path, BARE.replace('"fidelity"]', '"fidelity", "logits"]'))
    monkeypatch.setattr(check, "torch_is_here", lambda: False)
    assert release.run() == 5
    assert "convert-mtp[verify]" in capsys.readouterr().err

    def missing(name: str) -> str:
        raise PackageNotFoundError(name)

    monkeypatch.setattr(check, "version", missing)
    assert release.run() == 5
    assert "convert-mtp[llamacpp]" in capsys.readouterr().err
    assert not release.out.exists()


def test_patterns_that_match_nothing(bare: Release, capsys) -> None:
    """Are refused; one for the head's tensors is not, though trunk-only files have none of them."""
    bare.change('types = ["Q4_K_M"]', 'types = ["Q4_K_M"]\ntensor_types = ["eh_proj=F16"]')
    assert bare.run() == 0
    for name in (f"bundled/{NAME}-MTP-Q4_K_M.gguf", f"trunk/mtp-{NAME}-Q8_0.gguf"):
        types = {t.name: t.tensor_type.name for t in GGUFReader(bare.repository / name).tensors}
        assert types["blk.4.nextn.eh_proj.weight"] == "F16"
    bare.change("eh_proj=F16", "no_such=F16")
    assert bare.run() == 2
    assert "matches no tensor" in capsys.readouterr().err
