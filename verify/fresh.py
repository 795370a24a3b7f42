"""Plain decoding in a process of its own: whether a run repeats itself where nothing is shared."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

import torch

from converter.errors import EnvironmentFailure
from verify.decode import Settings, Stream, decode
from verify.models.base import TorchModel
from verify.models.opening import open_model


def decode_afresh(
    file: Path, sidecar: Path | None, engine: TorchModel, settings: Settings, prompt: Sequence[int]
) -> Stream:
    """The stream that a new process gives for this file, on the engine's device and with its rows alone."""
    with tempfile.TemporaryDirectory() as folder:
        job, out = Path(folder, "job.json"), Path(folder, "stream.pt")
        how = asdict(settings) | {"stop": sorted(settings.stop)}
        job.write_text(
            json.dumps({
                "file": str(file), "sidecar": str(sidecar) if sidecar else None, "device": str(engine.device),
                "settings": how, "prompt": list(prompt), "threads": torch.get_num_threads(),
                "single_rows": sorted(engine.single_rows, key=str),
            })
        )  # fmt: skip
        command = [sys.executable, "-m", "verify.fresh", str(job), str(out)]
        child = subprocess.run(command, capture_output=True, text=True, check=False)  # noqa: S603  (our own module)
        if child.returncode:
            raise EnvironmentFailure(
                "decoding in a fresh process failed",
                file,
                found=child.stderr.strip()[-500:] or f"exit code {child.returncode}",
            )
        tokens, rows = torch.load(out, weights_only=True)
        return Stream(tokens, list(rows))


def _child(job_file: str, out: str) -> None:
    job = json.loads(Path(job_file).read_text())
    torch.set_num_threads(job["threads"])
    engine = open_model(Path(job["file"]), Path(job["sidecar"]) if job["sidecar"] else None, job["device"])
    engine.single_rows = {tuple(kind) if isinstance(kind, list) else kind for kind in job["single_rows"]}
    settings = Settings(**(job["settings"] | {"stop": frozenset(job["settings"]["stop"])}))
    stream = decode(engine, job["prompt"], settings)
    torch.save((stream.tokens, torch.stack(stream.rows)), out)


if __name__ == "__main__":
    _child(*sys.argv[1:])
