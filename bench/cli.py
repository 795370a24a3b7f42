"""The command lines bench-mtp and recommend-mtp: parse, call, print."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from converter.console import Progress, parser_for, run_command
from converter.errors import UsageError

if TYPE_CHECKING:
    from bench.policy import Recommendation
    from bench.report import BenchReport

_EXIT_CODES = """\
exit codes: 0 done, 1 the engine does not run a file, 2 wrong usage, 3 invalid input, 4 not supported, 5 environment
(engine missing or unreachable), 130 interrupted; the same command goes on"""


def _bench_parser() -> argparse.ArgumentParser:
    parser = parser_for(
        "bench-mtp", "Measure what drafts are worth over types, tasks, drafts and settings; results are kept cell by cell.",
        _EXIT_CODES,
    )  # fmt: skip
    parser.add_argument("files", metavar="FILE", nargs="+", type=Path, help=".gguf files")
    parser.add_argument("-o", "--out", metavar="DIR", type=Path, required=True, help="folder of the results")
    parser.add_argument(
        "--source", metavar="MODEL", help="checkpoint that --mtp-types makes heads from; of Gemma 4 the assistant's"
    )
    parser.add_argument("--sidecar", metavar="FILE", type=Path, help="the head of trunk-only files")
    parser.add_argument(
        "--engine", metavar="llama.cpp|torch|URL", action="append", default=[], help="repeatable (default: llama.cpp)"
    )
    parser.add_argument("--plain-engine", metavar="URL", help="with --engine URL: a server of the model without MTP")
    parser.add_argument(
        "--tasks", metavar="T[,T...]", type=_words, default=["code", "factual", "analysis", "creative"],
        help="bundled tasks, or files of prompts parted by blank lines (default: all four)",
    )  # fmt: skip
    parser.add_argument("--temperature", metavar="T[,T...]", type=_floats, default=[0.0], help="0 is greedy (default)")
    parser.add_argument("--drafts", metavar="N|A-B|N,N", type=_numbers, default=[1, 2, 3, 4], help="default: 1-4")
    parser.add_argument(
        "--mtp-types", metavar="T[,T...]", type=_words, default=[],
        help="types of the head to try, made from --source; match: the trunk's (default: the file's own head)",
    )  # fmt: skip
    parser.add_argument("--p-min", metavar="P[,P...]", type=_floats, default=[0.0], help="drafting stops below P")
    parser.add_argument("--slots", metavar="N[,N...]", type=_numbers, default=[1], help="requests at a time")
    parser.add_argument("--context", metavar="N[,N...]", type=_numbers, default=[0], help="fill prompts up to N tokens")
    parser.add_argument("--workload", metavar="IN:OUT", action="append", type=_workload, default=[], help="repeatable")
    parser.add_argument("--runs", metavar="N", type=int, default=3, help="repetitions of everything (default: 3)")
    parser.add_argument("--prompts", metavar="N", type=int, default=12, help="of each task, at most (default: 12)")
    parser.add_argument("--tokens", metavar="N", type=int, default=128, help="of each answer (default: 128)")
    parser.add_argument("--threads", metavar="N", type=int, default=0, help="of llama.cpp (default: all cores)")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="where torch runs")
    parser.add_argument("--seed", type=int, default=0, help="of sampling and of the order")
    parser.add_argument("--no-costs", action="store_true", help="do not measure what steps cost by made-up acceptance")
    parser.add_argument("--quiet", action="store_true", help="no progress")
    return parser


def _recommend_parser() -> argparse.ArgumentParser:
    parser = parser_for(
        "recommend-mtp",
        "Say whether to draft, how many tokens, with which head, by what bench-mtp measured.",
        _EXIT_CODES,
    )
    parser.add_argument("folder", metavar="DIR", type=Path, help="results of bench-mtp")
    parser.add_argument("--task", help="code, factual, …; default: all tasks alike")
    parser.add_argument("--type", metavar="T", help="part of a file's name, such as Q4_K_M")
    parser.add_argument("--temperature", metavar="T", type=float)
    parser.add_argument("--engine", help="llama.cpp, torch, or a URL that was measured")
    parser.add_argument("--slots", metavar="N", type=int, default=1, help="requests at a time (default: 1)")
    parser.add_argument("--input-tokens", metavar="N", type=int, default=0, help="of a typical prompt")
    parser.add_argument("--output-tokens", metavar="N", type=int, default=0, help="of a typical answer")
    parser.add_argument("-o", "--out", metavar="DIR", type=Path, help="write preset.ini and policy.json there")
    return parser


def _words(value: str) -> list[str]:
    return [w for w in value.split(",") if w]


def _numbers(value: str) -> list[int]:
    first, dash, last = value.partition("-")
    return list(range(int(first), int(last) + 1)) if dash else [int(n) for n in value.split(",")]


def _floats(value: str) -> list[float]:
    return [float(t) for t in value.split(",")]


def _workload(value: str) -> tuple[int, int]:
    before, _, after = value.partition(":")
    return int(before), int(after)


def bench_main(argv: Sequence[str] | None = None) -> int:
    """Entry point of bench-mtp."""
    return run_command(_bench_parser(), _bench, argv)


def recommend_main(argv: Sequence[str] | None = None) -> int:
    """Entry point of recommend-mtp."""
    return run_command(_recommend_parser(), _recommend, argv)


def _bench(args: argparse.Namespace) -> BenchReport:
    from bench.matrix import LLAMA_CPP
    from bench.measure import Options, measure
    from bench.report import WORKLOADS, BenchReport, Workload
    from bench.store import Store
    from bench.summary import Results
    from converter.hub import locate

    source = Path(locate(args.source).path) if args.source else None
    options = Options(
        args.files, source, args.sidecar, args.engine or [LLAMA_CPP], args.plain_engine, args.tasks, args.temperature,
        args.drafts, args.mtp_types, args.p_min, args.slots, args.context, args.runs, args.prompts, args.tokens,
        args.threads, args.seed, args.device, not args.no_costs,
    )  # fmt: skip
    progress = Progress(quiet=args.quiet, unit="cells")
    try:
        measure(options, args.out, progress)
    finally:
        progress.close()
    workloads = [Workload(f"{a:,} in, {b:,} out", a, b) for a, b in args.workload] or WORKLOADS
    store = Store(args.out)
    report = BenchReport(Results(store), workloads, store.settings)
    report.write(args.out)
    return report


class _Recommendations:
    """What recommend-mtp prints."""

    def __init__(self, found: Sequence[Recommendation]) -> None:
        self.found = found

    def as_text(self) -> str:
        return "\n".join(r.as_text() for r in self.found)

    def as_json(self) -> dict[str, Any]:
        from bench.policy import SCHEMA

        return {"schema": SCHEMA, "recommendations": [r.as_json() for r in self.found]}


def _recommend(args: argparse.Namespace) -> _Recommendations:
    from bench import preset
    from bench.policy import Policy, Query
    from bench.store import Store
    from bench.summary import Results

    if bool(args.input_tokens) != bool(args.output_tokens):
        raise UsageError("--input-tokens and --output-tokens go together")
    query = Query(
        args.task, args.type, args.temperature, args.engine, args.slots, args.input_tokens, args.output_tokens
    )
    found = Policy(Results(Store(args.folder))).recommend(query)
    if args.out is not None:
        preset.write(found, args.out)
    return _Recommendations(found)
