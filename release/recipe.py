"""What to release and how: a TOML file, checked key by key, on top of a preset."""

from __future__ import annotations

import difflib
import json
import re
import tomllib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import Field, dataclass, field, fields, replace
from functools import partial
from pathlib import Path
from typing import Any

from bench.measure import TASKS
from converter.calibration import AUTO
from converter.errors import InputError, UsageError
from converter.files import read_text
from converter.plan import MATCH
from converter.splits import parse_size
from quant.mixes import MIXES
from verify.results import LEVELS

BUNDLED, SIDECAR = "bundled", "sidecar"
PACKAGINGS = (BUNDLED, SIDECAR)
PRESETS = ("small", "standard", "full")
DEFAULT_PRESET = "standard"
_REPOSITORY = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")


class _BadValueError(ValueError):
    """What was expected instead."""


Check = Callable[[Any], Any]


def _key(default: Any, what: str, check: Check) -> Any:
    """A key of a recipe: its default, what it means (the comment that --init writes), and what it accepts."""
    return field(default=default, metadata={"what": what, "check": check})


# --- what values may be; each returns the value as the program has it, or raises _BadValueError


def _text(value: Any) -> str:
    if not isinstance(value, str) or not value.strip():
        raise _BadValueError("a string")
    return value


def _number(least: float, value: Any, *, whole: bool = True, most: float = float("inf")) -> Any:
    is_number = isinstance(value, int if whole else int | float) and not isinstance(value, bool)
    if not is_number or not least <= value <= most:
        limits = f"{least:g} to {most:g}" if most < float("inf") else f"at least {least:g}"
        raise _BadValueError(f"a {'whole ' if whole else ''}number, {limits}")
    return value


def _one_of(choices: tuple[str, ...], value: Any) -> str:
    if value not in choices:
        near = difflib.get_close_matches(str(value), choices, 1)
        meant = f"; did you mean {near[0]}?" if near else ""
        raise _BadValueError(f"one of {', '.join(choices)}{meant}")
    return value


def _list(check: Check, value: Any, *, empty: bool = False) -> tuple[Any, ...]:
    if not isinstance(value, list) or not (value or empty):
        raise _BadValueError("a list" + ("" if empty else " that is not empty"))
    found = tuple(check(v) for v in value)
    if len(set(found)) < len(found):
        raise _BadValueError("a list without repetitions")
    return found


def _size(value: Any) -> int:
    try:
        return parse_size(_text(value))
    except UsageError as error:
        raise _BadValueError(f"{error.expected}") from error


def _repository(value: Any) -> str:
    if not isinstance(value, str) or not _REPOSITORY.fullmatch(value):
        raise _BadValueError('a repository, such as "user/name"')
    return value


_MIX = partial(_one_of, tuple(MIXES))
_DRAFTS = partial(_number, 1, most=16)
_COUNT = partial(_number, 1)
_TEMPERATURE = partial(_number, 0, whole=False)


# --- sections


@dataclass(frozen=True)
class Files:
    """Which files are made."""

    types: tuple[str, ...] = _key(
        ("Q4_K_M", "Q5_K_M", "Q6_K", "Q8_0"), f"types of the trunk: {' '.join(MIXES)}", partial(_list, _MIX)
    )
    packagings: tuple[str, ...] = _key(
        PACKAGINGS, "bundled: trunk and head in one file; sidecar: trunk-only files, and the head in its own",
        partial(_list, partial(_one_of, PACKAGINGS)),
    )  # fmt: skip
    head: str | None = _key(
        None, "type of the head in bundled files, or match for the trunk's (default: Q8_0, or the trunk's if that keeps more)",
        partial(_one_of, (*MIXES, MATCH)),
    )  # fmt: skip
    sidecars: tuple[str, ...] = _key(("BF16", "Q8_0", "Q4_0"), "types of the sidecar", partial(_list, _MIX))
    tensor_types: tuple[str, ...] = _key(
        (),
        'types of single tensors, "REGEX=TYPE" over GGUF names; the last match wins',
        partial(_list, _text, empty=True),
    )
    imatrix: str | None = _key(None, "importance matrix of llama-imatrix", _text)
    mtp_imatrix: str | None = _key(None, 'importance of the head: a file, or "auto" to record it once', _text)
    split_max_size: int | None = _key(None, 'cut files into parts of at most so many bytes, such as "45G"', _size)


@dataclass(frozen=True)
class Checks:
    """How files are verified."""

    levels: tuple[str, ...] = _key(
        (), f"levels of verify-mtp ({', '.join(LEVELS)}); empty: all that can be run here; structure and engine always are",
        partial(_list, partial(_one_of, LEVELS), empty=True),
    )  # fmt: skip
    drafts: tuple[int, ...] = _key((1, 2, 3), "drafts per step", partial(_list, _DRAFTS))
    temperatures: tuple[float, ...] = _key((0.0,), "of the level identity; 0 is greedy", partial(_list, _TEMPERATURE))
    tokens: int = _key(64, "tokens of each answer", partial(_number, 2))
    text_tokens: int = _key(2048, "tokens of the text of the level logits", partial(_number, 2))
    prompts: str | None = _key(None, "file of prompts, parted by blank lines (default: bundled ones)", _text)
    text: str | None = _key(None, "text for perplexity and KL divergence (default: a bundled one)", _text)
    device: str = _key("auto", "where torch runs: auto, cpu or cuda", partial(_one_of, ("auto", "cpu", "cuda")))
    near_ties: str = _key(
        "publish", "files whose only differences are near-ties that the engine's rounding decides: publish or refuse",
        partial(_one_of, ("publish", "refuse")),
    )  # fmt: skip


@dataclass(frozen=True)
class Measurements:
    """What bench-mtp measures of them."""

    runs: int = _key(3, "repetitions of everything; 0: nothing is measured, and no number of drafts recommended",
                     partial(_number, 0))  # fmt: skip
    tasks: tuple[str, ...] = _key(TASKS, "bundled tasks, or files of prompts", partial(_list, _text))
    drafts: tuple[int, ...] = _key((1, 2, 3, 4), "drafts per step", partial(_list, _DRAFTS))
    temperatures: tuple[float, ...] = _key((0.0,), "0 is greedy", partial(_list, _TEMPERATURE))
    prompts: int = _key(12, "prompts of each task, at most", _COUNT)
    tokens: int = _key(128, "tokens of each answer", partial(_number, 2))
    threads: int = _key(0, "of llama.cpp; 0: all cores", partial(_number, 0))


@dataclass(frozen=True)
class Card:
    """What the model card says beyond the figures."""

    repository: str | None = _key(
        None, "where it will be published, for the command lines (--push sets it)", _repository
    )
    base_model: str | None = _key(
        None, "repository of the source (default: known for models from the Hub)", _repository
    )
    license: str | None = _key(None, "as the Hub spells it, such as apache-2.0 (default: the source's card's)", _text)
    author: str | None = _key(None, "who quantized", _text)
    languages: tuple[str, ...] = _key(
        (), "such as en (default: the source's card's)", partial(_list, _text, empty=True)
    )
    tags: tuple[str, ...] = _key((), "more tags", partial(_list, _text, empty=True))
    introduction: str | None = _key(None, "Markdown file that the card begins with", _text)


@dataclass(frozen=True)
class Recipe:
    """A whole recipe. file: where it was read from; paths in it are relative to its folder."""

    preset: str = _key(DEFAULT_PRESET, f"what is not set here comes from it: {', '.join(PRESETS)}",
                       partial(_one_of, PRESETS))  # fmt: skip
    name: str | None = _key(None, "name of the model in file names and metadata (default: the source's)", _text)
    assistant: str | None = _key(
        None, "folder or Hub id of a drafter that has a checkpoint of its own (Gemma 4)", _text
    )
    files: Files = field(default_factory=Files)
    verify: Checks = field(default_factory=Checks)
    bench: Measurements = field(default_factory=Measurements)
    card: Card = field(default_factory=Card)
    file: Path | None = None

    def path(self, value: str) -> Path:
        """A path of this recipe."""
        return (self.file.parent if self.file else Path()) / value

    def named_files(self) -> Iterator[tuple[str, str, str]]:
        """(section, key, path) of all files that it names; folders and Hub ids are models, which are looked for later."""
        files, verify = self.files, self.verify
        named = {
            ("files", "imatrix"): [files.imatrix], ("files", "mtp_imatrix"): [files.mtp_imatrix],
            ("verify", "prompts"): [verify.prompts], ("verify", "text"): [verify.text],
            ("bench", "tasks"): self.bench.tasks, ("card", "introduction"): [self.card.introduction],
        }  # fmt: skip
        known = {None, AUTO, *TASKS}
        return (
            (section, key, v) for (section, key), vs in named.items() for v in vs if v is not None and v not in known
        )


_SECTIONS: dict[str, type[Any]] = {"files": Files, "verify": Checks, "bench": Measurements, "card": Card}
_CHANGES: dict[str, dict[str, dict[str, Any]]] = {
    "small": {
        "files": {"types": ("Q4_K_M", "Q8_0"), "sidecars": ("Q8_0",)},
        "verify": {"drafts": (1, 3), "tokens": 32, "text_tokens": 1024},
        "bench": {"runs": 1, "tasks": ("code", "creative"), "drafts": (1, 2, 3), "prompts": 4, "tokens": 64},
    },
    "standard": {},
    "full": {
        "files": {
            "types": ("BF16", "Q8_0", "Q6_K", "Q5_K_M", "Q5_K_S", "Q4_K_M", "Q4_K_S", "IQ4_XS", "Q3_K_M", "Q2_K"),
        },
        "verify": {"temperatures": (0.0, 0.7), "text_tokens": 8192},
        "bench": {"temperatures": (0.0, 0.7), "tokens": 256},
    },
}  # fmt: skip


def preset(name: str) -> Recipe:
    """The recipe of a preset. Raises UsageError."""
    if name not in PRESETS:
        raise UsageError("there is no such preset", expected=", ".join(PRESETS), found=name)
    changes = {s: replace(_SECTIONS[s](), **values) for s, values in _CHANGES[name].items()}
    return Recipe(preset=name, **changes)


def read_recipe(file: Path) -> Recipe:
    """Read and check a recipe. Raises InputError, which names line and key."""
    text = read_text(file)
    try:
        values = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise InputError("this recipe is not TOML", file, found=str(error)) from error
    return _Reader(file, _lines(text)).recipe(values)


class _Reader:
    def __init__(self, file: Path, lines: Mapping[tuple[str, str], int]) -> None:
        self.file, self.lines = file, lines

    def recipe(self, values: Mapping[str, Any]) -> Recipe:
        top = {k: v for k, v in values.items() if k not in _SECTIONS}
        own = self._section("", Recipe, top)
        base = preset(own.get("preset", DEFAULT_PRESET))
        parts = {}
        for name, kind in _SECTIONS.items():
            section = values.get(name, {})
            if not isinstance(section, dict):
                raise self._error("", name, "a section", section)
            parts[name] = replace(getattr(base, name), **self._section(name, kind, section))
        recipe = replace(base, **own, **parts, file=self.file)
        for section, key, value in recipe.named_files():
            if not recipe.path(value).is_file():
                raise self._error(section, key, "a file, by its path from the recipe", value)
        return recipe

    def _section(self, section: str, kind: type[Any], values: Mapping[str, Any]) -> dict[str, Any]:
        known = {f.name: f for f in _keys(kind)}
        found = {}
        for name, value in values.items():
            if name not in known:
                raise self._unknown(section, name, list(known))
            try:
                found[name] = known[name].metadata["check"](value)
            except _BadValueError as error:
                raise self._error(section, name, str(error), value) from error
        return found

    def _unknown(self, section: str, name: str, known: list[str]) -> InputError:
        choices = known if section else [*known, *(f"[{s}]" for s in _SECTIONS)]
        near = difflib.get_close_matches(name, known + ([] if section else list(_SECTIONS)), 1)
        where = next((s for s, kind in _SECTIONS.items() if name in {f.name for f in _keys(kind)}), None)
        hint = f"did you mean {near[0]}?" if near else (f"it belongs into [{where}]" if where else "")
        return InputError(
            f"{self._place(section, name)}: there is no such key", self.file, expected=", ".join(choices),
            found=name, hint=hint,
        )  # fmt: skip

    def _error(self, section: str, name: str, expected: str, found: Any) -> InputError:
        return InputError(f"{self._place(section, name)}: not a value for this key", self.file, expected=expected,
                          found=json.dumps(found, default=str))  # fmt: skip

    def _place(self, section: str, name: str) -> str:
        line = self.lines.get((section, name)) or self.lines.get((section, "")) or self.lines.get((name, ""))
        key = f"{section}.{name}" if section else name
        return f"line {line}, {key}" if line else key


def _keys(kind: type[Any]) -> Iterator[Field[Any]]:
    return (f for f in fields(kind) if "check" in f.metadata)


def _lines(text: str) -> dict[tuple[str, str], int]:
    """Where keys stand, by (section, key), and sections, by (section, ""); the TOML library does not tell."""
    found: dict[tuple[str, str], int] = {}
    section = ""
    for number, line in enumerate(text.splitlines(), 1):
        if head := re.match(r"\s*\[\s*([\w.\"-]+)\s*\]", line):
            section = head[1].strip('"')
            found.setdefault((section, ""), number)
        elif key := re.match(r"\s*([\w-]+|\"[^\"]*\")\s*(?:\.\s*([\w-]+)\s*)?=", line):
            first = key[1].strip('"')
            found.setdefault((first, key[2]) if key[2] and not section else (section, first), number)
    return found


# --- writing one


def commented(name: str) -> str:
    """A recipe file of a preset: every key with its meaning; those without a default are commented out."""
    recipe = preset(name)
    lines = ["# A recipe for release-mtp. Every key may be left out; paths are relative to this file.", ""]
    lines += _commented(recipe, Recipe)
    for section, kind in _SECTIONS.items():
        lines += ["", f"[{section}]", *_commented(getattr(recipe, section), kind)]
    return "\n".join(lines) + "\n"


def _commented(values: Any, kind: type[Any]) -> Iterator[str]:
    for key in _keys(kind):
        value = getattr(values, key.name)
        yield f"# {key.metadata['what']}"
        yield f"# {key.name} =" if value is None else f"{key.name} = {_toml(value)}"


def _toml(value: Any) -> str:
    if isinstance(value, tuple):
        return f"[{', '.join(map(_toml, value))}]"
    return json.dumps(value)  # strings, numbers and booleans are written alike
