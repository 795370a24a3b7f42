"""Names and folders, by what engines make of them."""

from __future__ import annotations

import pytest

from converter.errors import UsageError
from release.names import names_of
from tests.oracles.discovery import by_tag, mains, sidecars

TYPES = ("BF16", "Q4_K_M", "Q8_0")


def listing(source: str) -> tuple[list[str], list[str], list[str]]:
    """(bundled, trunk, sidecars) as a repository lists them."""
    names = names_of(source)
    return tuple([p.format(type=t) for t in TYPES] for p in (names.bundled, names.trunk, names.sidecar))  # type: ignore[return-value]


@pytest.mark.parametrize("source", ["Qwen/Qwen3.6-27B", "a-model", "zephyr-7B", "Org/tiny-mtp-7B", "Qwen3-Next-MTP"])
@pytest.mark.parametrize("key", [str, str.lower], ids=["by byte", "ignoring case"])
def test_nothing_is_paired_that_does_not_belong_together(source: str, key) -> None:
    """Bundled files find no sidecar, trunk-only ones do, and a tag gives the bundled file however files are listed."""
    bundled, trunk, heads = listing(source)
    files = sorted(bundled + trunk + heads, key=key)
    assert sorted(mains(files)) == sorted(bundled + trunk)
    for kind, file in zip(TYPES, sorted(bundled), strict=True):
        assert sidecars(files, file) == []
        assert by_tag(files, kind)[0] == file
        assert len(by_tag(files, kind)) == 2
    for file in trunk:
        assert set(sidecars(files, file)) == set(heads)


def test_front_ends_that_go_by_names() -> None:
    """Those that look for -MTP in a name, or for mtp- at its beginning, find what they mean."""
    bundled, trunk, heads = listing("Org/Qwen3.6-27B-MTP")
    assert all("-MTP-" in f and "-MTP-MTP" not in f for f in bundled)
    assert not any("-MTP" in f for f in trunk + heads)
    assert all(f.rpartition("/")[2].startswith("mtp-") for f in heads)


@pytest.mark.parametrize(
    ("wanted", "words"),
    [("a b", "letters"), ("my-mtp-7B", "mtp-"), ("x-mmproj", "mmproj"), ("Foo-Q8_0-distill", "no Q8_0"), ("q4_0.x", "no q4_0"),
     ("../x", "letters"), ("", "letters")],
)  # fmt: skip
def test_names_that_engines_misread_are_refused(wanted: str, words: str) -> None:
    """With what is wrong about them; an empty name is none."""
    with pytest.raises(UsageError) as error:
        names_of(wanted or ".", wanted)
    assert words in str(error.value)
    assert "recipe" in str(error.value)


def test_a_type_within_a_word_is_no_type() -> None:
    """Engines look for the tag before a dot or dash only."""
    assert names_of("IQ4_XSmall").base == "IQ4_XSmall"
