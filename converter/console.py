"""What all command lines share: errors become one message and an exit code, progress goes to stderr."""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Callable, Sequence
from typing import Protocol

from converter.errors import ToolError

INTERRUPTED = 130
_LINE_EVERY_S = 10.0


EXIT_CODES = """\
exit codes: 0 done, 2 wrong usage, 3 invalid input, 4 not supported, 5 environment (disk, permission, memory),
130 interrupted"""


def parser_for(prog: str, description: str, epilog: str = EXIT_CODES) -> argparse.ArgumentParser:
    """A parser with what all commands have: --version, --json and the exit codes."""
    from importlib.metadata import version

    parser = argparse.ArgumentParser(
        prog=prog, description=description, epilog=epilog, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--version", action="version", version=f"%(prog)s {version('convert-mtp')}")
    parser.add_argument("--json", action="store_true", help="print the result as JSON")
    return parser


class Report(Protocol):
    """A result that a command prints."""

    def as_text(self) -> str: ...

    def as_json(self) -> dict[str, object]: ...


def run_command(
    parser: argparse.ArgumentParser, body: Callable[[argparse.Namespace], Report], argv: Sequence[str] | None
) -> int:
    """Parse, run, print. Returns the exit code: 0, an error's own (2 to 5), or 130 after Ctrl-C."""
    args = parser.parse_args(argv)
    try:
        report = body(args)
    except ToolError as error:
        if args.json:
            facts = {key: str(value) for key, value in error.facts()}
            print(json.dumps({"error": error.what, "exit_code": error.exit_code, **facts}))
        print(f"{parser.prog}: {error}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        print(f"{parser.prog}: interrupted; nothing was left under a final name", file=sys.stderr)
        return INTERRUPTED
    except MemoryError:
        print(f"{parser.prog}: out of memory\n  hint: fewer --workers take less", file=sys.stderr)
        return 5
    try:
        print(json.dumps(report.as_json(), indent=2) if args.json else report.as_text())
        sys.stdout.flush()
    except BrokenPipeError:  # the reader has seen enough; keep the interpreter from flushing again at exit
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return 0


def amount(size: float) -> str:
    """Bytes as people read them, in powers of ten."""
    for unit, scale in (("GB", 1e9), ("MB", 1e6)):
        if size >= scale:
            return f"{size / scale:,.2f} {unit}"
    return f"{size / 1e3:.1f} kB"


class Progress:
    """What is done, rate and ETA on stderr: a bar on a terminal, a line every ten seconds on a pipe.

    unit: "B" for bytes, else what is counted.
    """

    def __init__(self, *, quiet: bool, unit: str = "B") -> None:
        self.quiet, self.unit = quiet, unit
        self._bar = None
        self._started = self._last = time.monotonic()

    def __call__(self, done: int, total: int, tensor: str) -> None:
        if self.quiet:
            return
        if sys.stderr.isatty():
            self._update_bar(done, total, tensor)
        elif time.monotonic() - self._last >= _LINE_EVERY_S:
            self._last = time.monotonic()
            rate = done / (self._last - self._started)
            show = amount if self.unit == "B" else lambda n: f"{n:,.1f} {self.unit}".replace(".0 ", " ")
            left = f"{(total - done) / rate:.0f}" if rate else "?"
            print(
                f"{show(done)} of {show(total)}, {show(rate)}/s, {left} s left, {tensor}",
                file=sys.stderr, flush=True,
            )  # fmt: skip

    def close(self) -> None:
        if self._bar is not None:
            self._bar.close()

    def _update_bar(self, done: int, total: int, tensor: str) -> None:
        from tqdm import tqdm

        if self._bar is None:
            self._bar = tqdm(total=total, unit=self.unit, unit_scale=self.unit == "B", dynamic_ncols=True)
        self._bar.set_postfix_str(tensor, refresh=False)
        self._bar.update(done - self._bar.n)
