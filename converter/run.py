"""From a plan to published files: lock, go on where an earlier run stopped, execute, check, rename."""

from __future__ import annotations

import resource
from collections import defaultdict
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass, field

from converter.checkpoint import Checkpoint
from converter.console import amount
from converter.device import Device
from converter.errors import EnvironmentFailure, InputError, UnsupportedError, UsageError
from converter.execute import Chunk, Work, dead_experts, make_jobs
from converter.executors import Executor
from converter.journal import Identity, Journal
from converter.plan import Plan
from converter.writer import OutputFile, refuse_folders, refuse_full_disk

_SPARE_DESCRIPTORS = 256


Progress = Callable[[int, int, str], None]  # source bytes done and in all, the tensor at hand
Notify = Callable[[str, str, Mapping[str, object]], None]  # name of the event, a line for people, facts


@dataclass
class RunResult:
    """source_bytes: read by this run. resumed_bytes: of the source, done by an earlier one."""

    notes: list[str] = field(default_factory=list)
    source_bytes: int = 0
    resumed_bytes: int = 0


def run_plan(
    plan: Plan,
    checkpoint: Checkpoint,
    *,
    device: Device,
    executor: Executor,
    force: bool = False,
    resume: bool = True,
    progress: Progress = lambda _done, _total, _tensor: None,
    notify: Notify = lambda _name, _message, _facts: None,
) -> RunResult:
    """Write all files of a plan, or none.

    Raises UsageError where an output exists and force is not set, EnvironmentFailure where it cannot be written. What
    was done stays beside the outputs for the next run, unless the input is at fault.
    """
    refuse_folders(plan)
    _raise_descriptor_limit(2 * len(plan.files))
    outputs = [OutputFile(planned) for planned in plan.files]
    first = plan.files[0].path
    journal_path = first.with_name(first.name + ".journal")
    if not force and not journal_path.exists():
        _refuse_existing(outputs)
    identity = Identity.of(plan, checkpoint)
    work = Work(make_jobs(plan), checkpoint, [], device, plan.importance, sync=executor.remote)
    run = _Run(work, outputs, Journal(journal_path, identity), progress, notify)
    try:
        chunks = run.prepare(identity, force=force, resume=resume)
        result = run.execute(chunks, executor)
        for output in outputs:
            output.finish()
        for output in outputs:
            output.publish()
    except (InputError, UnsupportedError):
        run.discard()
        raise
    except BaseException as error:
        run.keep_or_discard(error)
        raise
    run.journal.remove()
    run.close()
    return result


class _Run:
    """The parts of one run, while it holds its locks."""

    def __init__(
        self, work: Work, outputs: list[OutputFile], journal: Journal, progress: Progress, notify: Notify
    ) -> None:
        self.work, self.outputs, self.journal = work, outputs, journal
        self.progress, self.notify = progress, notify
        self.total = work.total_bytes
        self.done = 0

    def prepare(self, identity: Identity, *, force: bool, resume: bool) -> list[Chunk]:
        """Open all outputs; returns what is left to do."""
        if self.journal.void and resume:
            self.notify("void", f"starting over: {self.journal.void}", {"reason": self.journal.void})
        usable = resume and bool(self.journal.records)
        todo = self._todo([usable and output.adopt() for output in self.outputs])
        self._refuse_foreign(todo, force=force)
        refuse_full_disk(self.outputs)
        if not any(output.is_open for output in self.outputs):
            self.journal.begin(identity)
        for output in self.outputs:
            if not output.is_open:
                output.start()
        self.work.sinks = [output.sink() for output in self.outputs]
        self.done = self.total - sum(map(self.work.source_bytes, todo))
        if self.done:
            words = f"going on: {amount(self.done)} of {amount(self.total)} were done by an earlier run"
            self.notify("resume", words, {"done": self.done, "total": self.total})
        return todo

    def execute(self, chunks: list[Chunk], executor: Executor) -> RunResult:
        work, result = self.work, RunResult(resumed_bytes=self.done)
        seen: dict[int, set[int]] = defaultdict(set)
        left = {chunk.key for chunk in chunks}
        for key, record in self.journal.records.items():
            if key not in left:
                seen[key[0]] |= record.experts
        with closing(executor.run(work, iter(chunks))) as finished:
            for done in finished:
                self.journal.append(done)
                seen[done.chunk.job] |= done.experts
                result.source_bytes += done.source_bytes
                self.done += done.source_bytes
                self.progress(self.done, self.total, work.jobs[done.chunk.job].rule.target)
        result.notes = dead_experts(work.jobs, seen)
        return result

    def discard(self) -> None:
        """Nothing of this can be used."""
        for output in self.outputs:
            output.discard()
        self.journal.remove()
        self.work.close()

    def keep_or_discard(self, error: BaseException) -> None:
        """Leave what the next run can go on from, and say so."""
        if not self.journal.worth_keeping:
            self.discard()
            return
        self.close()
        self.journal.close()
        if isinstance(error, EnvironmentFailure) and self.done:
            kept = f"{amount(self.done)} of {amount(self.total)} are done and kept: the same command goes on from there"
            error.hint = f"{error.hint}; {kept}" if error.hint else kept

    def close(self) -> None:
        for output in self.outputs:
            output.close()
        self.work.close()

    def _todo(self, adopted: list[bool]) -> list[Chunk]:
        """All chunks, without the targets whose recorded bytes stand in the files."""
        chunks = list(self.work.chunks())
        if not any(adopted):
            return chunks
        with ThreadPoolExecutor() as pool:
            return [chunk for chunk in pool.map(self._missing, chunks) if chunk.targets]

    def _missing(self, chunk: Chunk) -> Chunk:
        record = self.journal.records.get(chunk.key)
        if record is None:
            return chunk
        targets = []
        for target in chunk.targets:
            file, offset, count = self.work.place(chunk, target)
            output, wanted = self.outputs[file], record.checksums.get(target)
            if not output.is_open or wanted is None or output.checksum(offset, count) != wanted:
                targets.append(target)
        return Chunk(chunk.job, chunk.first, chunk.stop, tuple(targets))

    def _refuse_foreign(self, todo: list[Chunk], *, force: bool) -> None:
        """Outputs that exist must be of the run that is continued, and whole."""
        unfinished = {self.work.place(chunk, t)[0] for chunk in todo for t in chunk.targets}
        for number in unfinished:
            output = self.outputs[number]
            if output.published:  # it has the planned header, but not the run's bytes
                output.close()
                output.published = False
        if not force:
            _refuse_existing([o for o in self.outputs if not o.published])


def _refuse_existing(outputs: list[OutputFile]) -> None:
    for output in outputs:
        if output.planned.path.exists():
            raise UsageError("the output exists already", output.planned.path, hint="--force replaces it")


def _raise_descriptor_limit(files: int) -> None:
    """Every output is open during a run, in the parent and in the workers."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = files + _SPARE_DESCRIPTORS
    if soft != resource.RLIM_INFINITY and soft < needed:
        if hard != resource.RLIM_INFINITY and hard < needed:
            raise EnvironmentFailure(
                "too many output files for this system's limit of open files", expected=f"ulimit -n {needed}", found=hard,
                hint="larger parts (--split-max-size), or fewer types at a time",
            )  # fmt: skip
        resource.setrlimit(resource.RLIMIT_NOFILE, (needed, hard))
