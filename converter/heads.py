"""Which MTP head a GGUF file or a model folder has, in which types, and how an engine can use it."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from converter import archs
from converter.checkpoint import ShardFiles
from converter.errors import InputError, ToolError
from converter.gguf_model import GGUFModel, is_gguf, open_gguf
from converter.hub import is_hub_id, locate
from converter.model import read_model
from converter.plan import DRAFTER
from converter.rules import Architecture, Role

SCHEMA = 1
# Published measurements put the best draft length between 2 and 4; 3 is also the engine's default.
_DRAFT_DEFAULT = 3
_GLUE = ("nextn.eh_proj.weight", "nextn.enorm.weight", "nextn.hnorm.weight")


@dataclass
class HeadReport:
    """kind: bundled, trunk, sidecar, drafter (of files), checkpoint (of folders).

    drafts_for: architecture of the targets of a drafter, which is a whole model of its own. problems: what keeps it from working.
    """

    file: Path
    kind: str
    architecture: str
    trunk_layers: int
    head_layers: int
    head_tensors: int = 0
    head_types: dict[str, int] = field(default_factory=dict)
    trunk_types: dict[str, int] = field(default_factory=dict)
    head_input: str | None = None
    problems: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    drafts_for: str | None = None

    @property
    def can_draft(self) -> bool:
        return (self.head_layers > 0 or self.drafts_for is not None) and not self.problems

    def draft_settings(self) -> dict[str, Any] | None:
        """What llama.cpp takes; the best n is to be measured."""
        if not self.can_draft:
            return None
        return {
            "spec_type": "draft-mtp",
            "n_max_default": _DRAFT_DEFAULT,
            "n_max_worth_trying": [1, 2, 3, 4],
            "p_min_worth_trying": [0.0, 0.75],
            "command": self._command(),
        }

    def _command(self) -> str | None:
        options = f"--spec-type draft-mtp --spec-draft-n-max {_DRAFT_DEFAULT}"
        if self.kind == "bundled":
            return f"llama-server -m {self.file} {options}"
        if self.kind in {"sidecar", DRAFTER}:
            return f"llama-server -m TRUNK.gguf -md {self.file} {options}"
        return None

    def as_json(self) -> dict[str, Any]:
        return {
            "schema": SCHEMA, "file": str(self.file), "kind": self.kind, "architecture": self.architecture,
            "trunk_layers": self.trunk_layers, "head_layers": self.head_layers, "head_tensors": self.head_tensors,
            "head_types": self.head_types, "trunk_types": self.trunk_types, "head_input": self.head_input,
            "can_draft": self.can_draft, "draft": self.draft_settings(), "drafts_for": self.drafts_for, "problems": self.problems, "notes": self.notes,
        }  # fmt: skip

    def as_text(self) -> str:
        def types(counts: dict[str, int]) -> str:
            return ", ".join(f"{t} {n}x" for t, n in counts.items()) or "none"

        lines = [
            f"{self.file}: {self.architecture}, {self.kind}",
            f"  trunk: {self.trunk_layers} layers: {types(self.trunk_types)}",
        ]
        if self.drafts_for:
            lines[1:] = [
                f"  a drafter for {self.drafts_for} models, {self.trunk_layers} layers: {types(self.trunk_types)}"
            ]
        elif self.head_layers or self.head_tensors:
            lines.append(f"  head: {self.head_layers} layer(s), {self.head_tensors} tensors: {types(self.head_types)}")
        else:
            lines.append("  head: none")
        if self.head_input and (self.head_layers or self.drafts_for):
            lines.append(f"  fed with: {self.head_input}")
        if (draft := self.draft_settings()) is not None:
            tries = ", ".join(str(n) for n in draft["n_max_worth_trying"])
            lines.append(f"  drafts: chained; n = {tries} are worth measuring, {_DRAFT_DEFAULT} to begin with")
            if draft["command"]:
                lines.append(f"  run: {draft['command']}")
        lines += [f"  problem: {p}" for p in self.problems]
        lines += [f"  note: {n}" for n in self.notes]
        return "\n".join(lines)


def inspect(model: str | Path, revision: str | None = None) -> HeadReport:
    """Report on a GGUF file, a model folder, or a string that is a Hub id, of which headers alone are fetched.

    Raises ToolError for what is none of them.
    """
    located = locate(model, revision=revision, stream=is_hub_id(model))
    path = located.path
    if not path.exists():
        raise InputError("there is no such file or folder", path)
    if path.is_dir() and not is_gguf(path):
        return _inspect_folder(path, located.files)
    return _inspect_gguf(open_gguf(path))


def _inspect_folder(folder: Path, files: ShardFiles | None) -> HeadReport:
    problems: list[str] = []
    try:
        model = read_model(folder, files=files)
    except ToolError as error:
        # The trunk alone may be sound: then the head is what is wrong, and worth telling apart.
        try:
            model = read_model(folder, with_head=False, files=files)
        except ToolError:
            raise error from None
        problems.append(str(error))
    model.close()
    tensors = [(rule.role, source.dtype) for rule in model.rules for source in model.sources[rule.target]]
    head = Counter(dtype for role, dtype in tensors if role is Role.MTP)
    trunk = Counter(dtype for role, dtype in tensors if role is not Role.MTP)
    return HeadReport(
        folder, "checkpoint", model.architecture.name, model.table.trunk_layers, model.head_layers, head.total(),
        dict(head), dict(trunk), model.architecture.head_input, problems, model.notes, model.architecture.drafts_for,
    )  # fmt: skip


def _inspect_gguf(header: GGUFModel) -> HeadReport:
    name = header.get("general.architecture")
    if not isinstance(name, str):
        raise InputError(
            "this GGUF file does not say which architecture it is", header.file, hint="general.architecture"
        )
    known = archs.by_gguf_name(name)
    if known is not None and known.drafts_for:
        return _inspect_drafter(header, known)
    blocks, layers = (_count(header, f"{name}.{key}") for key in ("block_count", "nextn_predict_layers"))
    trunk_layers = max(0, blocks - layers)
    in_head = {t.name for t in header.tensors if _block(t.name) >= trunk_layers}
    nextn = {t.name for t in header.tensors if ".nextn." in t.name}
    sidecar = layers > 0 and not any(0 <= _block(t.name) < trunk_layers for t in header.tensors)
    problems = _problems(header, trunk_layers, layers, in_head, nextn)
    return HeadReport(
        header.file, "sidecar" if sidecar else "bundled" if layers else "trunk", name, trunk_layers, layers, len(in_head),
        dict(Counter(t.type.name for t in header.tensors if t.name in in_head)),
        dict(Counter(t.type.name for t in header.tensors if t.name not in in_head)),
        known.head_input if known else None, problems,
        [] if known else [f"{name} is not an architecture that this version converts"],
    )  # fmt: skip


def _inspect_drafter(header: GGUFModel, known: Architecture) -> HeadReport:
    names = {t.name for t in header.tensors}
    needed = ("token_embd.weight", "output_norm.weight", "nextn.pre_projection.weight", "nextn.post_projection.weight")
    return HeadReport(
        header.file, DRAFTER, known.name, _count(header, f"{known.name}.block_count"), 0, 0, {},
        dict(Counter(t.type.name for t in header.tensors)), known.head_input,
        [f"{name} is missing" for name in needed if name not in names], [], known.drafts_for,
    )  # fmt: skip


def _count(header: GGUFModel, key: str) -> int:
    value = header.get(key, 0)
    if type(value) is not int:
        raise InputError("a metadata key has the wrong type", header.file, expected=f"{key}: u32", found=repr(value))
    return value


def _problems(header: GGUFModel, trunk_layers: int, layers: int, in_head: set[str], nextn: set[str]) -> list[str]:
    """What keeps engines from loading or from drafting, judged from the header."""
    problems: list[str] = []
    if nextn and not layers:
        problems.append(
            "the file has nextn tensors but no nextn_predict_layers key: engines read the head as a trunk layer and refuse"
        )
    if layers and not in_head:
        problems.append(
            f"nextn_predict_layers is {layers}, but the file holds no head: engines abort when asked to draft"
        )
    elif layers:
        missing = [g for g in _GLUE if f"blk.{trunk_layers}.{g}" not in nextn]
        if missing:
            problems.append(f"the head is not complete: blk.{trunk_layers} lacks {', '.join(missing)}")
    names = {t.name for t in header.tensors}
    problems += [f"{name} is missing" for name in ("token_embd.weight", "output_norm.weight") if name not in names]
    return problems


def _block(name: str) -> int:
    """Number of the block a tensor belongs to, -1 for those of none."""
    parts = name.split(".")
    return int(parts[1]) if parts[0] == "blk" and len(parts) > 1 and parts[1].isdigit() else -1
