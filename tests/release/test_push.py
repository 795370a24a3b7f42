"""Releases on a Hub that stands on this machine: what arrives, when it becomes visible, and what goes wrong."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from gguf import GGUFReader

from tests.checkpoints import clone
from tests.conftest import EXAMPLE
from tests.oracles.hub import COMMIT, FakeHub
from tests.release.conftest import Release

TOKEN = "hf_that_may_write"
PUSH = "import sys; from release.push import push; print(push(__import__('pathlib').Path(sys.argv[1]), sys.argv[2], 'words'))"


@pytest.fixture
def hub(tmp_path: Path) -> Iterator[FakeHub]:
    server = FakeHub()
    server.root, server.token = tmp_path / "hub", TOKEN
    yield server
    server.close()


@pytest.fixture
def run(hub: FakeHub, tmp_path: Path):
    """run(code or module, *arguments, **environment) in a process of its own, with an empty cache and a token."""

    def command(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
        clean = {k: v for k, v in os.environ.items() if not k.startswith(("HF_", "HUGGING", "http", "HTTP"))}
        clean |= {"HF_ENDPOINT": hub.url, "HF_HOME": str(tmp_path / "hf"), "NO_PROXY": "*", "HF_TOKEN": TOKEN}
        clean |= {"HF_HUB_DISABLE_XET": "1", "OMP_NUM_THREADS": "1"} | environment  # the protocol that the server has
        return subprocess.run(
            [sys.executable, *arguments],
            env=clean,
            capture_output=True,
            text=True,
            check=False,
            cwd=tmp_path,
            timeout=120,
        )

    return command


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Something like a release."""
    root = tmp_path / "release"
    for name, data in {
        "README.md": b"card",
        "bundled/x-MTP-Q8_0.gguf": b"b" * 5000,
        "trunk/mtp-x-Q8_0.gguf": b"t" * 3000,
    }.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_bytes(data)
    (root / ".hidden").write_bytes(b"not of the release")
    return root


def there(hub: FakeHub, name: str) -> dict[str, bytes]:
    root = hub.folders[name]
    return {f.relative_to(root).as_posix(): f.read_bytes() for f in root.rglob("*") if f.is_file()}


def test_all_files_by_one_commit(run, hub: FakeHub, folder: Path) -> None:
    """The repository is made; large files go first, and nothing is visible before the commit."""
    done = run("-c", PUSH, str(folder), "user/x")
    assert done.returncode == 0, done.stderr
    assert there(hub, "user/x") == {
        f.relative_to(folder).as_posix(): f.read_bytes()
        for f in folder.rglob("*.*")
        if f.is_file() and f.name != ".hidden"
    }
    assert hub.commits == ["words"]
    order = [(m, p) for m, p, _ in hub.requests]
    commit = order.index(("POST", "/api/models/user/x/commit/main"))
    assert [m for m, _ in order[:commit]].count("PUT") == 2
    assert "PUT" not in [m for m, _ in order[commit:]]


def test_what_is_there_is_not_sent_again(run, hub: FakeHub, folder: Path) -> None:
    """And files of an earlier release go, those of others stay."""
    run("-c", PUSH, str(folder), "user/x")
    hub.folders["user/x"].joinpath("mmproj-x.gguf").write_bytes(b"someone else's")
    (folder / "trunk/mtp-x-Q8_0.gguf").rename(folder / "trunk/mtp-x-Q4_0.gguf")
    (folder / "README.md").write_text("---\nlicense: mit\n---\nanother card")
    hub.requests.clear()
    done = run("-c", PUSH, str(folder), "user/x")
    assert done.returncode == 0, done.stderr
    assert [p for m, p, _ in hub.requests if m == "PUT"] == []
    assert set(there(hub, "user/x")) == {
        "README.md",
        "bundled/x-MTP-Q8_0.gguf",
        "trunk/mtp-x-Q4_0.gguf",
        "mmproj-x.gguf",
    }
    assert there(hub, "user/x")["README.md"].endswith(b"another card")
    assert "deleted=('trunk/mtp-x-Q8_0.gguf',)" in done.stdout


def test_an_interrupted_push(run, hub: FakeHub, folder: Path) -> None:
    """Shows nothing; the next one goes on."""
    (folder / "bundled/y-MTP-Q8_0.gguf").write_bytes(b"y" * 4000)
    hub.faults["PUT"] = ["403"]
    done = run("-c", PUSH, str(folder), "user/x")
    assert done.returncode != 0
    assert "EnvironmentFailure" in done.stderr
    assert there(hub, "user/x") == {}
    sent = set(hub.large)
    hub.requests.clear()
    done = run("-c", PUSH, str(folder), "user/x")
    assert done.returncode == 0, done.stderr
    assert len([p for m, p, _ in hub.requests if m == "PUT"]) == 3 - len(sent)
    assert len(there(hub, "user/x")) == 4


def test_a_card_that_the_hub_refuses(run, hub: FakeHub, folder: Path) -> None:
    """Is said before anything is sent."""
    (folder / "README.md").write_text("---\nlicense: no-such\n---\ncard")
    done = run("-c", PUSH, str(folder), "user/x")
    assert "front matter" in done.stderr
    assert "not one of those" in done.stderr
    assert not any(m == "PUT" for m, _, _ in hub.requests)
    assert hub.folders == {}


def test_the_command(run, hub: FakeHub, bare: Release) -> None:
    """release-mtp --push: release and presets in repositories of their own, which card and presets name."""
    arguments = ["-m", "release.cli", str(EXAMPLE), str(bare.out), "--recipe", str(bare.recipe), "--quiet"]
    done = run(*arguments, "--push", "user/tiny", "--private")
    assert done.returncode == 0, done.stderr
    assert set(there(hub, "user/tiny")) == bare.files()
    assert set(there(hub, "user/tiny-presets")) == {"preset.ini", "README.md"}
    assert b"hf = user/tiny:Q4_K_M" in there(hub, "user/tiny-presets")["preset.ini"]
    assert b"user/tiny" in there(hub, "user/tiny")["README.md"]
    assert "/user/tiny/commit/" in done.stdout
    assert len(hub.commits) == 2


def test_a_model_from_the_hub(run, hub: FakeHub, bare: Release, tmp_path: Path) -> None:
    """Repository and commit stand in card and file; license and language are those of the source's card."""
    source = clone(EXAMPLE, tmp_path / "source")
    (source / "README.md").write_text("---\nlicense: mit\nlanguage:\n- en\n- de\n---\n# Tiny\n")
    hub.folders["org/Tiny-MTP"] = source
    out = tmp_path / "new"
    done = run("-m", "release.cli", "org/Tiny-MTP", str(out), "--recipe", str(bare.recipe))
    assert done.returncode == 0, done.stderr
    assert "fetching org/Tiny-MTP" in done.stderr
    card = (out / "Tiny-MTP-GGUF" / "README.md").read_text()
    assert all(x in card for x in ("license: mit", "- de", "base_model: org/Tiny-MTP", f"revision `{COMMIT}`"))
    assert "vllm serve org/Tiny-MTP" in card
    assert "license" not in done.stdout
    fields = GGUFReader(out / "Tiny-MTP-GGUF" / "bundled" / "Tiny-MTP-Q4_K_M.gguf").fields
    assert (fields["mtp.source"].contents(), fields["mtp.source.revision"].contents()) == ("org/Tiny-MTP", COMMIT)


@pytest.mark.parametrize(
    ("name", "environment", "code", "words"),
    [
        ("user/tiny", {"HF_TOKEN": ""}, 5, "HF_TOKEN"),
        ("user/tiny", {"HF_TOKEN": "hf_that_may_read"}, 5, "does not let you write"),
        ("user/tiny", {"HF_ENDPOINT": "http://127.0.0.1:9"}, 5, "nothing of it is visible"),
        ("no repository", {}, 2, "user/name"),
    ],
    ids=["no token", "wrong token", "no Hub", "no name"],
)
def test_what_goes_wrong(run, bare: Release, name: str, environment: dict[str, str], code: int, words: str) -> None:
    """Is said with what to do, without a traceback; the release itself is there."""
    arguments = ["-m", "release.cli", str(EXAMPLE), str(bare.out), "--recipe", str(bare.recipe), "--quiet"]
    done = run(*arguments, "--push", name, **environment)
    assert done.returncode == code, done.stderr
    assert words in done.stderr
    assert "Traceback" not in done.stderr
    assert bare.ggufs()
