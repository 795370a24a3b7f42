"""Level fidelity: each tensor of the file against what the source makes of it, chunk by chunk.

The source's rows are taken forward through the architecture's transforms and quantized again, by the importance matrix
where there is one: a file of this program, or of ggml, must have these very bytes. Where it has others nearly everywhere,
another recipe was used, and its error is judged against that of our own bytes, block by block; where only some blocks
differ, the file is damaged.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from converter.execute import parts_by_importance, read_rows
from converter.gguf_file import TensorEntry
from converter.gguf_model import GGUFModel
from converter.imatrix import ImportanceMatrix
from converter.model import Model
from converter.rules import Rule
from converter.transforms import matrix_shape
from quant import QuantizationError, dequantize, quantize
from quant.block import BlockType, takes_weights
from verify.results import Finding, LevelResult

_CHUNK_VALUES = 4 * 2**20
_LOSSLESS = {"F32", "F16", "BF16"}
_LOCAL = 0.5  # fewer blocks than this share differ: damage; more: another recipe
_WORSE = 2.0  # another recipe's error may be so many times ours
_OUTLIER = 12.0  # and that of one block so many times


@dataclass
class TensorError:
    """How far a tensor is from the source. error, ours: root of summed squares over that of the source's values."""

    name: str
    type: str
    blocks: int
    different: int
    error: float
    ours: float
    worst: str = ""
    cause: str = ""

    def as_json(self) -> dict[str, object]:
        return vars(self)


def check_fidelity(model: GGUFModel, source: Model, importance: ImportanceMatrix | None = None) -> LevelResult:
    """Compare all tensors that both have; what only one has is a matter of structure. importance: the file's weights."""
    rules = {r.target: r for r in source.rules}
    found = [
        _compare(model, source, rules[entry.name], entry, _weights(entry, importance))
        for entry in model.tensors
        if entry.name in rules and _same_shape(entry.ne, rules[entry.name])
    ]
    findings = [f for t in found if (f := _judged(t)) is not None]
    equal = sum(not t.different for t in found)
    summary = f"{equal} of {len(found)} tensors have the very bytes that the source gives"
    others = [t for t in found if t.different and not any(f.where == t.name for f in findings)]
    if others:
        worst = max(others, key=lambda t: t.error / max(t.ours, 1e-30))
        summary += (
            f"; {len(others)} are of another recipe, errors up to {worst.error / max(worst.ours, 1e-30):.2f} times ours"
        )
    found.sort(key=lambda t: (-t.different / max(t.blocks, 1), -t.error))
    return LevelResult("fidelity", summary, findings, {"tensors": [t.as_json() for t in found]})


def _same_shape(ne: tuple[int, ...], rule: Rule) -> bool:
    return np.prod(ne) == np.prod(rule.target_shape) and ne[0] == rule.target_shape[-1]


def _weights(entry: TensorEntry, importance: ImportanceMatrix | None) -> np.ndarray | None:
    """[experts or 1, row length], of tensors that are quantized with weights."""
    if importance is None or not takes_weights(entry.type) or entry.name not in importance.entries:
        return None
    return importance.entries[entry.name].reshape(-1, entry.ne[0])


def _compare(
    model: GGUFModel, source: Model, rule: Rule, entry: TensorEntry, weights: np.ndarray | None
) -> TensorError:
    name, kind = entry.name, entry.type
    blocks = different = 0
    squares = errors = ours = 0.0
    worst, at = 0.0, ""
    cause = _Cause(rule)
    for first, expected, data in _chunks(model, source, rule, name, kind):
        try:
            made = _quantized(expected, kind, rule, first, weights)
        except QuantizationError:  # the source itself cannot be stored so
            made = np.zeros_like(data)
        unequal = (made != data).reshape(len(data), -1, kind.nbytes).any(-1)
        blocks += unequal.size
        different += int(unequal.sum())
        squares += float(np.square(expected, dtype=np.float64).sum())
        values = dequantize(data, kind.name)
        cause.look(values, expected)
        if not unequal.any():
            error = float(np.square(values - expected, dtype=np.float64).sum())
            errors, ours = errors + error, ours + error
            continue
        of_file, of_ours = (
            np.square(v.astype(np.float64) - expected).reshape(len(data), -1, kind.block).sum(-1)
            for v in (np.nan_to_num(values, nan=1e30, posinf=1e30, neginf=1e30), dequantize(made, kind.name))
        )
        errors, ours = errors + float(of_file.sum()), ours + float(of_ours.sum())
        floor = 1e-4 * float(np.square(expected, dtype=np.float64).mean()) * kind.block
        ratio = np.where(unequal, of_file / (of_ours + floor), 0)
        row, block = (int(i) for i in np.unravel_index(ratio.argmax(), ratio.shape))
        if ratio[row, block] > worst:
            worst, at = float(ratio[row, block]), f"row {first + row}, block {block}"
    scale = max(squares, 1e-30)
    result = TensorError(name, kind.name, blocks, different, (errors / scale) ** 0.5, (ours / scale) ** 0.5)
    if different and (worst > _OUTLIER or different < _LOCAL * blocks or kind.name in _LOSSLESS):
        result.worst = at
    if different:
        result.cause = cause.named()
    return result


def _quantized(expected: np.ndarray, kind: BlockType, rule: Rule, first: int, weights: np.ndarray | None) -> np.ndarray:
    """Rows first … of a tensor as bytes."""
    rows = np.arange(first, first + len(expected))
    parts = [quantize(expected[a:b], kind.name, w) for a, b, w in parts_by_importance(rule, rows, weights)]
    return parts[0] if len(parts) == 1 else np.concatenate(parts)


def _chunks(
    model: GGUFModel, source: Model, rule: Rule, name: str, kind: BlockType
) -> Iterator[tuple[int, np.ndarray, np.ndarray]]:
    """(first row, what the source makes of these rows, the file's bytes of them)."""
    rows, length = matrix_shape(rule.target_shape)
    file, begin = model.place(name)
    step = max(1, _CHUNK_VALUES // length)
    row_bytes = kind.row_bytes(length)
    for first in range(0, rows, step):
        stop = min(first + step, rows)
        expected = read_rows(rule, source.sources[name], source.checkpoint, first, stop)
        data = np.fromfile(file, np.uint8, (stop - first) * row_bytes, offset=begin + first * row_bytes)
        yield first, expected, data.reshape(stop - first, row_bytes)


def _judged(tensor: TensorError) -> Finding | None:
    if not tensor.different:
        return None
    share = tensor.different / tensor.blocks
    where = f"; the worst at {tensor.worst}" if tensor.worst else ""
    words = f"{tensor.different} of {tensor.blocks}{where}"
    if tensor.type in _LOSSLESS:
        return Finding("values differ from the source's", tensor.name, found=words, cause=tensor.cause)
    if tensor.error > _WORSE * tensor.ours + 1e-3:
        expected = f"an error of {tensor.ours:.4f} or little more"
        return Finding("far from the source", tensor.name, expected, f"{tensor.error:.4f}", tensor.cause)
    if tensor.worst and share < _LOCAL:
        return Finding(
            "some blocks differ from the source's quantization, most are equal: damaged", tensor.name, found=words
        )
    if tensor.worst:
        return Finding("a block far from the source", tensor.name, found=tensor.worst)
    return None


class _Cause:
    """Looks for a simple story of what was done to a tensor."""

    def __init__(self, rule: Rule) -> None:
        self.rule = rule
        self.stories = {
            "all zeros": lambda v, e: not v.any() and bool(e.any()),
            "1 is missing: the norm's shift was not applied": lambda v, e: _near(v + 1, e),
            "1 too much: the norm's shift was applied twice": lambda v, e: _near(v - 1, e),
            "the halves are exchanged": lambda v, e: _near(np.roll(v, v.shape[-1] // 2, axis=-1), e),
            "the sign is wrong": lambda v, e: _near(-v, e),
            "not finite": lambda v, _: not np.isfinite(v).all(),
            "rows stand in another order (heads or experts moved)": _same_rows,
            "columns stand in another order (heads moved)": lambda v, e: _same_rows(v.T, e.T),
        }
        self.left = dict(self.stories)

    def look(self, values: np.ndarray, expected: np.ndarray) -> None:
        """Drop what does not explain these rows."""
        if _near(values, expected):
            self.left = {k: v for k, v in self.left.items() if k == "not finite"}
        with np.errstate(all="ignore"):
            self.left = {words: story for words, story in self.left.items() if story(values, expected)}

    def named(self) -> str:
        return next(iter(self.left), "")


def _near(a: np.ndarray, b: np.ndarray) -> bool:
    scale = float(np.abs(b).mean()) or 1.0
    return bool(np.isfinite(a).all()) and float(np.abs(a - b).mean()) < 0.2 * scale


def _same_rows(values: np.ndarray, expected: np.ndarray) -> bool:
    """Whether rows have the same norms in another order."""
    if len(values) < 4 or not np.isfinite(values).all():
        return False
    a, b = (np.sort(np.square(x, dtype=np.float64).sum(-1)) for x in (values, expected))
    return float(np.abs(a - b).mean()) < 0.05 * float(b.mean() or 1)
