"""Where the checkpoints are, and conversions that many tests look at, made once."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest

from converter import convert

ROOT = Path(__file__).parents[1]
EXAMPLE = ROOT / "examples" / "tiny-qwen3.5-dense"
SHARED = ROOT.parent / "shared" / "fixtures"
MIXES = (
    "F32", "F16", "BF16", "Q8_0", "Q6_K", "Q5_K_M", "Q5_K_S", "Q5_1", "Q5_0", "Q4_K_M", "Q4_K_S", "Q4_1", "Q4_0",
    "IQ4_NL", "IQ4_XS", "Q3_K_L", "Q3_K_M", "Q3_K_S", "Q2_K",
)  # fmt: skip


def shared(name: str) -> Path:
    """A checkpoint or table of the shared fixtures; the test is skipped where they are absent."""
    path = SHARED / name
    if not path.exists():
        pytest.skip(f"needs {name} of the shared fixtures, which are not beside this project")
    return path


def checkpoint(kind: str) -> Path:
    """The trained checkpoint of that kind: the dense one ships with the project."""
    return EXAMPLE if kind == "dense" else shared("tiny-qwen3.5-moe")


@pytest.fixture(scope="session")
def target() -> Path:
    """The trained Gemma 4."""
    return shared("tiny-gemma4")


@pytest.fixture(scope="session")
def assistant() -> Path:
    """Its drafter."""
    return shared("tiny-gemma4-assistant")


def script(name: str) -> ModuleType:
    """A program of scripts/fixtures as a module."""
    spec = importlib.util.spec_from_file_location(name, ROOT / "scripts" / "fixtures" / f"{name}.py")
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("gpu"):
        import torch

        if not torch.cuda.is_available():
            pytest.skip("needs a CUDA device")


@pytest.fixture(scope="session")
def conversions(tmp_path_factory: pytest.TempPathFactory):
    """conversions(kind, packaging) is a folder with one file per mix, named TYPE.gguf; made at first use."""
    made: dict[tuple[str, str], Path] = {}

    def get(kind: str, packaging: str) -> Path:
        if (kind, packaging) not in made:
            folder = tmp_path_factory.mktemp(f"{kind}-{packaging}")
            convert(checkpoint(kind), folder / "{type}.gguf", types=MIXES, mtp=packaging)
            made[kind, packaging] = folder
        return made[kind, packaging]

    return get
