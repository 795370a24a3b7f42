"""Models by Hub id, over a server on this machine: downloaded, streamed, and all that goes wrong on the way."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from converter import convert
from converter.errors import UsageError
from converter.files import model_name
from converter.hub import is_hub_id
from tests.conftest import EXAMPLE
from tests.oracles.hub import COMMIT, FakeHub

MODEL = f"org/{EXAMPLE.name}"
SHARDS = sorted(f.name for f in EXAMPLE.glob("*.safetensors"))


@pytest.fixture
def hub() -> Iterator[FakeHub]:
    server = FakeHub()
    server.folders[MODEL] = EXAMPLE
    yield server
    server.close()


@pytest.fixture
def run(hub: FakeHub, tmp_path: Path):
    """run(program, *arguments, **environment) in a process of its own, with an empty cache and no token."""

    def command(program: str, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
        clean = {k: v for k, v in os.environ.items() if not k.startswith(("HF_", "HUGGING", "http", "HTTP"))}
        clean |= {"HF_ENDPOINT": hub.url, "HF_HOME": str(tmp_path / "hf"), "NO_PROXY": "*"} | environment
        code = (
            "import sys; from converter import cli, hub; hub._WAIT_S = 0.01; sys.exit(getattr(cli, sys.argv.pop(1))())"
        )
        return subprocess.run(
            [sys.executable, "-c", code, f"{program}_main", *arguments], env=clean, capture_output=True, text=True,
            check=False, cwd=tmp_path, timeout=120,
        )  # fmt: skip

    return command


@pytest.fixture(scope="module")
def expected(tmp_path_factory) -> bytes:
    """The conversion of the folder."""
    out = tmp_path_factory.mktemp("local") / "x.gguf"
    convert(EXAMPLE, out, types=["Q8_0"])
    return out.read_bytes()


def test_downloaded(run, hub: FakeHub, tmp_path: Path, expected: bytes) -> None:
    """Into the cache, once; the name in the metadata is the model's, not the snapshot's; offline it is still there."""
    done = run("convert", MODEL, "x.gguf", "--type", "Q8_0")
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "x.gguf").read_bytes() == expected
    snapshot = tmp_path / "hf" / "hub" / f"models--{MODEL.replace('/', '--')}" / "snapshots" / COMMIT
    assert {f.name for f in snapshot.iterdir()} == {f.name for f in EXAMPLE.iterdir() if f.name != "TRAINING.md"}
    sent = dict(hub.sent)
    again = run("convert", MODEL, "y.gguf", "--type", "Q8_0", HF_HUB_OFFLINE="1")
    assert again.returncode == 0, again.stderr
    assert (tmp_path / "y.gguf").read_bytes() == expected
    assert hub.sent == sent
    assert hub.leaked == []


def test_streamed(run, hub: FakeHub, tmp_path: Path, expected: bytes) -> None:
    """No shard on disk; each byte that is needed is fetched once."""
    done = run("convert", MODEL, "x.gguf", "--type", "Q8_0", "--stream", "--json")
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "x.gguf").read_bytes() == expected
    assert not list(tmp_path.rglob("*.safetensors"))
    headers = sum(8 + int.from_bytes((EXAMPLE / s).read_bytes()[:8], "little") for s in SHARDS)
    assert sum(hub.sent[s] for s in SHARDS) == json.loads(done.stdout)["source_bytes"] + headers


def test_streamed_by_processes(run, tmp_path: Path, expected: bytes) -> None:
    """The reader travels."""
    done = run("convert", MODEL, "x.gguf", "--type", "Q8_0", "--stream", "--executor", "processes", "--workers", "2")
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "x.gguf").read_bytes() == expected


@pytest.mark.parametrize(
    "faults", [["broken"], ["short"], ["503"], ["broken", "broken", "short", "broken"]], ids=" ".join
)
def test_streaming_over_a_bad_connection(run, hub: FakeHub, tmp_path: Path, expected: bytes, faults: list[str]) -> None:
    """What breaks off or comes short is asked for again, from where it stopped."""
    hub.faults[SHARDS[0]] = ["", "", "", *faults]
    hub.faults[SHARDS[1]] = ["", "", *faults]
    done = run("convert", MODEL, "x.gguf", "--type", "Q8_0", "--stream")
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "x.gguf").read_bytes() == expected
    assert hub.faults[SHARDS[0]] == hub.faults[SHARDS[1]] == []


def test_a_download_that_breaks_off(run, hub: FakeHub, tmp_path: Path, expected: bytes) -> None:
    """huggingface_hub goes on where it stopped."""
    hub.faults[SHARDS[0]] = ["broken"]
    done = run("convert", MODEL, "x.gguf", "--type", "Q8_0")
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "x.gguf").read_bytes() == expected


def test_a_connection_that_stays_broken(run, hub: FakeHub, tmp_path: Path, expected: bytes) -> None:
    """Exit 5, and the next run goes on from what was done."""
    hub.faults[SHARDS[1]] = [*[""] * 20, *["gone"] * 200]
    done = run("convert", MODEL, "x.gguf", "--type", "Q8_0", "--stream", "--workers", "1")
    assert done.returncode == 5, done.stderr
    assert "breaks off again and again" in done.stderr
    assert "the same command goes on" in done.stderr
    assert not (tmp_path / "x.gguf").exists()
    hub.faults.clear()
    done = run("convert", MODEL, "x.gguf", "--type", "Q8_0", "--stream", "--json")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["resumed_bytes"] > 0
    assert (tmp_path / "x.gguf").read_bytes() == expected


def test_a_server_without_ranges(run, hub: FakeHub) -> None:
    """Is not read to the end for every piece."""
    hub.faults[SHARDS[0]] = ["whole"]
    done = run("convert", MODEL, "x.gguf", "--stream")
    assert done.returncode == 5
    assert "does not answer requests for ranges" in done.stderr
    assert "without --stream" in done.stderr


@pytest.mark.parametrize("stream", [(), ("--stream",)], ids=["download", "stream"])
def test_refused_by_the_hub(run, hub: FakeHub, tmp_path: Path, stream: tuple[str, ...]) -> None:
    """Unknown model (401 without, 404 with a token), private, gated, wrong revision: which one, and what to do."""
    hub.folders["org/private"] = hub.folders["org/gated"] = EXAMPLE
    hub.private["org/private"] = "hf_right"
    hub.gated.add("org/gated")

    def refused(*arguments: str, code: int, **environment: str) -> str:
        done = run("convert", *arguments, "x.gguf", *stream, **environment)
        assert done.returncode == code, done.stderr
        assert "Traceback" not in done.stderr
        return done.stderr

    said = refused("org/nothing", code=3)
    assert "no such folder, and no such model on the Hub" in said
    assert "HF_TOKEN" in said
    assert "404" in refused("org/nothing", code=3, HF_TOKEN="hf_any")
    assert "401" in refused("org/private", code=3)
    assert "accept its conditions" in refused("org/gated", code=5, HF_TOKEN="hf_any")
    assert "no such revision" in refused(MODEL, "--revision", "v9", code=3)
    assert not list(tmp_path.glob("*.gguf*"))
    done = run("convert", "org/private", "x.gguf", *stream, HF_TOKEN="hf_right")
    assert done.returncode == 0, done.stderr
    assert hub.leaked == []


def test_a_shard_that_the_hub_lacks(run, hub: FakeHub, tmp_path: Path) -> None:
    """A 404 for one file: the index names it."""
    from tests.checkpoints import clone

    hub.folders[MODEL] = clone(EXAMPLE, tmp_path / "repository")
    (tmp_path / "repository" / SHARDS[1]).unlink()
    for stream in ((), ("--stream",)):
        done = run("convert", MODEL, "x.gguf", *stream)
        assert done.returncode == 3
        assert SHARDS[1] in done.stderr


def test_unreachable_and_offline(run, tmp_path: Path) -> None:
    """Exit 5, and where was looked."""
    done = run("convert", MODEL, "x.gguf", HF_HUB_OFFLINE="1")
    assert done.returncode == 5, done.stderr
    assert "HF_HUB_OFFLINE" in done.stderr
    done = run("convert", MODEL, "x.gguf", HF_ENDPOINT="http://127.0.0.1:9")
    assert done.returncode == 5, done.stderr
    assert "http://127.0.0.1:9" in done.stderr
    assert not list(tmp_path.glob("*.gguf*"))


def test_headers_are_enough_to_look(run, hub: FakeHub, tmp_path: Path) -> None:
    """inspect-mtp and --dry-run fetch no weights."""
    done = run("inspect", MODEL, "--json")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert (found["kind"], found["head_layers"], found["can_draft"]) == ("checkpoint", 1, True)
    done = run("convert", MODEL, str(tmp_path), "--dry-run", "--json")
    assert done.returncode == 0, done.stderr
    (file,) = json.loads(done.stdout)["files"]
    assert Path(file["path"]).name == f"{EXAMPLE.name}-Q4_K_M.gguf"
    assert sum(hub.sent[s] for s in SHARDS) < 40_000


def test_what_counts_as_a_hub_id(tmp_path: Path, monkeypatch) -> None:
    """A string of owner/name that no folder answers to; paths are paths."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "here" / "model").mkdir(parents=True)
    assert is_hub_id("Qwen/Qwen3.6-27B")
    for other in ("model", "a/b/c", "/a/b", "./a", "~/a", "here/model", "out/x.gguf", Path("Qwen/Qwen3.6-27B")):
        assert not is_hub_id(other)
    assert model_name(Path("hub/models--Qwen--Qwen3.6--27B/snapshots/0123")) == "Qwen3.6--27B"
    with pytest.raises(UsageError, match="for models on the Hub"):
        convert(EXAMPLE, "x.gguf", stream=True)
    with pytest.raises(UsageError, match="for models on the Hub"):
        convert(EXAMPLE, "x.gguf", revision="main")
    with pytest.raises(UsageError, match="must be downloaded"):
        convert("org/model", "x.gguf", stream=True, mtp_imatrix="auto")
