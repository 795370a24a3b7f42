"""What a file says of its origin, and bytes that several files share."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

from gguf import GGUFReader

from converter.device import Cpu
from converter.executors import open_executor
from converter.metadata import Provenance
from converter.model import read_model
from converter.plan import Options, Packaging, make_plan
from converter.run import run_plan
from tests.conftest import EXAMPLE

ORIGIN = Provenance("convert-mtp 1.2", "Org/Model", "abc123", {"config.json": "00ff"}, {"imatrix": None})


def written(folder: Path, *packagings: tuple[Packaging, str]) -> None:
    """Both kinds of files in one run."""
    model = read_model(EXAMPLE)
    plans = [make_plan(model, folder / n, Options(("Q4_K_M",), None, p, provenance=ORIGIN)) for p, n in packagings]
    plan = replace(plans[0], files=[f for p in plans for f in p.files])
    run_plan(plan, model.checkpoint, device=Cpu(), executor=open_executor("threads", 2))


def test_the_metadata_tells_the_origin(tmp_path) -> None:
    """Program, source, revision, hashes, options and the type of every tensor, as another reader finds them."""
    written(tmp_path, (Packaging.BUNDLED, "a.gguf"))
    reader = GGUFReader(tmp_path / "a.gguf")
    found = {name: field.contents() for name, field in reader.fields.items() if name.startswith("mtp.")}
    types = {t.name: t.tensor_type.name for t in reader.tensors}
    assert found["mtp.program"] == "convert-mtp 1.2"
    assert (found["mtp.source"], found["mtp.source.revision"]) == ("Org/Model", "abc123")
    assert found["mtp.source.sha256"] == ["00ff  config.json"]
    assert json.loads(found["mtp.options"]) == {
        "packaging": "bundled", "type": "Q4_K_M", "mtp_type": "Q8_0", "imatrix": None,
    }  # fmt: skip
    assert dict(t.split("=") for t in found["mtp.tensor_types"]) == types


def test_files_that_share_a_form_are_quantized_once(tmp_path, monkeypatch) -> None:
    """A bundled and a trunk-only file of one type: the trunk's bytes are made once, and are the same in both."""
    counted: list[str] = []
    quantize = Cpu.quantize
    monkeypatch.setattr(
        Cpu, "quantize", lambda self, x, kind, *rest: (counted.append(kind), quantize(self, x, kind, *rest))
    )
    written(tmp_path, (Packaging.BUNDLED, "a.gguf"))
    alone = len(counted)
    counted.clear()
    both = tmp_path / "both"
    both.mkdir()
    written(both, (Packaging.BUNDLED, "a.gguf"), (Packaging.NONE, "b.gguf"))
    assert len(counted) == alone > 0
    bundled, trunk = (GGUFReader(both / n) for n in ("a.gguf", "b.gguf"))
    data = {t.name: bytes(t.data) for t in bundled.tensors}
    assert len(data) > len(trunk.tensors) > 10
    assert all(data[t.name] == bytes(t.data) for t in trunk.tensors)
    assert (both / "a.gguf").read_bytes() == (tmp_path / "a.gguf").read_bytes()
