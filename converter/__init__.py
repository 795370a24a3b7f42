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
    assistant: str | Path | None = None,
    target: str | Path | None = None,
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
    keeps more bits. mtp: "bundled", "sidecar", "only" or "none". assistant: the
    drafter of a model whose head is a checkpoint of its own, such as Gemma 4's; it goes into a sidecar. target: of a
    drafter that is converted alone, to check that they belong together. tensor_types: "REGEX=TYPE" over GGUF names, the
    last match wins. revision: branch, tag or commit on the Hub. stream: read the shards there instead of downloading them
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

    def found(what: str | Path, revision: str | None = None) -> Located:
        return locate(what, revision=revision, stream=stream or (headers_are_enough and is_hub_id(what)), notify=notify)

    located = found(model, revision)
    drafter = found(assistant) if assistant is not None else None
    place = open_device(device)
    crew = open_executor(executor, workers or place.workers)
    started = time.monotonic()
    plan, checkpoint = _plan(located, Path(out), options, mtp_imatrix, drafter)
    if target is not None:
        _check_target(located, found(target))
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


def _check_target(drafter: Located, target: Located) -> None:
    from converter.model import read_model
    from converter.plan import refuse_strangers

    models = [read_model(located.path, files=located.files) for located in (drafter, target)]
    try:
        refuse_strangers(*models)
    finally:
        for model in models:
            model.close()


def _plan(
    located: Located, out: Path, options: Options, mtp_imatrix: str | Path | None, drafter: Located | None
) -> tuple[Plan, Checkpoint]:
    """What to write, and what to read it from: a GGUF model that is packed anew, or a model folder."""
    from dataclasses import replace

    from converter.calibration import head_importance
    from converter.checkpoint import join, require_folder
    from converter.errors import UsageError
    from converter.gguf_model import is_gguf, open_gguf
    from converter.model import read_model
    from converter.plan import Options, Packaging, make_plan
    from converter.repack import plan_repack

    model = located.path
    if is_gguf(model):
        if drafter is not None or mtp_imatrix or options != Options(packaging=options.packaging):
            raise UsageError(
                "a GGUF file is packed anew as it is, without quantizing", model, expected="--mtp and --split options only",
                hint="convert from the source checkpoint for another type",
            )  # fmt: skip
        return plan_repack(open_gguf(model), out, options.packaging)
    require_folder(model)
    options = replace(options, head_importance=head_importance(model, mtp_imatrix))
    source = read_model(model, with_head=options.packaging is not Packaging.NONE, files=located.files)
    try:
        if drafter is None:
            return make_plan(source, out, options), source.checkpoint
        assistant = read_model(drafter.path, files=drafter.files)
        return make_plan(source, out, options, assistant), join(source.checkpoint, assistant.checkpoint)
    except BaseException:
        source.close()
        raise
