"""What was chosen, as llama.cpp reads it: an INI of presets (spec/runtime.md, section 5), and JSON for everything else."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from bench.policy import SCHEMA, Recommendation
from converter.files import os_errors

PRESET, POLICY = "preset.ini", "policy.json"


def preset(found: Sequence[Recommendation]) -> str:
    """One section per file, named like it; files for which drafting is off get none of its options."""
    lines = ["version = 1"]
    for r in found:
        path = Path(r.file)
        lines += ["", f"[{path.stem}]", f"model = {path}"]
        if r.on and r.best:
            load = r.best.load
            lines += ["spec-type = draft-mtp", f"spec-draft-n-max = {load.drafts}"]
            lines += [f"spec-draft-p-min = {load.p_min:g}"] if load.p_min else []
    return "\n".join(lines) + "\n"


def write(found: Sequence[Recommendation], folder: Path) -> None:
    """Both files into a folder, which is made. Raises EnvironmentFailure."""
    with os_errors("cannot write the policy", folder):
        folder.mkdir(parents=True, exist_ok=True)
        (folder / PRESET).write_text(preset(found))
        policy = {"schema": SCHEMA, "recommendations": [r.as_json() for r in found]}
        (folder / POLICY).write_text(json.dumps(policy, indent=2))
