"""What all command lines share: errors become one message and an exit code, progress goes to stderr."""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

from converter.errors import ToolError

INTERRUPTED = 130
_LINE_EVERY_S = 10.0
_JSON_EVERY_S = 1.0


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


def positive(value: str) -> int:
    """An argument that counts something."""
    number = int(value)
    if number < 1:
        raise argparse.ArgumentTypeError("must be at least 1")
    return number


class Report(Protocol):
    """A result that a command prints."""

    def as_text(self) -> str: ...

    def as_json(self) -> dict[str, object]: ...


def run_command(
    parser: argparse.ArgumentParser, body: Callable[[argparse.Namespace], Report], argv: Sequence[str] | None
) -> int:
    """Parse, run, print. Returns the exit code: the report's own or 0, an error's (2 to 5), or 130 after Ctrl-C."""
    args = parser.parse_args(argv)
    try:
        report = body(args)
    except ToolError as error:
        if args.json:
            facts = {key: str(value) for key, value in error.facts()}
            print(json.dumps({"error": error.what, "exit_code": error.exit_code, **facts}))
        _complain(args, parser.prog, str(error), error.exit_code)
        return error.exit_code
    except KeyboardInterrupt:
        words = "interrupted; nothing was left under a final name, the same command goes on"
        _complain(args, parser.prog, words, INTERRUPTED)
        return INTERRUPTED
    except MemoryError:
        _complain(args, parser.prog, "out of memory\n  hint: fewer --workers take less", 5)
        return 5
    try:
        print(json.dumps(report.as_json(), indent=2) if args.json else report.as_text())
        sys.stdout.flush()
    except BrokenPipeError:  # the reader has seen enough; keep the interpreter from flushing again at exit
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return getattr(report, "exit_code", 0)


def _complain(args: argparse.Namespace, program: str, message: str, code: int) -> None:
    if getattr(args, "log_json", False):
        print(json.dumps({"event": "error", "message": message, "exit_code": code}), file=sys.stderr)
    else:
        print(f"{program}: {message}", file=sys.stderr)


def amount(size: float) -> str:
    """Bytes as people read them, in powers of ten."""
    for unit, scale in (("GB", 1e9), ("MB", 1e6)):
        if size >= scale:
            return f"{size / scale:,.2f} {unit}"
    return f"{size / 1e3:.1f} kB"


class Progress:
    """What is done, rate and ETA on stderr: a bar on a terminal, a line every ten seconds on a pipe.

    unit: "B" for bytes, else what is counted. as_json: lines of JSON instead, one per second and event.
    """

    def __init__(self, *, quiet: bool, unit: str = "B", as_json: bool = False) -> None:
        self.quiet, self.unit, self.as_json = quiet, unit, as_json
        self._bar = None
        self._started = self._last = time.monotonic()
        self._first: int | None = None

    def __call__(self, done: int, total: int, tensor: str) -> None:
        if self._first is None:  # what an earlier run had done does not count for the rate
            self._first = done
        now = time.monotonic()
        rate = (done - self._first) / max(now - self._started, 1e-9)
        left = (total - done) / rate if rate else None
        if self.as_json:
            if now - self._last >= _JSON_EVERY_S or done == total:
                self._last = now
                seconds = None if left is None else round(left, 1)
                self._line({"event": "progress", "done": done, "total": total, "rate": round(rate), "seconds_left": seconds,
                            "tensor": tensor})  # fmt: skip
        elif self.quiet:
            return
        elif sys.stderr.isatty():
            self._update_bar(done, total, tensor)
        elif now - self._last >= _LINE_EVERY_S:
            self._last = now
            show = amount if self.unit == "B" else lambda n: f"{n:,.1f} {self.unit}".replace(".0 ", " ")
            ends = "?" if left is None else f"{left:.0f}"
            print(
                f"{show(done)} of {show(total)}, {show(rate)}/s, {ends} s left, {tensor}",
                file=sys.stderr, flush=True,
            )  # fmt: skip

    def event(self, name: str, message: str, facts: Mapping[str, object]) -> None:
        """Something worth a line: also where progress is not wanted."""
        if self.as_json:
            self._line({"event": name, "message": message, **facts})
        else:
            print(message, file=sys.stderr, flush=True)

    def close(self) -> None:
        if self._bar is not None:
            self._bar.close()

    def _line(self, value: dict[str, object]) -> None:
        print(json.dumps(value), file=sys.stderr, flush=True)

    def _update_bar(self, done: int, total: int, tensor: str) -> None:
        from tqdm import tqdm

        if self._bar is None:
            self._bar = tqdm(total=total, initial=done, unit=self.unit, unit_scale=self.unit == "B", dynamic_ncols=True)
        self._bar.set_postfix_str(tensor, refresh=False)
        self._bar.update(done - self._bar.n)
