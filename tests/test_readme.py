"""Every command in README.md is one that works."""

from __future__ import annotations

import re
import shlex

import pytest

from bench import cli as bench_cli
from converter import cli
from release import cli as release_cli
from tests.conftest import ROOT
from verify import calibrate
from verify import cli as verify_cli

README = (ROOT / "README.md").read_text()
BLOCKS = re.findall(r"```(\w+)\n(.*?)```", README, re.DOTALL)
COMMANDS = [
    shlex.split(line, comments=True)
    for language, block in BLOCKS
    if language == "sh"
    for line in block.splitlines()
    if line.startswith(
        ("convert-mtp", "inspect-mtp", "calibrate-mtp", "verify-mtp", "bench-mtp", "recommend-mtp", "release-mtp")
    )
]
MAINS = {
    "convert-mtp": cli.convert_main, "inspect-mtp": cli.inspect_main, "calibrate-mtp": calibrate.main,
    "verify-mtp": verify_cli.main, "bench-mtp": bench_cli.bench_main, "recommend-mtp": bench_cli.recommend_main,
    "release-mtp": release_cli.main,
}  # fmt: skip


def test_there_are_commands() -> None:
    """The pattern above still finds them."""
    assert len(COMMANDS) >= 7


HERE = [c for c in COMMANDS if "examples/" in " ".join(c) or c[1].startswith(("tiny", "parts", "--init"))]
ELSEWHERE = [c for c in COMMANDS if c not in HERE]


@pytest.mark.parametrize("command", ELSEWHERE, ids=" ".join)
def test_commands_for_models_that_are_not_here(command: list[str], monkeypatch, tmp_path, capsys) -> None:
    """They parse; what fails is the missing folder, or the Hub that is not asked."""
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.chdir(tmp_path)
    assert MAINS[command[0]](command[1:]) == (5 if "/" in command[1] else 3)
    assert "there is no such folder" in capsys.readouterr().err


def test_commands_for_the_example(tmp_path, monkeypatch) -> None:
    """In the page's order, in a folder that has the example."""
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    monkeypatch.chdir(tmp_path)
    assert [MAINS[c[0]](c[1:]) for c in HERE] == [0] * 15


def test_python_block(tmp_path, monkeypatch, capsys) -> None:
    """As printed."""
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    monkeypatch.chdir(tmp_path)
    (block,) = (text for language, text in BLOCKS if language == "python")
    exec(compile(block, "README.md", "exec"), {})
    assert "tiny-Q4_K_M.gguf" in capsys.readouterr().out


def test_types_and_options_are_those_of_the_program(capsys) -> None:
    """The page and --help name the same types."""
    from quant.mixes import MIXES

    with pytest.raises(SystemExit):
        cli.convert_main(["--help"])
    shown = capsys.readouterr().out
    for name in MIXES:
        assert name in README
        assert name in shown
