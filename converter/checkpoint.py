"""A checkpoint folder of safetensors shards: what it holds, from headers alone, and reading rows of it.

Format: 8 bytes little-endian header length, JSON header {name: {dtype, shape, data_offsets}}, then the data; the
tensors cover the data without gaps (safetensors format specification). Nothing is ever unpickled.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any, Protocol

from converter.errors import CheckpointError, EnvironmentFailure
from converter.files import os_errors, read_json_object

if TYPE_CHECKING:
    import numpy as np

DTYPE_BYTES = {
    "F64": 8, "F32": 4, "F16": 2, "BF16": 2, "F8_E4M3": 1, "F8_E5M2": 1, "F8_E8M0": 1,
    "I64": 8, "I32": 4, "I16": 2, "I8": 1, "U64": 8, "U32": 4, "U16": 2, "U8": 1, "BOOL": 1,
}  # fmt: skip
MAX_HEADER = 100_000_000  # the limit of the safetensors library
INDEX = "model.safetensors.index.json"


@dataclass(frozen=True)
class TensorInfo:
    """A tensor as a shard's header tells it. `begin` and `end` are byte positions in the file; shape in torch order."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    file: Path
    begin: int
    end: int

    @property
    def itemsize(self) -> int:
        return DTYPE_BYTES[self.dtype]

    @property
    def values(self) -> int:
        return math.prod(self.shape)


@dataclass(frozen=True)
class Ghost:
    """An index entry without a tensor: the file that should hold it, and another one that does, if any."""

    file: Path
    elsewhere: Path | None


@dataclass(frozen=True)
class ShardId:
    """What tells that a shard is still the one it was: size, time of change or a hub's etag, hash of its header."""

    size: int
    stamp: str
    header_sha256: str


class ShardFiles(Protocol):
    """Where shards lie and how their bytes are read, by any thread; travels to other processes."""

    def names(self) -> list[str]:
        """The *.safetensors files, sorted."""
        ...

    def check(self, file: Path) -> None:
        """Raise CheckpointError where this file must not be taken for one of the model's."""
        ...

    def size(self, file: Path) -> int: ...

    def stamp(self, file: Path) -> str: ...

    def read(self, file: Path, position: int, view: memoryview) -> int:
        """Fill `view` with what stands from `position` on; returns how many bytes there were."""
        ...

    def close(self) -> None: ...


class LocalFiles:
    """Shards in a folder, wherever the reading process stands."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder.absolute()
        self._descriptors: dict[Path, int] = {}

    def __reduce__(self) -> tuple[object, ...]:
        return LocalFiles, (self.folder,)

    def names(self) -> list[str]:
        with os_errors("cannot list this folder", self.folder):
            return sorted(
                f.name for f in self.folder.glob("*.safetensors") if f.is_file() and not f.name.startswith(".")
            )

    def check(self, file: Path) -> None:
        """A shard may be a link only into the folder itself or into the Hub cache's blobs, where snapshots point to."""
        if not file.is_symlink():
            return
        target, home = file.resolve(), self.folder.resolve()
        blobs = home.parent.parent / "blobs"
        in_cache = home.parent.name == "snapshots" and target.parent == blobs
        if target.parent != home and not in_cache:
            raise CheckpointError(
                "this shard is a link that leaves the model folder", file,
                expected=f"a file in {self.folder}", found=str(target),
                hint="copy the file here if it is the one you mean",
            )  # fmt: skip

    def size(self, file: Path) -> int:
        with os_errors("cannot read this shard", file):
            return file.stat().st_size

    def stamp(self, file: Path) -> str:
        with os_errors("cannot read this shard", file):
            return str(file.stat().st_mtime_ns)

    def read(self, file: Path, position: int, view: memoryview) -> int:
        done = 0
        with os_errors("cannot read this shard", file):
            descriptor = self._descriptor(file)
            while done < len(view) and (count := os.preadv(descriptor, [view[done:]], position + done)):
                done += count
        return done

    def close(self) -> None:
        while self._descriptors:
            os.close(self._descriptors.popitem()[1])

    def _descriptor(self, file: Path) -> int:
        # Two threads may open a file at once; setdefault keeps one, and the other is closed again.
        known = self._descriptors.get(file)
        if known is None:
            opened = os.open(self.folder / file.name, os.O_RDONLY)
            known = self._descriptors.setdefault(file, opened)
            if known != opened:
                os.close(opened)
        return known


@dataclass
class Checkpoint:
    """All tensors of a model.

    `strays` are tensors that the index does not know; `ghosts` index entries that no file has. What becomes of both is
    decided by whoever knows what the model needs.
    """

    folder: Path
    files: ShardFiles
    tensors: dict[str, TensorInfo]
    strays: dict[str, TensorInfo] = field(default_factory=dict)
    ghosts: dict[str, Ghost] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    ids: dict[Path, ShardId] = field(default_factory=dict)

    def shards(self) -> list[Path]:
        return sorted({t.file for t in self.tensors.values()})

    def read(self, info: TensorInfo, begin: int, out: np.ndarray) -> None:
        """Fill `out` (contiguous) with the tensor's bytes from `begin` on. Raises EnvironmentFailure where they end."""
        view = out.data.cast("B")
        position = info.begin + begin
        assert position + len(view) <= info.end, (info.name, begin, len(view))
        count = self.files.read(info.file, position, view)
        if count < len(view):
            raise EnvironmentFailure(
                "the shard ended while it was read: it changed since its header was checked",
                info.file, info.name, f"{info.end:,} bytes", f"{position + count:,} bytes",
            )  # fmt: skip

    def close(self) -> None:
        self.files.close()


class JoinedFiles:
    """Shards of several models, told apart by their folders: for reading alone, after all headers were read."""

    def __init__(self, files: Mapping[Path, ShardFiles]) -> None:
        self._of = dict(files)

    def names(self) -> list[str]:
        return sorted({name for files in self._of.values() for name in files.names()})

    def check(self, file: Path) -> None:
        self._of[file.parent].check(file)

    def size(self, file: Path) -> int:
        return self._of[file.parent].size(file)

    def stamp(self, file: Path) -> str:
        return self._of[file.parent].stamp(file)

    def read(self, file: Path, position: int, view: memoryview) -> int:
        return self._of[file.parent].read(file, position, view)

    def close(self) -> None:
        for files in self._of.values():
            files.close()


def join(first: Checkpoint, *others: Checkpoint) -> Checkpoint:
    """What reads the tensors of all; names may repeat, so the tensors themselves stay with each."""
    everyone = (first, *others)
    ids = {file: i for checkpoint in everyone for file, i in checkpoint.ids.items()}
    return Checkpoint(first.folder, JoinedFiles({c.folder: c.files for c in everyone}), {}, ids=ids)


def open_checkpoint(folder: Path, files: ShardFiles | None = None) -> Checkpoint:
    """Read the headers of all shards of a model and check them against sizes and index.

    folder: where config and index lie. files: where the shards do; None for the folder itself. Raises CheckpointError
    where a file is damaged, missing or outside the folder.
    """
    require_folder(folder)
    files = files or LocalFiles(folder)
    present = [folder / name for name in files.names()]
    reader = _HeaderReader(files)
    index_file = folder / INDEX
    if index_file.is_file():
        return _with_index(folder, index_file, present, reader)
    if not present:
        raise _no_weights(folder)
    return _without_index(folder, present, reader)


def require_folder(folder: Path) -> None:
    """Raise CheckpointError where this is no folder."""
    if not folder.is_dir():
        what = "this is a file, not a model folder" if folder.exists() else "there is no such folder"
        raise CheckpointError(what, folder, hint="give the folder that holds config.json and *.safetensors")


def _without_index(folder: Path, present: list[Path], reader: _HeaderReader) -> Checkpoint:
    tensors: dict[str, TensorInfo] = {}
    for file in present:
        for info in reader.header(file):
            other = tensors.setdefault(info.name, info)
            if other is not info:
                raise CheckpointError(
                    "two files hold a tensor of the same name, and there is no index to say which counts",
                    file, info.name, expected="one of them", found=f"{other.file.name} and {file.name}",
                    hint="move the file that does not belong to this model out of the folder",
                )  # fmt: skip
    return Checkpoint(folder, reader.files, tensors, ids=reader.ids)


def _with_index(folder: Path, index_file: Path, present: list[Path], reader: _HeaderReader) -> Checkpoint:
    weight_map = _weight_map(index_file)
    tensors: dict[str, TensorInfo] = {}
    homeless: dict[str, Path] = {}
    everywhere: dict[str, Path] = {}
    strays: dict[str, TensorInfo] = {}
    notes: list[str] = []
    for shard in sorted(set(weight_map.values())):
        file = _shard_path(folder, index_file, shard)
        wanted = {name for name, where in weight_map.items() if where == shard}
        if file not in present:
            raise CheckpointError(
                f"the index names a shard that is not there, with {len(wanted)} tensors",
                file, tensor=some(wanted), hint="the download is incomplete: fetch this file",
            )  # fmt: skip
        headers = {info.name: info for info in reader.header(file)}
        everywhere.update(dict.fromkeys(headers, file))
        for name in sorted(wanted):
            if name in headers:
                tensors[name] = headers[name]
            else:
                homeless[name] = file
        unlisted = headers.keys() - weight_map.keys()
        strays.update((name, headers[name]) for name in sorted(unlisted))
    listed = {_shard_path(folder, index_file, shard) for shard in weight_map.values()}
    for file in present:
        if file in listed:
            continue
        for info in reader.header(file):
            if info.name in weight_map:
                continue
            other = strays.setdefault(info.name, info)
            if other is not info:
                raise CheckpointError(
                    "two files outside the index hold a tensor of the same name",
                    file, info.name, found=f"{other.file.name} and {file.name}",
                    hint="move the file that does not belong to this model out of the folder",
                )  # fmt: skip
        notes.append(f"{file.name} is not in {INDEX}: the index decides, tensors that it lists elsewhere are not read")
    ghosts = {name: Ghost(file, everywhere.get(name)) for name, file in homeless.items()}
    return Checkpoint(folder, reader.files, tensors, strays, ghosts, notes, reader.ids)


def _weight_map(index_file: Path) -> dict[str, str]:
    found = read_json_object(index_file, CheckpointError).get("weight_map")
    if not isinstance(found, dict) or not all(isinstance(v, str) for v in found.values()):
        raise CheckpointError("the index has no usable weight_map", index_file, expected='{"weight_map": {name: file}}')
    if not found:
        raise CheckpointError("the index lists no tensors", index_file)
    return found


def _shard_path(folder: Path, index_file: Path, shard: str) -> Path:
    path = PurePosixPath(shard)
    if path.is_absolute() or ".." in path.parts or "\\" in shard or "\0" in shard or path.name != shard:
        raise CheckpointError(
            "the index names a file outside the model folder",
            index_file,
            expected="a plain file name",
            found=repr(shard),
        )
    return folder / shard


def _no_weights(folder: Path) -> CheckpointError:
    pickles = sorted(f.name for f in folder.iterdir() if f.suffix in {".bin", ".pt", ".pth"})
    if pickles:
        return CheckpointError(
            "the weights are pickle files, which can run code when opened; they are not read",
            folder, expected="*.safetensors", found=", ".join(pickles[:3]),
            hint="save them as safetensors first: AutoModel.from_pretrained(folder, weights_only=True)"
            ".save_pretrained(new_folder)",
        )  # fmt: skip
    return CheckpointError("this folder has no weights", folder, expected="*.safetensors", found="none")


class _HeaderReader:
    """Reads the headers of shards and remembers what tells these shards from others."""

    def __init__(self, files: ShardFiles) -> None:
        self.files = files
        self.ids: dict[Path, ShardId] = {}

    def header(self, file: Path) -> list[TensorInfo]:
        """The tensors of one shard, every number checked against the file's size."""
        self.files.check(file)
        size, stamp = self.files.size(file), self.files.stamp(file)
        prefix = self._read(file, 0, min(8, size))
        length = int.from_bytes(prefix, "little")
        if len(prefix) < 8 or length > size - 8 or length > MAX_HEADER:
            raise CheckpointError(
                "this is not a safetensors file, or it is cut off inside its header",
                file, expected=f"a header of {length:,} bytes", found=f"{size:,} bytes in all",
            )  # fmt: skip
        raw = self._read(file, 8, length)
        self.ids[file] = ShardId(size, stamp, hashlib.sha256(raw).hexdigest())
        try:
            header = json.loads(raw, object_pairs_hook=_unique_keys)
        except (ValueError, RecursionError) as error:
            raise CheckpointError("the shard's header is not valid JSON", file, found=str(error)) from error
        if not isinstance(header, dict):
            raise CheckpointError("the shard's header is not a JSON object", file)
        header.pop("__metadata__", None)
        infos = [_tensor_info(name, entry, file, 8 + length) for name, entry in header.items()]
        _check_coverage(infos, file, 8 + length, size)
        return infos

    def _read(self, file: Path, position: int, count: int) -> bytes:
        raw = bytearray(count)
        return bytes(raw[: self.files.read(file, position, memoryview(raw))])


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    keys = dict(pairs)
    if len(keys) != len(pairs):
        twice = next(k for k, _ in pairs if sum(k == other for other, _ in pairs) > 1)
        raise ValueError(f"the name {twice!r} occurs twice")
    return keys


def _tensor_info(name: str, entry: Any, file: Path, data: int) -> TensorInfo:
    def integers(value: object) -> bool:
        return isinstance(value, list) and all(type(n) is int and n >= 0 for n in value)

    if not isinstance(entry, Mapping) or not integers(entry.get("shape")) or not integers(entry.get("data_offsets")):
        raise CheckpointError("the shard's header has a malformed entry", file, name, found=json.dumps(entry)[:200])
    dtype = entry.get("dtype")
    if dtype not in DTYPE_BYTES:
        raise CheckpointError("unknown dtype", file, name, expected=", ".join(DTYPE_BYTES), found=repr(dtype))
    shape, offsets = tuple(entry["shape"]), entry["data_offsets"]
    needed = math.prod(shape) * DTYPE_BYTES[dtype]
    if len(offsets) != 2 or offsets[1] - offsets[0] != needed:
        raise CheckpointError(
            "the header's data range does not fit the shape", file, name,
            expected=f"{needed:,} bytes for {dtype} {list(shape)}", found=f"data_offsets {offsets}",
        )  # fmt: skip
    return TensorInfo(name, dtype, shape, file, data + offsets[0], data + offsets[1])


def _check_coverage(infos: list[TensorInfo], file: Path, data: int, size: int) -> None:
    """The tensors must tile the data section: no overlap, no hole, no missing or extra byte."""
    end = max((t.end for t in infos), default=data)
    if end > size:
        lost = [t.name for t in infos if t.end > size]
        raise CheckpointError(
            f"the shard is shorter than its header says: {len(lost)} tensor(s) cut off or missing",
            file, some(lost), f"{end:,} bytes", f"{size:,} bytes",
            hint="the download is incomplete: fetch this file again",
        )  # fmt: skip
    position = data
    for info in sorted(infos, key=lambda t: (t.begin, t.end)):
        if info.begin != position:
            what = "overlaps the one before it" if info.begin < position else "leaves a gap before it"
            raise CheckpointError(
                f"the shard's header is inconsistent: this tensor {what}",
                file, info.name, expected=f"begin at byte {position:,}", found=f"byte {info.begin:,}",
            )  # fmt: skip
        position = info.end
    if size > end:
        raise CheckpointError(
            "the shard is longer than its header says", file, expected=f"{end:,} bytes", found=f"{size:,} bytes",
            hint="fetch this file again",
        )  # fmt: skip


def some(names: Iterable[str], most: int = 5) -> str:
    """A few of the names, and how many more there are."""
    ordered = sorted(names)
    more = f" and {len(ordered) - most} more" if len(ordered) > most else ""
    return ", ".join(ordered[:most]) + more
