"""Recipes: presets, what is refused and how it is said, and the commented file of --init."""

from __future__ import annotations

import tomllib
from dataclasses import replace
from pathlib import Path

import pytest

from converter.errors import InputError, UsageError
from release import cli
from release.recipe import PRESETS, commented, preset, read_recipe


def recipe(folder: Path, text: str):
    file = folder / "recipe.toml"
    file.write_text(text)
    return read_recipe(file)


@pytest.mark.parametrize("name", PRESETS)
def test_a_commented_recipe_is_its_preset(name: str, tmp_path: Path, capsys) -> None:
    """--init writes a file that says what the preset does, and has every key."""
    file = tmp_path / "r.toml"
    assert cli.main(["--init", str(file), "--preset", name]) == 0
    assert str(file) in capsys.readouterr().out
    assert read_recipe(file) == replace(preset(name), file=file)
    keys = {line.lstrip("# ").partition(" =")[0] for line in file.read_text().splitlines() if " =" in line}
    assert {"types", "sidecars", "split_max_size", "near_ties", "threads", "license", "assistant"} <= keys
    assert cli.main(["--init", str(file)]) == 2  # not over a file that is there


def test_presets_grow() -> None:
    """From two types to many, all of them names that convert-mtp knows."""
    small, standard, full = (preset(n).files.types for n in PRESETS)
    assert len(small) < len(standard) < len(full)
    assert set(small) <= set(standard) <= set(full)


def test_what_is_not_said_is_the_presets(tmp_path: Path) -> None:
    """Keys of a section one by one."""
    found = recipe(tmp_path, 'preset = "small"\n[files]\ntypes = ["Q6_K"]\n[bench]\nruns = 0\n')
    assert found.files.types == ("Q6_K",)
    assert found.files.sidecars == preset("small").files.sidecars
    assert (found.bench.runs, found.bench.tokens) == (0, preset("small").bench.tokens)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ('types = ["Q8_0"]', ("line 1, types", "no such key", "[files]")),
        ('[files]\n\n# a comment\ntypes = ["Q4_KM"]', ("line 4, files.types", "did you mean Q4_K_M?")),
        ("[files]\ntypes = []", ("line 2, files.types", "not empty")),
        ('[files]\ntypes = ["Q8_0", "Q8_0"]', ("line 2, files.types", "repetitions")),
        ("[files]\ntypo = 1", ("line 2, files.typo", "no such key", "did you mean types?")),
        ("\n[filez]\na = 1", ("line 2, filez", "did you mean files?")),
        ("files = 3", ("line 1, files", "a section")),
        ("[verify]\ndrafts = [1, 17]", ("line 2, verify.drafts", "1 to 16", "[1, 17]")),
        ("[verify]\ntokens = true", ("line 2, verify.tokens", "whole number")),
        ("bench.runs = -1", ("line 1, bench.runs", "at least 0")),
        ('[files]\nsplit_max_size = "4 gibi"', ("line 2, files.split_max_size", "such as 4G")),
        ('[card]\nrepository = "name"', ("line 2, card.repository", "user/name")),
        ('[verify]\nprompts = "no.txt"', ("line 2, verify.prompts", "a file", "no.txt")),
        ('[bench]\ntasks = ["code", "poems"]', ("line 2, bench.tasks", "a file", "poems")),
        ('[files]\nmtp_imatrix = "x.gguf"', ("line 2, files.mtp_imatrix", "a file")),
        ('preset = "huge"', ("line 1, preset", "small, standard, full")),
        ("a = 1\nname = \n", ("not TOML", "line 2")),
    ],
)
def test_mistakes_are_named_by_line_and_key(text: str, words: tuple[str, ...], tmp_path: Path) -> None:
    """With what was expected."""
    with pytest.raises(InputError) as error:
        recipe(tmp_path, text)
    assert all(w in str(error.value) for w in words), str(error.value)
    assert str(tmp_path / "recipe.toml") in str(error.value)


def test_files_are_found_from_the_recipe(tmp_path: Path, monkeypatch) -> None:
    """Wherever the command is given; what is no file by its meaning is not looked for."""
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "p.txt").write_text("a prompt")
    monkeypatch.chdir("/")
    found = recipe(tmp_path / "mine", '[files]\nmtp_imatrix = "auto"\n[bench]\ntasks = ["code", "p.txt"]\n')
    assert [found.path(t) for t in found.bench.tasks[1:]] == [tmp_path / "mine" / "p.txt"]


def test_the_command_says_so_too(tmp_path: Path, capsys) -> None:
    """Exit code 3, and no traceback; wrong usage is 2."""
    (tmp_path / "r.toml").write_text("[files]\nhead = 1\n")
    assert cli.main(["model", str(tmp_path / "out"), "--recipe", str(tmp_path / "r.toml")]) == 3
    assert "line 2, files.head" in capsys.readouterr().err
    assert cli.main(["model", "out", "--recipe", "r.toml", "--preset", "small"]) == 2
    assert cli.main(["model"]) == 2
    assert not (tmp_path / "out").exists()


def test_there_is_no_other_preset() -> None:
    """Said with those that there are."""
    with pytest.raises(UsageError, match="no such preset"):
        preset("tiny")


def test_comments_are_toml() -> None:
    """As another reader sees it."""
    assert tomllib.loads(commented("full"))["files"]["sidecars"] == ["BF16", "Q8_0", "Q4_0"]
