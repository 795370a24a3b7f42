"""The command lines as a user meets them: output, exit codes, messages, and a free --help."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from converter.cli import convert_main, inspect_main
from tests.checkpoints import Tensors, clone, edit_json, variant
from tests.conftest import EXAMPLE


def test_convert_prints_a_summary(tmp_path: Path, capsys) -> None:
    """Types and bytes of trunk and head apart, bits per weight, seconds, rate; on stdout."""
    assert (
        convert_main([str(EXAMPLE), str(tmp_path / "N-{type}.gguf"), "--type", "Q4_K_M,Q8_0", "--mtp", "sidecar"]) == 0
    )
    out = capsys.readouterr().out
    for words in ("N-Q4_K_M.gguf", "mtp-N-Q8_0.gguf", "trunk:", "head:", "bits per weight", "MB/s", "vision tower"):
        assert words in out
    assert sorted(f.name for f in tmp_path.iterdir()) == ["N-Q4_K_M.gguf", "N-Q8_0.gguf", "mtp-N-Q8_0.gguf"]


def test_dry_run_decides_the_same_and_writes_nothing(tmp_path: Path, capsys) -> None:
    """--dry-run --json is the plan of the run that follows."""
    command = [str(EXAMPLE), str(tmp_path / "x.gguf"), "--json"]
    assert convert_main([*command, "--dry-run"]) == 0
    dry = json.loads(capsys.readouterr().out)
    assert list(tmp_path.iterdir()) == []
    assert convert_main(command) == 0
    wet = json.loads(capsys.readouterr().out)
    run_facts = {"dry_run", "seconds", "source_bytes", "rate_gbps"}
    assert {k: v for k, v in dry.items() if k not in run_facts} == {k: v for k, v in wet.items() if k not in run_facts}
    assert (dry["dry_run"], wet["dry_run"], wet["schema"]) == (True, False, 1)
    assert wet["files"][0]["bytes"] == (tmp_path / "x.gguf").stat().st_size


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (["missing", "x.gguf"], 3, "no such folder"),
        ([str(EXAMPLE), "x.gguf", "--type", "Q9"], 2, "Q9"),
        ([str(EXAMPLE), "x.gguf", "--type", "Q4_K_M,Q8_0"], 2, "{type}"),
        ([str(EXAMPLE), "x.gguf", "--tensor-type", "nothing=F16"], 2, "matches no tensor"),
        ([str(EXAMPLE), "x.gguf", "--tensor-type", "output=IQ1_S"], 4, "cannot be written"),
        ([str(EXAMPLE / "config.json"), "x.gguf"], 3, "config.json"),
    ],
    ids=["no model", "type", "template", "override", "unwritable type", "file as model"],
)
def test_errors_have_their_code_and_one_message(tmp_path: Path, monkeypatch, capsys, arguments, code, words) -> None:
    """No traceback; the message is on stderr, and with --json on stdout as data."""
    monkeypatch.chdir(tmp_path)
    assert convert_main(arguments) == code
    captured = capsys.readouterr()
    assert words in captured.err
    assert captured.out == ""
    assert convert_main([*arguments, "--json"]) == code
    assert json.loads(capsys.readouterr().out)["exit_code"] == code
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "arguments",
    [[], ["a"], ["a", "b", "--mtp", "maybe"], ["a", "b", "--workers", "0"], ["a", "b", "--no-mtp", "--mtp", "only"]],
)
def test_wrong_usage_is_2(arguments: list[str], capsys) -> None:
    """As argparse has it."""
    with pytest.raises(SystemExit) as caught:
        convert_main(arguments)
    assert caught.value.code == 2
    assert "usage" in capsys.readouterr().err


@pytest.mark.parametrize(
    "command",
    [
        "converter.cli.convert_main",
        "converter.cli.inspect_main",
        "verify.cli.main",
        "bench.cli.bench_main",
        "bench.cli.recommend_main",
    ],
)
def test_help_imports_nothing_heavy(command: str) -> None:
    """llvmlite, numpy, gguf and tqdm stay out of --help, and of importing the packages."""
    script = (
        f"import sys\nfrom {command.rpartition('.')[0]} import {command.rpartition('.')[2]} as main\n"
        "import quant, converter, verify, bench\n"
        "try:\n    main(['--help'])\nexcept SystemExit:\n    pass\n"
        "print([m for m in ('numpy', 'llvmlite', 'gguf', 'tqdm', 'torch') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "[]"
    assert "exit codes" in done.stdout


def test_progress_on_a_pipe_is_quiet_for_short_runs(tmp_path: Path) -> None:
    """No bar where there is no terminal; stdout holds the result alone."""
    command = [sys.executable, "-m", "converter", str(EXAMPLE), str(tmp_path / "x.gguf"), "--type", "F16"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stderr == ""
    assert done.stdout.startswith("note: left out")


def test_progress_bar_on_a_terminal(tmp_path: Path) -> None:
    """Rate and bytes, on a pseudo-terminal."""
    import os
    import pty
    import termios

    ours, theirs = pty.openpty()
    termios.tcsetwinsize(theirs, (24, 100))
    command = [sys.executable, "-m", "converter", str(EXAMPLE), str(tmp_path / "x.gguf")]
    subprocess.run(command, stdout=subprocess.PIPE, stderr=theirs, check=True)
    os.close(theirs)
    shown = os.read(ours, 100_000).decode()
    os.close(ours)
    assert "B/s" in shown
    assert "100%" in shown


def test_inspect_bundled(conversions, capsys) -> None:
    """Kind, layers, types, how to run it."""
    file = conversions("dense", "bundled") / "Q4_K_M.gguf"
    assert inspect_main([str(file)]) == 0
    out = capsys.readouterr().out
    for words in (
        "bundled",
        "4 layers",
        "1 layer(s), 15 tensors",
        "F32 7x, Q8_0 8x",
        "final norm",
        f"-m {file} --spec-type draft-mtp",
    ):
        assert words in out


@pytest.mark.parametrize(
    ("packaging", "name", "kind", "layers", "can_draft"),
    [("bundled", "F16.gguf", "bundled", 1, True), ("sidecar", "mtp-Q8_0.gguf", "sidecar", 1, True),
     ("none", "Q8_0.gguf", "trunk", 0, False)],
)  # fmt: skip
def test_inspect_json(conversions, capsys, packaging, name, kind, layers, can_draft) -> None:
    """The same as data."""
    assert inspect_main([str(conversions("dense", packaging) / name), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["kind"], found["head_layers"], found["can_draft"], found["problems"]) == (kind, layers, can_draft, [])
    assert (found["draft"] is not None) == can_draft
    assert found["trunk_layers"] == 4


def test_inspect_folder(tmp_path: Path, capsys) -> None:
    """A checkpoint, with a head, without, and with a broken one."""
    assert inspect_main([str(EXAMPLE), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["head_types"] == {"BF16": 15}

    def broken(tensors: Tensors) -> None:
        del tensors["mtp.norm.weight"]

    assert inspect_main([str(variant(EXAMPLE, tmp_path, tensors=broken)), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["can_draft"] is False
    assert "mtp.norm.weight" in found["problems"][0]


def test_inspect_s16_head_without_its_key(conversions, tmp_path: Path, capsys) -> None:
    """S16: a file whose head no key announces; the problem is named."""
    raw = (conversions("dense", "bundled") / "F16.gguf").read_bytes()
    (tmp_path / "x.gguf").write_bytes(raw.replace(b"qwen35.nextn_predict_layers", b"qwen35.xextn_predict_layers"))
    assert inspect_main([str(tmp_path / "x.gguf")]) == 0
    assert "problem: the file has nextn tensors but no nextn_predict_layers" in capsys.readouterr().out


def test_inspect_announced_head_that_is_missing(conversions, tmp_path: Path, capsys) -> None:
    """block_count and nextn say a head, no tensor has it."""
    import struct

    raw = (conversions("dense", "none") / "F16.gguf").read_bytes()
    key = b"qwen35.full_attention_interval"
    at = raw.index(key)
    # The same length as the key it takes the place of, so that nothing moves.
    renamed = raw.replace(key, b"qwen35.nextn_predict_layers\0\0\0")
    assert raw[at + len(key) + 4 :][:4] == struct.pack("<I", 4)
    (tmp_path / "x.gguf").write_bytes(renamed)
    assert inspect_main([str(tmp_path / "x.gguf")]) == 0
    assert "trunk" in capsys.readouterr().out


@pytest.mark.parametrize(("content", "words"), [(b"nonsense of some length.....", "not a GGUF"), (b"", "too short")])
def test_inspect_what_is_no_model(tmp_path: Path, capsys, content: bytes, words: str) -> None:
    """Exit 3."""
    (tmp_path / "x").write_bytes(content)
    assert inspect_main([str(tmp_path / "x")]) == 3
    assert words in capsys.readouterr().err
    assert inspect_main([str(tmp_path / "missing")]) == 3


def test_bad_model_card(tmp_path: Path, capsys) -> None:
    """Front matter that is no YAML: exit 3, not a traceback."""
    folder = clone(EXAMPLE, tmp_path / "m")
    (folder / "README.md").write_text("---\nname: [unclosed\n---\n")
    code = convert_main([str(folder), str(tmp_path / "x.gguf"), "--dry-run"])
    assert code in {0, 3}
    assert "Traceback" not in capsys.readouterr().err


def test_name_and_card(tmp_path: Path) -> None:
    """Model card fields and sampling defaults become keys; --name wins."""
    from gguf import GGUFReader

    folder = clone(EXAMPLE, tmp_path / "m")
    (folder / "README.md").write_text("---\nlicense: apache-2.0\ntags: [mtp, code]\nbase_model: a/b\n---\n# x\n")
    edit_json(folder / "generation_config.json", lambda g: g.update(temperature=0.6, top_k=20))
    assert convert_main([str(folder), str(tmp_path / "x.gguf"), "--name", "My Model", "--quiet"]) == 0
    fields = {n: f.contents() for n, f in GGUFReader(tmp_path / "x.gguf").fields.items()}
    assert (fields["general.name"], fields["general.license"], fields["general.tags"]) == (
        "My Model", "apache-2.0", ["mtp", "code"],
    )  # fmt: skip
    assert fields["general.sampling.top_k"] == 20
    assert fields["general.sampling.temp"] == pytest.approx(0.6)
    assert fields["general.base_model.0.repo_url"].endswith("/a/b")
