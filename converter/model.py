"""A checkpoint understood: every tensor has its rule, every rule its tensors, and the head is counted.

Completeness is judged by the architecture's table alone. The index, the config and the file names only say where to
look; where they disagree with the table or with each other, that is an error or a note, never silence.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from converter import archs
from converter.checkpoint import Checkpoint, ShardFiles, TensorInfo, open_checkpoint, require_folder, some
from converter.config import Config
from converter.errors import CheckpointError, ToolError, UnsupportedError
from converter.rules import Architecture, Role, Rule, Table

# Keys by which configs of different families announce a head.
_ANNOUNCING = ("mtp_num_hidden_layers", "num_nextn_predict_layers")
SEPARATE_DRAFTER = "the drafter of this model is a checkpoint of its own: --assistant MODEL converts it as well"
READABLE = ("BF16", "F16", "F32")
_COMPARE_BYTES = 16 * 2**20


@dataclass
class Model:
    """A checkpoint with its table. sources: for every rule its tensors, in the rule's order."""

    folder: Path
    config: Config
    architecture: Architecture
    checkpoint: Checkpoint
    table: Table
    sources: Mapping[str, tuple[TensorInfo, ...]]
    rules: list[Rule]
    dropped: Mapping[str, int] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    @property
    def head_layers(self) -> int:
        return self.table.head_layers

    def close(self) -> None:
        self.checkpoint.close()


def read_model(folder: Path, *, with_head: bool = True, files: ShardFiles | None = None) -> Model:
    """Open a model folder and match its tensors to its architecture's table.

    files: where the shards are, None for the folder itself.
    with_head=False leaves MTP tensors out of account, whatever state they are in. Raises ToolError.
    """
    require_folder(folder)
    config = Config.load(folder)
    architecture = archs.find(config)
    checkpoint = open_checkpoint(folder, files)
    notes = list(checkpoint.notes)
    named = _canonical(checkpoint.tensors.values(), architecture)
    strays = {n: t for n, t in _canonical(checkpoint.strays.values(), architecture).items() if n not in named}
    table = _table_with_strays(config, architecture, named, strays, notes)
    _refuse_ghosts(checkpoint, architecture, table)
    wanted = [r for r in table.rules if with_head or r.role is not Role.MTP]
    if with_head:
        _refuse_broken_promise(config, table)
    _refuse_missing(config, checkpoint, wanted, named)
    if with_head and not architecture.drafts_for:
        _compare_announcement(config, table, notes)
    dropped = _refuse_unnamed(config, table, named)
    sources = {rule.target: tuple(named[s] for s in rule.sources) for rule in wanted}
    for rule in wanted:
        for source in sources[rule.target]:
            _check(rule, source)
    kept = [rule for rule in wanted if not _is_copy(rule, sources, checkpoint, notes)]
    if table.head_layers > architecture.most_head_layers:
        notes.append(
            f"the head has {table.head_layers} layers; engines run only {architecture.most_head_layers} for "
            f"{architecture.name} and will refuse to draft with this file"
        )
    notes += [f"left out {count} tensors: {why}" for why, count in dropped.items()]
    return Model(folder, config, architecture, checkpoint, table, sources, kept, dropped, notes)


def _canonical(tensors: Iterable[TensorInfo], architecture: Architecture) -> dict[str, TensorInfo]:
    named: dict[str, TensorInfo] = {}
    for info in tensors:
        other = named.setdefault(architecture.canonical(info.name), info)
        if other is not info:
            raise CheckpointError(
                "two tensors mean the same thing under different prefixes", info.file, info.name, found=other.name
            )
    return named


def _table_with_strays(
    config: Config,
    architecture: Architecture,
    named: dict[str, TensorInfo],
    strays: dict[str, TensorInfo],
    notes: list[str],
) -> Table:
    """The table; tensors that the index forgot are taken in where the table needs them (`named` grows)."""
    table = architecture.table(config, named.keys())
    if not strays:
        return table
    wider = architecture.table(config, named.keys() | strays.keys())
    complete = all(s in named for rule in table.rules for s in rule.sources)
    if complete and wider.head_layers == table.head_layers:
        return table
    needed = {s for rule in wider.rules for s in rule.sources if s in strays}
    if not needed:
        return table
    named.update((name, strays[name]) for name in sorted(needed))
    files = sorted({strays[name].file.name for name in needed})
    notes.append(f"{len(needed)} tensors are in {', '.join(files)} but not in the index: included")
    return wider


def _refuse_ghosts(checkpoint: Checkpoint, architecture: Architecture, table: Table) -> None:
    for name, ghost in sorted(checkpoint.ghosts.items()):
        if architecture.canonical(name) in table.optional:
            continue
        elsewhere = f"it is in {ghost.elsewhere.name}" if ghost.elsewhere else "no shard has it"
        raise CheckpointError(
            "the index names a tensor that its shard does not hold", ghost.file, name, found=elsewhere,
            hint="index and shards are not of one download: fetch them again",
        )  # fmt: skip


def _refuse_missing(config: Config, checkpoint: Checkpoint, rules: list[Rule], named: Mapping[str, TensorInfo]) -> None:
    for role, part in ((Role.TRUNK, "the trunk"), (Role.SHARED, "the trunk"), (Role.MTP, "the MTP head")):
        needed = [s for rule in rules if rule.role is role for s in rule.sources]
        missing = [s for s in needed if s not in named]
        if missing:
            raise CheckpointError(
                f"{part} is not complete: {len(missing)} of its {len(needed)} tensors are missing",
                checkpoint.folder, some(missing),
                expected=f"what {config.file.name} describes: {config.architecture()}",
                found=f"{len(named)} tensors in {len(checkpoint.shards())} files",
                hint=_missing_hint(config, role),
            )  # fmt: skip


def _missing_hint(config: Config, role: Role) -> str:
    quantized = config.top.get("quantization_config") or config.text.get("quantization_config")
    if quantized:
        method = quantized.get("quant_method", "unknown method") if isinstance(quantized, dict) else quantized
        return f"these weights are quantized ({method}) and packed: convert the original checkpoint instead"
    if role is Role.MTP:
        return "fetch the file that holds them, or leave the head out: --no-mtp"
    return "fetch the files that hold them; does config.json belong to this model?"


def _announced(config: Config) -> tuple[str, int]:
    """(key, number of head layers) as config.json has it; ("", 0) where it says nothing."""
    key = next((k for k in _ANNOUNCING if config.get(k) is not None), "")
    return key, config.integer(key, least=0) if key else 0


def _refuse_broken_promise(config: Config, table: Table) -> None:
    key, announced = _announced(config)
    if announced and not table.head_layers:
        raise CheckpointError(
            "config.json promises an MTP head, but the weights hold none", config.file, tensor="mtp.*",
            expected=f"{announced} layer(s) ({key})", found="0 tensors",
            hint="a fine-tuning or quantizing tool most likely dropped it. Convert without: --no-mtp. Or put it back: "
            "copy the shards of the original repository that hold mtp.* into this folder",
        )  # fmt: skip


def _compare_announcement(config: Config, table: Table, notes: list[str]) -> None:
    key, announced = _announced(config)
    found = table.head_layers
    if not found and archs.drafter_of(archs.find(config).name):
        notes.append(SEPARATE_DRAFTER)
    elif not found:
        notes.append("this model has no MTP head")
    elif not announced:
        notes.append(
            f"config.json does not announce an MTP head, but the weights hold one of {found} layer(s): included"
        )
    elif announced != found:
        raise CheckpointError(
            "config.json and the weights disagree about the MTP head", config.file, tensor="mtp.layers.*",
            expected=f"{announced} layer(s) ({key})", found=f"{found} layer(s)",
        )  # fmt: skip


def _refuse_unnamed(config: Config, table: Table, named: Mapping[str, TensorInfo]) -> dict[str, int]:
    """Every tensor is used or left out by a rule with a reason; returns how many were left out for which."""
    used = {s for rule in table.rules for s in rule.sources}
    dropped: Counter[str] = Counter()
    unnamed: list[TensorInfo] = []
    for name, info in named.items():
        if name in used:
            continue
        drop = next((d for d in table.drops if d.matches(name)), None)
        if drop is None:
            unnamed.append(info)
        else:
            dropped[drop.why] += 1
    if unnamed:
        raise CheckpointError(
            f"{len(unnamed)} tensor(s) that no rule for {config.architecture()} names",
            unnamed[0].file, some(t.name for t in unnamed),
            expected=f"the tensors of {table.trunk_layers} trunk layers and {table.head_layers} head layer(s)",
            hint="config.json may be of another model or have lost a layer count; nothing is skipped silently",
        )  # fmt: skip
    return dict(dropped)


def _check(rule: Rule, source: TensorInfo) -> None:
    if source.shape != rule.shape:
        raise CheckpointError(
            rule.known_wrong.get(source.shape, "a tensor has the wrong shape"), source.file, source.name,
            expected=list(rule.shape), found=list(source.shape),
            hint="take the original checkpoint" if source.shape in rule.known_wrong else "does config.json belong to it?",
        )  # fmt: skip
    if source.dtype not in READABLE:
        kind: type[ToolError] = UnsupportedError if source.dtype.startswith("F") else CheckpointError
        raise kind(
            "weights of this dtype cannot be converted", source.file, source.name,
            expected=", ".join(READABLE), found=source.dtype,
            hint="this looks like a quantized checkpoint: convert the original one, in BF16",
        )  # fmt: skip


def _is_copy(
    rule: Rule, sources: Mapping[str, tuple[TensorInfo, ...]], checkpoint: Checkpoint, notes: list[str]
) -> bool:
    """Whether a tensor that may repeat another one does, to the byte; a note says what became of it."""
    if rule.duplicates is None:
        return False
    (mine,), (other,) = sources[rule.target], sources[rule.duplicates]
    same = mine.dtype == other.dtype and mine.shape == other.shape and _same_bytes(checkpoint, mine, other)
    fate = f"equals {other.name}: not stored twice" if same else f"differs from {other.name}: stored as {rule.target}"
    notes.append(f"{mine.name} {fate}")
    return same


def _same_bytes(checkpoint: Checkpoint, a: TensorInfo, b: TensorInfo) -> bool:
    size = a.end - a.begin
    for begin in range(0, size, _COMPARE_BYTES):
        count = min(_COMPARE_BYTES, size - begin)
        pair = np.empty((2, count), np.uint8)
        checkpoint.read(a, begin, pair[0])
        checkpoint.read(b, begin, pair[1])
        if not np.array_equal(pair[0], pair[1]):
            return False
    return True
