"""Level structure: the file as a container, its tensors and its metadata, against the source or against itself.

With a source the file is compared with the plan of its own conversion: each tensor's name and shape, each key's value.
Without one, shapes and keys must agree with each other, and the tokenizer with itself.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from converter import archs
from converter.checkpoint import some
from converter.errors import ToolError, UnsupportedError
from converter.gguf_file import KeyValue, ValueType
from converter.gguf_model import GGUFModel
from converter.heads import inspect
from converter.model import Model
from converter.plan import DRAFTER, Options, Packaging, PlannedFile, make_plan
from verify.results import Finding, LevelResult

_PACKAGING = {"bundled": Packaging.BUNDLED, "trunk": Packaging.NONE, "sidecar": Packaging.ONLY, DRAFTER: Packaging.NONE}
# What depends on names, types and programs rather than on the model.
_FREE = ("general.", "quantize.", "mtp.", "split.")
_NAME = 40


def check_structure(model: GGUFModel, source: Model | None) -> LevelResult:
    """Compare with the source where there is one. The file's header has been read without error already."""
    head = inspect(model.file)
    findings = [Finding(problem) for problem in head.problems]
    if source is not None:
        findings += _against_plan(model, _plan(model, source, head.kind))
    findings += _tokenizer(model)
    layers = (
        f"{head.trunk_layers} layers"
        if head.drafts_for
        else f"{head.trunk_layers} layers" + (f" and a head of {head.head_layers}" if head.head_layers else ", no head")
    )
    compared = "as the source's conversion has them" if source is not None else "not compared with a source"
    summary = f"{head.kind}, {layers}, {len(model.tensors)} tensors, {len(model.keys)} keys: {compared}"
    return LevelResult("structure", summary, findings, {"kind": head.kind, "types": head.trunk_types | head.head_types})


def _plan(model: GGUFModel, source: Model, kind: str) -> PlannedFile:
    """What a conversion of the source to this kind of file would be."""

    def planned(pre_tokenizer: str | None) -> PlannedFile:
        options = Options(("F32",), None, _PACKAGING[kind], (), pre_tokenizer)
        return make_plan(source, Path("planned.gguf"), options).files[0]

    try:
        return planned(None)
    except UnsupportedError:  # a pre-tokenizer that was named by hand
        return planned(model.get("tokenizer.ggml.pre"))


def _against_plan(model: GGUFModel, plan: PlannedFile) -> Iterable[Finding]:
    wanted = {t.entry.name: t.entry.ne for t in plan.tensors}
    found = {t.name: t.ne for t in model.tensors}
    missing, extra = wanted.keys() - found.keys(), found.keys() - wanted.keys()
    if missing:
        yield Finding(f"{len(missing)} tensors are missing", some(missing))
    if extra:
        yield Finding(f"{len(extra)} tensors that the source does not make", some(extra))
    for name in sorted(wanted.keys() & found.keys()):
        if _trimmed(wanted[name]) != _trimmed(found[name]):
            yield Finding("wrong shape", name, str(list(wanted[name])), str(list(found[name])))
    yield from _keys(model.keys, plan.keys)


def _trimmed(ne: tuple[int, ...]) -> tuple[int, ...]:
    while len(ne) > 1 and ne[-1] == 1:
        ne = ne[:-1]
    return ne


def _keys(found: Mapping[str, KeyValue], wanted: list[KeyValue]) -> Iterable[Finding]:
    for key in wanted:
        if key.key.startswith(_FREE) and key.key != "general.architecture":
            continue
        other = found.get(key.key)
        if other is None:
            yield Finding("a metadata key is missing", key.key, _shown(key.value))
        elif not _equal(key, other):
            yield _difference(key, other)
        elif (other.type, other.is_array) != (key.type, key.is_array):
            yield Finding("a metadata key has another type", key.key, key.type.name, other.type.name)


def _equal(wanted: KeyValue, found: KeyValue) -> bool:
    if wanted.type is ValueType.FLOAT32 and not wanted.is_array and isinstance(found.value, float):
        return np.float32(wanted.value) == np.float32(found.value)
    return bool(wanted.value == found.value)


def _difference(wanted: KeyValue, found: KeyValue) -> Finding:
    if wanted.is_array and found.is_array:
        if len(wanted.value) != len(found.value):
            return Finding("another length", wanted.key, str(len(wanted.value)), str(len(found.value)))
        pairs = zip(wanted.value, found.value, strict=True)
        at = next(i for i, (a, b) in enumerate(pairs) if a != b)
        return Finding("another value", f"{wanted.key}[{at}]", repr(wanted.value[at]), repr(found.value[at]))
    return Finding("another value", wanted.key, _shown(wanted.value), _shown(found.value))


def _shown(value: Any) -> str:
    words = repr(value)
    return (
        words if len(words) <= _NAME else f"{words[:_NAME]}… ({len(value)})" if isinstance(value, list | str) else words
    )


def _tokenizer(model: GGUFModel) -> Iterable[Finding]:
    """The vocabulary against the embedding, merges and special tokens against the vocabulary."""
    tokens = model.get("tokenizer.ggml.tokens")
    if not isinstance(tokens, list):
        yield Finding("the file has no tokens", "tokenizer.ggml.tokens")
        return
    embedding = next((t for t in model.tensors if t.name == "token_embd.weight"), None)
    if embedding is not None and embedding.ne[1] != len(tokens):
        yield Finding(
            "tokens and rows of the embedding differ", "token_embd.weight", str(len(tokens)), str(embedding.ne[1])
        )
    kinds = model.get("tokenizer.ggml.token_type", [])
    if len(kinds) != len(tokens):
        yield Finding("not one kind per token", "tokenizer.ggml.token_type", str(len(tokens)), str(len(kinds)))
    known = set(tokens)
    if len(known) != len(tokens):
        yield Finding("a token occurs twice", "tokenizer.ggml.tokens")
    for i, merge in enumerate(model.get("tokenizer.ggml.merges", [])):
        a, _, b = merge.partition(" ")
        if not {a, b, a + b} <= known:
            yield Finding(
                "a merge of tokens that are not in the vocabulary", f"tokenizer.ggml.merges[{i}]", found=repr(merge)
            )
            break
    for name, entry in model.keys.items():
        if name.startswith("tokenizer.ggml.") and name.endswith("_token_id") and not 0 <= entry.value < len(tokens):
            yield Finding("a special token out of range", name, f"below {len(tokens)}", str(entry.value))


def unreadable(error: ToolError) -> LevelResult:
    """The result of a file that cannot even be read."""
    facts = dict(error.facts())
    finding = Finding(
        error.what, str(facts.get("tensor", "")), str(facts.get("expected", "")), str(facts.get("found", ""))
    )
    return LevelResult("structure", "the file cannot be read", [finding])


def is_known(model: GGUFModel) -> bool:
    """Whether this program knows the file's architecture."""
    return archs.by_gguf_name(model.get("general.architecture", "")) is not None
