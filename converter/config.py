"""config.json as one view: keys of `text_config` win over the top level (spec/qwen.md, section 1)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from converter.errors import ConfigError
from converter.files import read_json_object

_MISSING = object()


@dataclass(frozen=True)
class Config:
    """Typed access to a model's config; every error names the file and the key."""

    file: Path
    top: Mapping[str, Any]
    text: Mapping[str, Any]

    @classmethod
    def load(cls, folder: Path) -> Config:
        file = folder / "config.json"
        if not file.is_file():
            raise ConfigError("this folder has no config.json", folder, hint="give the folder of a Hugging Face model")
        top = read_json_object(file, ConfigError)
        text = top.get("text_config", {})
        if not isinstance(text, dict):
            raise ConfigError("text_config is not an object", file, found=type(text).__name__)
        return cls(file, top, text)

    def architecture(self) -> str:
        """The Hugging Face class name that decides the conversion."""
        for holder in (self.text, self.top):
            names = holder.get("architectures")
            if isinstance(names, list) and names and isinstance(names[0], str):
                return names[0]
        raise ConfigError('config.json lacks the key "architectures"', self.file, expected="a list with a class name")

    def get(self, key: str, default: Any = None) -> Any:
        """The value of `key`, null counting as absent."""
        for holder in (self.text, self.top):
            if holder.get(key) is not None:
                return holder[key]
        return default

    def integer(self, key: str, default: int | None = None, least: int = 1) -> int:
        value = self._value(key, default)
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            raise self._wrong(key, f"an integer >= {least}", value)
        return value

    def number(self, key: str, default: float | None = None) -> float:
        value = self._value(key, default)
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise self._wrong(key, "a number", value)
        return float(value)

    def flag(self, key: str, default: bool) -> bool:
        value = self._value(key, default)
        if not isinstance(value, bool):
            raise self._wrong(key, "true or false", value)
        return value

    def integers(self, key: str, default: list[int]) -> list[int]:
        value = self._value(key, default)
        if not isinstance(value, list) or not all(type(n) is int for n in value):
            raise self._wrong(key, "a list of integers", value)
        return value

    def section(self, *keys: str) -> Config:
        """The first of these keys that is there, an object, as a view of its own; an empty one where none is."""
        key = next((k for k in keys if self.get(k) is not None), None)
        value = self.get(key) if key else {}
        if not isinstance(value, dict):
            raise self._wrong(str(key), "an object", value)
        return Config(self.file, value, {})

    def _value(self, key: str, default: Any) -> Any:
        value = self.get(key, _MISSING if default is None else default)
        if value is _MISSING:
            raise ConfigError(f'config.json lacks the key "{key}"', self.file)
        return value

    def _wrong(self, key: str, expected: str, found: object) -> ConfigError:
        return ConfigError(f'config.json: "{key}" has a wrong value', self.file, expected=expected, found=repr(found))
