"""Vocabulary, merges, special tokens, pre-tokenizer and chat templates as GGUF keys (spec/qwen.md, section 6)."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from difflib import SequenceMatcher
from enum import IntEnum
from pathlib import Path
from typing import Any

from converter.config import Config
from converter.errors import TokenizerError, UnsupportedError
from converter.files import read_json_object, read_text
from converter.gguf_file import KeyValue, ValueType, array, flag, text, u32

# How the engine calls the ways of splitting text before BPE, by the regular expression in tokenizer.json.
PRE_TOKENIZERS = {
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+": "qwen35",
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+": "qwen2",
}
# Special tokens that GGUF has a key for; "seperator" is the format's spelling.
_SPECIAL = {"bos": "bos", "eos": "eos", "unk": "unknown", "sep": "seperator", "pad": "padding", "mask": "mask"}
_LOOKS_CONTROL = re.compile(r"<\|.*\|>|<｜.*｜>|<pad>|<mask>|<unused\d*>", re.DOTALL)
BYTE_LEVEL, GEMMA4 = "gpt2", "gemma4"  # the engine's names
_NO_SCORE = -1000.0  # BPE ranks by its merges
SPACE_IN_WORDS = "\u2581"
_BYTE = re.compile(r"<0x[0-9A-F]{2}>")
_FILLED = re.compile(r"\[PAD\d+\]")
_VISIBLE = {
    "<|channel>", "<channel|>", "<|tool_call>", "<tool_call|>", "<|tool_response>", "<tool_response|>", '<|"|>',
}  # fmt: skip
_SPACE_IN_BYTES = "\u0120"  # a space in the byte-level alphabet


class TokenType(IntEnum):
    """Values of tokenizer.ggml.token_type."""

    NORMAL = 1
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6


@dataclass(frozen=True)
class Added:
    """A token that stands beside the BPE vocabulary."""

    id: int
    content: str
    special: bool


@dataclass
class Tokenizer:
    """The keys to write, and what a user should hear."""

    keys: list[KeyValue]
    notes: list[str] = field(default_factory=list)


def load_tokenizer(
    config: Config, vocabulary: int, pre_tokenizer: str | None = None, kind: str = BYTE_LEVEL
) -> Tokenizer:
    """Read the tokenizer of a model folder into GGUF keys.

    vocabulary: rows of the embedding; the token list is filled up to it. pre_tokenizer: the engine's name for it, where
    the user knows better. kind: BYTE_LEVEL or GEMMA4, as the architecture has it. Raises TokenizerError, and UnsupportedError for an unknown pre-tokenizer.
    """
    folder = config.file.parent
    file = folder / "tokenizer.json"
    if not file.is_file():
        raise TokenizerError("this folder has no tokenizer.json", folder, hint="take it from the original repository")
    tokenizer = read_json_object(file, TokenizerError)
    settings_file = folder / "tokenizer_config.json"
    settings = read_json_object(settings_file, TokenizerError) if settings_file.is_file() else {}
    model = tokenizer.get("model")
    if not isinstance(model, dict) or model.get("type") != "BPE" or not isinstance(model.get("vocab"), dict):
        found = model.get("type") if isinstance(model, dict) else None
        raise UnsupportedError("only BPE tokenizers are supported", file, expected="BPE", found=found)
    added = _added_tokens(tokenizer, settings, file)
    tokens, types = _token_list(model["vocab"], added, vocabulary, file)
    templates, notes = _chat_templates(folder, settings)
    keys = [text("tokenizer.ggml.model", kind)]
    if kind == GEMMA4:
        _refuse_other_than_gemma4(tokenizer, file)
        types = _gemma4_types(tokens, added, settings)
        keys += [
            array("tokenizer.ggml.tokens", ValueType.STRING, tokens),
            array("tokenizer.ggml.scores", ValueType.FLOAT32, [_NO_SCORE] * len(tokens)),
        ]
    else:
        keys.append(text("tokenizer.ggml.pre", pre_tokenizer or _pre_tokenizer(tokenizer, file)))
        keys.append(array("tokenizer.ggml.tokens", ValueType.STRING, tokens))
    keys.append(array("tokenizer.ggml.token_type", ValueType.INT32, types))
    merges = _merges(model.get("merges"), folder, file)
    if merges:
        keys.append(array("tokenizer.ggml.merges", ValueType.STRING, merges))
    keys += _special_ids(settings, config, added, vocabulary)
    if kind == GEMMA4:
        keys += [
            flag(f"tokenizer.ggml.{name}", value=on)
            for name, on in (("add_space_prefix", False), ("add_bos_token", True))
        ]
        keys += _suppressed(folder)
    else:
        keys += _add_flags(tokenizer.get("post_processor"), settings)
    return Tokenizer(keys + templates, notes)


def _refuse_other_than_gemma4(tokenizer: dict[str, Any], file: Path) -> None:
    """Spaces become U+2581, and what has no token is spelt in bytes: that is what the engine does."""
    normalizer, fallback = tokenizer.get("normalizer"), tokenizer["model"].get("byte_fallback")
    wanted = {"type": "Replace", "pattern": {"String": " "}, "content": SPACE_IN_WORDS}
    if normalizer != wanted or not fallback:
        raise UnsupportedError(
            "this is not Gemma 4's tokenizer", file, expected="spaces replaced by U+2581, byte_fallback",
            found=f"normalizer {repr(normalizer)[:200]}, byte_fallback {fallback}",
        )  # fmt: skip


def _gemma4_types(tokens: list[str], added: list[Added], settings: dict[str, Any]) -> list[int]:
    """Control are only special tokens that tokenizer_config.json names; what else was added is user-defined.

    So are those that chat parsers must see, named or not.
    """
    control = set(_named_special(settings)) - _VISIBLE
    beside = {token.content for token in added}
    ids = {token.id for token in added}

    def kind(i: int, content: str) -> TokenType:
        if _BYTE.fullmatch(content):
            return TokenType.BYTE
        if content in control:
            return TokenType.CONTROL
        if content in beside and i in ids:
            return TokenType.USER_DEFINED
        return TokenType.UNUSED if _FILLED.fullmatch(content) else TokenType.NORMAL

    return [int(kind(i, content)) for i, content in enumerate(tokens)]


def _named_special(settings: dict[str, Any]) -> Iterator[str]:
    """Contents of all special tokens in tokenizer_config.json."""
    more = [settings.get("additional_special_tokens"), settings.get("extra_special_tokens")]
    entries = [v for k, v in settings.items() if k.endswith("_token") and not k.startswith("add_")]
    for listed in more:
        entries += listed.values() if isinstance(listed, dict) else listed if isinstance(listed, list) else []
    for entry in entries:
        content = entry.get("content") if isinstance(entry, dict) else entry
        if isinstance(content, str):
            yield content


def _suppressed(folder: Path) -> list[KeyValue]:
    """Tokens that are never to be generated, of generation_config.json."""
    file = folder / "generation_config.json"
    listed = read_json_object(file, TokenizerError).get("suppress_tokens") if file.is_file() else None
    if not listed:
        return []
    if not isinstance(listed, list) or not all(type(t) is int for t in listed):
        raise TokenizerError("suppress_tokens is not a list of ids", file, found=repr(listed)[:200])
    return [array("tokenizer.ggml.suppress_tokens", ValueType.INT32, listed)]


def _added_tokens(tokenizer: dict[str, Any], settings: dict[str, Any], file: Path) -> list[Added]:
    """Added tokens of tokenizer.json, and those that only tokenizer_config.json has."""

    def entries() -> Iterator[tuple[object, object]]:
        listed = tokenizer.get("added_tokens") or []
        if not isinstance(listed, list):
            raise TokenizerError("added_tokens is not a list", file, found=type(listed).__name__)
        yield from ((t.get("id") if isinstance(t, dict) else None, t) for t in listed)
        decoder = settings.get("added_tokens_decoder") or {}
        if isinstance(decoder, dict):
            yield from ((int(i) if str(i).isdigit() else i, t) for i, t in decoder.items())

    found: dict[str, Added] = {}
    for token_id, entry in entries():
        content = entry.get("content") if isinstance(entry, dict) else None
        if type(token_id) is not int or not isinstance(content, str) or not isinstance(entry, dict):
            raise TokenizerError("an added token has no id or no content", file, found=repr(entry)[:200])
        known = found.setdefault(content, Added(token_id, content, bool(entry.get("special"))))
        if known.id != token_id:
            raise TokenizerError(
                f"the added token {content!r} has two ids", file, expected="one id", found=f"{known.id} and {token_id}",
                hint="tokenizer.json and tokenizer_config.json disagree: take both from one source",
            )  # fmt: skip
    return list(found.values())


def _token_list(vocab: dict[str, int], added: list[Added], size: int, file: Path) -> tuple[list[str], list[int]]:
    tokens: list[str | None] = [None] * size
    types = [TokenType.UNUSED] * size

    def put(token_id: object, content: str, kind: TokenType) -> None:
        if type(token_id) is not int or not 0 <= token_id < size:
            raise TokenizerError(
                f"the token {content!r} has no row in the embedding", file, expected=f"an id below {size} (vocab_size)",
                found=token_id, hint="the tokenizer belongs to another model, or vocab_size in config.json is wrong",
            )  # fmt: skip
        other = tokens[token_id]
        if other is not None and other != content:
            raise TokenizerError("two tokens have one id", file, found=f"{token_id}: {other!r} and {content!r}")
        tokens[token_id], types[token_id] = content, kind

    for content, token_id in vocab.items():
        put(token_id, content, TokenType.NORMAL)
    for token in added:
        control = token.special or _LOOKS_CONTROL.fullmatch(token.content) is not None
        put(token.id, token.content, TokenType.CONTROL if control else TokenType.USER_DEFINED)
    return [f"[PAD{i}]" if t is None else t for i, t in enumerate(tokens)], [int(t) for t in types]


def _merges(listed: object, folder: Path, file: Path) -> list[str]:
    """Merges in rank order as "a b"."""
    if listed is None and (folder / "merges.txt").is_file():
        lines = read_text(folder / "merges.txt", TokenizerError).splitlines()
        return [line for line in lines if line and not line.startswith("#version")]
    if not isinstance(listed, list):
        raise TokenizerError("the tokenizer has no list of merges", file, found=type(listed).__name__)
    merges: list[str] = []
    for entry in listed:
        parts = entry.split(" ") if isinstance(entry, str) else entry
        if not isinstance(parts, list) or len(parts) != 2 or not all(isinstance(p, str) for p in parts):
            raise TokenizerError("a merge is not a pair", file, found=repr(entry)[:200])
        merges.append(" ".join(part.replace(" ", _SPACE_IN_BYTES) for part in parts))
    return merges


def _pre_tokenizer(tokenizer: dict[str, Any], file: Path) -> str:
    """Recognise the splitting rule by what tokenizer.json says of it, never by trying it out."""
    pattern, faithful = _split_pattern(tokenizer.get("pre_tokenizer"))
    name = PRE_TOKENIZERS.get(pattern or "")
    if name is not None and faithful:
        return name
    nearest = max(PRE_TOKENIZERS, key=lambda known: SequenceMatcher(None, known, pattern or "").ratio())
    raise UnsupportedError(
        "the pre-tokenizer is not one that is known here", file,
        expected=f"nearest is {PRE_TOKENIZERS[nearest]}: {nearest}",
        found=pattern if pattern is not None else repr(tokenizer.get("pre_tokenizer"))[:400],
        hint="if you know which of the engine's pre-tokenizers it is, name it with --pre-tokenizer",
    )  # fmt: skip


def _split_pattern(pre: object) -> tuple[str | None, bool]:
    """(regular expression, whether the rest is as byte-level BPE has it: isolated pieces, no added space)."""
    steps = pre.get("pretokenizers") if isinstance(pre, dict) else None
    if not isinstance(steps, list) or not all(isinstance(step, dict) for step in steps):
        return None, False
    pattern = next((s.get("pattern") for s in steps if s.get("type") == "Split"), None)
    regex = pattern.get("Regex") if isinstance(pattern, dict) else None
    faithful = (
        [s.get("type") for s in steps] == ["Split", "ByteLevel"]
        and steps[0].get("behavior") == "Isolated"
        and not steps[0].get("invert")
        and not steps[1].get("add_prefix_space")
        and not steps[1].get("use_regex", True)
    )
    return regex, faithful


def _special_ids(settings: dict[str, Any], config: Config, added: list[Added], size: int) -> list[KeyValue]:
    ids = {token.content: token.id for token in added}
    keys: list[KeyValue] = []
    for short, name in _SPECIAL.items():
        entry = settings.get(f"{short}_token")
        content = entry.get("content") if isinstance(entry, dict) else entry
        found = ids.get(content) if isinstance(content, str) else None
        if found is None:
            found = config.top.get(f"{short}_token_id")
        if type(found) is not int:
            found = config.text.get(f"{short}_token_id")
        if type(found) is int and 0 <= found < size:  # a list, as some configs have for eos, says no single token
            keys.append(u32(f"tokenizer.ggml.{name}_token_id", found))
    return keys


def _add_flags(post: object, settings: dict[str, Any]) -> list[KeyValue]:
    """Which tokens are put around a text: by the post-processor, then by tokenizer_config.json."""
    flags: dict[str, bool] = {}
    steps = post.get("processors", [post]) if isinstance(post, dict) else []
    for step in steps:
        if step.get("type") == "ByteLevel":
            flags.setdefault("bos", False)
            flags.setdefault("eos", False)
        elif step.get("type") == "TemplateProcessing":
            single = step.get("single") or [{}]
            ends = [piece.get("SpecialToken", {}).get("id") for piece in (single[0], single[-1])]
            for short, token in zip(("bos", "eos"), ends, strict=True):
                if len(single) > 1 and token:
                    entry = settings.get(f"{short}_token")
                    flags[short] = token == (entry.get("content") if isinstance(entry, dict) else entry)
    for short in _SPECIAL:
        if isinstance(settings.get(f"add_{short}_token"), bool):
            flags[short] = settings[f"add_{short}_token"]
    return [flag(f"tokenizer.ggml.add_{short}_token", value) for short, value in flags.items()]


def _chat_templates(folder: Path, settings: dict[str, Any]) -> tuple[list[KeyValue], list[str]]:
    """All templates by name. chat_template.jinja wins over tokenizer_config.json, as in transformers 5."""
    jinja, legacy = folder / "chat_template.jinja", folder / "chat_template.json"
    inline = _named(settings.get("chat_template"), folder / "tokenizer_config.json")
    notes: list[str] = []
    if jinja.is_file():
        templates = {"default": read_text(jinja, TokenizerError)}
        for extra in sorted((folder / "additional_chat_templates").glob("*.jinja")):
            templates[extra.stem] = read_text(extra, TokenizerError)
        if inline and inline.get("default") != templates["default"]:
            notes.append("chat_template.jinja and tokenizer_config.json differ: chat_template.jinja is taken")
    elif inline:
        templates = inline
    elif legacy.is_file():
        templates = _named(read_json_object(legacy, TokenizerError).get("chat_template"), legacy)
    else:
        templates = {}
    if not templates:
        return [], ["no chat template found: front ends will guess one"]
    others = sorted(templates.keys() - {"default"})
    keys = [text("tokenizer.chat_template", templates["default"])] if "default" in templates else []
    keys += [text(f"tokenizer.chat_template.{name}", templates[name]) for name in others]
    if others:
        keys.append(array("tokenizer.chat_templates", ValueType.STRING, others))
    return keys, notes


def _named(value: object, file: Path) -> dict[str, str]:
    """A template, or a list of {name, template}, by name."""
    if value is None:
        return {}
    if isinstance(value, str):
        return {"default": value}
    if isinstance(value, list) and all(isinstance(t, dict) for t in value):
        named = {t.get("name"): t.get("template") for t in value}
        if all(isinstance(k, str) and isinstance(v, str) for k, v in named.items()):
            return named
    raise TokenizerError("chat_template is neither a text nor a list of named ones", file, found=repr(value)[:200])
