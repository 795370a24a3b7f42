"""The general.* keys: name and card fields, size label, file type, and what this program adds (spec/qwen.md, 7, 8)."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from converter.errors import InputError
from converter.files import model_name
from converter.gguf_file import KeyValue, ValueType, array, text, u32

_QUANTIZATION_VERSION = 2


def card_keys(folder: Path, name: str | None) -> tuple[list[KeyValue], bool]:
    """Keys from model card, config, generation config and folder name; and whether a size label is among them."""
    import logging
    import tempfile

    from gguf import GGUFWriter, Metadata

    logging.getLogger("gguf").setLevel(logging.ERROR)
    try:
        with tempfile.TemporaryDirectory() as place:
            link = Path(place, model_name(folder))  # the library goes by the folder's name
            link.symlink_to(folder.resolve())
            metadata = Metadata.load(None, link, name)
    except Exception as error:  # a card's front matter or a JSON file that the library cannot take
        raise InputError(
            "model card or generation_config.json cannot be read", folder, found=f"{type(error).__name__}: {error}"
        ) from error
    writer = GGUFWriter(path=None, arch="")
    metadata.set_gguf_meta_model(writer)
    keys: list[KeyValue] = []
    for key, entry in writer.kv_data[0].items():
        if key == "general.architecture":
            continue
        kind = ValueType(entry.type)
        if kind is ValueType.ARRAY:
            if entry.value:
                keys.append(array(key, ValueType.STRING, [str(v) for v in entry.value]))
        else:
            keys.append(KeyValue(key, kind, entry.value))
    return keys, metadata.size_label is not None


def size_label(tensors: Iterable[tuple[str, int]], experts: int) -> str:
    """Parameters of a file as people write them: "27B"; with experts "8x4.5M", shared weights plus one expert."""
    from gguf.utility import size_label as notation

    total = shared = expert = 0
    for name, values in tensors:
        total += values
        if "_exps." in name:
            expert += values // experts
        else:
            shared += values
    return notation(total, shared, expert, experts)


def file_keys(
    architecture: str, card: Sequence[KeyValue], label: str | None, own: Sequence[KeyValue], file_type: int
) -> list[KeyValue]:
    """All keys before the tokenizer's, `general.architecture` first as tools expect."""
    keys = [text("general.architecture", architecture), text("general.type", "model"), *card]
    if label is not None:
        keys.append(text("general.size_label", label))
    keys += [KeyValue(f"{architecture}.{k.key}", k.type, k.value, k.is_array) for k in own]
    return [*keys, u32("general.file_type", file_type), u32("general.quantization_version", _QUANTIZATION_VERSION)]


@dataclass(frozen=True)
class Provenance:
    """Where a file comes from, for its metadata.

    program: name and version. source: repository or folder name; revision: its commit, where that is known. files: of
    the source, with their SHA-256. options: what was asked for, JSON-able.
    """

    program: str
    source: str
    revision: str | None = None
    files: Mapping[str, str] = field(default_factory=dict)
    options: Mapping[str, object] = field(default_factory=dict)

    def keys(self, kind: str, trunk: str, head: str | None, tensors: Iterable[tuple[str, str]]) -> list[KeyValue]:
        """Of one file: its kind and mixes, and the type of every tensor by name.

        A split file's first part has few of the tensors, but tells all types. Lists are of strings, which all viewers show.
        """
        options = {"packaging": kind, "type": trunk, "mtp_type": head, **self.options}
        found = [text("mtp.program", self.program), text("mtp.source", self.source)]
        if self.revision:
            found.append(text("mtp.source.revision", self.revision))
        if self.files:
            sums = [f"{digest}  {name}" for name, digest in sorted(self.files.items())]
            found.append(array("mtp.source.sha256", ValueType.STRING, sums))
        found.append(text("mtp.options", json.dumps(options, sort_keys=True)))
        return [*found, array("mtp.tensor_types", ValueType.STRING, [f"{name}={kind}" for name, kind in tensors])]
