"""The pump: for every chunk of rows read, transform, quantize to all requested types, write at the planned place.

Nothing is decided here. A chunk is whole rows of one tensor; it is read once, taken through in strips that stay in the
cache, and every output's bytes are written where the plan says. Chunks are independent, so any executor may run them
in any order and the bytes are the same.
"""

from __future__ import annotations

import zlib
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
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
from converter.writer import Sink
from quant import QuantizationError

RAW = "U8"  # of sources that are finished blocks
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

    @property
    def source_row_bytes(self) -> int:
        """Bytes that are read for a row."""
        if not self.sources:
            return 0
        source = self.sources[0]
        return (source.shape[-1] if self.copies else self.row_length) * source.itemsize

    def form(self, target: int) -> tuple[str, bool]:
        """What decides a target's bytes: its type, and whether it is quantized with weights."""
        tensor = self.targets[target][1]
        return tensor.type.name, tensor.weighted

    @property
    def copies(self) -> bool:
        """Whether the sources hold finished blocks, which go to the files as they are."""
        return bool(self.sources) and self.sources[0].dtype == RAW


@dataclass(frozen=True)
class Chunk:
    """Rows first ... stop - 1 of a job's result, for those of its targets that do not have them yet.

    job: index into the work's jobs. targets: indices into the job's.
    """

    job: int
    first: int
    stop: int
    targets: tuple[int, ...]

    @property
    def key(self) -> ChunkKey:
        return self.job, self.first, self.stop


ChunkKey = tuple[int, int, int]  # job, first, stop


@dataclass
class Done:
    """What a chunk tells when it is written.

    checksums: of the bytes written, by target. experts: those of which it saw a value other than zero.
    """

    chunk: Chunk
    checksums: dict[int, int]
    source_bytes: int
    experts: set[int] = field(default_factory=set)


@dataclass
class Work:
    """All that is needed to do any chunk of a plan, anywhere: it pickles."""

    jobs: list[Job]
    checkpoint: Checkpoint
    sinks: Sequence[Sink]
    device: Device
    importance: ImportanceMatrix | None = None
    sync: bool = False  # whether a chunk counts as done only when other machines see its bytes

    def chunks(self) -> Iterator[Chunk]:
        """The work cut into pieces of whole rows."""
        for number, job in enumerate(self.jobs):
            step = max(1, self.device.chunk_values // job.row_length)
            targets = tuple(range(len(job.targets)))
            for first in range(0, job.rows, step):
                yield Chunk(number, first, min(first + step, job.rows), targets)

    def source_bytes(self, chunk: Chunk) -> int:
        return (chunk.stop - chunk.first) * self.jobs[chunk.job].source_row_bytes

    @property
    def total_bytes(self) -> int:
        """Source bytes that a whole run reads."""
        return sum(job.rows * job.source_row_bytes for job in self.jobs)

    def place(self, chunk: Chunk, target: int) -> tuple[int, int, int]:
        """Where a chunk's bytes for one target stand: (index of the file, offset in its data section, bytes)."""
        job = self.jobs[chunk.job]
        file, tensor = job.targets[target]
        row_bytes = tensor.type.row_bytes(job.row_length)
        return file, tensor.entry.offset + chunk.first * row_bytes, (chunk.stop - chunk.first) * row_bytes

    def close(self) -> None:
        self.checkpoint.close()
        for sink in self.sinks:
            sink.close()

    def run(self, chunk: Chunk) -> Done:
        """One chunk from source to all files that need it."""
        job = self.jobs[chunk.job]
        rows = np.arange(chunk.first, chunk.stop)
        forms = [job.form(t) for t in chunk.targets]
        if job.copies:
            raw = np.empty((len(rows), job.source_row_bytes), np.uint8)
            self.checkpoint.read(job.sources[0], chunk.first * job.source_row_bytes, raw)
            outputs = dict.fromkeys(forms, raw)
        else:
            raw = _read(job, rows, self.checkpoint, self.device)
            # Files that want the same form of a tensor, such as a bundled and a trunk-only one, share its bytes.
            tensors = {form: job.targets[t][1] for form, t in zip(forms, chunk.targets, strict=True)}
            outputs = {f: np.empty((len(rows), t.type.row_bytes(job.row_length)), np.uint8) for f, t in tensors.items()}
            self._quantize(job, rows, raw, list(tensors.values()), list(outputs.values()))
        sums = {form: zlib.crc32(out.data.cast("B")) for form, out in outputs.items()}
        for target, form in zip(chunk.targets, forms, strict=True):
            file, offset, _ = self.place(chunk, target)
            self.sinks[file].write(offset, outputs[form].data.cast("B"), sync=self.sync)
        checksums = {target: sums[form] for target, form in zip(chunk.targets, forms, strict=True)}
        return Done(chunk, checksums, self.source_bytes(chunk), set() if job.copies else _live_experts(job, rows, raw))

    def _quantize(
        self, job: Job, rows: np.ndarray, raw: np.ndarray, targets: list[PlannedTensor], outputs: list[np.ndarray]
    ) -> None:
        weights = [_weights(tensor, self.importance) for tensor in targets]
        strip = max(1, self.device.strip_values // job.row_length)
        for begin in range(0, len(rows), strip):
            part = slice(begin, begin + strip)
            jobs = list(zip(targets, weights, (out[part] for out in outputs), strict=True))
            _quantize_strip(job, rows[part], raw[part], jobs, self.device)


def make_jobs(plan: Plan) -> list[Job]:
    """Every source tensor once, with all places it goes to, in the order of the files."""
    targets: dict[tuple[str, tuple[TensorInfo, ...]], list[tuple[int, PlannedTensor]]] = defaultdict(list)
    for i, file in enumerate(plan.files):
        for tensor in file.tensors:  # a target and its drafter have tensors of the same names
            targets[tensor.entry.name, tensor.sources].append((i, tensor))
    return [Job(t[0][1].rule, t[0][1].sources, tuple(t)) for t in targets.values()]


def _read(job: Job, rows: np.ndarray, checkpoint: Checkpoint, device: Device) -> np.ndarray:
    """The source rows of these result rows, in result order and stored dtype: [rows, row length]."""
    if not job.sources:
        return np.array(job.rule.made, np.float32).reshape(-1, job.row_length)[rows]
    raw = device.empty((len(rows), job.row_length), _DTYPES[job.sources[0].dtype])
    row_bytes = raw.strides[0]
    for source, first, begin, stop in _runs(job, rows):
        checkpoint.read(source, first * row_bytes, raw[begin:stop])
    return raw


def read_tensor(rule: Rule, sources: tuple[TensorInfo, ...], checkpoint: Checkpoint) -> np.ndarray:
    """What a rule makes of its sources: the whole tensor, float32, in torch order."""
    rows = matrix_shape(rule.target_shape)[0]
    return read_rows(rule, sources, checkpoint, 0, rows).reshape(rule.target_shape)


def read_rows(rule: Rule, sources: tuple[TensorInfo, ...], checkpoint: Checkpoint, first: int, stop: int) -> np.ndarray:
    """Rows first ... stop - 1 of what a rule makes of its sources, seen as a matrix: float32 [rows, row length]."""
    raw = _read(Job(rule, sources, ()), np.arange(first, stop), checkpoint, Cpu())
    return apply_values(_as_float32(raw), rule.transforms)


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
    targets: Sequence[tuple[PlannedTensor, np.ndarray | None, np.ndarray]],
    device: Device,
) -> None:
    """Quantize one strip for every (tensor, weights, output); `rows` are the result rows it holds."""
    steps = job.rule.transforms
    first = 0
    try:
        x = device.place(raw if not changes_values(steps) else apply_values(_as_float32(raw), steps))
        for tensor, weight, out in targets:
            for begin, stop, of_part in parts_by_importance(job.rule, rows, weight):
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


def parts_by_importance(
    rule: Rule, rows: np.ndarray, weights: np.ndarray | None
) -> Iterator[tuple[int, int, np.ndarray | None]]:
    """Stretches of rows with one importance: (begin, stop, weights of the columns). Experts have one each.

    rows: indices of rows of the rule's result. weights: [experts or 1, row length].
    """
    if weights is None or len(weights) == 1:
        yield 0, len(rows), None if weights is None else weights[0]
        return
    experts = rows // rule.target_shape[1]
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


def dead_experts(jobs: Sequence[Job], seen: Mapping[int, set[int]]) -> list[str]:
    """Notes on experts without a weight other than zero; `seen` are the live ones by job, where all rows were read."""
    notes: list[str] = []
    for number, live in sorted(seen.items()):
        rule = jobs[number].rule
        if len(rule.target_shape) == 3 and not jobs[number].copies and len(live) < rule.target_shape[0]:
            dead = sorted(set(range(rule.target_shape[0])) - live)
            notes.append(f"{rule.target}: all weights of expert {', '.join(map(str, dead))} are zero")
    return notes
