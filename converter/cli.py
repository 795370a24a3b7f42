"""The command lines convert-mtp and inspect-mtp: parse, call, print."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from converter.console import Progress, parser_for, positive, run_command

if TYPE_CHECKING:
    from converter.heads import HeadReport
    from converter.report import ConversionReport


def _convert_parser() -> argparse.ArgumentParser:
    parser = parser_for("convert-mtp", "Convert a Hugging Face checkpoint with an MTP head to GGUF.")
    parser.add_argument(
        "model",
        metavar="MODEL",
        help="folder with config.json, tokenizer and *.safetensors; a Hub id such as Qwen/Qwen3.6-27B; or a GGUF file to "
        "pack anew, as --mtp and --split say",
    )
    parser.add_argument("out", metavar="OUT", type=Path, help="file to write, may hold {type}; or an existing folder")
    parser.add_argument(
        "--type", metavar="T[,T...]", default="",
        help="types of the trunk: F32 F16 BF16 Q8_0 Q6_K Q5_K_M Q5_K_S Q5_1 Q5_0 Q4_K_M Q4_K_S Q4_1 Q4_0 IQ4_NL IQ4_XS "
        "Q3_K_L Q3_K_M Q3_K_S Q2_K (default: the one in OUT's name, else Q4_K_M)",
    )  # fmt: skip
    parser.add_argument(
        "--mtp-type", metavar="T|match", help="type of the head (default: Q8_0, or the trunk's if that keeps more bits)"
    )
    parser.add_argument(
        "--assistant",
        metavar="MODEL",
        help="the drafter's own checkpoint, of models that have one: Gemma 4's assistant",
    )
    parser.add_argument("--target", metavar="MODEL", help="for MODEL a drafter: check that it belongs to this target")
    where = parser.add_mutually_exclusive_group()
    where.add_argument(
        "--mtp", choices=("bundled", "sidecar", "only", "none"), default="bundled",
        help="where the head goes: into the file, into mtp-OUT beside a trunk-only file, alone into OUT, or nowhere",
    )  # fmt: skip
    where.add_argument("--no-mtp", dest="mtp", action="store_const", const="none", help="the same as --mtp none")
    parser.add_argument(
        "--tensor-type", metavar="REGEX=TYPE", action="append", default=[],
        help="type of tensors whose GGUF name the pattern is found in; may be repeated, the last match wins "
        "(in llama-quantize the first does)",
    )  # fmt: skip
    parser.add_argument(
        "--imatrix", metavar="FILE", type=Path, help="importance matrix of llama-imatrix (GGUF or .dat)"
    )
    parser.add_argument(
        "--mtp-imatrix", metavar="auto|FILE",
        help="importance of the head's tensors where --imatrix has none: from FILE, or auto to record it now, in torch",
    )  # fmt: skip
    parser.add_argument(
        "--split-max-size", metavar="SIZE", type=_size, help="cut files into parts of at most so many bytes: 4G, 500M"
    )
    parser.add_argument(
        "--split-max-tensors", metavar="N", type=positive, help="cut files into parts of at most so many tensors"
    )
    parser.add_argument("--revision", metavar="REV", help="branch, tag or commit of a model on the Hub")
    parser.add_argument(
        "--stream", action="store_true", help="read a model on the Hub by ranges instead of downloading it first"
    )
    parser.add_argument("--name", help="model name in the metadata (default: from model card or folder)")
    parser.add_argument(
        "--pre-tokenizer", metavar="NAME", help="the engine's name for the pre-tokenizer, if unknown here"
    )
    parser.add_argument("--workers", metavar="N", type=positive, help="how many work at a time (default: all cores)")
    parser.add_argument(
        "--executor", choices=("threads", "processes", "ray"), default="threads",
        help="who does the work; ray: a cluster on a shared file system, named by RAY_ADDRESS; the bytes are the same",
    )  # fmt: skip
    parser.add_argument(
        "--device", choices=("cpu", "cuda", "auto"), default="cpu",
        help="where to quantize: compiled kernels on the CPU, or a CUDA GPU through torch; the bytes are the same",
    )  # fmt: skip
    parser.add_argument("--dry-run", action="store_true", help="decide and print everything, write nothing")
    parser.add_argument("--force", action="store_true", help="replace existing outputs")
    parser.add_argument(
        "--resume", action=argparse.BooleanOptionalAction, default=True,
        help="go on where an earlier run of the same conversion was cut off (default), or start over",
    )  # fmt: skip
    parser.add_argument("--quiet", action="store_true", help="no progress")
    parser.add_argument("--log-json", action="store_true", help="progress and events on stderr as lines of JSON")
    return parser


def _size(value: str) -> int:
    from converter.errors import UsageError
    from converter.splits import parse_size

    try:
        return parse_size(value)
    except UsageError as error:
        raise argparse.ArgumentTypeError(f"{error.found}: expected {error.expected}") from error


def convert_main(argv: Sequence[str] | None = None) -> int:
    """Entry point of convert-mtp."""
    return run_command(_convert_parser(), _convert, argv)


def _convert(args: argparse.Namespace) -> ConversionReport:
    from converter import convert

    progress = Progress(quiet=args.quiet, as_json=args.log_json)
    if args.quiet or args.log_json or not sys.stderr.isatty():
        os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")  # of downloads, which huggingface_hub shows
    try:
        return convert(
            args.model, args.out, types=[t for t in args.type.split(",") if t], mtp_type=args.mtp_type, mtp=args.mtp,
            assistant=args.assistant, target=args.target,
            tensor_types=args.tensor_type, pre_tokenizer=args.pre_tokenizer, name=args.name, revision=args.revision,
            stream=args.stream, imatrix=args.imatrix, mtp_imatrix=args.mtp_imatrix, split_max_size=args.split_max_size,
            split_max_tensors=args.split_max_tensors, workers=args.workers, executor=args.executor, device=args.device,
            dry_run=args.dry_run, force=args.force, resume=args.resume, progress=progress, notify=progress.event,
        )  # fmt: skip
    finally:
        progress.close()


def inspect_main(argv: Sequence[str] | None = None) -> int:
    """Entry point of inspect-mtp."""
    parser = parser_for("inspect-mtp", "Say which MTP head a GGUF file or a model folder has, and how it can be run.")
    parser.add_argument("file", metavar="FILE_OR_MODEL", help="a .gguf file, a model folder or a Hub id")
    parser.add_argument("--revision", metavar="REV", help="branch, tag or commit of a model on the Hub")
    return run_command(parser, _inspect, argv)


def _inspect(args: argparse.Namespace) -> HeadReport:
    from converter.heads import inspect

    return inspect(args.file, args.revision)
