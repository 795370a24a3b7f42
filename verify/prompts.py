"""Texts to verify with, as token ids: bundled ones, or a file of the user's; by the source's tokenizer or the file's."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from importlib import resources
from pathlib import Path
from typing import Any

from converter.archs import find
from converter.config import Config
from converter.errors import EnvironmentFailure, InputError, TokenizerError
from converter.files import read_text
from converter.gguf_model import GGUFModel
from converter.tokenizer import GEMMA4, SPACE_IN_WORDS, load_tokenizer

_ANY = "any"  # pre-tokenizer's name, which does not matter here
PROMPTS = "prompts.txt"
TEXT = "text.txt"
Encode = Callable[[str], list[int]]


def tokenizer_of_folder(folder: Path) -> Encode:
    """By tokenizer.json; nothing is added but the first token of texts, where the model wants one. Raises ToolError."""
    file = folder / "tokenizer.json"
    library = _library()
    try:
        loaded = library.Tokenizer.from_file(str(file))
    except Exception as error:  # the library raises nothing narrower
        raise TokenizerError("this tokenizer cannot be used", file, found=str(error)) from error
    config = Config.load(folder)
    keys = load_tokenizer(config, config.integer("vocab_size"), _ANY, find(config).tokenizer).keys
    first = _first({k.key: k.value for k in keys}.get)
    return lambda text: first + loaded.encode(text, add_special_tokens=False).ids


def _first(get: Callable[[str], Any]) -> list[int]:
    """What stands before every text: the begin token, where the metadata says so."""
    token = get("tokenizer.ggml.bos_token_id")
    return [token] if get("tokenizer.ggml.add_bos_token") and type(token) is int else []


def tokenizer_of_file(model: GGUFModel) -> Encode:
    """By the vocabulary and merges of a GGUF file; words are cut as GPT-2's are, which is near enough for prompts.

    Gemma's have no cuts at all: spaces become U+2581, and what has no token is spelt in bytes.
    """
    library = _library()
    tokens, merges = model.get("tokenizer.ggml.tokens"), model.get("tokenizer.ggml.merges")
    if not isinstance(tokens, list) or not isinstance(merges, list):
        raise InputError("this file has no vocabulary with merges", model.file)
    vocabulary = {token: i for i, token in enumerate(tokens)}
    try:
        pairs = [tuple(merge.split(" ", 1)) for merge in merges]
        gemma = model.get("tokenizer.ggml.model") == GEMMA4
        extra = (
            {"byte_fallback": True, "unk_token": tokens[model.get("tokenizer.ggml.unknown_token_id", 0)]}
            if gemma
            else {}
        )
        loaded = library.Tokenizer(library.models.BPE(vocabulary, pairs, **extra))
    except Exception as error:  # the library raises nothing narrower
        raise TokenizerError("this vocabulary cannot be used", model.file, found=str(error)) from error
    if gemma:
        loaded.normalizer = library.normalizers.Replace(" ", SPACE_IN_WORDS)
    else:
        loaded.pre_tokenizer = library.pre_tokenizers.ByteLevel(add_prefix_space=False)
    first = _first(model.get)
    return lambda text: first + loaded.encode(text, add_special_tokens=False).ids


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
        raise EnvironmentFailure(
            "tokenizers is not installed", hint="pip install 'convert-mtp[llamacpp]' or 'convert-mtp[verify]'"
        ) from error
    return tokenizers
