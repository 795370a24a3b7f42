"""From a model and options to a list of output files with every tensor's place: all decisions, no data.

Pure and deterministic: the same checkpoint and options give the same plan, and the plan fixes every byte position, so
that execution can be cut up in any way.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from enum import StrEnum
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from converter.checkpoint import TensorInfo
from converter.errors import CheckpointError, InputError, UnsupportedError, UsageError
from converter.files import model_name
from converter.gguf_file import MAX_NAME, KeyValue, TensorEntry, entries_in_order, header_bytes, pad, text, u32
from converter.imatrix import ImportanceMatrix, read_imatrix
from converter.metadata import Provenance, card_keys, file_keys, size_label
from converter.model import SEPARATE_DRAFTER, Model
from converter.rules import Role, Rule
from converter.tokenizer import load_tokenizer
from quant import BlockType, UnknownTypeError, block_type
from quant.block import takes_weights
from quant.mixes import FLOAT_TYPES, MIXES, Mix, TrunkFacts, fitting, head_types, mix, trunk_types

if TYPE_CHECKING:
    import numpy as np

DEFAULT_TYPE = "Q4_K_M"
DEFAULT_HEAD = "Q8_0"
DRAFTER = "drafter"  # kind of a file: a whole small model that drafts for another one
MATCH = "match"
_SIDECAR_PREFIX = "mtp-"  # by which engines and front ends find a sidecar


class Packaging(StrEnum):
    """Where the head goes."""

    BUNDLED = "bundled"
    SIDECAR = "sidecar"
    ONLY = "only"
    NONE = "none"


@dataclass(frozen=True)
class Options:
    """What a user may choose. types: mixes for the trunk, empty for the default or what the file name says.

    provenance: what the files say of their origin; nothing without it.
    """

    types: tuple[str, ...] = ()
    mtp_type: str | None = None
    packaging: Packaging = Packaging.BUNDLED
    tensor_types: tuple[str, ...] = ()
    pre_tokenizer: str | None = None
    name: str | None = None
    imatrix: Path | None = None
    head_importance: ImportanceMatrix | None = None
    provenance: Provenance | None = None


@dataclass(frozen=True)
class PlannedTensor:
    """One tensor of one output file.

    wanted: the type it would have had if its rows were whole blocks of it. weighted: quantized with its entry of the
    importance matrix.
    """

    entry: TensorEntry
    rule: Rule
    sources: tuple[TensorInfo, ...]
    wanted: str | None = None
    weighted: bool = False

    @property
    def type(self) -> BlockType:
        return self.entry.type


@dataclass(frozen=True)
class Part:
    """Which part of a split file this is: number from 0, how many there are, the name of the whole."""

    number: int
    count: int
    whole: Path


@dataclass(frozen=True)
class PlannedFile:
    """One output file: name, metadata, tensors with their offsets. kind: bundled, trunk, sidecar or drafter."""

    path: Path
    kind: str
    mix: str
    head_mix: str | None
    keys: list[KeyValue]
    tensors: list[PlannedTensor]
    part: Part | None = None

    @property
    def whole(self) -> Path:
        """The name without the part's number."""
        return self.part.whole if self.part else self.path

    @cached_property
    def header(self) -> bytes:
        return header_bytes(self.keys, [t.entry for t in self.tensors])

    @property
    def data_bytes(self) -> int:
        """Bytes of all tensors, without the padding between them."""
        return sum(t.entry.nbytes for t in self.tensors)

    @property
    def size(self) -> int:
        last = self.tensors[-1].entry
        return len(self.header) + pad(last.offset + last.nbytes)


@dataclass(frozen=True)
class Plan:
    """All output files of a run."""

    files: list[PlannedFile]
    notes: list[str]
    architecture: str
    trunk_layers: int
    head_layers: int
    head_input: str
    importance: ImportanceMatrix | None = None

    def digest(self) -> str:
        """Names everything that decides the output's bytes."""
        return hashlib.sha256(json.dumps(self.as_json(), sort_keys=True).encode()).hexdigest()

    def as_json(self) -> dict[str, Any]:
        return {
            "architecture": self.architecture,
            "trunk_layers": self.trunk_layers,
            "head_layers": self.head_layers,
            "head_input": self.head_input if self.head_layers else None,
            "imatrix_sha256": self.importance.digest() if self.importance else None,
            "notes": self.notes,
            "files": [_file_json(f) for f in self.files],
        }


def _file_json(file: PlannedFile) -> dict[str, Any]:
    return {
        "path": str(file.path),
        "part": [file.part.number, file.part.count] if file.part else None,
        "kind": file.kind,
        "type": file.mix,
        "mtp_type": file.head_mix,
        "bytes": file.size,
        "header_sha256": hashlib.sha256(file.header).hexdigest(),
        "tensors": [_tensor_json(t) for t in file.tensors],
    }


def _tensor_json(tensor: PlannedTensor) -> dict[str, Any]:
    return {
        "name": tensor.entry.name,
        "shape": list(reversed(tensor.entry.ne)),
        "type": tensor.type.name,
        "wanted": tensor.wanted,
        "weighted": tensor.weighted,
        "role": tensor.rule.role.value,
        "offset": tensor.entry.offset,
        "bytes": tensor.entry.nbytes,
        "sources": [{"name": s.name, "file": s.file.name, "dtype": s.dtype, "begin": s.begin} for s in tensor.sources],
        "transforms": [{type(t).__name__: asdict(t)} for t in tensor.rule.transforms],
    }


def make_plan(model: Model, out: Path, options: Options, assistant: Model | None = None) -> Plan:
    """Decide everything. Raises UsageError for options that cannot be meant, ToolError for input that cannot be.

    assistant: a drafter with a checkpoint of its own, which becomes the sidecar.
    """
    if assistant is not None:
        return _plan_pair(model, assistant, out, options)
    has_head = model.head_layers > 0 and options.packaging is not Packaging.NONE
    if not has_head and options.packaging in {Packaging.SIDECAR, Packaging.ONLY}:
        raise CheckpointError("there is no MTP head to put into a file of its own", model.folder)
    target = _target(out, model)
    trunks = _trunk_mixes(options, target)
    overrides = _Overrides(options.tensor_types)
    tokenizer = load_tokenizer(
        model.config, model.table.vocabulary, options.pre_tokenizer, model.architecture.tokenizer
    )
    importance = _Importance(model, options)
    draft = _Draft(model, overrides, tokenizer.keys, options, importance)
    files: list[PlannedFile] = []
    for trunk in trunks:
        head = _head_mix(options, trunk) if has_head else None
        for file in draft.files(target, trunk, head, options.packaging):
            same = next((f for f in files if f.path == file.path), None)
            if same is None:
                files.append(file)
            elif same.kind != "sidecar" or file.kind != "sidecar":  # trunks of several types share one sidecar
                raise UsageError("trunk and sidecar would have the same name", file.path)
    overrides.refuse_unmatched()
    notes = [*model.notes, *tokenizer.notes, *name_notes(files), *importance.notes(files)]
    return Plan(
        files, notes, model.architecture.name, model.table.trunk_layers,
        model.head_layers if has_head else 0, model.architecture.head_input, importance.matrix,
    )  # fmt: skip


def _plan_pair(target: Model, drafter: Model, out: Path, options: Options) -> Plan:
    """A target and its drafter: the target's files, and beside them the drafter's in every type that is wanted.

    A drafter cannot be bundled: "bundled" and "sidecar" are the same here, "only" is the drafter alone.
    """
    refuse_strangers(drafter, target)
    alone = replace(options, packaging=Packaging.NONE, mtp_type=None)
    if options.packaging is Packaging.ONLY:
        types = (options.mtp_type,) if options.mtp_type and not options.types else options.types
        return make_plan(drafter, out, replace(alone, types=types))
    plans = [make_plan(target, out, alone)]
    if options.packaging is not Packaging.NONE:
        where = _target(out, target)
        heads = {
            (head := _head_mix(options, m)).name: sidecar_path(where, m.name, head.name)
            for m in _trunk_mixes(options, where)
        }
        for name, path in heads.items():
            plans.append(make_plan(drafter, path, Options(types=(name,), packaging=Packaging.NONE)))
    files = [file for plan in plans for file in plan.files]
    notes = list(dict.fromkeys(n for plan in plans for n in plan.notes if n != SEPARATE_DRAFTER or len(plans) == 1))
    return replace(plans[0], files=files, notes=notes)


def refuse_strangers(drafter: Model, target: Model) -> None:
    """Raise CheckpointError where a drafter was not made for a target."""
    if drafter.architecture.drafts_for != target.architecture.name:
        raise CheckpointError(
            "this is no drafter for that model", drafter.folder,
            expected=f"a drafter of {target.architecture.name}", found=drafter.architecture.name,
        )  # fmt: skip
    assert drafter.architecture.check_pair is not None
    drafter.architecture.check_pair(drafter.config, target.config)
    words = [_words(m) for m in (target, drafter)]
    different = next((i for i, (a, b) in enumerate(zip(*words, strict=False)) if a != b), None)
    if different is not None:
        raise CheckpointError(
            f"this drafter does not belong to the target: token {different}", drafter.folder / "tokenizer.json",
            expected=repr(words[0][different]), found=repr(words[1][different]), hint="take the assistant of the same model",
        )  # fmt: skip


def _words(model: Model) -> list[str]:
    keys = load_tokenizer(model.config, model.table.vocabulary, kind=model.architecture.tokenizer).keys
    return next(k.value for k in keys if k.key == "tokenizer.ggml.tokens")


class _Draft:
    """Builds the files of one model; what they share is worked out once."""

    def __init__(
        self, model: Model, overrides: _Overrides, tokenizer: list[KeyValue], options: Options, importance: _Importance
    ) -> None:
        self.model, self.overrides, self.tokenizer, self.importance = model, overrides, tokenizer, importance
        self.card, self.has_label = card_keys(model.folder, options.name)
        self.provenance = options.provenance

    def files(self, target: Path, trunk: Mix, head: Mix | None, packaging: Packaging) -> Iterator[PlannedFile]:
        if packaging is Packaging.ONLY:
            assert head is not None
            yield self.sidecar(Path(str(target).replace("{type}", head.name)), head)
            return
        path = Path(str(target).replace("{type}", trunk.name))
        if self.model.architecture.drafts_for:
            yield self.file(path, DRAFTER, trunk, None, (Role.SHARED, Role.TRUNK))
        elif head is None or packaging is Packaging.SIDECAR:
            yield self.file(path, "trunk", trunk, None, (Role.SHARED, Role.TRUNK))
        else:
            yield self.file(path, "bundled", trunk, head, (Role.SHARED, Role.TRUNK, Role.MTP))
        if head is not None and packaging is Packaging.SIDECAR:
            yield self.sidecar(sidecar_path(target, trunk.name, head.name), head)

    def sidecar(self, path: Path, head: Mix) -> PlannedFile:
        return self.file(path, "sidecar", head, head, (Role.SHARED, Role.MTP))

    def file(self, path: Path, kind: str, main: Mix, head: Mix | None, roles: Sequence[Role]) -> PlannedFile:
        rules = [r for role in roles for r in self.model.rules if r.role is role]
        types = self._types(kind, main, head, rules)
        chosen = [(r, *self._type(r, types.get(r.target))) for r in rules]
        entries = entries_in_order((r.target, tuple(reversed(r.target_shape)), kind) for r, kind, _ in chosen)
        tensors = [
            PlannedTensor(entry, rule, self.model.sources[rule.target], wanted, self.importance.serves(entry))
            for entry, (rule, _, wanted) in zip(entries, chosen, strict=True)
        ]
        layers = self.model.head_layers if head else 0
        label = size_label(((r.target, math.prod(r.target_shape)) for r in rules), self.model.table.experts)
        keys = file_keys(
            self.model.architecture.name, self.card, None if self.has_label else label,
            self.model.table.metadata(layers), main.file_type,
        )  # fmt: skip
        if kind == "bundled" and head is not None:
            keys.append(u32("mtp.file_type", head.file_type))
        keys += self.tokenizer
        keys += self.importance.keys(main, head if kind == "bundled" else None)
        if self.provenance is not None:
            types = [(e.name, e.type.name) for e in entries]
            keys += self.provenance.keys(kind, main.name, head.name if head else None, types)
        return PlannedFile(path, kind, main.name, head.name if head else None, keys, tensors)

    def _types(self, kind: str, main: Mix, head: Mix | None, rules: list[Rule]) -> dict[str, BlockType]:
        named = [(r.target, r.target_shape) for r in rules]
        if kind == "sidecar":
            return head_types(main, named)
        trunk = [(r.target, r.target_shape) for r in rules if r.role is not Role.MTP]
        table = self.model.table
        weighted = self.importance.of_model is not None
        facts = TrunkFacts(table.trunk_layers, table.experts, table.heads_per_kv_head, weighted)
        types = trunk_types(main, trunk, facts)
        if head is not None:
            types |= head_types(head, [(r.target, r.target_shape) for r in rules if r.role is Role.MTP])
        return types

    def _type(self, rule: Rule, chosen: BlockType | None) -> tuple[BlockType, str | None]:
        """(type, the one that was wanted where rows do not fit it)."""
        if chosen is None:
            return block_type("F32"), None
        wanted = self.overrides.apply(rule.target, chosen)
        fits = fitting(wanted, rule.target_shape[-1])
        return fits, (wanted.name if fits is not wanted else None)


def importance_for(model: Model, imatrix: Path | None, head: ImportanceMatrix | None) -> ImportanceMatrix | None:
    """What a model's tensors are weighted by: entries of both files that fit it. Raises InputError."""
    return _Importance(model, Options(imatrix=imatrix, head_importance=head)).matrix


class _Importance:
    """The importance of a run: of the whole model, of the head where that has none, and what neither has.

    Only the former decides about the trunk's mix, as in llama-quantize.
    """

    def __init__(self, model: Model, options: Options) -> None:
        self.of_model = read_imatrix(options.imatrix) if options.imatrix else None
        self.of_head = options.head_importance
        self.unfit: list[str] = []
        entries: dict[str, np.ndarray] = {}
        for matrix, rules in (
            (self.of_head, [r for r in model.rules if r.role is Role.MTP]),
            (self.of_model, model.rules),
        ):
            if matrix is not None:
                entries |= self._fitting(matrix, {r.target: r.target_shape for r in rules})
        first = self.of_model or self.of_head
        self.matrix = replace(first, entries=entries) if first else None

    def _fitting(self, matrix: ImportanceMatrix, shapes: dict[str, tuple[int, ...]]) -> dict[str, np.ndarray]:
        """The entries of a matrix for these tensors. Raises InputError where one has another size."""
        fitting: dict[str, np.ndarray] = {}
        for name in sorted(matrix.entries.keys() & shapes.keys()):
            shape, values = shapes[name], matrix.entries[name]
            if values.size == shape[-1] * (shape[0] if len(shape) == 3 else 1):
                fitting[name] = values
            elif name == "token_embd.weight":  # of tied models it is the output's input; llama-quantize ignores it
                self.unfit.append(name)
            else:
                raise InputError(
                    "the importance matrix is of another model", matrix.file, name,
                    expected=f"{shape[-1]} columns per matrix of {list(shape)}", found=f"{values.size} values",
                )  # fmt: skip
        return fitting

    def serves(self, entry: TensorEntry) -> bool:
        """Whether this tensor is quantized with weights."""
        return self.matrix is not None and takes_weights(entry.type) and entry.name in self.matrix.entries

    def keys(self, main: Mix, head: Mix | None) -> list[KeyValue]:
        """The metadata that says by what a file was weighted."""
        keys: list[KeyValue] = []
        if self.of_model is not None and main.type not in FLOAT_TYPES:
            keys += self.of_model.keys()
        if self.of_head is not None and (head or main).type not in FLOAT_TYPES:
            keys.append(text("mtp.imatrix.file", self.of_head.file.name[:127]))
        return keys

    def notes(self, files: list[PlannedFile]) -> list[str]:
        if self.matrix is None:
            return []
        without = sorted({
            t.entry.name for f in files for t in f.tensors if takes_weights(t.type) and not t.weighted
        })  # fmt: skip
        if not without:
            return []
        head = sum(
            any(t.entry.name == n and t.rule.role is Role.MTP for f in files for t in f.tensors) for n in without
        )
        of_head = f" ({head} of the MTP head)" if head else ""
        what = f"{len(without)} tensors{of_head} have no entry in the importance matrix"
        return [f"{what} and are quantized without weights: {', '.join(without)}"]


class _Overrides:
    """--tensor-type REGEX=TYPE: searched anywhere in the GGUF name, the last match wins."""

    def __init__(self, options: Sequence[str]) -> None:
        self.options = options
        self.rules = [self._parse(option) for option in options]
        self.matched = [False] * len(options)

    @staticmethod
    def _parse(option: str) -> tuple[re.Pattern[str], BlockType]:
        pattern, equals, name = option.rpartition("=")
        if not equals or not pattern:
            raise UsageError("--tensor-type needs REGEX=TYPE", found=option)
        try:
            kind = block_type(name)
        except UnknownTypeError as error:
            raise UsageError(f"--tensor-type {option}", found=str(error)) from error
        if not kind.can_write:
            raise UnsupportedError(f"--tensor-type {option}: tensors of type {kind.name} cannot be written")
        try:
            return re.compile(pattern), kind
        except re.error as error:
            raise UsageError(f"--tensor-type {option}: not a regular expression", found=str(error)) from error

    def apply(self, name: str, kind: BlockType) -> BlockType:
        for i, (pattern, override) in enumerate(self.rules):
            if pattern.search(name):
                self.matched[i], kind = True, override
        return kind

    def refuse_unmatched(self) -> None:
        for option, matched in zip(self.options, self.matched, strict=True):
            if not matched:
                raise UsageError(
                    f"--tensor-type {option} matches no tensor that can be quantized",
                    hint="names are GGUF's, such as blk.0.ffn_down.weight; norms and other small tensors stay F32",
                )


def _target(out: Path, model: Model) -> Path:
    """OUT as a file name, which may still hold {type}."""
    if out.is_dir():
        return out / f"{model_name(model.folder)}-{{type}}.gguf"
    return out


def _trunk_mixes(options: Options, target: Path) -> list[Mix]:
    names = options.types or _type_in_name(target) or ()
    if not names and options.packaging is Packaging.ONLY:
        names = (options.mtp_type or DEFAULT_HEAD,)
    try:
        chosen = [mix(name) for name in names or (DEFAULT_TYPE,)]
    except UnknownTypeError as error:
        raise UsageError("--type", found=str(error)) from error
    if len({m.name for m in chosen}) < len(chosen):
        raise UsageError("--type names a type twice", found=",".join(names))
    if len(chosen) > 1 and "{type}" not in target.name:
        raise UsageError(
            "several types need {type} in the output's name", found=str(target), hint="for example out/NAME-{type}.gguf"
        )
    return chosen


def _type_in_name(target: Path) -> tuple[str, ...]:
    found = re.findall(rf"(?<![A-Za-z0-9])({'|'.join(MIXES)})(?![A-Za-z0-9_])", target.name, re.IGNORECASE)
    return (found[-1],) if found else ()


def _head_mix(options: Options, trunk: Mix) -> Mix:
    """The head's mix: as asked, else Q8_0 or the trunk's where that keeps more bits."""
    asked = options.mtp_type
    if asked is None:
        if options.packaging is Packaging.ONLY:
            return trunk
        more = block_type(trunk.type).bits_per_value > block_type(DEFAULT_HEAD).bits_per_value
        return trunk if more else mix(DEFAULT_HEAD)
    if asked.lower() == MATCH:
        return trunk
    try:
        return mix(asked)
    except UnknownTypeError as error:
        raise UsageError("--mtp-type", found=str(error), hint="or match, for the trunk's type") from error


def sidecar_path(target: Path, trunk: str, head: str) -> Path:
    """mtp-NAME-HEADTYPE.gguf beside the trunk's file; trunk and head are names of mixes."""
    name = target.name
    if "{type}" in name:
        name = name.replace("{type}", head)
    elif re.search(re.escape(trunk), name, re.IGNORECASE):
        name = re.sub(re.escape(trunk), head, name, flags=re.IGNORECASE)
    else:
        stem = name.removesuffix(".gguf")
        name = f"{stem}-{head}.gguf"
    return target.with_name(_SIDECAR_PREFIX + name.removeprefix(_SIDECAR_PREFIX))


def name_notes(files: list[PlannedFile]) -> list[str]:
    """What the engine's discovery would make of the names."""
    notes = [
        f"{f.path.name}: engines take a name with '{_SIDECAR_PREFIX}' for a sidecar; write MTP in capitals"
        for f in files
        if f.kind not in {"sidecar", DRAFTER} and _SIDECAR_PREFIX in f.path.name
    ]
    notes += [
        f"{f.path.name}: engines find a sidecar by the prefix '{_SIDECAR_PREFIX}'"
        for f in files
        if f.kind in {"sidecar", DRAFTER} and not f.path.name.startswith(_SIDECAR_PREFIX)
    ]
    too_long = [t.entry.name for f in files for t in f.tensors if len(t.entry.name) > MAX_NAME]
    assert not too_long, too_long
    return notes
