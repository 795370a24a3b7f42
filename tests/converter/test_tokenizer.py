"""Vocabulary, pre-tokenizer and templates: recognised by what they say, never guessed."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from converter.config import Config
from converter.errors import TokenizerError, ToolError, UnsupportedError
from converter.tokenizer import PRE_TOKENIZERS, Tokenizer, load_tokenizer
from tests.checkpoints import copy_small_files, edit_json
from tests.conftest import EXAMPLE

ROWS = 2048
QWEN35, QWEN2 = PRE_TOKENIZERS


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    copy_small_files(EXAMPLE, tmp_path)
    return tmp_path


def read(folder: Path, rows: int = ROWS, pre: str | None = None) -> tuple[dict[str, Any], Tokenizer]:
    tokenizer = load_tokenizer(Config.load(folder), rows, pre)
    return {k.key.removeprefix("tokenizer."): k.value for k in tokenizer.keys}, tokenizer


def set_pattern(folder: Path, pattern: str) -> None:
    edit_json(
        folder / "tokenizer.json",
        lambda t: t["pre_tokenizer"]["pretokenizers"][0]["pattern"].update(Regex=pattern),
    )


def test_s21_added_tokens_do_not_matter(folder: Path) -> None:
    """S21: two more special tokens change any hash, not the pre-tokenizer."""
    new = [{"id": 2045 + i, "content": f"<|new{i}|>", "special": i == 0, "normalized": False} for i in range(2)]
    edit_json(folder / "tokenizer.json", lambda t: t["added_tokens"].extend(new))
    keys, _ = read(folder)
    assert keys["ggml.pre"] == "qwen35"
    assert keys["ggml.tokens"][2045:] == ["<|new0|>", "<|new1|>", "[PAD2047]"]
    assert keys["ggml.token_type"][2043:] == [4, 4, 3, 3, 5]  # looks like a control token even where not special


def test_s21_a_changed_merge_does_not_matter(folder: Path) -> None:
    """S21: the merges are what they are."""
    edit_json(folder / "tokenizer.json", lambda t: t["model"]["merges"].reverse())
    keys, _ = read(folder)
    assert keys["ggml.pre"] == "qwen35"
    assert keys["ggml.merges"][-1] == "Ġ Ġ"


def test_s21_unknown_pre_tokenizer(folder: Path) -> None:
    """S21: exit 4 with the pattern found and the nearest known; a flag names it."""
    set_pattern(folder, QWEN35.replace("'re|", ""))
    with pytest.raises(UnsupportedError) as caught:
        read(folder)
    message = str(caught.value)
    assert caught.value.exit_code == 4
    assert QWEN35.replace("'re|", "") in message
    assert f"nearest is qwen35: {QWEN35}" in message
    assert "--pre-tokenizer" in message
    assert read(folder, pre="qwen35")[0]["ggml.pre"] == "qwen35"


def test_qwen2_pattern_is_known(folder: Path) -> None:
    """The older pattern, without marks."""
    set_pattern(folder, QWEN2)
    assert read(folder)[0]["ggml.pre"] == "qwen2"


@pytest.mark.parametrize(
    "change",
    [
        lambda p: p["pretokenizers"][0].update(behavior="Removed"),
        lambda p: p["pretokenizers"][0].update(invert=True),
        lambda p: p["pretokenizers"][1].update(add_prefix_space=True),
        lambda p: p["pretokenizers"][1].update(use_regex=True),
        lambda p: p["pretokenizers"].append({"type": "Digits"}),
        lambda p: p["pretokenizers"].pop(0),
        lambda p: p.clear(),
    ],
    ids=["removed", "inverted", "prefix space", "second regex", "one step more", "no split", "nothing"],
)
def test_same_pattern_in_another_setting_is_unknown(folder: Path, change) -> None:
    """The regular expression alone does not make the engine split alike."""
    edit_json(folder / "tokenizer.json", lambda t: change(t["pre_tokenizer"]))
    with pytest.raises(UnsupportedError):
        read(folder)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda t: t["added_tokens"].append({"id": 9999, "content": "<x>"}), "no row in the embedding"),
        (lambda t: t["added_tokens"].append({"id": 5, "content": "<x>"}), "two tokens have one id"),
        (lambda t: t["added_tokens"].append({"content": "<x>"}), "no id"),
        (lambda t: t["model"]["vocab"].update(zzz="5"), "no row in the embedding"),
        (lambda t: t["model"].update(merges=[["a"]]), "not a pair"),
        (lambda t: t["model"].update(merges=["a b c"]), "not a pair"),
        (lambda t: t["model"].update(merges=None), "no list of merges"),
    ],
    ids=["id too high", "id taken", "no id", "id a text", "single", "triple", "none"],
)
def test_bad_vocabulary(folder: Path, change, words: str) -> None:
    """Exit 3, naming file and token."""
    edit_json(folder / "tokenizer.json", change)
    with pytest.raises(TokenizerError, match=words) as caught:
        read(folder)
    assert (caught.value.exit_code, caught.value.file) == (3, folder / "tokenizer.json")


def test_other_models_than_bpe_are_unsupported(folder: Path) -> None:
    """Exit 4."""
    edit_json(folder / "tokenizer.json", lambda t: t["model"].update(type="Unigram"))
    with pytest.raises(UnsupportedError, match="Unigram"):
        read(folder)


def test_no_tokenizer(folder: Path) -> None:
    """Exit 3, with where to get it."""
    (folder / "tokenizer.json").unlink()
    with pytest.raises(TokenizerError, match=r"no tokenizer\.json"):
        read(folder)


@pytest.mark.parametrize("as_strings", [True, False])
def test_merges_in_both_forms(folder: Path, as_strings: bool) -> None:
    """Pairs and strings are the same; a space inside a part is written as the alphabet has it."""
    pairs = [["a", "b"], ["Ġ", "c"]]
    edit_json(
        folder / "tokenizer.json",
        lambda t: t["model"].update(merges=[" ".join(p) for p in pairs] if as_strings else [*pairs, ["a b", "c"]]),
    )
    expected = ["a b", "Ġ c"] + ([] if as_strings else ["aĠb c"])
    assert read(folder)[0]["ggml.merges"] == expected


def test_merges_txt_where_tokenizer_json_has_none(folder: Path) -> None:
    """The older layout."""
    edit_json(folder / "tokenizer.json", lambda t: t["model"].pop("merges"))
    (folder / "merges.txt").write_text("#version: 0.2\na b\n\nĠ c\n")
    assert read(folder)[0]["ggml.merges"] == ["a b", "Ġ c"]


def test_vocabulary_of_the_tokenizers_library(folder: Path) -> None:
    """Every id that the tokenizers library knows has its text; the rest is filled up."""
    from tokenizers import Tokenizer as Reference

    reference = Reference.from_file(str(folder / "tokenizer.json"))
    tokens = read(folder, rows=3000)[0]["ggml.tokens"]
    assert len(tokens) == 3000
    known = {i: reference.id_to_token(i) for i in range(3000) if reference.id_to_token(i) is not None}
    assert {i: tokens[i] for i in known} == known
    assert tokens[2999] == "[PAD2999]"


@pytest.mark.parametrize(
    ("settings", "config", "expected"),
    [
        ({"eos_token": "<|endoftext|>"}, {}, 2040),
        ({"eos_token": {"content": "<|im_start|>"}}, {}, 2041),
        ({"eos_token": None}, {}, 2042),  # from text_config
        ({"eos_token": None}, {"eos_token_id": 7}, 7),
        ({"eos_token": "not a token"}, {"eos_token_id": [1, 2]}, 2042),
    ],
)
def test_special_ids(folder: Path, settings: dict, config: dict, expected: int) -> None:
    """tokenizer_config.json first, then config.json, then text_config; lists do not count."""
    edit_json(folder / "tokenizer_config.json", lambda s: s.update(settings))
    edit_json(folder / "config.json", lambda c: c.update(config))
    assert read(folder)[0]["ggml.eos_token_id"] == expected


@pytest.mark.parametrize(
    ("post", "setting", "expected"),
    [
        ({"type": "ByteLevel"}, None, False),
        ({"type": "Sequence", "processors": [{"type": "ByteLevel"}]}, True, True),
        ({"type": "TemplateProcessing",
          "single": [{"SpecialToken": {"id": "<|im_start|>"}}, {"Sequence": {"id": "A"}}]}, None, True),
        (None, None, None),
    ],
)  # fmt: skip
def test_add_bos(folder: Path, post: dict | None, setting: bool | None, expected: bool | None) -> None:
    """The post-processor says it, tokenizer_config.json overrides."""
    edit_json(folder / "tokenizer.json", lambda t: t.update(post_processor=post))
    edit_json(folder / "tokenizer_config.json", lambda s: s.update(bos_token="<|im_start|>", add_bos_token=setting))
    assert read(folder)[0].get("ggml.add_bos_token") == expected


def test_s22_jinja_wins(folder: Path) -> None:
    """S22: where both exist and differ the .jinja file is taken, and said."""
    edit_json(folder / "tokenizer_config.json", lambda s: s.update(chat_template="old"))
    keys, tokenizer = read(folder)
    assert keys["chat_template"] == (EXAMPLE / "chat_template.jinja").read_text()
    assert any("chat_template.jinja is taken" in note for note in tokenizer.notes)


def test_s22_all_sources(folder: Path) -> None:
    """S22: inline text, a list of named ones, chat_template.json, additional templates, none at all."""
    (folder / "chat_template.jinja").unlink()
    assert "chat_template" not in read(folder)[0]
    assert any("no chat template" in note for note in read(folder)[1].notes)
    (folder / "chat_template.json").write_text(json.dumps({"chat_template": "from json"}))
    assert read(folder)[0]["chat_template"] == "from json"
    edit_json(folder / "tokenizer_config.json", lambda s: s.update(chat_template="inline"))
    assert read(folder)[0]["chat_template"] == "inline"
    named = [
        {"name": "default", "template": "d"},
        {"name": "tool_use", "template": "t"},
        {"name": "a", "template": "b"},
    ]
    edit_json(folder / "tokenizer_config.json", lambda s: s.update(chat_template=named))
    keys, _ = read(folder)
    assert (keys["chat_template"], keys["chat_template.tool_use"]) == ("d", "t")
    assert keys["chat_templates"] == ["a", "tool_use"]
    shutil.copyfile(EXAMPLE / "chat_template.jinja", folder / "chat_template.jinja")
    (folder / "additional_chat_templates").mkdir()
    (folder / "additional_chat_templates" / "rag.jinja").write_text("r")
    keys, _ = read(folder)
    assert (keys["chat_template.rag"], keys["chat_templates"]) == ("r", ["rag"])


@pytest.mark.parametrize("file", ["tokenizer.json", "tokenizer_config.json"])
@pytest.mark.parametrize("content", [b"{", b"[]", b"\xff\xfe"])
def test_unreadable_files(folder: Path, file: str, content: bytes) -> None:
    """Exit 3 with the file's name."""
    (folder / file).write_bytes(content)
    with pytest.raises(ToolError, match=file) as caught:
        read(folder)
    assert caught.value.exit_code == 3
