"""The command line release-mtp: parse, call, print."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from converter.console import Progress, parser_for, positive, run_command
from converter.errors import UsageError

if TYPE_CHECKING:
    from converter.console import Report

_EXIT_CODES = """\
exit codes: 0 every file passed, 1 a file failed verification and was not published, 2 wrong usage, 3 invalid input
(checkpoint, recipe), 4 not supported, 5 environment (disk, memory, engine missing, Hub), 130 interrupted; the same
command goes on"""
_PRESETS = ("small", "standard", "full")
RECIPE = Path("recipe.toml")


def _parser() -> argparse.ArgumentParser:
    parser = parser_for(
        "release-mtp", "Make, verify, measure and describe all files of a model: a folder that can be published as it is.",
        _EXIT_CODES,
    )  # fmt: skip
    parser.add_argument("model", metavar="MODEL", nargs="?", help="folder of the source checkpoint, or a Hub id")
    parser.add_argument("out", metavar="OUT_DIR", nargs="?", type=Path, help="folder of the release; made")
    parser.add_argument(
        "--recipe", metavar="FILE", type=Path, help="which files, and how they are verified and measured"
    )
    parser.add_argument("--preset", choices=_PRESETS, help="a ready recipe (default: standard)")
    parser.add_argument(
        "--init", metavar="FILE", nargs="?", const=RECIPE, type=Path,
        help="write a commented recipe (of --preset) and stop (default: recipe.toml)",
    )  # fmt: skip
    parser.add_argument("--push", metavar="USER/REPO", help="upload to the Hub when every file has passed")
    parser.add_argument("--private", action="store_true", help="of a repository that --push makes")
    parser.add_argument("--revision", metavar="REV", help="branch, tag or commit of a model on the Hub")
    parser.add_argument("--workers", metavar="N", type=positive, help="how many convert at a time (default: all cores)")
    parser.add_argument("--device", choices=("cpu", "cuda", "auto"), default="cpu", help="where to quantize")
    parser.add_argument("--dry-run", action="store_true", help="plan everything, make nothing")
    parser.add_argument("--quiet", action="store_true", help="no progress")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point of release-mtp."""
    return run_command(_parser(), _release, argv)


@dataclass
class _Written:
    """Of --init."""

    file: Path

    def as_text(self) -> str:
        return f"wrote {self.file}; next: release-mtp MODEL OUT_DIR --recipe {self.file}"

    def as_json(self) -> dict[str, object]:
        return {"schema": 1, "recipe": str(self.file)}


def _release(args: argparse.Namespace) -> Report:

    from release.recipe import DEFAULT_PRESET, commented, preset, read_recipe

    if args.init is not None:
        return _init(args.init, commented(args.preset or DEFAULT_PRESET))
    if args.model is None or args.out is None:
        raise UsageError("release-mtp needs MODEL and OUT_DIR", hint="or --init, for a recipe to begin with")
    if args.recipe and args.preset:
        raise UsageError("--preset is for releases without a recipe", hint='a recipe names its own: preset = "small"')
    recipe = read_recipe(args.recipe) if args.recipe else preset(args.preset or DEFAULT_PRESET)
    from release.run import Hooks, release

    if args.quiet or not sys.stderr.isatty():
        os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")  # of downloads and uploads
    shown = _Shown(quiet=args.quiet)
    try:
        return release(
            args.model, args.out, recipe, revision=args.revision, push_to=args.push, private=args.private,
            dry_run=args.dry_run, device=args.device, workers=args.workers, hooks=Hooks(shown.notify, shown.progress),
        )  # fmt: skip
    finally:
        shown.close()


def _init(file: Path, text: str) -> _Written:
    from converter.files import os_errors

    if file.exists():
        raise UsageError("there is a file of this name", file, hint="name another one: --init FILE")
    with os_errors("cannot write the recipe", file):
        file.write_text(text, encoding="utf-8")
    return _Written(file)


class _Shown:
    """Steps and their progress on stderr."""

    def __init__(self, *, quiet: bool) -> None:
        self.quiet = quiet
        self.now: Progress | None = None

    def notify(self, line: str) -> None:
        if not self.quiet:
            self.close()
            print(f"{line} …", file=sys.stderr, flush=True)

    def progress(self, unit: str) -> Callable[[int, int, str], Any]:
        self.close()
        self.now = Progress(quiet=self.quiet, unit=unit)
        return self.now

    def close(self) -> None:
        if self.now is not None:
            self.now.close()
            self.now = None


if __name__ == "__main__":
    raise SystemExit(main())
