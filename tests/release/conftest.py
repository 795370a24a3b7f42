"""Recipes that are quick, and a release made once."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from release import cli
from tests.conftest import EXAMPLE

NAME = EXAMPLE.name
PROMPTS = "import os\nimport sys\n\nclass Message:\n    def __init__(self, policy=None):\n"
QUICK = """
preset = "small"
[files]
types = ["Q4_K_M", "Q8_0"]
sidecars = ["Q8_0", "Q4_0"]
[verify]
drafts = [1, 2]
tokens = 12
text_tokens = 128
prompts = "prompts.txt"
[bench]
runs = 1
tasks = ["code"]
prompts = 2
tokens = 12
drafts = [1, 2]
[card]
license = "apache-2.0"
base_model = "Org/Tiny"
languages = ["en"]
author = "Somebody"
"""
BARE = """
[files]
types = ["Q4_K_M"]
sidecars = ["Q8_0"]
[verify]
levels = ["structure", "fidelity"]
drafts = [1]
tokens = 4
prompts = "prompts.txt"
[bench]
runs = 0
"""


@dataclass
class Release:
    """A release in a folder."""

    out: Path
    recipe: Path
    code: int = 0

    def run(self, *options: str) -> int:
        self.code = cli.main([str(EXAMPLE), str(self.out), "--recipe", str(self.recipe), "--quiet", *options])
        return self.code

    def change(self, old: str, new: str) -> None:
        text = self.recipe.read_text()
        assert old in text
        self.recipe.write_text(text.replace(old, new))

    @property
    def repository(self) -> Path:
        return self.out / f"{NAME}-MTP-GGUF"

    @property
    def presets(self) -> Path:
        return self.out / f"{NAME}-MTP-GGUF-presets"

    def files(self, folder: Path | None = None) -> set[str]:
        folder = folder or self.repository
        return {f.relative_to(folder).as_posix() for f in folder.rglob("*") if f.is_file()}

    def ggufs(self, folder: Path | None = None) -> set[str]:
        return {f for f in self.files(folder) if f.endswith(".gguf")}


def begin(folder: Path, recipe: str) -> Release:
    (folder / "prompts.txt").write_text(PROMPTS)
    (folder / "recipe.toml").write_text(recipe)
    return Release(folder / "out", folder / "recipe.toml")


@pytest.fixture(scope="module")
def made(tmp_path_factory) -> Release:
    """Everything, at all levels, measured; not to be changed."""
    release = begin(tmp_path_factory.mktemp("release"), QUICK)
    release.run()
    return release


@pytest.fixture(scope="module")
def bare_made(tmp_path_factory) -> Release:
    """The least: one type, no torch, nothing measured; not to be changed."""
    release = begin(tmp_path_factory.mktemp("bare"), BARE)
    release.run()
    return release


@pytest.fixture
def bare(bare_made: Release, tmp_path: Path) -> Release:
    """A copy of it."""
    shutil.copytree(bare_made.out, tmp_path / "out")
    for name in ("recipe.toml", "prompts.txt"):
        shutil.copy2(bare_made.recipe.parent / name, tmp_path / name)
    return Release(tmp_path / "out", tmp_path / "recipe.toml")


@pytest.fixture
def counted(monkeypatch) -> dict[str, list[str]]:
    """What was converted and verified from now on."""
    from release import check, run

    seen: dict[str, list[str]] = {"converted": [], "verified": []}
    run_plan, verify = run.run_plan, check.verify

    def converting(plan, *rest, **options):
        seen["converted"] += [p.path.name for p in plan.files]
        return run_plan(plan, *rest, **options)

    def verifying(file, options, notify):
        seen["verified"].append(Path(file).name + (f" + {options.sidecar.name}" if options.sidecar else ""))
        return verify(file, options, notify)

    monkeypatch.setattr(run, "run_plan", converting)
    monkeypatch.setattr(check, "verify", verifying)
    return seen


@pytest.fixture
def spoil(monkeypatch) -> Callable[[str, str], None]:
    """spoil(file, tensor): from now on that tensor of that file is damaged when it is made."""
    import gguf

    from release import run

    faults: list[tuple[str, str]] = []
    run_plan = run.run_plan

    def converting(plan, *rest, **options):
        result = run_plan(plan, *rest, **options)
        for planned in plan.files:
            for name, tensor in faults:
                if planned.path.name == name:
                    found = next(t for t in gguf.GGUFReader(planned.path).tensors if t.name == tensor)
                    with planned.path.open("r+b") as file:
                        file.seek(found.data_offset)
                        file.write(b"\x11" * (found.n_bytes // 2))
        return result

    monkeypatch.setattr(run, "run_plan", converting)
    return lambda file, tensor: faults.append((file, tensor))
