"""A model whose drafter is a checkpoint of its own."""

from __future__ import annotations

import json
from pathlib import Path

from gguf import GGUFReader

from release import cli
from tests.release.conftest import begin

RECIPE = """
name = "Gemma"
assistant = "{assistant}"
[files]
types = ["Q8_0"]
sidecars = ["BF16", "Q8_0"]
[verify]
levels = ["structure", "fidelity", "acceptance"]
drafts = [1]
tokens = 12
prompts = "prompts.txt"
[bench]
runs = 1
tasks = ["code"]
prompts = 1
tokens = 8
drafts = [1]
"""


def test_target_and_drafter(target: Path, assistant: Path, tmp_path: Path) -> None:
    """Trunk-only files with drafters beside them, tried together; each file names its own source."""
    release = begin(tmp_path, RECIPE.format(assistant=assistant))
    assert cli.main([str(target), str(release.out), "--recipe", str(release.recipe), "--quiet"]) == 0
    root = release.out / "Gemma-MTP-GGUF"
    assert release.ggufs(root) == {"trunk/Gemma-Q8_0.gguf", "trunk/mtp-Gemma-BF16.gguf", "trunk/mtp-Gemma-Q8_0.gguf"}
    sources = {n: GGUFReader(root / n).fields["mtp.source"].contents() for n in release.ggufs(root)}
    assert set(sources.values()) == {target.name, assistant.name}
    assert sources["trunk/Gemma-Q8_0.gguf"] == target.name
    rows = json.loads((root / "results.json").read_text())["files"]
    for row in rows:
        engine = next(level for level in row["levels"] if level["level"] == "engine" and " with " in level["of"])
        assert engine["verdict"] == "passed"
        assert row["acceptance"][0] > 0.5
    card = (root / "README.md").read_text()
    assert "-m trunk/Gemma-Q8_0.gguf -md trunk/mtp-Gemma-Q8_0.gguf --spec-type draft-mtp" in card
    assert "lms load" not in card
    assert "--assistant" not in card
    told = json.loads((root / "provenance.json").read_text())
    assert set(told["sources"]) == {"model", "assistant"}
    preset = (release.out / "Gemma-MTP-GGUF-presets" / "preset.ini").read_text()
    assert ("model-draft" in preset) == ("spec-type" in preset)


def test_a_drafter_of_another_model(target: Path, tmp_path: Path, capsys) -> None:
    """Is refused before anything is written."""
    release = begin(tmp_path, RECIPE.format(assistant=target))
    assert cli.main([str(target), str(release.out), "--recipe", str(release.recipe), "--quiet"]) == 3
    assert "no drafter" in capsys.readouterr().err
    assert release.ggufs(release.out) == set()
