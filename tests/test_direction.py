"""Imports follow the arrow: quant <- converter <- verify <- bench <- release."""

from __future__ import annotations

import ast

import pytest

from tests.conftest import ROOT

MAY_IMPORT: dict[str, set[str]] = {
    "quant": set(),
    "converter": {"quant"},
    "verify": {"quant", "converter"},
    "bench": {"quant", "converter", "verify"},
    "release": {"quant", "converter", "verify", "bench"},
}


def imported_by(package: str) -> set[str]:
    """Top-level names of everything a package imports, function-level imports too."""
    names: set[str] = set()
    for file in (ROOT / package).rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Import):
                names |= {alias.name.split(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.module:
                names.add(node.module.split(".")[0])
    return names


@pytest.mark.parametrize("package", MAY_IMPORT)
def test_imports_follow_the_arrow(package: str) -> None:
    """A package imports itself, what stands before it, and nothing of the tests or scripts."""
    imported = imported_by(package)
    assert imported
    assert imported & MAY_IMPORT.keys() <= MAY_IMPORT[package] | {package}
    assert not imported & {"tests", "scripts"}
