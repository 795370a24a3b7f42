"""Decoding and judging what was converted; may use `quant` and `converter`, nothing there uses this."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from verify.results import VerificationReport

__all__ = ["verify"]


def verify(file: str | Path, **options: Any) -> VerificationReport:
    """Verify a GGUF file, or a model folder; options are those of `verify.check.Options`, as of the command line.

    Raises ToolError where the inputs cannot be used at all; what is wrong with a file that can be is in the report.

    >>> verify("examples/tiny-qwen3.5-dense", levels=["structure"]).verdict.name
    'PASSED'
    """
    from verify.check import Options
    from verify.check import verify as run

    return run(file, Options(**options))
