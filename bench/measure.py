"""Run the matrix: every load once per round, every cell a line in the folder; what is there already is not run again."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from importlib import resources
from pathlib import Path
from typing import Any

from bench.matrix import LLAMA_CPP, OWN, TORCH, Axes, Cell, Load, rounds
from bench.runners import LlamaCpp, Runner, Torch, Url, runner_of
from bench.store import Cost, HeadScore, Record, Store
from converter.errors import EnvironmentFailure, InputError, ToolError, UsageError
from converter.gguf_model import GGUFModel, open_gguf
from quant.mixes import MIXES
from verify.engines.base import Request, Run

TASKS = ("code", "factual", "analysis", "creative")
_WARM_UP_TOKENS = 8
_ROOM = 8  # positions beyond prompt, answer and drafts
_COST_PROMPTS = 3
_NEVER_SURE = 1.0  # a p-min that ends drafting after one draft, which is then not used

Progress = Callable[[int, int, str], None]


@dataclass(frozen=True)
class Options:
    """What to measure. heads: types of the head that are made from source, "match" for the trunk's; empty: its own.

    tasks: bundled ones, or files of prompts parted by blank lines. prompts: at most so many of each task. tokens: of each
    answer. runs: repetitions of everything. threads: of llama.cpp, 0 for all cores. costs: measure what steps cost.
    """

    files: Sequence[Path]
    source: Path | None = None
    sidecar: Path | None = None
    engines: Sequence[str] = (LLAMA_CPP,)
    plain_engine: str | None = None
    tasks: Sequence[str] = TASKS
    temperatures: Sequence[float] = (0.0,)
    drafts: Sequence[int] = (1, 2, 3, 4)
    heads: Sequence[str] = ()
    p_mins: Sequence[float] = (0.0,)
    slots: Sequence[int] = (1,)
    contexts: Sequence[int] = (0,)
    runs: int = 3
    prompts: int = 12
    tokens: int = 128
    threads: int = 0
    seed: int = 0
    device: str = "cpu"
    costs: bool = True

    def refuse_nonsense(self) -> None:
        """Raises UsageError."""
        if not self.files:
            raise UsageError("there is nothing to measure", expected="one or more .gguf files")
        for name, least, values in (
            ("--drafts", 0, self.drafts), ("--temperature", 0, self.temperatures), ("--p-min", 0, self.p_mins),
            ("--slots", 1, self.slots), ("--context", 0, self.contexts), ("--runs", 1, [self.runs]),
            ("--tokens", 2, [self.tokens]), ("--prompts", 1, [self.prompts]),
        ):  # fmt: skip
            if not values or min(values) < least:
                raise UsageError(f"{name} is out of range", expected=f"at least {least}", found=list(values))
        if self.heads and self.source is None:
            raise UsageError(
                "--mtp-types needs --source", hint="heads of other types are made from the source checkpoint"
            )
        for engine in self.engines:
            if engine not in {LLAMA_CPP, TORCH} and "://" not in engine:
                raise UsageError("there is no such engine", expected=f"{LLAMA_CPP}, {TORCH} or http://…", found=engine)
            if "://" in engine and self.plain_engine is None:
                raise UsageError(
                    "--engine URL needs --plain-engine URL: a server cannot switch MTP off by request",
                    hint="start a second server of the same model without MTP",
                )  # fmt: skip
        if any(e != LLAMA_CPP for e in self.engines) and list(self.p_mins) != [0.0]:
            raise UsageError("--p-min is a setting of llama.cpp in process", found=list(self.engines))
        if TORCH in self.engines and list(self.slots) != [1]:
            raise UsageError("torch answers one request at a time", expected="--slots 1", found=list(self.slots))
        for file in self.files:
            if not file.exists():
                raise InputError("there is no such file", file)


def measure(options: Options, folder: Path, progress: Progress = lambda _done, _total, _what: None) -> None:
    """Fill a folder with results. Raises ToolError; what was measured until then stays."""
    options.refuse_nonsense()
    _Measurement(options, folder, progress).run()


class _Measurement:
    def __init__(self, options: Options, folder: Path, progress: Progress) -> None:
        self.options, self.folder, self.progress = options, folder, progress
        self.store = Store(folder)
        self.models = {str(file): open_gguf(file) for file in options.files}
        self.prints = {file: _fingerprint(model) for file, model in self.models.items()}
        self.threads = options.threads or len(os.sched_getaffinity(0))

    def run(self) -> None:
        options = self.options
        texts = {name: _paragraphs(name) for name in options.tasks}
        digest = hashlib.sha256(repr(texts).encode()).hexdigest()[:16]
        self.store.begin({
            "tokens": options.tokens, "prompts": options.prompts, "tasks": digest, "threads": self.threads,
            "seed": options.seed,
        })  # fmt: skip
        self.prompts = {_task(name): self._ids(parts) for name, parts in texts.items()}
        self.sidecars = self._heads()
        self.runners: dict[str, Runner] = {
            e: runner_of(e, options.plain_engine, self.sidecars, self.context, self.threads, options.device)
            for e in options.engines
        }
        self._scores()
        loads = self._loads()
        done = self._done()
        total = options.runs * sum(len(self._cells(load)) for load in loads)
        count = len(done)
        for run, load in rounds(loads, options.runs, options.seed):
            self.progress(min(count, total), total, str(load))
            cells = [c for c in self._cells(load) if (c, run, self.prints[c.load.file]) not in done]
            if cells:
                self._measure(run, load, cells)
                count += len(cells)
        self.progress(total, total, "done")
        if options.costs and LLAMA_CPP in options.engines:
            self._costs()

    # --- the matrix

    @cached_property
    def head_names(self) -> list[str]:
        return list(self.options.heads) or [OWN]

    def _loads(self) -> list[Load]:
        options = self.options
        found: list[Load] = []
        for engine in options.engines:
            runner = self.runners[engine]
            is_url = isinstance(runner, Url)
            own = [runner.drafts(next(iter(self.prompts.values()))[0])] if is_url else options.drafts
            axes = Axes(
                [engine], list(self.models)[:1] if is_url else list(self.models), [OWN] if is_url else self.head_names,
                own, (), p_mins=options.p_mins, slots=options.slots,
            )  # fmt: skip
            found += axes.loads()
        return found

    def _cells(self, load: Load) -> list[Cell]:
        options = self.options
        axes = Axes((), (), (), (), list(self.prompts), options.temperatures, contexts=options.contexts)
        return axes.cells(load)

    def _done(self) -> set[tuple[Cell, int, str]]:
        if not self.store.file.exists():
            return set()
        records = (item for item in self.store if isinstance(item, Record) and not item.failed)
        return {(r.cell, r.run, r.files) for r in records}

    @cached_property
    def context(self) -> int:
        longest = max(len(p) for prompts in self.prompts.values() for p in prompts)
        room = self.options.tokens + max(self.options.drafts, default=0) + _ROOM
        return max(longest, *self.options.contexts) + room

    # --- inputs

    @cached_property
    def encode(self) -> Callable[[str], list[int]]:
        from verify.prompts import tokenizer_of_file, tokenizer_of_folder

        if self.options.source is not None:
            return tokenizer_of_folder(self.options.source)
        return tokenizer_of_file(next(iter(self.models.values())))

    @cached_property
    def filling(self) -> list[int]:
        """What prompts are made longer with."""
        from verify.prompts import TEXT, bundled

        return self.encode(bundled(TEXT))

    def _ids(self, parts: Sequence[str]) -> list[list[int]]:
        return [self.encode(part) for part in parts[: self.options.prompts]]

    def _filled(self, prompt: Sequence[int], context: int) -> tuple[int, ...]:
        """A prompt behind as much text as it takes; longer ones lose their beginning."""
        if not context:
            return tuple(prompt)
        first = self.encode("")  # the begin token, of models that want one
        own, filling = prompt[len(first) :], self.filling[len(first) :]
        missing = max(0, context - len(prompt))
        text = filling * (missing // len(filling) + 1)
        return (*first, *text[:missing], *own[max(0, len(prompt) - context) :])

    def _heads(self) -> Mapping[tuple[str, str], Path | None]:
        """The sidecar of every file and head; types that are asked for are made from the source, once."""
        from converter.heads import inspect

        found: dict[tuple[str, str], Path | None] = {}
        for file, model in self.models.items():
            if inspect(file).can_draft:
                found[file, OWN] = None
            elif self.options.sidecar is not None:
                found[file, OWN] = self.options.sidecar
            elif not self.options.heads and any(self.options.drafts):
                raise InputError(
                    "this file has no head that can draft",
                    model.file,
                    hint="--sidecar FILE, or --source and --mtp-types",
                )
            for head in self.options.heads:
                found[file, head] = self._made(_trunk_type(model) if head == "match" else head)
        return found

    def _made(self, mix: str) -> Path:
        from converter import convert
        from converter.heads import inspect

        file = self.folder / "heads" / f"mtp-{mix}.gguf"
        if not file.exists():
            assert self.options.source is not None
            file.parent.mkdir(parents=True, exist_ok=True)
            if inspect(self.options.source).drafts_for:  # a drafter with a checkpoint of its own
                convert(self.options.source, file, types=[mix])
            else:
                convert(self.options.source, file, types=[mix], mtp="only", mtp_type="match")
        return file

    # --- measuring

    def _measure(self, run: int, load: Load, cells: Sequence[Cell]) -> None:
        files = self.prints[load.file]
        try:
            found = self.runners[load.engine].run(load, [self._requests(c) for c in cells], self._warm_up(cells))
        except EnvironmentFailure:
            raise
        except ToolError as error:
            for cell in cells:
                self.store.append(Record(cell, run, files, failed=str(error)))
            return
        for cell, result in zip(cells, found, strict=True):
            self.store.append(_record(cell, run, files, result))

    def _requests(self, cell: Cell) -> list[Request]:
        options = self.options
        return [
            Request(self._filled(p, cell.context), options.tokens, cell.temperature, options.seed + i)
            for i, p in enumerate(self.prompts[cell.task])
        ]

    def _warm_up(self, cells: Sequence[Cell]) -> list[Request]:
        """One short answer for each slot."""
        prompt = self.prompts[cells[0].task][0]
        return [Request(tuple(prompt), _WARM_UP_TOKENS)] * cells[0].load.slots

    def _scores(self) -> None:
        """All heads of a file judged on one decode of its trunk, where there are several or torch is asked for."""
        if len(self.head_names) < 2 and TORCH not in self.options.engines:
            return
        from verify.acceptance import accepted_by_position, greedy_texts

        torch = self.runners.get(TORCH)
        if not isinstance(torch, Torch):
            torch = Torch(self.sidecars, self.context, self.options.device)
        made = {(i.file, i.head, i.task, i.files) for i in self._stored() if isinstance(i, HeadScore)}
        most = max(self.options.drafts)
        for file, task in ((f, t) for f in self.models for t in self.prompts):
            heads = [h for h in self.head_names if (file, h, task, self.prints[file]) not in made]
            if not heads or not most:
                continue
            self.progress(0, 1, f"heads of {Path(file).name} on {task}")
            texts = greedy_texts(torch.model(file, OWN), self.prompts[task], self.options.tokens)
            for head in heads:
                counts = accepted_by_position(torch.model(file, head), texts, most)
                self.store.append(HeadScore(file, head, task, self.prints[file], counts))

    def _stored(self) -> list[Any]:
        return list(self.store) if self.store.file.exists() else []

    def _costs(self) -> None:
        """Steps with all drafts rejected by the engine's own decree, for every head and number of drafts."""
        llama = self.runners[LLAMA_CPP]
        assert isinstance(llama, LlamaCpp)
        made = {(i.file, i.head, i.run, i.files) for i in self._stored() if isinstance(i, Cost)}
        widths = [n for n in self.options.drafts if n]
        wanted = [(r, f, h) for r in range(self.options.runs) for f in self.models for h in self.head_names]
        for number, (run, file, head) in enumerate(wanted):
            if (file, head, run, self.prints[file]) in made or not widths:
                continue
            self.progress(number, len(wanted), f"cost of steps, {Path(file).name}, {head} head")
            self.store.append(_Steps(self, llama, file, head).cost(run, widths))


class _Steps:
    """What steps cost in llama.cpp."""

    def __init__(self, measurement: _Measurement, llama: LlamaCpp, file: str, head: str) -> None:
        self.of, self.llama, self.file, self.head = measurement, llama, file, head

    def cost(self, run: int, widths: Sequence[int]) -> Cost:
        from dataclasses import replace

        def engine(drafts: int, p_min: float = 0.0) -> Any:
            return self.llama.engine(Load(LLAMA_CPP, self.file, self.head, drafts, p_min))

        step_s = {n: self._seconds(replace(engine(n), synthetic=(0.0,) * n)) for n in widths}
        step_s[0] = self._seconds(engine(0))
        alone = self._seconds(engine(1, _NEVER_SURE)) - step_s[0]
        model = self.of.models[self.file]
        architecture = model.get("general.architecture", "")
        experts, used = (model.get(f"{architecture}.{key}", 0) for key in ("expert_count", "expert_used_count"))
        return Cost(
            LLAMA_CPP, self.file, self.head, run, self.of.prints[self.file], step_s, max(0.0, alone), experts, used
        )

    def _seconds(self, engine: Any) -> float:
        """Of one step, which gives one token; the median over prompts."""
        from verify.engines.llama_cpp import run_batches

        prompts = next(iter(self.of.prompts.values()))
        requests = [Request(tuple(p), self.of.options.tokens) for p in prompts[:_COST_PROMPTS]]
        found = run_batches(engine, [requests], requests[:1])[0]
        return sorted(1 / c.tokens_per_s for c in found.completions)[len(requests) // 2]


def _record(cell: Cell, run: int, files: str, result: Run) -> Record:
    answers, counts = result.completions, result.counts
    total = sum(len(c.tokens) for c in answers)
    drafted, accepted = result.drafted, result.accepted
    return Record(
        cell, run, files, result.engine, [list(c.tokens) for c in answers],
        [len(c.tokens) / c.tokens_per_s if c.tokens_per_s else 0.0 for c in answers],
        [c.prompt_tokens / c.prompt_per_s if c.prompt_per_s else 0.0 for c in answers],
        [c.prompt_tokens for c in answers], [c.seconds for c in answers], result.seconds,
        counts.steps if counts else (total - accepted if accepted is not None else None), drafted, accepted,
        list(counts.by_position) if counts else [], result.peak_bytes,
    )  # fmt: skip


def _fingerprint(model: GGUFModel) -> str:
    """Of all parts: sizes, and the beginning of the first."""
    with model.file.open("rb") as file:
        head = hashlib.sha256(file.read(1 << 20)).hexdigest()[:16]
    return f"{head}-{sum(t.nbytes for t in model.tensors)}"


def _trunk_type(model: GGUFModel) -> str:
    """The mix that a file says it has."""
    number = model.get("general.file_type")
    for mix in MIXES.values():
        if mix.file_type == number:
            return mix.name
    raise InputError("this file does not say its type", model.file, expected="general.file_type", found=number,
                     hint="name the head's type instead of match")  # fmt: skip


def _task(name: str) -> str:
    return name if name in TASKS else Path(name).stem


def _paragraphs(name: str) -> list[str]:
    """Prompts of a bundled task or a file."""
    from converter.files import read_text

    if name in TASKS:
        text = (resources.files("bench") / "data" / f"{name}.txt").read_text(encoding="utf-8")
    elif Path(name).is_file():
        text = read_text(Path(name))
    else:
        raise UsageError("there is no such task or file", expected=", ".join(TASKS), found=name)
    parts = [part.strip("\n") for part in text.split("\n\n") if part.strip()]
    if not parts:
        raise InputError("there are no prompts in this file", Path(name))
    return parts


__all__ = ["TASKS", "Options", "measure"]
