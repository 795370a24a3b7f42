"""Texts to verify with, as token ids: bundled ones, or a file of the user's; by the source's tokenizer or the file's."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from importlib import resources
from pathlib import Path
from typing import Any

from converter.errors import EnvironmentFailure, InputError, TokenizerError
from converter.files import read_text
from converter.gguf_model import GGUFModel

PROMPTS = "prompts.txt"
TEXT = "text.txt"
Encode = Callable[[str], list[int]]


def tokenizer_of_folder(folder: Path) -> Encode:
    """By tokenizer.json, nothing added. Raises TokenizerError."""
    file = folder / "tokenizer.json"
    library = _library()
    try:
        loaded = library.Tokenizer.from_file(str(file))
    except Exception as error:  # the library raises nothing narrower
        raise TokenizerError("this tokenizer cannot be used", file, found=str(error)) from error
    return lambda text: loaded.encode(text, add_special_tokens=False).ids


def tokenizer_of_file(model: GGUFModel) -> Encode:
    """By the vocabulary and merges of a GGUF file; words are cut as GPT-2's are, which is near enough for prompts."""
    library = _library()
    tokens, merges = model.get("tokenizer.ggml.tokens"), model.get("tokenizer.ggml.merges")
    if not isinstance(tokens, list) or not isinstance(merges, list):
        raise InputError("this file has no vocabulary with merges", model.file)
    vocabulary = {token: i for i, token in enumerate(tokens)}
    try:
        pairs = [tuple(merge.split(" ", 1)) for merge in merges]
        loaded = library.Tokenizer(library.models.BPE(vocabulary, pairs))
    except Exception as error:  # the library raises nothing narrower
        raise TokenizerError("this vocabulary cannot be used", model.file, found=str(error)) from error
    loaded.pre_tokenizer = library.pre_tokenizers.ByteLevel(add_prefix_space=False)
    return lambda text: loaded.encode(text, add_special_tokens=False).ids


def prompts(encode: Encode, file: Path | None) -> list[list[int]]:
    """Prompts as token ids: one per paragraph (blank lines part them) of a file, or of the bundled one."""
    text = read_text(file) if file else bundled(PROMPTS)
    found = [ids for part in text.split("\n\n") if part.strip() and (ids := encode(part.strip("\n")))]
    if not found:
        raise InputError("there are no prompts in this file", file)
    return found


def text_ids(encode: Encode, file: Path | None, most: int) -> Sequence[int]:
    """The first tokens of a text."""
    return encode(read_text(file) if file else bundled(TEXT))[:most]


def bundled(name: str) -> str:
    return (resources.files("verify") / "data" / name).read_text(encoding="utf-8")


def _library() -> Any:
    try:
        import tokenizers
    except ImportError as error:
        raise EnvironmentFailure("tokenizers is not installed", hint="pip install 'convert-mtp[verify]'") from error
    return tokenizers
