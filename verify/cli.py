"""The command line verify-mtp: parse, call, print."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from converter.console import parser_for, run_command
from verify.results import LEVELS

if TYPE_CHECKING:
    from verify.results import VerificationReport

_EXIT_CODES = """\
exit codes: 0 verified, 1 verification failed, 2 wrong usage, 3 invalid input, 4 not supported, 5 environment (memory,
engine missing), 6 inconclusive (near-ties only, or not deterministic), 130 interrupted"""


def _parser() -> argparse.ArgumentParser:
    parser = parser_for(
        "verify-mtp", "Prove that a file decodes with its MTP head exactly as without, and compare it with its source.",
        _EXIT_CODES,
    )  # fmt: skip
    parser.add_argument(
        "file", metavar="FILE_OR_MODEL", help="a .gguf file, any part of a split one, or a model folder"
    )
    parser.add_argument("--source", metavar="MODEL", help="folder or Hub id that the file was made from")
    parser.add_argument("--sidecar", metavar="FILE", type=Path, help="the head's own file, for a trunk-only FILE")
    parser.add_argument("--assistant", metavar="MODEL", help="source of a drafter that has a checkpoint of its own")
    parser.add_argument(
        "--imatrix", metavar="FILE", type=Path, help="importance matrix that the file was made with, for its very bytes"
    )
    parser.add_argument("--mtp-imatrix", metavar="FILE", type=Path, help="the same of the head")
    parser.add_argument(
        "--level", metavar="L[,L...]", type=_words, default=[],
        help=f"{', '.join(LEVELS)}, or all (default: what the inputs allow)",
    )  # fmt: skip
    parser.add_argument("--mode", choices=("exact", "native", "both"), default="exact", help="of the level identity")
    parser.add_argument(
        "--drafts", metavar="N|A-B|N,N", type=_numbers, default=[1, 2, 3], help="drafts per step (default: 1-3)"
    )
    parser.add_argument("--temperature", metavar="T[,T...]", type=_floats, default=[0.0], help="0 is greedy (default)")
    parser.add_argument(
        "--prompts", metavar="FILE", type=Path, help="prompts, parted by blank lines (default: bundled)"
    )
    parser.add_argument("--text", metavar="FILE", type=Path, help="text for the level logits (default: bundled)")
    parser.add_argument("--tokens", metavar="N", type=int, default=64, help="tokens per prompt (default: 64)")
    parser.add_argument("--text-tokens", metavar="N", type=int, default=2048, help="tokens of the text (default: 2048)")
    parser.add_argument("--seed", type=int, default=0, help="of the noise at temperatures above 0")
    parser.add_argument(
        "--engine",
        metavar="llama.cpp|URL",
        help="also decode in this engine; URL: llama-server, vLLM or SGLang with MTP",
    )
    parser.add_argument("--plain-engine", metavar="URL", help="with --engine URL: a server of the model without MTP")
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto", help="where torch runs")
    parser.add_argument("--report", metavar="DIR", type=Path, help="write report.html and report.json there")
    parser.add_argument("--quiet", action="store_true", help="no progress")
    return parser


def _words(value: str) -> list[str]:
    words = [w for w in value.split(",") if w]
    return [] if "all" in words else words


def _numbers(value: str) -> list[int]:
    first, dash, last = value.partition("-")
    return list(range(int(first), int(last) + 1)) if dash else [int(n) for n in value.split(",")]


def _floats(value: str) -> list[float]:
    return [float(t) for t in value.split(",")]


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point of verify-mtp."""
    return run_command(_parser(), _verify, argv)


def _verify(args: argparse.Namespace) -> VerificationReport:
    from verify.check import Options, verify

    def notify(level: str) -> None:
        if not args.quiet:
            print(f"{level} …", file=sys.stderr, flush=True)

    options = Options(
        args.source, args.sidecar, args.assistant, args.level, args.device, args.mode, args.drafts, args.temperature, args.prompts,
        args.text, args.tokens, args.text_tokens, args.engine, args.plain_engine, args.seed, args.imatrix, args.mtp_imatrix,
    )  # fmt: skip
    report = verify(args.file, options, notify)
    if args.report is not None:
        from verify.page import write_report

        write_report(report, args.report)
    return report


if __name__ == "__main__":
    raise SystemExit(main())
