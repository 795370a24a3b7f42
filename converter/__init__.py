"""Hugging Face checkpoints with MTP heads to GGUF: checkpoint -> plan -> transform -> quantize -> write."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from converter.checkpoint import Checkpoint
    from converter.hub import Located
    from converter.plan import Options, Plan
    from converter.report import ConversionReport

__all__ = ["convert"]


def convert(
    model: str | Path,
    out: str | Path,
    *,
    types: Sequence[str] = (),
    mtp_type: str | None = None,
    mtp: str = "bundled",
    tensor_types: Sequence[str] = (),
    pre_tokenizer: str | None = None,
    name: str | None = None,
    revision: str | None = None,
    stream: bool = False,
    imatrix: str | Path | None = None,
    mtp_imatrix: str | Path | None = None,
    split_max_size: int | None = None,
    split_max_tensors: int | None = None,
    workers: int | None = None,
    executor: str = "threads",
    device: str = "cpu",
    dry_run: bool = False,
    force: bool = False,
    resume: bool = True,
    progress: Callable[[int, int, str], None] = lambda _done, _total, _tensor: None,
    notify: Callable[[str, str, Mapping[str, object]], None] = lambda _name, _message, _facts: None,
) -> ConversionReport:
    """Convert a model folder to one GGUF file per type, reading each source tensor once; or pack a GGUF model anew.

    model: folder with config.json, tokenizer.json and safetensors shards; a string that is no path for a model on the
    Hub, such as "Qwen/Qwen3.6-27B"; or a GGUF file, any part of a split one, of which tensors are copied as they are.
    out: file name, with {type} for several types, or a folder. types: mixes such as "Q4_K_M"; empty for the one in the
    file name, else Q4_K_M. mtp_type: the head's mix, "match" for the trunk's; None for Q8_0 or the trunk's if that
    keeps more bits. mtp: "bundled", "sidecar", "only" or "none". tensor_types: "REGEX=TYPE" over GGUF names, the last
    match wins. revision: branch, tag or commit on the Hub. stream: read the shards there instead of downloading them
    first; a dry run does that too. imatrix: an importance matrix of llama-imatrix, GGUF or .dat. mtp_imatrix: another one for tensors of the head that it does not
    have, or "auto" to record that with calibrate-mtp first (needs the extra [verify]). split_max_size, split_max_tensors:
    cut files into parts of at most so many bytes of tensors, so many tensors. device: where to quantize,
    "cpu", "cuda" or "auto"; executor: who does it, "threads", "processes" or "ray"; the bytes are the same. resume: go
    on where an earlier run of the same conversion was cut off. progress: called with (source bytes done, in all,
    tensor). notify: called with (name of an event, a line about it, facts). Raises converter.errors.ToolError; nothing
    has a final name then.
    """
    import time

    from converter.calibration import AUTO
    from converter.device import open_device
    from converter.errors import UsageError
    from converter.executors import open_executor
    from converter.hub import is_hub_id, locate
    from converter.plan import Options, Packaging
    from converter.report import ConversionReport
    from converter.run import run_plan
    from converter.splits import Limits, split_plan

    options = Options(
        tuple(types), mtp_type, Packaging(mtp), tuple(tensor_types), pre_tokenizer, name,
        Path(imatrix) if imatrix else None,
    )  # fmt: skip
    if stream and mtp_imatrix == AUTO:
        raise UsageError("--mtp-imatrix auto runs the model, for which it must be downloaded", hint="without --stream")
    headers_are_enough = dry_run and mtp_imatrix != AUTO and is_hub_id(model)
    located = locate(model, revision=revision, stream=stream or headers_are_enough, notify=notify)
    place = open_device(device)
    crew = open_executor(executor, workers or place.workers)
    started = time.monotonic()
    plan, checkpoint = _plan(located, Path(out), options, mtp_imatrix)
    try:
        plan = split_plan(plan, Limits(split_max_size, split_max_tensors))
        if dry_run:
            return ConversionReport(plan, dry_run=True, notes=plan.notes)
        result = run_plan(
            plan, checkpoint, device=place, executor=crew, force=force, resume=resume, progress=progress, notify=notify
        )
    finally:
        checkpoint.close()
    return ConversionReport(
        plan, dry_run=False, seconds=time.monotonic() - started, source_bytes=result.source_bytes,
        resumed_bytes=result.resumed_bytes, notes=plan.notes + result.notes,
    )  # fmt: skip


def _plan(located: Located, out: Path, options: Options, mtp_imatrix: str | Path | None) -> tuple[Plan, Checkpoint]:
    """What to write, and what to read it from: a GGUF model that is packed anew, or a model folder."""
    from dataclasses import replace

    from converter.calibration import head_importance
    from converter.checkpoint import require_folder
    from converter.errors import UsageError
    from converter.gguf_model import is_gguf, open_gguf
    from converter.model import read_model
    from converter.plan import Options, Packaging, make_plan
    from converter.repack import plan_repack

    model = located.path
    if is_gguf(model):
        if mtp_imatrix or options != Options(packaging=options.packaging):
            raise UsageError(
                "a GGUF file is packed anew as it is, without quantizing", model, expected="--mtp and --split options only",
                hint="convert from the source checkpoint for another type",
            )  # fmt: skip
        return plan_repack(open_gguf(model), out, options.packaging)
    require_folder(model)
    options = replace(options, head_importance=head_importance(model, mtp_imatrix))
    source = read_model(model, with_head=options.packaging is not Packaging.NONE, files=located.files)
    try:
        return make_plan(source, out, options), source.checkpoint
    except BaseException:
        source.close()
        raise
