"""The pump: for every chunk of rows read, transform, quantize to all requested types, write at the planned place.

Nothing is decided here. A chunk is whole rows of one tensor; it is read once, taken through in strips that stay in the
cache, and every output's bytes are written where the plan says. Chunks are independent, so any executor may run them
in any order and the bytes are the same.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np

from converter.checkpoint import Checkpoint, TensorInfo
from converter.device import Cpu, Device
from converter.errors import CheckpointError
from converter.imatrix import ImportanceMatrix
from converter.plan import Plan, PlannedTensor
from converter.rules import Rule
from converter.transforms import Transform, apply_values, matrix_shape, source_column, source_rows
from converter.writer import ChunkSink
from quant import QuantizationError

_DTYPES = {"BF16": np.dtype(np.uint16), "F16": np.dtype(np.float16), "F32": np.dtype(np.float32)}


@dataclass(frozen=True)
class Job:
    """A source tensor on its way to all files that take it: (index of the file, tensor there)."""

    rule: Rule
    sources: tuple[TensorInfo, ...]
    targets: tuple[tuple[int, PlannedTensor], ...]

    @property
    def rows(self) -> int:
        return matrix_shape(self.rule.target_shape)[0]

    @property
    def row_length(self) -> int:
        return matrix_shape(self.rule.target_shape)[1]


@dataclass(frozen=True)
class Chunk:
    """Rows first ... stop - 1 of a job's result."""

    job: Job
    first: int
    stop: int

    @property
    def source_bytes(self) -> int:
        return (self.stop - self.first) * self.job.row_length * self.job.sources[0].itemsize


@dataclass
class Done:
    """What a chunk tells when it is written. experts: those of which it saw a value other than zero."""

    chunk: Chunk
    experts: set[int] = field(default_factory=set)


def jobs(plan: Plan) -> list[Job]:
    """Every source tensor once, with all places it goes to, in the order of the files."""
    targets: dict[str, list[tuple[int, PlannedTensor]]] = defaultdict(list)
    for i, file in enumerate(plan.files):
        for tensor in file.tensors:
            targets[tensor.entry.name].append((i, tensor))
    return [Job(t[0][1].rule, t[0][1].sources, tuple(t)) for t in targets.values()]


def chunks(plan: Plan, values: int) -> Iterator[Chunk]:
    """The work of a plan, cut into pieces of about so many values."""
    for job in jobs(plan):
        step = max(1, values // job.row_length)
        for first in range(0, job.rows, step):
            yield Chunk(job, first, min(first + step, job.rows))


def total_bytes(plan: Plan) -> int:
    """Source bytes that a run reads."""
    return sum(Chunk(job, 0, job.rows).source_bytes for job in jobs(plan))


def run_threads(
    plan: Plan,
    checkpoint: Checkpoint,
    sinks: Sequence[ChunkSink],
    workers: int | None = None,
    device: Device | None = None,
    progress: Callable[[int, str], None] = lambda _done, _tensor: None,
) -> list[str]:
    """Execute a plan on threads: kernels, reads and writes release the GIL. Returns notes on what was seen.

    At most two chunks per worker are in memory. The first error stops the run and is raised.
    progress: called with (source bytes read so far, tensor).
    """
    device = device or Cpu()
    workers = workers or device.workers
    seen: dict[str, set[int]] = defaultdict(set)
    pending: set[Future[Done]] = set()
    work = chunks(plan, device.chunk_values)
    read = 0
    with ThreadPoolExecutor(workers) as pool:
        try:
            while True:
                while len(pending) < 2 * workers and (chunk := next(work, None)):
                    pending.add(pool.submit(run_chunk, chunk, checkpoint, sinks, device, plan.importance))
                if not pending:
                    break
                finished, pending = wait(pending, return_when=FIRST_COMPLETED)
                for future in finished:
                    done = future.result()
                    seen[done.chunk.job.rule.target] |= done.experts
                    read += done.chunk.source_bytes
                    progress(read, done.chunk.job.rule.target)
        except BaseException:
            pool.shutdown(wait=True, cancel_futures=True)
            raise
    return _dead_experts(plan, seen)


def run_chunk(
    chunk: Chunk,
    checkpoint: Checkpoint,
    sinks: Sequence[ChunkSink],
    device: Device,
    importance: ImportanceMatrix | None = None,
) -> Done:
    """One chunk from source to all files."""
    job = chunk.job
    rows = np.arange(chunk.first, chunk.stop)
    raw = _read(job, rows, checkpoint, device)
    weights = [_weights(tensor, importance) for _, tensor in job.targets]
    outputs = [np.empty((len(rows), t.type.row_bytes(job.row_length)), np.uint8) for _, t in job.targets]
    strip = max(1, device.strip_values // job.row_length)
    for begin in range(0, len(rows), strip):
        piece = raw[begin : begin + strip]
        parts = [out[begin : begin + strip] for out in outputs]
        _quantize_strip(job, rows[begin : begin + strip], piece, weights, parts, device)
    for (file, tensor), out in zip(job.targets, outputs, strict=True):
        sinks[file].write(tensor.entry.offset + chunk.first * out.shape[1], out.data.cast("B"))
    return Done(chunk, _live_experts(job, rows, raw))


def _read(job: Job, rows: np.ndarray, checkpoint: Checkpoint, device: Device) -> np.ndarray:
    """The source rows of these result rows, in result order and stored dtype: [rows, row length]."""
    raw = device.empty((len(rows), job.row_length), _DTYPES[job.sources[0].dtype])
    row_bytes = raw.strides[0]
    for source, first, begin, stop in _runs(job, rows):
        checkpoint.read(source, first * row_bytes, raw[begin:stop])
    return raw


def read_tensor(rule: Rule, sources: tuple[TensorInfo, ...], checkpoint: Checkpoint) -> np.ndarray:
    """What a rule makes of its sources: the whole tensor, float32, in torch order."""
    job = Job(rule, sources, ())
    raw = _read(job, np.arange(job.rows), checkpoint, Cpu())
    return apply_values(_as_float32(raw), rule.transforms).reshape(rule.target_shape)


def _runs(job: Job, rows: np.ndarray) -> Iterator[tuple[TensorInfo, int, int, int]]:
    """Runs of rows that lie one after the other in one source: (source, first row there, begin, stop in `rows`)."""
    which, inside = _origin(job, rows)
    for begin, stop in _stretches((np.diff(inside) != 1) | (np.diff(which) != 0)):
        yield job.sources[int(which[begin])], int(inside[begin]), begin, stop


def _stretches(breaks: np.ndarray) -> Iterator[tuple[int, int]]:
    """(begin, stop) of what lies between breaks; breaks[i] says that item i + 1 does not go on from item i."""
    return pairwise([0, *(np.flatnonzero(breaks) + 1).tolist(), len(breaks) + 1])


def _origin(job: Job, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """For every result row the index of its source tensor and the row in it."""
    which, inside = np.divmod(rows, job.rows // len(job.sources))
    return which, source_rows(inside, job.rule.shape, job.rule.transforms)


def _weights(tensor: PlannedTensor, importance: ImportanceMatrix | None) -> np.ndarray | None:
    """Importance of the tensor's columns, [experts or 1, row length], where it is quantized with weights."""
    if importance is None or not tensor.weighted:
        return None
    return importance.entries[tensor.entry.name].reshape(-1, tensor.entry.ne[0])


def _quantize_strip(
    job: Job,
    rows: np.ndarray,
    raw: np.ndarray,
    weights: Sequence[np.ndarray | None],
    outputs: Sequence[np.ndarray],
    device: Device,
) -> None:
    """Quantize one strip for every target; `rows` are the result rows it holds."""
    steps = job.rule.transforms
    first = 0
    try:
        x = device.place(raw if not changes_values(steps) else apply_values(_as_float32(raw), steps))
        for (_, tensor), weight, out in zip(job.targets, weights, outputs, strict=True):
            for begin, stop, of_part in _parts(job, rows, weight):
                first = begin
                device.quantize(x[begin:stop], tensor.type.name, of_part, out[begin:stop])
    except QuantizationError as error:
        row, column = divmod(error.index, job.row_length)
        row += first
        which, inside = (int(i[0]) for i in _origin(job, rows[row : row + 1]))
        source = job.sources[which]
        flat = inside * job.row_length + source_column(column, steps)
        raise CheckpointError(
            f"a weight holds a value that cannot be stored: {error.what}", source.file, source.name,
            expected=f"finite values within the range of {error.type}",
            found=f"at index {[int(i) for i in np.unravel_index(flat, source.shape)]}",
            hint="the checkpoint is damaged, or this type is too narrow for it",
        ) from error  # fmt: skip


def _parts(job: Job, rows: np.ndarray, weights: np.ndarray | None) -> Iterator[tuple[int, int, np.ndarray | None]]:
    """Stretches of rows with one importance: (begin, stop, weights of the columns). Experts have one each."""
    if weights is None or len(weights) == 1:
        yield 0, len(rows), None if weights is None else weights[0]
        return
    experts = rows // job.rule.target_shape[1]
    for begin, stop in _stretches(np.diff(experts) != 0):
        yield begin, stop, weights[int(experts[begin])]


def changes_values(steps: Sequence[Transform]) -> bool:
    """Whether rows can go to the kernels as they were read."""
    return any(type(step).values is not Transform.values for step in steps)


def _as_float32(raw: np.ndarray) -> np.ndarray:
    if raw.dtype == np.uint16:
        return (raw.astype(np.uint32) << 16).view(np.float32)
    return raw.astype(np.float32)


def _live_experts(job: Job, rows: np.ndarray, raw: np.ndarray) -> set[int]:
    """Experts with a value other than zero among these rows; empty for tensors without experts."""
    if len(job.rule.target_shape) != 3:
        return set()
    experts = rows // job.rule.target_shape[1]
    # The first row decides for all but a dead expert; only there is every row looked at.
    firsts = np.flatnonzero(np.diff(experts, prepend=-1))
    live = {int(experts[i]) for i in firsts if raw[i].any()}
    return live | {int(e) for e in set(experts.tolist()) - live if raw[experts == e].any()}


def _dead_experts(plan: Plan, seen: Mapping[str, set[int]]) -> list[str]:
    notes: list[str] = []
    for job in jobs(plan):
        shape = job.rule.target_shape
        if len(shape) == 3 and len(seen[job.rule.target]) < shape[0]:
            dead = sorted(set(range(shape[0])) - seen[job.rule.target])
            notes.append(f"{job.rule.target}: all weights of expert {', '.join(map(str, dead))} are zero")
    return notes
