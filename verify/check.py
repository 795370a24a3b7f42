"""All levels of one file: opens what each needs, runs them in order, and says what could not be seen."""

from __future__ import annotations

import importlib.util
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from converter.archs import by_gguf_name
from converter.errors import EnvironmentFailure, GGUFError, InputError, UsageError
from converter.gguf_model import GGUFModel, is_gguf, open_gguf
from converter.hub import locate
from converter.model import Model, read_model
from converter.plan import DRAFTER, refuse_strangers
from verify.results import LEVELS, Finding, LevelResult, VerificationReport

if TYPE_CHECKING:
    from converter.heads import HeadReport
    from converter.imatrix import ImportanceMatrix
    from verify.models.base import TorchModel

LLAMA_CPP = "llama.cpp"
MODES = ("exact", "native", "both")
_UNSEEN_WITHOUT_SOURCE = (
    "without --source: weights that are wrong but well formed, a head that is worse than its original, metadata that "
    "differs from the source's"
)


@dataclass(frozen=True)
class Options:
    """What to verify and how. levels: empty for all that the inputs allow.

    imatrix, mtp_imatrix: importance matrices that the file was made with, of the model and of its head.
    """

    source: str | Path | None = None
    sidecar: Path | None = None
    assistant: str | Path | None = None
    levels: Sequence[str] = ()
    device: str = "auto"
    mode: str = "exact"
    drafts: Sequence[int] = (1, 2, 3)
    temperatures: Sequence[float] = (0.0,)
    prompts: Path | None = None
    text: Path | None = None
    tokens: int = 64
    text_tokens: int = 2048
    engine: str | None = None
    plain_engine: str | None = None
    seed: int = 0
    imatrix: Path | None = None
    mtp_imatrix: Path | None = None

    def refuse_nonsense(self) -> None:
        unknown = sorted(set(self.levels) - set(LEVELS))
        if unknown:
            raise UsageError("there is no such level", expected=", ".join(LEVELS), found=", ".join(unknown))
        if self.mode not in MODES:
            raise UsageError("there is no such mode", expected=", ".join(MODES), found=self.mode)
        if not self.drafts or min(self.drafts) < 1 or max(self.drafts) > 16:
            raise UsageError("a number of drafts is out of range", expected="1 to 16", found=list(self.drafts))
        if self.tokens < 2 or min(self.temperatures, default=0) < 0:
            raise UsageError("--tokens must be at least 2, temperatures at least 0")
        if self.source is None and (self.imatrix or self.mtp_imatrix):
            raise UsageError("--imatrix and --mtp-imatrix need --source", hint="they say what its values become")
        if "engine" in self.levels and self.engine is None:
            raise UsageError("the level engine needs --engine", expected="llama.cpp, or the URL of a server")
        if self.engine is not None and self.engine != LLAMA_CPP:
            if "://" not in self.engine:
                raise UsageError("there is no such engine", expected="llama.cpp, or http://…", found=self.engine)
            if self.plain_engine is None:
                raise UsageError(
                    "--engine URL needs --plain-engine URL: a server cannot switch MTP off by request",
                    hint="start a second server of the same model without MTP",
                )


Notify = Callable[[str], None]


def verify(
    file: str | Path, options: Options | None = None, notify: Notify = lambda _level: None
) -> VerificationReport:
    """Verify a GGUF file (any part, or the folder, of a split one) or a model folder.

    Raises ToolError where the inputs cannot be used at all; what is wrong with a file that can be is in the report.
    notify: called with the name of each level that begins.
    """
    options = options or Options()
    options.refuse_nonsense()
    return _Check(Path(locate(file).path), options, notify).report()


@dataclass
class _Check:
    file: Path
    options: Options
    notify: Notify

    def report(self) -> VerificationReport:
        source = Path(locate(self.options.source).path) if self.options.source is not None else None
        if not self.file.exists():
            raise InputError("there is no such file or folder", self.file)
        self.source_folder = source
        if source is not None:
            _ = self.source  # one that cannot be read is not the file's fault
        self._refuse_strangers()
        report = VerificationReport(self.file, source)
        levels = self.options.levels or [
            level for level in LEVELS if level != "engine" or self.options.engine is not None
        ]
        if self.gguf_error is not None:
            report.levels.append(self.gguf_error)
            return report
        for level in LEVELS:
            if level in levels:
                self.notify(level)
                started = time.monotonic()
                result = self._level(level)
                result.seconds = time.monotonic() - started
                report.levels.append(result)
        if source is None and self.gguf is not None:
            report.unseen.append(_UNSEEN_WITHOUT_SOURCE)
        return report

    def _refuse_strangers(self) -> None:
        """Raise CheckpointError for an assistant of another model."""
        if self.assistant is None:
            return
        is_folder = self.gguf_error is None and self.gguf is None
        target = self.source or (read_model(self.file) if is_folder else None)
        if target is not None and not target.architecture.drafts_for:
            refuse_strangers(self.assistant, target)

    def _level(self, level: str) -> LevelResult:
        """One level; what keeps the file from being run at all is a finding."""
        try:
            return getattr(self, f"_{level}")()
        except GGUFError as error:
            return LevelResult(level, "the file cannot be run", [Finding(str(error))])
        except (RuntimeError, IndexError) as error:  # of torch: shapes that do not fit each other
            if "out of memory" in str(error):
                raise EnvironmentFailure("out of memory", self.file, hint="--device cpu, or fewer --tokens") from error
            words = str(error).splitlines()[0]
            return LevelResult(level, "the file cannot be run", [Finding(f"its tensors do not fit together: {words}")])

    @cached_property
    def gguf_error(self) -> LevelResult | None:
        from verify.structure import unreadable

        try:
            _ = self.gguf
        except GGUFError as error:
            return unreadable(error)
        return None

    @cached_property
    def gguf(self) -> GGUFModel | None:
        return open_gguf(self.file) if is_gguf(self.file) or self.file.is_file() else None

    @property
    def files(self) -> list[GGUFModel]:
        """The file, and its sidecar."""
        sidecar = [open_gguf(self.options.sidecar)] if self.options.sidecar is not None else []
        return [self.gguf, *sidecar] if self.gguf is not None else sidecar

    @cached_property
    def source(self) -> Model | None:
        if self.source_folder is None:
            return None
        return read_model(self.source_folder)

    @cached_property
    def importance(self) -> ImportanceMatrix | None:
        """What the source's tensors were weighted by."""
        from converter.imatrix import read_imatrix
        from converter.plan import importance_for

        imatrix, head = self.options.imatrix, self.options.mtp_imatrix
        if self.source is None or (imatrix is None and head is None):
            return None
        return importance_for(self.source, imatrix, read_imatrix(head) if head else None)

    @cached_property
    def assistant(self) -> Model | None:
        """The source of a drafter with a checkpoint of its own."""
        return read_model(self.assistant_folder) if self.assistant_folder is not None else None

    @cached_property
    def assistant_folder(self) -> Path | None:
        given = self.options.assistant
        return Path(locate(given).path) if given is not None else None

    def _source_of(self, file: GGUFModel) -> Model | None:
        """What a file was made from: the drafter's source for drafters."""
        name = file.get("general.architecture")
        if self.source is not None and self.source.architecture.drafts_for and self.source.architecture.name == name:
            return self.source
        architecture = by_gguf_name(name) if isinstance(name, str) else None
        return self.assistant if architecture is not None and architecture.drafts_for else self.source

    @cached_property
    def engine(self) -> TorchModel:
        return self._torch(self.file, self.sidecar)

    @property
    def sidecar(self) -> Path | None:
        """What drafts for the file, where that is not in it: of a folder, the assistant's."""
        return self.options.sidecar or (self.assistant_folder if self.gguf is None else None)

    @cached_property
    def reference(self) -> TorchModel | None:
        """The source, with the source's drafter where that is a checkpoint of its own."""
        return self._torch(self.source_folder, self.assistant_folder) if self.source_folder is not None else None

    def _torch(self, file: Path, sidecar: Path | None) -> TorchModel:
        try:
            import torch

            from verify.models.opening import open_model
        except ImportError as error:
            raise EnvironmentFailure("torch is not installed", hint="pip install 'convert-mtp[verify]'") from error
        device = self.options.device
        if device == "auto":
            device = "cuda" if torch.cuda.is_available() else "cpu"
        elif device == "cuda" and not torch.cuda.is_available():
            raise EnvironmentFailure("there is no CUDA device", hint="--device cpu")
        return open_model(file, sidecar, device)

    @cached_property
    def encode(self) -> Any:
        from verify.prompts import tokenizer_of_file, tokenizer_of_folder

        if self.source_folder is not None:
            return tokenizer_of_folder(self.source_folder)
        return tokenizer_of_folder(self.file) if self.gguf is None else tokenizer_of_file(self.gguf)

    @cached_property
    def prompts(self) -> list[list[int]]:
        from verify.prompts import prompts

        return prompts(self.encode, self.options.prompts)

    def _skip(self, level: str, why: str) -> LevelResult:
        return LevelResult(level, f"skipped: {why}", skipped=True)

    @cached_property
    def _head(self) -> HeadReport:
        from converter.heads import inspect

        return inspect(self.file)

    @cached_property
    def _runs(self) -> str:
        """Why this cannot be decoded by itself; empty where it can."""
        if self.gguf is not None and self._head.kind in {"sidecar", DRAFTER}:
            return "this file only drafts: give the trunk's file, and this one with --sidecar"
        return ""

    @cached_property
    def _not_in_torch(self) -> str:
        """Why torch does not run this; empty where it does."""
        if self._runs:
            return self._runs
        from verify.models.weights import open_weights

        name = open_weights(self.file).key("general.architecture")
        try:
            from verify.models.opening import in_torch
        except ImportError:
            return ""  # opening it will say what is missing
        return "" if in_torch(name) else f"{name} is not decoded in torch; --engine llama.cpp decodes it"

    # --- levels

    def _structure(self) -> LevelResult:
        from verify.structure import check_structure

        if self.gguf is None:
            model = read_model(self.file)
            model.close()
            head = f"a head of {model.head_layers} layer(s)" if model.head_layers else "no head"
            return LevelResult("structure", f"checkpoint, {model.table.trunk_layers} layers and {head}, complete")
        return _merged([check_structure(file, self._source_of(file)) for file in self.files])

    def _fidelity(self) -> LevelResult:
        from verify.fidelity import check_fidelity

        if self.gguf is None or self.source is None:
            return self._skip("fidelity", "there is no source to compare with" if self.gguf else "this is the source")
        pairs = [(file, source) for file in self.files if (source := self._source_of(file)) is not None]
        return _merged([check_fidelity(f, s, self.importance if s is self.source else None) for f, s in pairs])

    def _logits(self) -> LevelResult:
        from verify.logits import check_logits
        from verify.prompts import text_ids

        if self._not_in_torch or self.gguf is None or self.reference is None:
            return self._skip("logits", self._not_in_torch or "there is no source to compare with")
        bits = _bits_per_weight(self.gguf)
        text, first = text_ids(self.encode, self.options.text, self.options.text_tokens), self.encode("")
        return check_logits(self.engine, self.reference, text[len(first) :], bits, self._module(), first)

    def _module(self) -> Callable[[Any], Any] | None:
        """Transformers' own module of the file's weights, where memory allows."""
        from verify.models.module import fits, module_logits, module_of
        from verify.models.weights import open_weights

        weights = open_weights(self.file)
        if self.source is None or not fits(weights):
            return None
        try:
            return partial(module_logits, module_of(weights, self.source))
        except ImportError:
            return None

    def _identity(self) -> LevelResult:
        from verify.fresh import decode_afresh
        from verify.identity import EXACT, NATIVE, Plan, check_identity

        if self._not_in_torch:
            return self._skip("identity", self._not_in_torch)
        if not self.engine.has_head:
            return self._skip("identity", "there is no head to draft with")
        options = self.options
        modes = (EXACT, NATIVE) if options.mode == "both" else (options.mode,)
        plan = Plan(self.prompts, options.tokens, options.drafts, options.temperatures, modes, options.seed)
        fresh = partial(decode_afresh, self.file, self.sidecar, self.engine)
        return check_identity(self.engine, plan, fresh=fresh)

    def _acceptance(self) -> LevelResult:
        from verify.acceptance import check_acceptance

        if self._not_in_torch:
            return self._skip("acceptance", self._not_in_torch)
        return check_acceptance(
            self.engine, self.reference, self.prompts, self.options.tokens, max(self.options.drafts)
        )

    def _engine(self) -> LevelResult:
        from verify.engine import check_engine, check_servers

        url, plain_url = self.options.engine, self.options.plain_engine
        if url and plain_url:
            return check_servers(url, plain_url, self.prompts, self.options.tokens)
        if self.gguf is None:
            return self._skip("engine", "llama.cpp runs GGUF files")
        if self._runs:
            return self._skip("engine", self._runs)
        drafts = self.options.drafts if self.options.sidecar or self._head.kind == "bundled" else ()
        model = self.engine if drafts and torch_is_here() and not self._not_in_torch else None
        return check_engine(self.gguf.file, self.options.sidecar, self.prompts, self.options.tokens, drafts, model)


def torch_is_here() -> bool:
    """Whether levels that decode in torch can run; the engine's own tokens can be compared without it."""
    return importlib.util.find_spec("torch") is not None


def _merged(results: Sequence[LevelResult]) -> LevelResult:
    """One result of several files."""
    first = results[0]
    for other in results[1:]:
        first.summary += f"; sidecar: {other.summary}"
        first.findings += other.findings
        if "tensors" in first.data:
            first.data["tensors"] += other.data["tensors"]
    return first


def _bits_per_weight(model: GGUFModel) -> float:
    values = sum(t.nbytes // t.type.nbytes * t.type.block for t in model.tensors)
    return 8 * sum(t.nbytes for t in model.tensors) / values


__all__ = ["Options", "VerificationReport", "verify"]
