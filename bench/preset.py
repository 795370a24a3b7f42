"""What was chosen, as llama.cpp reads it: an INI of presets (spec/runtime.md, section 5), and JSON for everything else."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from bench.policy import SCHEMA, Recommendation
from converter.files import os_errors

PRESET, POLICY = "preset.ini", "policy.json"


def preset(found: Sequence[Recommendation]) -> str:
    """One section per file, named like it; files for which drafting is off get none of its options."""
    return ini((Path(r.file).stem, {"model": r.file, **draft_keys(r)}) for r in found)


def ini(sections: Iterable[tuple[str, Mapping[str, str]]]) -> str:
    """A preset's text of sections by name, with their keys."""
    lines = ["version = 1"]
    for name, keys in sections:
        lines += ["", f"[{name}]", *(f"{key} = {value}" for key, value in keys.items())]
    return "\n".join(lines) + "\n"


def draft_keys(found: Recommendation) -> dict[str, str]:
    """What switches drafts on as recommended; nothing where they are off."""
    if not found.on or found.best is None:
        return {}
    load = found.best.load
    keys = {"spec-type": "draft-mtp", "spec-draft-n-max": str(load.drafts)}
    return keys | ({"spec-draft-p-min": f"{load.p_min:g}"} if load.p_min else {})


def write(found: Sequence[Recommendation], folder: Path) -> None:
    """Both files into a folder, which is made. Raises EnvironmentFailure."""
    with os_errors("cannot write the policy", folder):
        folder.mkdir(parents=True, exist_ok=True)
        (folder / PRESET).write_text(preset(found))
        policy = {"schema": SCHEMA, "recommendations": [r.as_json() for r in found]}
        (folder / POLICY).write_text(json.dumps(policy, indent=2))
