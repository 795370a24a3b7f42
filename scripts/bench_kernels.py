"""Quantizers side by side in one run: ours, ggml's reference, libgguf, gguf-py; million values a second.

    python scripts/bench_kernels.py [--types Q4_K,Q6_K] [--seconds 60] [--cores N] [--json FILE]

All candidates of a type take turns on the same data, so that drift of the machine hits all alike; the best of all turns
counts. One core, then ours on all cores. "bytes" says whether the output equals ggml's. The roof is what a copy of the
same data through memory reaches.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import platform
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from quant import TYPES, quantize  # noqa: E402  (the script runs from a checkout too)
from quant.block import takes_weights  # noqa: E402
from quant.lanes import WIDTH  # noqa: E402
from tests.oracles import ggml  # noqa: E402

ROWS, COLUMNS = 256, 4096
LEAST_TURNS = 3
WRITABLE = [name for name, kind in TYPES.items() if kind.can_write]


@dataclass
class Row:
    """One type, with or without importance weights; rates in million values a second, None where a tool cannot."""

    type: str
    weighted: bool
    ours: float
    ggml: float
    libgguf: float | None
    gguf_py: float | None
    ratio: float
    all_cores: float
    bytes_equal: bool


Candidate = Callable[[], Any]


def candidates(name: str, x: np.ndarray, weights: np.ndarray | None) -> dict[str, Candidate]:
    """What can make this type; each call quantizes all of x."""
    out = np.empty((ROWS, TYPES[name].row_bytes(COLUMNS)), np.uint8)
    found: dict[str, Candidate] = {
        "ours": lambda: quantize(x, name, weights, out),
        "ggml": lambda: ggml.quantize_chunk(x, name, weights),
    }
    try:
        import gguf

        libgguf = importlib.import_module("libgguf")  # a peer to measure, not a dependency
    except ImportError:
        return found
    kind = gguf.GGMLQuantizationType[name]
    optional: dict[str, Candidate] = {"libgguf": lambda: libgguf.quantize_rows(x, kind, weights)}
    if weights is None and name != "F32":  # gguf-py passes float32 on without touching it
        optional["gguf_py"] = lambda: gguf.quants.quantize(x, kind)
    for tool, run in optional.items():
        try:
            run()
        except Exception:  # noqa: BLE001  (a tool that lacks this type has no rate)
            continue
        found[tool] = run
    return found


def best_times(runs: dict[str, Candidate], seconds: float) -> dict[str, float]:
    """The shortest time of each candidate, all taking turns for about so many seconds."""
    times = dict.fromkeys(runs, float("inf"))
    started, turns = time.perf_counter(), 0
    while turns < LEAST_TURNS or time.perf_counter() - started < seconds:
        for tool, run in runs.items():
            before = time.perf_counter()
            run()
            times[tool] = min(times[tool], time.perf_counter() - before)
        turns += 1
    return times


def on_all_cores(x: np.ndarray, name: str, weights: np.ndarray | None, cores: int) -> float:
    """Million values a second with one thread per core."""
    parts = np.array_split(np.concatenate([x] * cores), cores)
    outs = [np.zeros((len(p), TYPES[name].row_bytes(COLUMNS)), np.uint8) for p in parts]
    best = float("inf")
    with ThreadPoolExecutor(cores) as pool:
        for _ in range(LEAST_TURNS):
            before = time.perf_counter()
            list(pool.map(lambda part, out: quantize(part, name, weights, out), parts, outs))
            best = min(best, time.perf_counter() - before)
    return sum(p.size for p in parts) / best / 1e6


def measure(name: str, weighted: bool, seconds: float, cores: int) -> Row:
    """One row of the table."""
    rng = np.random.default_rng(0)
    x = rng.standard_normal((ROWS, COLUMNS)).astype(np.float32)
    weights = rng.random(COLUMNS).astype(np.float32) if weighted else None
    runs = candidates(name, x, weights)
    equal = runs["ours"]().tobytes() == runs["ggml"]()
    rates = {tool: x.size / t / 1e6 for tool, t in best_times(runs, seconds).items()}
    return Row(
        name, weighted, rates["ours"], rates["ggml"], rates.get("libgguf"), rates.get("gguf_py"),
        rates["ours"] / rates["ggml"], on_all_cores(x, name, weights, cores), equal,
    )  # fmt: skip


def copy_rate() -> float:
    """GB/s that a copy of 256 MB reads and writes: the roof of everything that touches memory."""
    source = np.ones(2**26, np.float32)
    target = np.empty_like(source)
    best = min(_timed(lambda: np.copyto(target, source)) for _ in range(5))
    return 2 * source.nbytes / best / 1e9


def _timed(run: Candidate) -> float:
    before = time.perf_counter()
    run()
    return time.perf_counter() - before


def processor() -> str:
    """Its name, as the system tells it."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    return next((line.split(":")[1].strip() for line in lines if line.startswith("model name")), platform.processor())


def table(rows: list[Row]) -> str:
    """As Markdown, which reads well on a terminal too."""
    lines = [
        "| type | weights | ours | ggml | ours ÷ ggml | libgguf | gguf-py | ours, all cores | bytes |",
        "|---|---|--:|--:|--:|--:|--:|--:|---|",
    ]
    for r in rows:
        optional = [f"{v:,.1f}" if v else "–" for v in (r.libgguf, r.gguf_py)]
        lines.append(
            f"| {r.type} | {'yes' if r.weighted else 'no'} | {r.ours:,.0f} | {r.ggml:,.1f} | {r.ratio:.1f} | "
            f"{' | '.join(optional)} | {r.all_cores:,.0f} | {'equal' if r.bytes_equal else 'DIFFERENT'} |"
        )
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--types", default=",".join(WRITABLE))
    parser.add_argument("--seconds", type=float, default=60, help="for all types together")
    parser.add_argument("--cores", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--json", type=Path, metavar="FILE")
    args = parser.parse_args()
    cases = [(t, w) for t in args.types.split(",") for w in (False, True) if not w or takes_weights(TYPES[t])]
    rows = []
    for name, weighted in cases:
        rows.append(measure(name, weighted, args.seconds / len(cases), args.cores))
        print(f"{name}{' weighted' if weighted else ''}: {rows[-1].ratio:.1f}", file=sys.stderr)
    roof = copy_rate()
    machine = f"{processor()}, {args.cores} cores, {WIDTH} lanes; a copy moves {roof:.1f} GB/s"
    print(machine, table(rows), sep="\n\n")
    if args.json:
        args.json.write_text(
            json.dumps({"machine": machine, "copy_gbps": roof, "rows": [asdict(r) for r in rows]}, indent=2)
        )
    return 0 if all(r.bytes_equal for r in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
