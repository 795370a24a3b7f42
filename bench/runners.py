"""Engines as the matrix uses them: start one as a load says, give it batches of requests, get a run for each."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from bench.matrix import LLAMA_CPP, OWN, TORCH, Load
from converter.errors import EnvironmentFailure
from verify.engines.base import Completion, DraftCounts, Request, Run
from verify.engines.http import Server
from verify.engines.llama_cpp import Engine, run_batches

if TYPE_CHECKING:
    from verify.models.base import TorchModel

_PROBE_TOKENS = 16
Batches = Sequence[Sequence[Request]]


class Runner(Protocol):
    """An engine."""

    def run(self, load: Load, batches: Batches, warm_up: Sequence[Request]) -> list[Run]:
        """A run for each batch; warm_up goes first. Raises ToolError where the load does not run."""
        ...


class LlamaCpp:
    """In a child process of its own for every load. sidecars: of files and heads, None for the file's own."""

    def __init__(self, sidecars: Mapping[tuple[str, str], Path | None], context: int, threads: int) -> None:
        self.sidecars, self.context, self.threads = sidecars, context, threads

    def engine(self, load: Load) -> Engine:
        sidecar = self.sidecars.get((load.file, load.head)) if load.drafts else None
        return Engine(
            load.file, str(sidecar) if sidecar else None, load.drafts, self.context, self.threads, p_min=load.p_min,
            slots=load.slots,
        )  # fmt: skip

    def run(self, load: Load, batches: Batches, warm_up: Sequence[Request]) -> list[Run]:
        return run_batches(self.engine(load), batches, warm_up)


class Url:
    """A running server, and one without MTP as its baseline; how many drafts it makes is its own affair."""

    def __init__(self, url: str, plain_url: str) -> None:
        self.url, self.plain_url = url, plain_url

    @cached_property
    def _servers(self) -> tuple[Server, Server]:
        return Server(self.url), Server(self.plain_url)

    def drafts(self, prompt: Sequence[int]) -> int:
        """Per step, as many as its counters have positions after an answer; 1 where it has none."""
        drafting, _ = self._servers
        drafting.complete(Request(tuple(prompt), _PROBE_TOKENS))
        counts = drafting.counts()
        return max(1, len(counts.by_position)) if counts else 1

    def run(self, load: Load, batches: Batches, warm_up: Sequence[Request]) -> list[Run]:
        drafting, plain = self._servers
        server = drafting if load.drafts else plain
        if warm_up:
            server.run(warm_up, load.slots)
        found = [server.run(batch, load.slots) for batch in batches]
        drafted = any(r.drafted for r in found)
        if load.drafts and not drafted and any(r.drafted is not None for r in found):
            raise EnvironmentFailure("the engine drafts nothing: MTP is not active", found=self.url)
        if not load.drafts and drafted:
            raise EnvironmentFailure("the engine for plain decoding drafts", found=self.plain_url)
        return found


class Torch:
    """Our own engine in this process, batched as engines do it; one request at a time."""

    def __init__(self, sidecars: Mapping[tuple[str, str], Path | None], context: int, device: str) -> None:
        self.sidecars, self.context, self.device = sidecars, context, device
        self._models: dict[tuple[str, str], TorchModel] = {}

    def model(self, file: str, head: str) -> TorchModel:
        """A trunk with a head, kept for later."""
        from verify.models.opening import open_model

        key = file, head
        if key not in self._models:
            sidecar = self.sidecars.get(key)
            if head == OWN or sidecar is None:
                self._models[key] = open_model(Path(file), sidecar, self.device)
            else:
                self._models[key] = self.model(file, OWN).with_head(sidecar)
        return self._models[key]

    def run(self, load: Load, batches: Batches, warm_up: Sequence[Request]) -> list[Run]:
        model = self.model(load.file, load.head if load.drafts else OWN)
        for request in warm_up:
            self._complete(model, load, request)
        return [self._batch(model, load, batch) for batch in batches]

    def _batch(self, model: TorchModel, load: Load, batch: Sequence[Request]) -> Run:
        started = time.monotonic()
        answers, streams = zip(*(self._complete(model, load, request) for request in batch), strict=True)
        drafted = [n for s in streams for n in s.drafted if n]
        accepted = [a for s in streams for a in s.accepted]
        by_position = tuple(sum(a > k for a in accepted) for k in range(load.drafts))
        counts = DraftCounts(len(drafted), sum(drafted), sum(accepted), by_position) if load.drafts else None
        import torch

        return Run(answers, counts, f"torch {torch.__version__}", time.monotonic() - started)

    def _complete(self, model: TorchModel, load: Load, request: Request) -> tuple[Completion, Any]:
        from verify.decode import HeadDrafter, Settings, decode

        settings = Settings(request.tokens, temperature=request.temperature, seed=request.seed, context=self.context)
        drafter = _Timed(HeadDrafter(model, self.context)) if load.drafts else _Timed(None)
        started = time.monotonic()
        stream = decode(model, request.prompt, settings, drafter, load.drafts)
        ended = time.monotonic()
        prompt_s, decode_s = drafter.began - started, ended - drafter.began
        answer = Completion(
            tuple(stream.tokens), sum(stream.drafted), sum(stream.accepted), len(stream.tokens) / decode_s, (),
            len(request.prompt), len(request.prompt) / prompt_s, ended - started,
        )  # fmt: skip
        return answer, stream


class _Timed:
    """A drafter, or none, that notes when the prompt was done."""

    def __init__(self, drafter: Any) -> None:
        self.drafter, self.began = drafter, 0.0

    def begin(self, hidden: Any, prompt: Sequence[int], trunk: Any) -> None:
        if self.drafter is not None:
            self.drafter.begin(hidden, prompt, trunk)
        self.began = time.monotonic()

    def draft(self, token: int, most: int) -> list[int]:
        return self.drafter.draft(token, most) if self.drafter is not None else []

    def accept(self, hidden: Any, tokens: Sequence[int]) -> None:
        if self.drafter is not None:
            self.drafter.accept(hidden, tokens)


def runner_of(
    engine: str, plain_url: str | None, sidecars: Mapping[tuple[str, str], Path | None], context: int, threads: int,
    device: str,
) -> Runner:  # fmt: skip
    """The engine of that name."""
    if engine == LLAMA_CPP:
        return LlamaCpp(sidecars, context, threads)
    if engine == TORCH:
        return Torch(sidecars, context, device)
    assert plain_url is not None
    return Url(engine, plain_url)
