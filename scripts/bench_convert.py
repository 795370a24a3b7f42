"""Whole conversions side by side: ours and the peers that are installed, over model sizes and workers.

    python scripts/bench_convert.py [--gb 0.5,1,2] [--types Q4_K_M,Q5_K_M,Q6_K,Q8_0,F16] [--runs 2] [-o DIR]

Makes synthetic checkpoints in the layout of Qwen3.5 and converts each to all types. Tools take turns; the best run
counts. Measured from outside: wall and CPU time, peak memory of one process with what it maps, bytes that system calls
moved (a tool that maps its source moves none), and those as a multiple of the least possible: every source byte read
once, every output byte written once. libgguf quantizes rows and no more: here the least program around it, which reads
each tensor once and appends its blocks, of one type per file, without a header. llama.cpp's chain, where its tools are
on PATH, writes a BF16 file first and reads that for each type.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from converter import archs  # noqa: E402  (the script runs from a checkout too)
from converter.config import Config  # noqa: E402
from quant.mixes import MIXES  # noqa: E402

EXAMPLE = ROOT / "examples" / "tiny-qwen3.5-dense"
HIDDEN, INTERMEDIATE, VOCABULARY = 1024, 3072, 32768
OF_THE_HEAD = {"mtp.fc.weight", "mtp.layers.0.input_layernorm.weight"}
LLAMA = ("convert_hf_to_gguf.py", "llama-quantize")


@dataclass
class Run:
    """One conversion to all types. Bytes are those of system calls; peak is of the largest process."""

    tool: str
    gb: float
    workers: int
    wall_s: float
    cpu_s: float
    peak_mb: float
    read_gb: float
    written_gb: float
    output_gb: float
    of_least: float


def make_checkpoint(folder: Path, gb: float) -> Path:
    """A dense Qwen3.5 of about so many GB with a head: the example's tokenizer, random weights, one shard."""
    folder.mkdir(parents=True)
    for file in EXAMPLE.iterdir():
        if "safetensors" not in file.name:
            shutil.copyfile(file, folder / file.name)
    layers = 4
    while (size := _write_config(folder, layers)) < gb * 1e9:
        layers += 4
    shapes = _shapes(folder)
    header: dict[str, Any] = {}
    end = 0
    for name, shape in shapes.items():
        count = 2 * int(np.prod(shape))
        header[name] = {"dtype": "BF16", "shape": list(shape), "data_offsets": [end, end + count]}
        end += count
    raw = json.dumps(header).encode()
    raw += b" " * (-len(raw) % 8)
    rng = np.random.default_rng(0)
    noise = ((rng.standard_normal(2**23).astype(np.float32) * 0.02).view(np.uint32) >> 16).astype(np.uint16)  # BF16
    with (folder / "model.safetensors").open("wb") as out:
        out.write(len(raw).to_bytes(8, "little") + raw)
        for shape in shapes.values():
            left = int(np.prod(shape))
            while left:
                first = int(rng.integers(0, len(noise) // 2))
                piece = noise[first : first + left]
                out.write(piece.tobytes())
                left -= len(piece)
    print(f"{folder.name}: {size / 1e9:.2f} GB, {layers} layers", file=sys.stderr)
    return folder


def _write_config(folder: Path, layers: int) -> int:
    """Returns the bytes of a model of that config."""
    config = json.loads((EXAMPLE / "config.json").read_text())
    config["text_config"] |= {
        "hidden_size": HIDDEN, "intermediate_size": INTERMEDIATE, "vocab_size": VOCABULARY, "num_hidden_layers": layers,
        "num_attention_heads": 16, "num_key_value_heads": 4, "head_dim": 128, "linear_key_head_dim": 128,
        "linear_value_head_dim": 128, "linear_num_key_heads": 16, "linear_num_value_heads": 32,
        "layer_types": ["linear_attention"] * 3 * (layers // 4) + ["full_attention"] * (layers // 4),
    }  # fmt: skip
    config["text_config"]["layer_types"] = [
        "full_attention" if i % 4 == 3 else "linear_attention" for i in range(layers)
    ]
    (folder / "config.json").write_text(json.dumps(config))
    return sum(2 * int(np.prod(shape)) for shape in _shapes(folder).values())


def _shapes(folder: Path) -> dict[str, tuple[int, ...]]:
    config = Config.load(folder)
    table = archs.find(config).table(config, OF_THE_HEAD)
    return {source: rule.shape for rule in table.rules for source in rule.sources if not rule.duplicates}


def measure(tool: str, gb: float, workers: int, commands: Sequence[Sequence[str]], source: Path, out: Path) -> Run:
    """Run commands one after the other and add up what they took."""
    wall = cpu = peak = 0.0
    read = written = 0
    for command in commands:
        counters = out / "io"
        # The counters of a process include those of the children it waited for; `sh` outlives the command.
        script = '"$@" >/dev/null 2>"$ERRORS"; code=$?; cat /proc/$$/io >"$COUNTERS"; exit $code'
        environment = os.environ | {"COUNTERS": str(counters), "ERRORS": str(out / "errors")}
        before = time.perf_counter()
        child = subprocess.Popen(["sh", "-c", script, "sh", *command], env=environment)
        _, status, usage = os.wait4(child.pid, 0)
        wall += time.perf_counter() - before
        if status:
            raise SystemExit(f"{tool} failed: {' '.join(command)}\n{(out / 'errors').read_text()[-2000:]}")
        cpu += usage.ru_utime + usage.ru_stime
        peak = max(peak, usage.ru_maxrss / 1024)
        moved = dict(line.split(": ") for line in counters.read_text().splitlines())
        read, written = read + int(moved["rchar"]), written + int(moved["wchar"])
        counters.unlink()
        (out / "errors").unlink()
    made = sum(f.stat().st_size for f in out.rglob("*.gguf") if not f.name.startswith("between"))
    shutil.rmtree(out)
    out.mkdir()
    least = sum(f.stat().st_size for f in source.glob("*.safetensors")) + made
    return Run(tool, gb, workers, wall, cpu, peak, read / 1e9, written / 1e9, made / 1e9, (read + written) / least)


def tools(source: Path, out: Path, types: Sequence[str], workers: int) -> dict[str, list[list[str]]]:
    """What can do this, and the commands for all types."""
    ours = [sys.executable, "-m", "converter", str(source), f"{out}/{{type}}.gguf", "--type", ",".join(types)]
    found = {"convert-mtp": [[*ours, "--mtp-type", "match", "--workers", str(workers), "--quiet"]]}
    if importlib.util.find_spec("libgguf"):
        blocks = ",".join(MIXES[t].type for t in types)
        found["libgguf"] = [[sys.executable, __file__, "--libgguf", str(source), str(out), blocks, str(workers)]]
    script, quantize = (_on_path(name) for name in LLAMA)
    if script and quantize:
        between = f"{out}/between.gguf"
        found["llama.cpp"] = [[script, str(source), "--outtype", "bf16", "--outfile", between]]
        found["llama.cpp"] += [[quantize, between, f"{out}/{t}.gguf", t, str(workers)] for t in types]
    return found


def with_libgguf(source: Path, out: Path, blocks: Sequence[str], workers: int) -> None:
    """The peer's part: tensor after tensor to all types; it starts its own threads."""
    os.environ["LIBGGUF_NUM_THREADS"] = str(workers)
    libgguf = importlib.import_module("libgguf")
    from gguf import GGMLQuantizationType
    from safetensors import safe_open

    files = {b: (out / f"{b}.gguf").open("wb") for b in blocks}
    with safe_open(source / "model.safetensors", "pt") as shard:
        for name in shard.keys():  # noqa: SIM118  (not a dictionary)
            x = shard.get_tensor(name).float().numpy()
            blocked = x.ndim == 2 and x.shape[1] % 256 == 0
            for block, file in files.items():
                file.write((libgguf.quantize_rows(x, GGMLQuantizationType[block]) if blocked else x).tobytes())
    for file in files.values():
        file.flush()
        os.fsync(file.fileno())
        file.close()


def _on_path(name: str) -> str | None:
    return shutil.which(name) or shutil.which(name, path=str(Path(sys.executable).parent))


def best(runs: list[Run]) -> list[Run]:
    """The fastest of each tool, size and number of workers."""
    found: dict[tuple[str, float, int], Run] = {}
    for run in runs:
        key = run.tool, run.gb, run.workers
        if key not in found or run.wall_s < found[key].wall_s:
            found[key] = run
    return list(found.values())


def table(runs: list[Run]) -> str:
    """As Markdown; speed is compared with the first tool of the same size and workers."""
    ours = {(r.gb, r.workers): r.wall_s for r in runs if r.tool == "convert-mtp"}
    return "\n".join([
        "| source GB | tool | workers | wall s | of ours | CPU s | peak MB | read GB | written GB | outputs GB | of least |",
        "|--:|---|--:|--:|--:|--:|--:|--:|--:|--:|--:|",
        *(
            f"| {r.gb:g} | {r.tool} | {r.workers} | {r.wall_s:.1f} | {r.wall_s / ours[r.gb, r.workers]:.2f} | {r.cpu_s:.1f} "
            f"| {r.peak_mb:,.0f} | {r.read_gb:.2f} | {r.written_gb:.2f} | {r.output_gb:.2f} | {r.of_least:.2f} |"
            for r in sorted(runs, key=lambda r: (r.gb, r.workers, r.tool))
        ),
    ])  # fmt: skip


def plot(runs: list[Run], out: Path) -> None:
    """Wall time and peak memory against size, and wall time against workers, as PNG and SVG."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    most = max(r.workers for r in runs)
    figure, (wall, memory, scaling) = plt.subplots(1, 3, figsize=(13, 4), layout="constrained")
    for tool in dict.fromkeys(r.tool for r in runs):
        by_size = sorted((r.gb, r.wall_s, r.peak_mb) for r in runs if r.tool == tool and r.workers == most)
        sizes = [size for size, _, _ in by_size]
        wall.plot(sizes, [seconds for _, seconds, _ in by_size], marker="o", label=tool)
        memory.plot(sizes, [peak for _, _, peak in by_size], marker="o", label=tool)
    largest = max(r.gb for r in runs)
    for tool in dict.fromkeys(r.tool for r in runs):
        by_workers = sorted((r.workers, r.wall_s) for r in runs if r.tool == tool and r.gb == largest)
        scaling.plot([w for w, _ in by_workers], [s for _, s in by_workers], marker="o", label=tool)
    scaling.set_xticks(sorted({r.workers for r in runs}))
    for axes, x, y in (
        (wall, "source, GB", f"wall time, s ({most} workers)"),
        (memory, "source, GB", "peak memory, MB"),
        (scaling, f"workers ({largest:g} GB)", "wall time, s"),
    ):
        axes.set(xlabel=x, ylabel=y, ylim=(0, None))
        axes.grid(alpha=0.3)
        axes.spines[["top", "right"]].set_visible(False)
    wall.legend(frameon=False)
    for suffix in ("png", "svg"):
        figure.savefig(out / f"bench_convert.{suffix}", dpi=120)


def numbers(value: str) -> list[float]:
    return [float(part) for part in value.split(",")]


def main() -> int:
    if sys.argv[1:2] == ["--libgguf"]:
        source, out, blocks, workers = sys.argv[2:]
        with_libgguf(Path(source), Path(out), blocks.split(","), int(workers))
        return 0
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gb", type=numbers, default=[0.5, 1.0, 2.0], help="sizes of the sources")
    parser.add_argument("--types", default="Q4_K_M,Q5_K_M,Q6_K,Q8_0")
    parser.add_argument(
        "--workers", type=numbers, help="numbers of workers for the largest size (default: 1 to all cores)"
    )
    parser.add_argument("--runs", type=int, default=2, help="of which the best counts")
    parser.add_argument("--tools", help="only these")
    parser.add_argument("-o", "--out", type=Path, help="folder for bench_convert.json, .png and .svg")
    args = parser.parse_args()
    types = args.types.split(",")
    if unknown := set(types) - MIXES.keys():
        parser.error(f"unknown types: {', '.join(sorted(unknown))}")
    cores = os.cpu_count() or 1
    counts = sorted(
        {int(w) for w in args.workers or [2**i for i in range(cores.bit_length()) if 2**i <= cores]} | {cores}
    )
    runs: list[Run] = []
    with tempfile.TemporaryDirectory(dir=args.out) as folder:
        for gb in args.gb:
            source, out = make_checkpoint(Path(folder, f"{gb:g}"), gb), Path(folder, "out")
            out.mkdir(exist_ok=True)
            for workers in counts if gb == max(args.gb) else [cores]:
                candidates = tools(source, out, types, workers)
                chosen = [t for t in candidates if not args.tools or t in args.tools.split(",")]
                size = round(sum(f.stat().st_size for f in source.glob("*.safetensors")) / 1e9, 2)
                for _ in range(args.runs):
                    for tool in chosen:
                        runs.append(measure(tool, size, workers, candidates[tool], source, out))
                        print(f"{gb:g} GB, {workers} workers, {tool}: {runs[-1].wall_s:.1f} s", file=sys.stderr)
            shutil.rmtree(source)
    chosen_runs = best(runs)
    print(table(chosen_runs))
    if args.out:
        (args.out / "bench_convert.json").write_text(json.dumps([asdict(r) for r in chosen_runs], indent=2))
        plot(chosen_runs, args.out)
    return 0


if __name__ == "__main__":
    sys.exit(main())
