"""llama.cpp in process, through xllamacpp, one model per child process: a broken file may kill it (spec/runtime.md).

The child loads the model, which serves on a loopback port, has the requests answered, writes the answers and ends.
"""

from __future__ import annotations

import importlib
import json
import re
import resource
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

from converter.errors import EnvironmentFailure
from verify.engines.base import Completion, DraftCounts, EngineError, Request, Run
from verify.engines.http import Server

_TIMEOUT_S = 600
_LOG_LINES = 15
_CANDIDATES = 5  # the verbosity that prints the candidates of every draft


@dataclass(frozen=True)
class Engine:
    """How to load a model. drafts: most tokens drafted per step, 0 for plain decoding. sidecar: the head's own file.

    context: positions per slot. synthetic: acceptance made up by the engine, one unconditional rate per draft position
    (spec/runtime.md, section 1): what verifying costs, whatever the head is worth.
    """

    model: str
    sidecar: str | None = None
    drafts: int = 0
    context: int = 2048
    threads: int = 1
    verbosity: int = 3  # shows why a file does not load
    p_min: float = 0.0
    slots: int = 1
    synthetic: tuple[float, ...] = ()


def complete(
    engine: Engine, prompts: Sequence[Sequence[int]], tokens: int, *, ignore_eos: bool = True, margins: bool = False
) -> list[Completion]:
    """Greedy answers to prompts of token ids, one after the other. margins: also ln p(best) - ln p(second) per token.

    Raises EngineError where the engine refuses or dies, EnvironmentFailure where it is not installed.
    """
    requests = [Request(tuple(p), tokens, ignore_eos=ignore_eos, margins=margins) for p in prompts]
    return list(run(engine, requests).completions)


def run(engine: Engine, requests: Sequence[Request]) -> Run:
    """All requests on a fresh engine, as many at a time as it has slots."""
    return run_batches(engine, [requests])[0]


def run_batches(engine: Engine, batches: Sequence[Sequence[Request]], warm_up: Sequence[Request] = ()) -> list[Run]:
    """Several batches on one fresh engine, each with counts of its own; those of warm_up go first and do not count."""
    return _ask(engine, batches, warm_up)[0]


@dataclass(frozen=True)
class DraftStep:
    """What the engine drafted after tokens[place]: for each draft its best candidates, (token, share of the ten best)."""

    place: int
    candidates: tuple[tuple[tuple[int, float], ...], ...]


def draft_steps(engine: Engine, prompt: Sequence[int], tokens: int) -> tuple[Completion, list[DraftStep]]:
    """One greedy answer from a fresh server, and the candidates that it prints for every draft (spec/runtime.md, 3)."""
    found, log = _ask(replace(engine, verbosity=_CANDIDATES), [[Request(tuple(prompt), tokens)]])
    answer = found[0].completions[0]
    steps: list[DraftStep] = []
    place = 0
    for drafts in _printed(log):
        steps.append(DraftStep(place, drafts))
        accepted = 0
        for draft in drafts:
            if place + 1 + accepted >= len(answer.tokens) or draft[0][0] != answer.tokens[place + 1 + accepted]:
                break
            accepted += 1
        place += accepted + 1
    return answer, steps


def _printed(log: str) -> Iterator[tuple[tuple[tuple[int, float], ...], ...]]:
    """Steps of drafts of candidates, as the log has them."""
    step: list[list[tuple[int, float]]] = []
    for rank, position, token, share in re.findall(
        r"draft candidate\s+(\d+), pos\s+(\d+):\s+(\d+) \(\s*([0-9.]+)\)", log
    ):
        if int(rank) == 0:
            if int(position) == 0 and step:
                yield tuple(map(tuple, step))
                step = []
            step.append([])
        step[-1].append((int(token), float(share)))
    if step:
        yield tuple(map(tuple, step))


def tokenize(engine: Engine, texts: Sequence[str]) -> list[list[int]]:
    """Token ids of texts as the engine's tokenizer has them, special tokens recognised, none added."""
    return _child_answers({"engine": asdict(engine), "texts": list(texts)})[0]["ids"]


def _ask(
    engine: Engine, batches: Sequence[Sequence[Request]], warm_up: Sequence[Request] = ()
) -> tuple[list[Run], str]:
    """Answers, and the engine's log."""
    job = {
        "engine": asdict(engine), "batches": [[asdict(r) for r in batch] for batch in batches],
        "warm_up": [asdict(r) for r in warm_up],
    }  # fmt: skip
    answer, log = _child_answers(job)
    runs = [_run_of(found, answer["peak_bytes"]) for found in answer["runs"]]
    expected = any(len(c.tokens) > _UNDRAFTED for r in runs for c in r.completions)
    if engine.drafts and not engine.synthetic and not engine.p_min and expected and not any(r.drafted for r in runs):
        raise EngineError("the engine drafted nothing: MTP was not active", Path(engine.model))
    return runs, log


_UNDRAFTED = 2  # tokens of an answer that are never drafted: the first, and the last


def _run_of(found: dict[str, Any], peak_bytes: int) -> Run:
    counts = found["counts"]
    answers = (
        Completion(**{**c, "tokens": tuple(c["tokens"]), "margins": tuple(c["margins"])}) for c in found["completions"]
    )
    return Run(
        tuple(answers), DraftCounts(**{**counts, "by_position": tuple(counts["by_position"])}) if counts else None,
        found["engine"], found["seconds"], peak_bytes,
    )  # fmt: skip


def _child_answers(job: dict[str, Any]) -> tuple[dict[str, Any], str]:
    """Start a child, let it answer, and say what its death means."""
    model = Path(job["engine"]["model"])
    with tempfile.TemporaryDirectory() as folder:
        questions, answers = Path(folder, "job.json"), Path(folder, "answers.json")
        questions.write_text(json.dumps(job))
        command = [sys.executable, "-m", "verify.engines.llama_cpp", str(questions), str(answers)]
        try:
            child = subprocess.run(command, capture_output=True, timeout=_TIMEOUT_S, check=False)
        except subprocess.TimeoutExpired as error:
            raise EngineError("the engine does not answer", model, found=f"{_TIMEOUT_S} s") from error
        if child.returncode == 0:
            return json.loads(answers.read_text()), child.stderr.decode(errors="replace")
        log = child.stderr.decode(errors="replace").strip().splitlines()
        if any("No module named 'xllamacpp'" in line for line in log):
            raise EnvironmentFailure("llama.cpp is not installed", hint="pip install 'convert-mtp[llamacpp]'")
        died = f"signal {-child.returncode}" if child.returncode < 0 else f"exit code {child.returncode}"
        raise EngineError(
            "llama.cpp does not run this file", model, expected="a loaded model",
            found="\n    ".join([died, *log[-_LOG_LINES:]]),
        )  # fmt: skip


def start(engine: Engine) -> Any:
    """A server in this process; `listening_address` says where. It ends when the object does."""
    x: Any = importlib.import_module("xllamacpp")  # ships no types

    params = x.CommonParams()
    params.model.path = engine.model
    params.n_ctx, params.n_parallel = engine.context * engine.slots, engine.slots
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = engine.threads
    params.warmup = params.fit_params = False
    params.cache_ram_mib = 0
    params.verbosity = engine.verbosity
    params.endpoint_metrics = True
    if engine.drafts:
        params.load_mtp = True
        params.speculative.types = [x.common_speculative_type.COMMON_SPECULATIVE_TYPE_DRAFT_MTP]
        params.speculative.draft.n_max = engine.drafts
        params.speculative.draft.p_min = engine.p_min
        if engine.sidecar:
            params.speculative.draft.mparams.path = engine.sidecar
        if engine.synthetic:
            params.speculative.synth_rates = list(engine.synthetic)
    return x.Server(params)


def _peak_bytes() -> int:
    """Of resident memory. Linux counts the process before exec as well in getrusage, so its own page is asked first."""
    try:
        status = Path("/proc/self/status").read_text()
        return 1024 * int(re.findall(r"VmHWM:\s+(\d+) kB", status)[0])
    except (OSError, IndexError):
        return 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def _child(job_file: str, answers_file: str) -> None:
    job = json.loads(Path(job_file).read_text())
    engine = Engine(**job["engine"])
    running = start(engine)
    server = Server(running.listening_address, timeout=_TIMEOUT_S)
    server.name = f"llama.cpp of xllamacpp {version('xllamacpp')}"  # which says its build nowhere else
    if "texts" in job:
        answer: dict[str, Any] = {"ids": [server.tokenize(text) for text in job["texts"]]}
    else:
        if job["warm_up"]:
            server.run([Request(**r) for r in job["warm_up"]], engine.slots)
        runs = [server.run([Request(**r) for r in batch], engine.slots) for batch in job["batches"]]
        answer = {"runs": [asdict(r) for r in runs], "peak_bytes": _peak_bytes()}
    Path(answers_file).write_text(json.dumps(answer))


if __name__ == "__main__":
    _child(*sys.argv[1:])
