"""Damaged, incomplete and hostile checkpoints are refused with file, tensor, expected and found."""

from __future__ import annotations

import json
import shutil
import struct
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from converter.checkpoint import open_checkpoint
from converter.errors import CheckpointError, EnvironmentFailure
from tests.checkpoints import clone, load, read_index, save, variant, write_index
from tests.conftest import EXAMPLE

SHARDS = sorted(f.name for f in EXAMPLE.glob("*.safetensors"))
INDEX = "model.safetensors.index.json"


def refused(folder: Path, *words: str) -> CheckpointError:
    """Opening fails with exit code 3, and the message holds all these words."""
    with pytest.raises(CheckpointError) as caught:
        open_checkpoint(folder)
    assert caught.value.exit_code == 3
    for word in words:
        assert word in str(caught.value)
    return caught.value


def test_tensors_and_rows_equal_the_safetensors_library() -> None:
    """Names, shapes and every byte; and a piece read from the middle."""
    checkpoint = open_checkpoint(EXAMPLE)
    foreign = load(EXAMPLE)
    assert {n: t.shape for n, t in checkpoint.tensors.items()} == {n: tuple(t.shape) for n, t in foreign.items()}
    for name, info in checkpoint.tensors.items():
        raw = np.empty(info.end - info.begin, np.uint8)
        checkpoint.read(info, 0, raw)
        assert raw.tobytes() == foreign[name].contiguous().view(torch.uint8).numpy().tobytes()
    info = checkpoint.tensors["lm_head.weight"]
    rows = np.empty((3, 256), np.uint16)
    checkpoint.read(info, 5 * 512, rows)
    assert rows.tobytes() == foreign["lm_head.weight"][5:8].contiguous().view(torch.uint8).numpy().tobytes()
    checkpoint.close()


@pytest.mark.parametrize("lost", [1, 1000, 2**20])
def test_truncated_shard(tmp_path: Path, lost: int) -> None:
    """S33: one byte is enough; the message has both sizes and the tensors concerned."""
    folder = clone(EXAMPLE, tmp_path)
    shard = folder / SHARDS[0]
    size = shard.stat().st_size
    with shard.open("r+b") as stream:
        stream.truncate(size - lost)
    error = refused(folder, SHARDS[0], f"{size:,} bytes", f"{size - lost:,} bytes", "fetch this file again")
    names = [n for n, f in read_index(folder).items() if f == SHARDS[0]]
    assert any(name in str(error.tensor) for name in names)


def test_shard_cut_off_in_its_header(tmp_path: Path) -> None:
    """Nothing but a few bytes of header left."""
    folder = clone(EXAMPLE, tmp_path)
    with (folder / SHARDS[1]).open("r+b") as stream:
        stream.truncate(100)
    refused(folder, SHARDS[1], "cut off inside its header", "100 bytes")


def test_empty_shard(tmp_path: Path) -> None:
    """A download that never began."""
    folder = clone(EXAMPLE, tmp_path)
    (folder / SHARDS[1]).write_bytes(b"")
    refused(folder, SHARDS[1], "0 bytes")


def test_shard_with_bytes_after_its_end(tmp_path: Path) -> None:
    """Longer than the header says."""
    folder = clone(EXAMPLE, tmp_path)
    with (folder / SHARDS[0]).open("ab") as stream:
        stream.write(b"\0")
    refused(folder, SHARDS[0], "longer than its header says")


def test_missing_shard(tmp_path: Path) -> None:
    """S33: named in the index, not there; says how many tensors are lost."""
    folder = clone(EXAMPLE, tmp_path)
    (folder / SHARDS[1]).unlink()
    count = sum(f == SHARDS[1] for f in read_index(folder).values())
    refused(folder, SHARDS[1], f"with {count} tensors", "incomplete")


def test_two_shards_swapped(tmp_path: Path) -> None:
    """S33: the index's names are in the other file; the message says where."""
    from converter.model import read_model

    folder = clone(EXAMPLE, tmp_path)
    first, second = folder / SHARDS[0], folder / SHARDS[1]
    first.rename(folder / "swap")
    second.rename(first)
    (folder / "swap").rename(second)
    with pytest.raises(CheckpointError, match="does not hold") as caught:
        read_model(folder)
    assert caught.value.file is not None
    assert f"it is in {SHARDS[1 - SHARDS.index(caught.value.file.name)]}" in str(caught.value)


def test_index_naming_a_missing_tensor(tmp_path: Path) -> None:
    """A name that no shard has."""
    from converter.model import read_model

    folder = clone(EXAMPLE, tmp_path)
    write_index(folder, read_index(folder) | {"model.language_model.layers.9.phantom": SHARDS[0]})
    with pytest.raises(CheckpointError) as caught:
        read_model(folder)
    assert caught.value.tensor == "model.language_model.layers.9.phantom"
    assert "no shard has it" in str(caught.value)


@pytest.mark.parametrize(
    "name", ["../x.safetensors", "/etc/x.safetensors", "a/../../x.safetensors", "sub/x.safetensors"]
)
def test_index_that_leaves_the_folder(tmp_path: Path, name: str) -> None:
    """S39: only plain names are taken from weight_map."""
    folder = clone(EXAMPLE, tmp_path / "model")
    shutil.copyfile(EXAMPLE / SHARDS[0], tmp_path / "x.safetensors")
    write_index(folder, {n: name if f == SHARDS[0] else f for n, f in read_index(folder).items()})
    refused(folder, "outside the model folder", repr(name), INDEX)


def test_link_out_of_the_folder(tmp_path: Path) -> None:
    """S39: a link to somewhere else is refused by name; one into the Hub cache's blobs is how snapshots work."""
    folder = clone(EXAMPLE, tmp_path / "model")
    shutil.move(folder / SHARDS[0], tmp_path / "elsewhere.safetensors")
    (folder / SHARDS[0]).symlink_to(tmp_path / "elsewhere.safetensors")
    refused(folder, SHARDS[0], "leaves the model folder", "elsewhere.safetensors")


def test_hub_cache_links_are_legal(tmp_path: Path) -> None:
    """S39: snapshots/REVISION/file -> ../../blobs/HASH."""
    snapshot = clone(EXAMPLE, tmp_path / "models--x" / "snapshots" / "abc")
    blobs = tmp_path / "models--x" / "blobs"
    blobs.mkdir()
    for shard in SHARDS:
        shutil.move(snapshot / shard, blobs / f"hash-{shard}")
        (snapshot / shard).symlink_to(Path("../../blobs") / f"hash-{shard}")
    assert len(open_checkpoint(snapshot).tensors) == len(load(EXAMPLE))


def test_same_tensor_in_two_files_without_index(tmp_path: Path) -> None:
    """S34: both files are named."""
    folder = variant(EXAMPLE, tmp_path)
    shutil.copyfile(folder / "model.safetensors", folder / "consolidated.safetensors")
    refused(folder, "consolidated.safetensors", "model.safetensors", "no index")


def test_index_decides_over_stray_files(tmp_path: Path) -> None:
    """S34: a second copy beside indexed shards is not read, and a note says so."""
    folder = clone(EXAMPLE, tmp_path)
    save_path = folder / "model.safetensors"
    save(folder, {n: t * 0 for n, t in load(EXAMPLE).items()}, index=False)
    checkpoint = open_checkpoint(folder)
    assert save_path not in checkpoint.shards()
    assert any("model.safetensors is not in" in note for note in checkpoint.notes)


def test_pickles_are_not_opened(tmp_path: Path) -> None:
    """S26: a .bin checkpoint is refused with the way to convert it."""
    (tmp_path / "pytorch_model.bin").write_bytes(b"\x80\x04cos\nsystem\n(S'touch /tmp/pwned'\ntR.")
    refused(tmp_path, "pytorch_model.bin", "save_pretrained")


def test_folder_without_weights(tmp_path: Path) -> None:
    """An empty folder, a file, nothing."""
    refused(tmp_path, "no weights")
    (tmp_path / "file").write_text("")
    refused(tmp_path / "file", "not a model folder")
    refused(tmp_path / "missing", "no such folder")


def _shard(file: Path, header: object, data: bytes = b"") -> None:
    raw = header if isinstance(header, bytes) else json.dumps(header).encode()
    file.write_bytes(struct.pack("<Q", len(raw)) + raw + data)


def _entry(shape: object, begin: int, end: int, dtype: str = "F32") -> dict[str, object]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


@pytest.mark.parametrize(
    ("header", "data", "words"),
    [
        (b"{", b"", "not valid JSON"),
        (b"[]", b"", "not a JSON object"),
        ({"a": _entry([2], 0, 4)}, b"0" * 4, "does not fit the shape"),
        ({"a": _entry([1], 0, 4), "b": _entry([1], 2, 6)}, b"0" * 6, "overlaps"),
        ({"a": _entry([1], 0, 4), "b": _entry([1], 6, 10)}, b"0" * 10, "leaves a gap"),
        ({"a": _entry([1], 0, 4, "Q9")}, b"0" * 4, "unknown dtype"),
        ({"a": _entry([-1], 0, 4)}, b"0" * 4, "malformed"),
        ({"a": _entry([True], 0, 4)}, b"0" * 4, "malformed"),
        ({"a": {"dtype": "F32"}}, b"", "malformed"),
        ({"a": _entry([2**62, 4], 0, 4)}, b"0" * 4, "does not fit the shape"),
        (b'{"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4]},"a":1}', b"0" * 4, "occurs twice"),
        (b'{"a":' * 5000, b"", "not valid JSON"),
    ],
)
def test_lying_headers(tmp_path: Path, header: object, data: bytes, words: str) -> None:
    """Every number of a header is checked before it is believed."""
    _shard(tmp_path / "model.safetensors", header, data)
    refused(tmp_path, words, "model.safetensors")


def test_header_longer_than_the_file(tmp_path: Path) -> None:
    """A length that would need a terabyte costs nothing."""
    (tmp_path / "model.safetensors").write_bytes(struct.pack("<Q", 2**40) + b"{}")
    refused(tmp_path, "cut off inside its header")


def test_shard_that_shrinks_while_it_is_read(tmp_path: Path) -> None:
    """A short read is an error, never zeros."""
    folder = clone(EXAMPLE, tmp_path)
    checkpoint = open_checkpoint(folder)
    info = max(checkpoint.tensors.values(), key=lambda t: t.end)
    with info.file.open("r+b") as stream:
        stream.truncate(info.end - 10)
    with pytest.raises(EnvironmentFailure, match="ended while it was read"):
        checkpoint.read(info, 0, np.empty(info.end - info.begin, np.uint8))
    checkpoint.close()


def test_example_is_the_size_it_claims() -> None:
    """The shipped checkpoint is complete (a clone without large files would not be)."""
    assert sum(t.numel() for f in SHARDS for t in load_file(EXAMPLE / f).values()) > 5_000_000
