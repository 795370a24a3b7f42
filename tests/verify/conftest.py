"""What the verifier found of the faults that were planted, as a table at the end of the run."""

from __future__ import annotations

from collections import defaultdict

from verify.results import LEVELS


def pytest_terminal_summary(terminalreporter) -> None:
    """A row per fault, a mark per level that saw it."""
    found: dict[str, set[str]] = defaultdict(set)
    for reports in terminalreporter.stats.values():
        for report in reports:
            properties = dict(getattr(report, "user_properties", ()))
            if "fault" in properties:
                found[properties["fault"]] |= set(properties["levels"].split(",")) - {""}
    if not found:
        return
    terminalreporter.section(f"{len(found)} planted faults")
    terminalreporter.line(f"{'fault':44}" + "".join(f"{level:>12}" for level in LEVELS))
    for fault, levels in sorted(found.items()):
        terminalreporter.line(f"{fault:44}" + "".join(f"{'found' if level in levels else '':>12}" for level in LEVELS))
    survivors = sorted(fault for fault, levels in found.items() if not levels)
    terminalreporter.line(f"survivors: {', '.join(survivors) or 'none'}")
