"""calibrate-mtp: an importance matrix of trunk and MTP head from a text, recorded in torch.

llama-imatrix leaves the head out unless told otherwise; here both are run over every chunk, the head on the trunk's true
states. The file is what llama-quantize and convert-mtp read (spec/quant.md, section 13).
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Any

from converter.console import Progress, parser_for, run_command
from converter.errors import EnvironmentFailure, InputError, TokenizerError, UsageError

if TYPE_CHECKING:
    import numpy as np

CHUNK = 512
BUNDLED = "text.txt"


@dataclass(frozen=True)
class Calibration:
    """What was recorded: file, tensors with an entry, those of the head among them, chunks of tokens."""

    file: Path
    entries: int
    head_entries: int
    chunks: int
    chunk_size: int

    def as_text(self) -> str:
        head = f"{self.head_entries} of the MTP head" if self.head_entries else "no MTP head"
        return f"{self.file}: {self.entries} tensors ({head}), {self.chunks} chunks of {self.chunk_size} tokens"

    def as_json(self) -> dict[str, object]:
        return {"schema": 1, **{k: str(v) if isinstance(v, Path) else v for k, v in vars(self).items()}}


def calibrate(
    model: str | Path,
    out: str | Path,
    text: str | Path | None = None,
    *,
    chunks: int | None = None,
    chunk_size: int = CHUNK,
    device: str = "cpu",
    progress: Callable[[int, int, str], None] = lambda _done, _total, _what: None,
) -> Calibration:
    """Run trunk and head over a text and write the mean squared inputs of their matrices.

    model: folder of the source checkpoint, or a string that is a Hub id. text: a file, None for the bundled one. chunks: how many at most, each of
    chunk_size tokens and run from an empty state. device: "cpu", "cuda" or "auto". progress: called with (chunks done,
    chunks in all, the text's name). Raises ToolError.
    """
    from converter.hub import locate

    weights, tokens, name = _prepared(locate(model).path, Path(text) if text else None)
    if len(tokens) < 2:
        raise InputError("the text is too short to calibrate with", Path(text) if text else None)
    chunk_size = min(chunk_size, len(tokens))
    starts = range(0, len(tokens) - chunk_size + 1, chunk_size)[:chunks]
    recorder = _Recorder()
    torch_model, torch = _torch_model(weights, device, recorder)
    for done, start in enumerate(starts):
        progress(done, len(starts), name)
        ids = torch.tensor(tokens[start : start + chunk_size], device=torch_model.device)
        state = torch_model.trunk_state(chunk_size)
        hidden = torch_model.trunk(ids, state, keep_rows=False)
        if torch_model.has_head:
            torch_model.head(hidden[:-1], ids[1:], torch_model.head_state(state, chunk_size))
    progress(len(starts), len(starts), name)
    from converter.imatrix import write_imatrix

    write_imatrix(Path(out), recorder.sums(weights), name, len(starts), chunk_size)
    own = set(torch_model.head_tensors())
    heads = sum(n in own for n in recorder.squares)
    return Calibration(Path(out), len(recorder.squares), heads, len(starts), chunk_size)


def _prepared(folder: Path, text: Path | None) -> tuple[Any, list[int], str]:
    """(weights, token ids, the text's name)."""
    from converter.files import os_errors
    from verify.models.weights import FolderWeights

    if not folder.is_dir():
        raise UsageError("calibration runs the source checkpoint: a model folder is needed", folder)
    weights = FolderWeights(folder)
    if text is None:
        content, name = (resources.files("verify") / "data" / BUNDLED).read_text(), "convert-mtp's bundled text"
    else:
        with os_errors("cannot read the text", text):
            content, name = text.read_text(encoding="utf-8", errors="replace"), text.name
    return weights, tokenize(folder, content), name


def tokenize(folder: Path, content: str) -> list[int]:
    """Token ids of a text by the folder's tokenizer.json, nothing added."""
    try:
        from tokenizers import Tokenizer
    except ImportError as error:
        raise _needs_verify() from error
    file = folder / "tokenizer.json"
    try:
        return Tokenizer.from_file(str(file)).encode(content, add_special_tokens=False).ids
    except Exception as error:  # the library raises nothing narrower
        raise TokenizerError("this tokenizer cannot be used", file, found=str(error)) from error


def _torch_model(weights: Any, device: str, recorder: _Recorder) -> tuple[Any, Any]:
    try:
        import torch
    except ImportError as error:
        raise _needs_verify() from error
    from verify.models.opening import model_of

    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cuda" and not torch.cuda.is_available():
        raise EnvironmentFailure("there is no CUDA device", hint="--device cpu")
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    return model_of(weights, device=device, dtype=dtype, observer=recorder), torch


def _needs_verify() -> EnvironmentFailure:
    return EnvironmentFailure(
        "calibration needs torch and tokenizers, which are not installed", hint="pip install 'convert-mtp[verify]'"
    )


class _Recorder:
    """Sums of squares per column and expert, in float64, and counts of rows."""

    def __init__(self) -> None:
        self.squares: dict[str, dict[int, Any]] = {}
        self.counts: dict[str, dict[int, int]] = {}

    def __call__(self, name: str, x: Any, expert: int | None) -> None:
        squares, counts = self.squares.setdefault(name, {}), self.counts.setdefault(name, {})
        e = expert or 0
        total = x.double().square().sum(0)
        squares[e] = squares[e] + total if e in squares else total
        counts[e] = counts.get(e, 0) + len(x)

    def sums(self, weights: Any) -> dict[str, tuple[np.ndarray, np.ndarray]]:
        """Name -> (sums [matrices, columns], counts [matrices]), float32."""
        import numpy as np

        experts = weights.key("expert_count", 0)
        result = {}
        for name, found in self.squares.items():
            matrices = experts if name.endswith("_exps.weight") else 1
            columns = len(next(iter(found.values())))
            sums, counts = np.zeros((matrices, columns), np.float32), np.zeros(matrices, np.float32)
            for e, total in found.items():
                sums[e], counts[e] = total.float().cpu().numpy(), self.counts[name][e]
            result[name] = sums, counts
        return result


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point of calibrate-mtp."""
    parser = parser_for("calibrate-mtp", "Record an importance matrix of trunk and MTP head over a text, in torch.")
    parser.add_argument("model", metavar="MODEL", help="model folder or Hub id")
    parser.add_argument("text", metavar="TEXT", type=Path, nargs="?", help="text file (default: a bundled one)")
    parser.add_argument("-o", "--out", metavar="FILE", type=Path, required=True, help="imatrix.gguf to write")
    parser.add_argument("--chunks", metavar="N", type=int, help="chunks at most (default: the whole text)")
    parser.add_argument("--chunk-size", metavar="N", type=int, default=CHUNK, help="tokens per chunk (default: 512)")
    parser.add_argument("--device", choices=("cpu", "cuda", "auto"), default="auto", help="where to run the model")
    parser.add_argument("--quiet", action="store_true", help="no progress")
    return run_command(parser, _run, argv)


def _run(args: argparse.Namespace) -> Calibration:
    if args.chunk_size < 2 or (args.chunks is not None and args.chunks < 1):
        raise UsageError("--chunk-size must be at least 2 and --chunks at least 1")
    progress = Progress(quiet=args.quiet, unit="chunks")
    try:
        return calibrate(
            args.model, args.out, args.text, chunks=args.chunks, chunk_size=args.chunk_size, device=args.device,
            progress=progress,
        )  # fmt: skip
    finally:
        progress.close()


if __name__ == "__main__":
    raise SystemExit(main())
