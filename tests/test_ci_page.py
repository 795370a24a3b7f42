"""What docs/ci.md says works: its script, its commands, its exit codes and the extras it installs."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from converter import convert
from tests.conftest import EXAMPLE, ROOT
from verify import cli

PAGE = (ROOT / "docs" / "ci.md").read_text()


@pytest.fixture(scope="module")
def script(tmp_path_factory) -> Path:
    (text,) = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    file = tmp_path_factory.mktemp("ci") / "quality_check.py"
    file.write_text(text)
    return file


@pytest.fixture(scope="module")
def report(tmp_path_factory) -> dict:
    """Of a good file, by the command that the page gives."""
    (command,) = re.findall(r"^verify-mtp (.*?)\\$", PAGE, re.MULTILINE)
    folder = tmp_path_factory.mktemp("good")
    file = folder / "tiny-Q6_K.gguf"
    convert(EXAMPLE, file)
    words = [str(file) if w == file.name else str(EXAMPLE) if w.startswith("examples/") else w for w in command.split()]
    done = subprocess.run([sys.executable, "-m", "verify.cli", *words], capture_output=True, text=True, check=True)
    return json.loads(done.stdout)


def checked(script: Path, report: dict, *limits: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, script, *limits], input=json.dumps(report), capture_output=True, text=True, check=False
    )


def test_a_good_file_passes(script: Path, report: dict) -> None:
    """Within the limits that the page gives."""
    limits = re.findall(r"^  \| python quality_check.py (.*)$", PAGE, re.MULTILINE)[0]
    done = checked(script, report, *limits.split())
    assert done.returncode == 0, done.stderr
    assert "verdict: passed" in done.stdout
    assert {"structure", "fidelity", "logits", "acceptance"} <= {line.split()[0] for line in done.stdout.splitlines()}


@pytest.mark.parametrize(
    ("limits", "words"),
    [(("--kld", "1e-9"), "KL divergence"), (("--top1", "1.01"), "top-1"), (("--acceptance", "0.99"), "first drafts")],
)
def test_limits_fail(script: Path, report: dict, limits: tuple[str, ...], words: str) -> None:
    """Each with its figure."""
    done = checked(script, report, *limits)
    assert done.returncode == 1
    assert words in done.stderr


def test_verdicts_fail(script: Path, report: dict, tmp_path: Path, capsys) -> None:
    """A damaged file, a near-tie where it is not wanted, a level that was not run but has a limit, a file that is none."""
    damaged = tmp_path / "tiny-Q6_K.gguf"
    convert(EXAMPLE, damaged)
    data = bytearray(damaged.read_bytes())
    data[-5000:-4000] = bytes(1000)
    damaged.write_bytes(data)
    capsys.readouterr()
    assert cli.main([str(damaged), "--source", str(EXAMPLE), "--level", "structure,fidelity", "--json", "--quiet"]) == 1
    bad = json.loads(capsys.readouterr().out)
    done = checked(script, bad)
    assert done.returncode == 1
    assert "nextn.eh_proj" in done.stderr
    assert checked(script, bad, "--acceptance", "0.1").stderr.count("first drafts") == 1
    tie = report | {"verdict": "inconclusive"}
    assert checked(script, tie).returncode == 0
    (tmp_path / "none.gguf").write_bytes(b"GGUF")
    assert cli.main([str(tmp_path / "no.gguf"), "--json", "--quiet"]) == 3
    done = checked(script, json.loads(capsys.readouterr().out))
    assert done.returncode == 1
    assert "no such file" in done.stderr


def test_exit_codes_are_those_of_the_programs(capsys) -> None:
    """Every code of the table stands in --help."""
    from release import cli as release_cli

    codes = re.findall(r"^\| (\d+) \| (.*?) \| (.*?) \|", PAGE, re.MULTILINE)
    assert [int(c) for c, *_ in codes] == [0, 1, 2, 3, 4, 5, 6, 130]
    for main, column in ((cli.main, 1), (release_cli.main, 2)):
        with pytest.raises(SystemExit):
            main(["--help"])
        shown = capsys.readouterr().out.partition("exit codes:")[2]
        told = {int(n) for n in re.findall(r"\b(\d+) [a-z]", shown)}
        assert {int(row[0]) for row in codes if not row[column].startswith("–")} <= told


def test_the_container_installs_what_there_is() -> None:
    """Extras and programs by their names."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    (extras,) = re.findall(r"/opt/convert-mtp\[(.*?)\]", PAGE)
    assert set(extras.split(",")) <= set(project["optional-dependencies"])
    (program,) = re.findall(r'CMD \["(.*?)"', PAGE)
    assert program in project["scripts"]
