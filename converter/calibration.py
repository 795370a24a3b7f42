"""The head's importance matrix: from a file, or recorded for this run."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path

from converter.errors import EnvironmentFailure
from converter.imatrix import ImportanceMatrix, read_imatrix

AUTO = "auto"


def head_importance(model: Path, source: str | Path | None) -> ImportanceMatrix | None:
    """The matrix of a file, one that is recorded now for "auto", or none."""
    if source is None:
        return None
    if str(source) != AUTO:
        return read_imatrix(Path(source))
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder, "mtp.imatrix.gguf")
        # In a process of its own: the model's memory is given back before conversion begins.
        command = [sys.executable, "-m", "verify.calibrate", str(model), "-o", str(out), "--quiet"]
        child = subprocess.run(command, capture_output=True, text=True, check=False)  # noqa: S603  (our own module)
        if child.returncode:
            message = child.stderr.strip().removeprefix("calibrate-mtp: ")
            raise EnvironmentFailure(
                "--mtp-imatrix auto: calibration failed", found=message or f"exit code {child.returncode}",
                hint="run calibrate-mtp by itself, and give its file with --mtp-imatrix FILE",
            )  # fmt: skip
        return read_imatrix(out)
