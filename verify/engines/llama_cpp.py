"""llama.cpp in process, through xllamacpp, one model per child process: a broken file may kill it (spec/runtime.md).

The child loads the model, answers HTTP requests to itself, writes the answers to a file and ends.
"""

from __future__ import annotations

import importlib
import json
import re
import subprocess
import sys
import tempfile
import urllib.request
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from converter.errors import EnvironmentFailure, ToolError

_TIMEOUT_S = 600
_LOG_LINES = 15
_CANDIDATES = 5  # the verbosity that prints the candidates of every draft


class EngineError(ToolError):
    """The engine refused the file or died of it: the file is not fit for use."""

    exit_code = 1


@dataclass(frozen=True)
class Engine:
    """How to load a model. drafts: most tokens drafted per step, 0 for plain decoding. sidecar: the head's own file."""

    model: str
    sidecar: str | None = None
    drafts: int = 0
    context: int = 2048
    threads: int = 1
    verbosity: int = 3  # shows why a file does not load


@dataclass(frozen=True)
class Completion:
    """One greedy answer: token ids, and what the engine says of drafts (0, 0 without) and speed (tokens a second)."""

    tokens: tuple[int, ...]
    drafted: int
    accepted: int
    tokens_per_s: float
    margins: tuple[float, ...] = ()


def complete(
    engine: Engine, prompts: Sequence[Sequence[int]], tokens: int, *, ignore_eos: bool = True, margins: bool = False
) -> list[Completion]:
    """Greedy answers to prompts of token ids, one after the other. margins: also ln p(best) - ln p(second) per token.

    Raises EngineError where the engine refuses or dies, EnvironmentFailure where it is not installed.
    """
    body = {
        "n_predict": tokens, "temperature": 0.0, "top_k": 1, "seed": 0, "cache_prompt": False, "return_tokens": True,
        "ignore_eos": ignore_eos, "samplers": ["top_k", "temperature"], "repeat_penalty": 1.0,
        **({"n_probs": 2, "samplers": ["temperature"]} if margins else {}),
    }  # fmt: skip
    answers, _ = _ask(engine, [("/completion", body | {"prompt": list(prompt)}) for prompt in prompts])
    return [_completion(engine, answer) for answer in answers]


@dataclass(frozen=True)
class DraftStep:
    """What the engine drafted after tokens[place]: for each draft its best candidates, (token, share of the ten best)."""

    place: int
    candidates: tuple[tuple[tuple[int, float], ...], ...]


def draft_steps(engine: Engine, prompt: Sequence[int], tokens: int) -> tuple[Completion, list[DraftStep]]:
    """One greedy answer from a fresh server, and the candidates that it prints for every draft (spec/runtime.md, 3)."""
    body = {
        "prompt": list(prompt), "n_predict": tokens, "temperature": 0.0, "top_k": 1, "cache_prompt": False,
        "return_tokens": True, "ignore_eos": True, "samplers": ["top_k", "temperature"],
    }  # fmt: skip
    answers, log = _ask(replace(engine, verbosity=_CANDIDATES), [("/completion", body)])
    answer = _completion(engine, answers[0])
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
    bodies = [{"content": t, "add_special": False, "parse_special": True} for t in texts]
    return [answer["tokens"] for answer in _ask(engine, [("/tokenize", body) for body in bodies])[0]]


def _completion(engine: Engine, answer: dict[str, Any]) -> Completion:
    timings = answer["timings"]
    if engine.drafts and "draft_n" not in timings:
        raise EngineError("the engine drafted nothing: MTP was not active", Path(engine.model))
    margins = [_margin(entry["top_logprobs"]) for entry in answer.get("completion_probabilities", [])]
    return Completion(
        tuple(answer["tokens"]), timings.get("draft_n", 0), timings.get("draft_n_accepted", 0),
        timings["predicted_per_second"], tuple(margins),
    )  # fmt: skip


def _margin(top: list[dict[str, Any]]) -> float:
    return top[0]["logprob"] - top[1]["logprob"] if len(top) > 1 else float("inf")


def _ask(engine: Engine, requests: list[tuple[str, dict[str, Any]]]) -> tuple[list[dict[str, Any]], str]:
    """Start a child, let it answer, and say what its death means; returns the answers and its log."""
    with tempfile.TemporaryDirectory() as folder:
        job, answers = Path(folder, "job.json"), Path(folder, "answers.json")
        job.write_text(json.dumps({"engine": asdict(engine), "requests": requests}))
        command = [sys.executable, "-m", "verify.engines.llama_cpp", str(job), str(answers)]
        try:
            child = subprocess.run(command, capture_output=True, timeout=_TIMEOUT_S, check=False)
        except subprocess.TimeoutExpired as error:
            raise EngineError("the engine does not answer", Path(engine.model), found=f"{_TIMEOUT_S} s") from error
        if child.returncode == 0:
            return json.loads(answers.read_text()), child.stderr.decode(errors="replace")
        log = child.stderr.decode(errors="replace").strip().splitlines()
        if any("No module named 'xllamacpp'" in line for line in log):
            raise EnvironmentFailure("llama.cpp is not installed", hint="pip install 'convert-mtp[llamacpp]'")
        died = f"signal {-child.returncode}" if child.returncode < 0 else f"exit code {child.returncode}"
        raise EngineError(
            "llama.cpp does not run this file", Path(engine.model), expected="a loaded model",
            found="\n    ".join([died, *log[-_LOG_LINES:]]),
        )  # fmt: skip


def _child(job_file: str, answers_file: str) -> None:
    x: Any = importlib.import_module("xllamacpp")  # ships no types

    job = json.loads(Path(job_file).read_text())
    engine = Engine(**job["engine"])
    params = x.CommonParams()
    params.model.path = engine.model
    params.n_ctx, params.n_parallel = engine.context, 1
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = engine.threads
    params.warmup = params.fit_params = False
    params.cache_ram_mib = 0
    params.verbosity = engine.verbosity
    if engine.drafts:
        params.load_mtp = True
        params.speculative.types = [x.common_speculative_type.COMMON_SPECULATIVE_TYPE_DRAFT_MTP]
        params.speculative.draft.n_max = engine.drafts
        if engine.sidecar:
            params.speculative.draft.mparams.path = engine.sidecar
    server = x.Server(params)
    answers = [_post(server.listening_address, path, body) for path, body in job["requests"]]
    Path(answers_file).write_text(json.dumps(answers))


def _post(address: str, path: str, body: dict[str, Any]) -> dict[str, Any]:
    data = json.dumps(body).encode()
    request = urllib.request.Request(address + path, data, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=_TIMEOUT_S) as answer:
        return json.load(answer)


if __name__ == "__main__":
    _child(*sys.argv[1:])
