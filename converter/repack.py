"""GGUF to GGUF without touching a weight: cut into parts or joined again, the head taken into a file of its own or out.

What comes out is what a conversion of the source would have given in that packaging, with the types that are there.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from converter import archs
from converter.checkpoint import Checkpoint, LocalFiles, ShardId, TensorInfo
from converter.errors import GGUFError, InputError, UnsupportedError
from converter.execute import RAW
from converter.gguf_file import KeyValue, TensorEntry, entries_in_order
from converter.gguf_model import GGUFModel
from converter.metadata import size_label
from converter.plan import Packaging, Plan, PlannedFile, PlannedTensor, name_notes, sidecar_path
from converter.rules import Role, Rule
from quant.mixes import MIXES

_AS_IT_IS = "mixed"  # a mix that this program does not know


def plan_repack(model: GGUFModel, out: Path, packaging: Packaging) -> tuple[Plan, Checkpoint]:
    """The plan that copies a model's tensors, and the checkpoint they are read from.

    Raises InputError where there is no head to put anywhere, UnsupportedError for tensors of unknown layout.
    """
    return _Repack(model).plan(out, packaging)


class _Repack:
    def __init__(self, model: GGUFModel) -> None:
        self.model = model
        empty = next((t.name for t in model.tensors if not t.nbytes), None)
        if empty is not None:
            raise UnsupportedError("an empty tensor cannot be copied", model.file, empty)
        self.architecture = self._text("general.architecture")
        self.blocks = self._number("block_count")
        self.head_layers = self._number("nextn_predict_layers")
        self.trunk_layers = self.blocks - self.head_layers
        self.roles = {t.name: self._role(t.name) for t in model.tensors}
        self.mix = self._mix("general.file_type")
        self.head_mix = self._mix("mtp.file_type") or (self.mix if self.head_layers else None)
        self.kind = "bundled" if self.head_layers else "trunk"
        if self.head_layers and Role.TRUNK not in self.roles.values():
            self.kind = "sidecar"

    def plan(self, out: Path, packaging: Packaging) -> tuple[Plan, Checkpoint]:
        if packaging in {Packaging.SIDECAR, Packaging.ONLY} and self.kind != "bundled":
            raise InputError("this file has no MTP head beside a trunk", self.model.file, found=self.kind)
        if packaging is Packaging.NONE and self.kind == "sidecar":
            raise InputError("a sidecar without its head would be empty", self.model.file)
        template = out / self._file_name() if out.is_dir() else out
        path = Path(str(template).replace("{type}", self.mix or _AS_IT_IS))
        trunk, head = self.mix or _AS_IT_IS, self.head_mix or _AS_IT_IS
        files: list[PlannedFile] = []
        if packaging is Packaging.BUNDLED or self.kind != "bundled":
            files.append(self._file(path, self.kind, trunk, self.head_mix, tuple(Role)))
        else:
            if packaging is not Packaging.ONLY:
                files.append(self._file(path, "trunk", trunk, None, (Role.SHARED, Role.TRUNK)))
            if packaging is not Packaging.NONE:
                beside = path if packaging is Packaging.ONLY else sidecar_path(template, trunk, head)
                files.append(self._file(beside, "sidecar", head, head, (Role.SHARED, Role.MTP)))
        known = archs.by_gguf_name(self.architecture)
        plan = Plan(
            files, name_notes(files), self.architecture, self.trunk_layers,
            self.head_layers if any(f.head_mix for f in files) else 0, known.head_input if known else "",
        )  # fmt: skip
        return plan, self._checkpoint()

    def _file(self, path: Path, kind: str, main: str, head: str | None, roles: Sequence[Role]) -> PlannedFile:
        chosen = [t for t in self.model.tensors if self.roles[t.name] in roles]
        entries = entries_in_order((t.name, t.ne, t.type) for t in chosen)
        tensors = [PlannedTensor(e, _copy(e, self.roles[e.name]), (self._source(e),)) for e in entries]
        return PlannedFile(path, kind, main, head, self._keys(kind, chosen), tensors)

    def _keys(self, kind: str, chosen: Sequence[TensorEntry]) -> list[KeyValue]:
        """The metadata of a file that holds only these tensors."""
        keys = dict(self.model.keys)
        if kind == self.kind:
            return list(keys.values())
        own = keys.pop("mtp.file_type", None)
        if kind == "sidecar" and own is not None:
            keys["general.file_type"] = replace(own, key="general.file_type")
        if kind == "trunk":
            prefix = f"{self.architecture}."
            keys.pop(f"{prefix}nextn_predict_layers")
            count = keys[f"{prefix}block_count"]
            keys[count.key] = replace(count, value=self.trunk_layers)
            for name, entry in keys.items():  # one value per layer
                if name.startswith(prefix) and entry.is_array and len(entry.value) == self.blocks:
                    keys[name] = replace(entry, value=entry.value[: self.trunk_layers])
        label = keys.get("general.size_label")
        if label is not None and label.value == self._label(self.model.tensors):
            keys[label.key] = replace(label, value=self._label(chosen))
        return list(keys.values())

    def _label(self, tensors: Sequence[TensorEntry]) -> str:
        experts = self.model.get(f"{self.architecture}.expert_count", 0)
        return size_label(((t.name, math.prod(t.ne)) for t in tensors), experts)

    def _source(self, entry: TensorEntry) -> TensorInfo:
        file, begin = self.model.place(entry.name)
        rows = math.prod(entry.ne[1:])
        return TensorInfo(entry.name, RAW, (rows, entry.nbytes // rows), file, begin, begin + entry.nbytes)

    def _checkpoint(self) -> Checkpoint:
        """The parts as shards."""
        import hashlib

        folder = self.model.file.parent
        files = LocalFiles(folder)
        ids: dict[Path, ShardId] = {}
        for part in self.model.parts:
            header = bytearray(part.data_start)
            files.read(part.file, 0, memoryview(header))
            ids[part.file] = ShardId(part.size, files.stamp(part.file), hashlib.sha256(header).hexdigest())
        return Checkpoint(folder, files, {t.name: self._source(t) for t in self.model.tensors}, ids=ids)

    def _role(self, name: str) -> Role:
        parts = name.split(".")
        if parts[0] != "blk" or len(parts) < 2 or not parts[1].isdigit():
            return Role.SHARED
        return Role.TRUNK if int(parts[1]) < self.trunk_layers else Role.MTP

    def _file_name(self) -> str:
        name = self.model.file.name
        first_part = f"-00001-of-{len(self.model.parts):05d}.gguf"
        return name.replace(first_part, ".gguf") if len(self.model.parts) > 1 else name

    def _text(self, key: str) -> str:
        value = self.model.get(key)
        if not isinstance(value, str):
            raise GGUFError("this file does not say which architecture it is", self.model.file, expected=key)
        return value

    def _number(self, name: str) -> int:
        value = self.model.get(f"{self.architecture}.{name}", 0)
        if type(value) is not int:
            raise GGUFError(
                "a metadata key has the wrong type", self.model.file, expected="u32", found=f"{name}: {value!r}"
            )
        return value

    def _mix(self, key: str) -> str | None:
        number = self.model.get(key)
        return next((m.name for m in MIXES.values() if m.file_type == number), None)


def _copy(entry: TensorEntry, role: Role) -> Rule:
    """A rule that changes nothing; a vector is one row."""
    shape = tuple(reversed(entry.ne))
    return Rule(entry.name, (entry.name,), shape if len(shape) > 1 else (1, *shape), role=role)
