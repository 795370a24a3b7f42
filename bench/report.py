"""Results as people read them: a leaderboard on the terminal, a table to compute with, and a page with plots."""

from __future__ import annotations

import csv
import io
import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from bench.cost import CostModel
from bench.matrix import LLAMA_CPP
from bench.policy import Policy, Query, Recommendation
from bench.summary import CellStats, Results, expected_tokens
from converter.console import amount
from converter.files import os_errors
from verify.html import BLUE, GRID, INK, ORANGE, document, figure, plots, table, text

SCHEMA = 1
_COLOURS = (BLUE, ORANGE, "#3d8b5f", "#8a5aa8", "#b0413e", "#5b6878", "#7a7a1f", "#2f9ea3")
_MARKS = "osD^vP*X"
_HALF = (4.9, 3.1)  # inches; two beside each other
_TOLD = ("tokens", "prompts", "threads", "seed")
_LEAST_REACH = 0.05  # of colours around a speedup of 1
PAGE, TABLE, LINES = "report.html", "results.csv", "results.jsonl"


@dataclass(frozen=True)
class Workload:
    """Tokens of a typical prompt and answer."""

    name: str
    input_tokens: int
    output_tokens: int


WORKLOADS = (
    Workload("short in, long out", 64, 1024), Workload("long in, short out", 8000, 300), Workload("agent turn", 2000, 200),
)  # fmt: skip


class BenchReport:
    """What bench-mtp prints and writes."""

    def __init__(
        self, results: Results, workloads: Sequence[Workload] = WORKLOADS, settings: Mapping[str, Any] | None = None
    ) -> None:
        self.results, self.workloads, self.settings = results, workloads, settings or {}
        self.policy = Policy(results)

    def recommendations(self, task: str | None = None, workload: Workload | None = None) -> list[Recommendation]:
        """For all files at one slot; for all tasks together where none is named."""
        tokens = (workload.input_tokens, workload.output_tokens) if workload else (0, 0)
        slots = min((c.load.slots for c in self.results.cells), default=1)
        query = Query(task, slots=slots, input_tokens=tokens[0], output_tokens=tokens[1])
        return self.policy.recommend(query) if self.results.cells else []

    def as_json(self) -> dict[str, Any]:
        return {
            "schema": SCHEMA, "settings": {"prompt_cache": False, **self.settings}, "cells": [row_of(s) for s in self.results.cells.values()],
            "failed": [{**c.as_json(), "error": words} for c, words in self.results.failed.items()],
            "heads": [asdict(s) for s in self.results.scores],
            "recommendations": [r.as_json() for r in self.recommendations()],
        }  # fmt: skip

    def as_text(self) -> str:
        ranked = sorted(self.results.drafting, key=lambda s: -(s.speedup.value if s.speedup else 0))
        lines = [f"{'speedup':>20}  {'tok/s':>8}  {'accepted':>8}  {'identical':>9}  setting"]
        for s in ranked[:_SHOWN]:
            found = f"{s.speedup.value:.2f}x ({s.speedup.low:.2f}-{s.speedup.high:.2f})" if s.speedup else "no baseline"
            accepted = "?" if s.acceptance is None else f"{s.acceptance:.0%}"
            same = "?" if s.identical is None else f"{s.identical[0]}/{s.identical[1]}"
            where = f"{s.cell.load}, {s.cell.task}, T = {s.cell.temperature:g}" + _context(s)
            lines.append(f"{found:>20}  {s.tokens_per_s.value:>8,.0f}  {accepted:>8}  {same:>9}  {where}")
        if len(ranked) > _SHOWN:
            lines.append(f"and {len(ranked) - _SHOWN} more")
        lines += [
            f"flag: {s.cell.load}, {s.cell.task}: {flag}" for s in self.results.cells.values() for flag in s.flags
        ]
        lines += [f"failed: {cell.load}, {cell.task}: {words}" for cell, words in self.results.failed.items()]
        lines += [f"{r.file}, {r.engine}: {r.words}" for r in self.recommendations()]
        return "\n".join(lines)

    def write(self, folder: Path) -> None:
        """Page, table and lines into a folder. Raises EnvironmentFailure."""
        with os_errors("cannot write the report", folder):
            (folder / TABLE).write_text(self.as_csv(), encoding="utf-8")
            rows = (json.dumps({"schema": SCHEMA, **row_of(s)}) for s in self.results.cells.values())
            (folder / LINES).write_text("".join(f"{row}\n" for row in rows), encoding="utf-8")
            (folder / PAGE).write_text(document("bench-mtp", _Page(self).body()), encoding="utf-8")

    def sections(self) -> str:
        """The body of the page without its title, to stand in another page."""
        return _Page(self).sections()

    def as_csv(self) -> str:
        """One row per cell."""
        rows = [row_of(s) for s in self.results.cells.values()]
        out = io.StringIO()
        if rows:
            writer = csv.DictWriter(out, list(rows[0]), lineterminator="\n")
            writer.writeheader()
            writer.writerows(
                {k: " ".join(map(str, v)) if isinstance(v, list) else v for k, v in r.items()} for r in rows
            )
        return out.getvalue()


_SHOWN = 20


def row_of(stats: CellStats) -> dict[str, Any]:
    """One flat object per cell; None for what was not reported."""
    found = stats.speedup
    return {
        **stats.cell.as_json(), "engine_build": stats.engine_build, "runs": stats.runs,
        "tokens_per_s": stats.tokens_per_s.value, "tokens_per_s_low": stats.tokens_per_s.low,
        "tokens_per_s_high": stats.tokens_per_s.high, "throughput": stats.throughput, "prompt_per_s": stats.prompt_per_s,
        "prompt_ratio": stats.prompt_ratio, "seconds": stats.seconds, "speedup": found.value if found else None,
        "speedup_low": found.low if found else None, "speedup_high": found.high if found else None,
        "acceptance": stats.acceptance, "drafted": stats.drafted, "mean_accepted": stats.mean_accepted,
        "by_position": stats.by_position, "lengths": stats.lengths, "peak_bytes": stats.peak_bytes,
        "identical": stats.identical[0] if stats.identical else None,
        "answers": stats.identical[1] if stats.identical else None, "first_difference": stats.first, "flags": stats.flags,
    }  # fmt: skip


def _context(stats: CellStats) -> str:
    return f", prompt of {stats.cell.context}" if stats.cell.context else ""


def _name(file: str) -> str:
    return Path(file).stem


# --- the page


class _Page:
    def __init__(self, report: BenchReport) -> None:
        self.report, self.results = report, report.results
        self.files = list(dict.fromkeys(c.load.file for c in self.results.cells))
        self.tasks = list(dict.fromkeys(c.task for c in self.results.cells))
        self.engines = list(dict.fromkeys(c.load.engine for c in self.results.cells))

    def body(self) -> str:
        return f"<h1>Multi-token prediction: what drafts are worth</h1>{self.sections()}"

    def sections(self) -> str:
        parts = [
            self._head(), self._chosen(), self._heat(), self._drafts(), self._positions(), self._costs(), self._heads(),
            self._workloads(), self._across(), self._all(),
        ]  # fmt: skip
        return "".join(parts)

    def _head(self) -> str:
        builds = sorted({s.engine_build for s in self.results.cells.values()})
        runs = max((s.runs for s in self.results.cells.values()), default=0)
        words = f"{', '.join(builds)}; {len(self.results.cells)} cells, {runs} runs each, in another order every time; no prompt cache"
        words += "".join(f", {name} {value}" for name, value in self.report.settings.items() if name in _TOLD) + "."
        found = f"<p class=quiet>{text(words)} Speedups are decoding times of plain over those with drafts, prompt by prompt;"
        return found + " intervals hold 95 %, by bootstrap over prompts and runs.</p>"

    def _chosen(self) -> str:
        rows = []
        for task in [None, *self.tasks]:
            for r in self.report.recommendations(task):
                load = r.best.load if r.best and r.on else None
                rows.append((
                    _name(r.file), r.engine, task or "all tasks", "on" if r.on else "off", load.drafts if load else "",
                    load.head if load else "", f"{r.expected:.2f}x", r.words.partition(": ")[2],
                ))  # fmt: skip
        header = ("file", "engine", "task", "drafts", "n", "head", "expected", "why")
        flags = [f"{s.cell.load}, {s.cell.task}: {flag}" for s in self.results.cells.values() for flag in s.flags]
        flags += [f"{cell.load}, {cell.task} failed: {words}" for cell, words in self.results.failed.items()]
        warned = f"<ul>{''.join(f'<li>{text(f)}' for f in flags)}</ul>" if flags else ""
        return f"<h2>What to use</h2>{table(header, rows)}{warned}"

    def _heat(self) -> str:
        """Best speedup by file and task."""
        engine = self.engines[0]
        draw = best_speedups(self.results, engine, {f: _name(f) for f in self.files})
        if draw is None:
            return ""
        return plots(figure(draw, f"Best speedup over plain decoding, {engine}", 6.4, 1.1 + 0.7 * len(self.files)))

    def _drafts(self) -> str:
        """Speedup against n, with what the models say."""
        figures = [
            figure(self._sweep(e, f), f"{_name(f)}, {e}", *_HALF)
            for e in self.engines
            for f in self.files
            if self._rows(e, f)
        ]
        if not figures:
            return ""
        note = (
            "<p class=quiet>Points are measured, with their intervals. Dashed: tokens of a step by the shares of accepted "
            "drafts at the longest n, over its fitted cost. Dotted: the same by one rate a, "
            "(1 - a<sup>n+1</sup>) / (1 - a).</p>"
        )
        return f"<h2>Speedup by number of drafts</h2>{plots(*figures)}{note}"

    def _rows(self, engine: str, file: str) -> list[CellStats]:
        """Of the first head, at the simplest setting of all other axes."""
        mine = [
            s for s in self.results.drafting if (s.cell.load.engine, s.cell.load.file) == (engine, file) and s.speedup
        ]
        if not mine:
            return []

        def key(s: CellStats) -> Any:
            return (
                s.cell.load.slots,
                s.cell.load.p_min,
                s.cell.temperature,
                s.cell.context,
            )

        least, head = min(map(key, mine)), mine[0].cell.load.head
        return [s for s in mine if key(s) == least and s.cell.load.head == head]

    def _sweep(self, engine: str, file: str) -> Callable[[Any], None]:
        rows = self._rows(engine, file)
        model = self.report.policy.cost(rows[0].cell.load, list(self.results.cells.values()))

        def draw(axes: Any) -> None:
            most = max(s.cell.load.drafts for s in rows)
            for k, task in enumerate(self.tasks):
                mine = sorted((s for s in rows if s.cell.task == task), key=lambda s: s.cell.load.drafts)
                if not mine:
                    continue
                at = [s.cell.load.drafts for s in mine]
                found = [s.speedup for s in mine if s.speedup]
                errors = [[f.value - f.low for f in found], [f.high - f.value for f in found]]
                colour = _COLOURS[k % len(_COLOURS)]
                axes.errorbar(at, [f.value for f in found], errors, fmt=_MARKS[k % len(_MARKS)] + "-", color=colour,
                              capsize=2, linewidth=1, markersize=4, label=task)  # fmt: skip
                if model and mine[-1].by_position:
                    places, rates = range(1, most + 1), mine[-1].by_position
                    axes.plot(places, [model.speedup(rates, n) for n in places], "--", color=colour, linewidth=1)
                    one = [expected_tokens(rates[0], n) / model.of(n) for n in places]
                    axes.plot(places, one, ":", color=colour, linewidth=1)
            axes.axhline(1, color=INK, linewidth=0.8)
            axes.set(xlabel="drafts per step", ylabel="speedup over plain", xticks=range(1, most + 1))
            axes.set_ylim(bottom=0)
            axes.legend(frameon=False, fontsize=8, loc="best")

        return draw

    def _positions(self) -> str:
        figures = []
        for engine in self.engines:
            for file in self.files:
                rows = [s for s in self._rows(engine, file) if s.by_position]
                if rows:
                    figures.append(figure(_by_position(rows), f"{_name(file)}, {engine}", *_HALF))
        return f"<h2>Acceptance by draft position</h2>{plots(*figures)}" if figures else ""

    def _costs(self) -> str:
        """Verification and drafting, apart from what heads are worth."""
        rows, curves = [], []
        for file, head in dict.fromkeys((c.file, c.head) for c in self.results.costs):
            loads = [s.cell.load for s in self.results.drafting if (s.cell.load.file, s.cell.load.head) == (file, head)]
            load = next((x for x in loads if x.engine == LLAMA_CPP and x.slots == 1 and not x.p_min), None)
            model = self.report.policy.cost(load, []) if load else None
            if model is None:
                continue
            curves.append((f"{_name(file)}, {head} head", model))
            rows.append((_name(file), head, model.overhead, model.draft, model.width, model.expert if model.experts else "dense",
                         ", ".join(f"{n}: {v:.2f}" for n, v in sorted(model.step.items()))))  # fmt: skip
        if not rows:
            return ""
        header = ("file", "head", "drafting at all", "per draft", "per row verified", "experts", "cost of a step by n")
        words = (
            "In steps of plain decoding, by the engine's made-up acceptance: a step costs the same whatever the head is worth. "
            "With experts, more verified tokens touch more of them."
        )
        found = plots(figure(_cost_curves(curves), "Cost of a step, llama.cpp"))
        return f"<h2>What a step costs</h2><p class=quiet>{words}</p>{found}{table(header, rows)}"

    def _heads(self) -> str:
        rows = [
            (_name(s.file), s.head, s.task, *(_share(a, d) for a, d in s.counts))
            for s in sorted(self.results.scores, key=lambda s: (s.file, s.task, s.head))
        ]
        if not rows:
            return ""
        width = max(len(r) for r in rows) - 3
        rows = [(*r, *[""] * (width + 3 - len(r))) for r in rows]
        header = ("file", "head", "task", *(f"first {k}" if k > 1 else "first" for k in range(1, width + 1)))
        words = (
            "Share of places where the first k drafts are the trunk's own text; all heads on one decode of the trunk."
        )
        return f"<h2>Types of the head</h2><p class=quiet>{words}</p>{table(header, rows)}"

    def _workloads(self) -> str:
        rows = []
        for workload in self.report.workloads:
            for r in self.report.recommendations(None, workload):
                best = r.best
                rows.append((
                    workload.name, f"{workload.input_tokens:,} : {workload.output_tokens:,}", _name(r.file), r.engine,
                    "on" if r.on else "off", f"{best.speedup.value:.2f}x" if best else "",
                    f"{best.decoding.value:.2f}x" if best else "", best.load.drafts if best else "",
                ))  # fmt: skip
        header = (
            "workload",
            "tokens in : out",
            "file",
            "engine",
            "drafts",
            "whole request",
            "decoding alone",
            "best n",
        )
        words = "Decoding fast is not finishing fast: the head reads prompts too. Prompt speeds are those of the nearest context."
        return f"<h2>Whole requests</h2><p class=quiet>{words}</p>{table(header, rows)}"

    def _across(self) -> str:
        """Engines side by side, their plain texts compared with the first one's."""
        rows = []
        for stats in self.results.cells.values():
            if stats.cell.load.drafts:
                continue
            same = agreement(self.results, stats)
            best = [s for s in self.results.drafting if s.cell.plain == stats.cell and s.speedup]
            top = max(best, key=lambda s: s.speedup.value if s.speedup else 0, default=None)
            rows.append((
                stats.engine_build, _name(stats.cell.load.file), stats.cell.task, stats.tokens_per_s.value,
                top.tokens_per_s.value if top else "", f"{top.speedup.value:.2f}x" if top and top.speedup else "",
                "not reported" if top is None or top.acceptance is None else f"{top.acceptance:.0%}",
                "" if top is None or top.identical is None else f"{top.identical[0]} of {top.identical[1]}",
                "" if same is None else f"{same:.0%}",
            ))  # fmt: skip
        header = ("engine", "file", "task", "plain tok/s", "best with drafts", "speedup", "accepted",
                  "answers as plain", "plain text as the first engine's")  # fmt: skip
        return f"<h2>Engines</h2>{table(header, rows)}" if len(self.engines) > 1 else ""

    def _all(self) -> str:
        rows = []
        for s in self.results.cells.values():
            load, found = s.cell.load, s.speedup
            rows.append((
                _name(load.file), load.engine, load.head, load.drafts, load.p_min, load.slots, s.cell.task,
                s.cell.temperature, s.cell.context, s.tokens_per_s.value,
                f"{s.tokens_per_s.low:,.0f}-{s.tokens_per_s.high:,.0f}",
                f"{found.value:.2f} ({found.low:.2f}-{found.high:.2f})" if found else "",
                "" if s.acceptance is None else f"{s.acceptance:.1%}", " ".join(f"{v:.2f}" for v in s.lengths),
                s.prompt_per_s, "" if s.prompt_ratio is None else f"{s.prompt_ratio:.2f}", amount(s.peak_bytes) if s.peak_bytes else "",
                "" if s.identical is None else f"{s.identical[0]}/{s.identical[1]}",
                "" if s.first is None else s.first,
            ))  # fmt: skip
        header = ("file", "engine", "head", "n", "p-min", "slots", "task", "T", "prompt", "tok/s", "range", "speedup",
                  "accepted", "share of steps accepting 0, 1, …", "prompt tok/s", "of plain's", "memory", "identical", "first differs at")  # fmt: skip
        return f"<h2>All cells</h2>{table(header, rows)}"


def best_speedups(results: Results, engine: str, names: Mapping[str, str]) -> Callable[[Any], None] | None:
    """A plot of the best speedup and its n by file and task; names: what files are called. None without figures."""
    tasks = list(dict.fromkeys(c.task for c in results.cells))
    grid = [[_best(results, engine, file, task) for task in tasks] for file in names]
    if not any(v is not None for row in grid for v in row):
        return None

    def draw(axes: Any) -> None:
        values = [[float("nan") if v is None else v[0] for v in row] for row in grid]
        reach = max(_LEAST_REACH, *(abs(v[0] - 1) for row in grid for v in row if v is not None))
        axes.imshow(values, cmap="PuOr_r", vmin=1 - 1.6 * reach, vmax=1 + 1.6 * reach, aspect="auto")
        axes.grid(visible=False)
        axes.set_xticks(range(len(tasks)), tasks)
        axes.set_yticks(range(len(names)), list(names.values()))
        for y, row in enumerate(grid):
            for x, v in enumerate(row):
                if v is not None:
                    axes.text(x, y, f"{v[0]:.2f}x\nn = {v[1]}", ha="center", va="center", color=INK, fontsize=9)

    return draw


def _best(results: Results, engine: str, file: str, task: str) -> tuple[float, int] | None:
    found = [
        (s.speedup.value, s.cell.load.drafts) for s in results.drafting
        if (s.cell.load.engine, s.cell.load.file, s.cell.task) == (engine, file, task) and s.speedup
    ]  # fmt: skip
    return max(found, default=None)


def _share(count: int, of: int) -> str:
    """With twice its standard error."""
    if not of:
        return ""
    share = count / of
    return f"{share:.1%} ± {2 * math.sqrt(share * (1 - share) / of):.1%}"


def _by_position(rows: Sequence[CellStats]) -> Callable[[Any], None]:
    def draw(axes: Any) -> None:
        tasks = list(dict.fromkeys(s.cell.task for s in rows))
        most = max(s.cell.load.drafts for s in rows)
        for k, task in enumerate(tasks):
            longest = max((s for s in rows if s.cell.task == task), key=lambda s: s.cell.load.drafts)
            places = range(1, len(longest.by_position) + 1)
            axes.plot(places, [100 * v for v in longest.by_position], _MARKS[k % len(_MARKS)] + "-", label=task,
                      color=_COLOURS[k % len(_COLOURS)], linewidth=1, markersize=4)  # fmt: skip
        axes.set(xlabel="draft", ylabel="steps that accept it, %", ylim=(0, 100), xticks=range(1, most + 1))
        axes.legend(frameon=False, fontsize=8)

    return draw


def _cost_curves(curves: Sequence[tuple[str, CostModel]]) -> Callable[[Any], None]:
    def draw(axes: Any) -> None:
        for k, (name, model) in enumerate(curves):
            colour, most = _COLOURS[k % len(_COLOURS)], max(model.step)
            axes.plot(list(model.step), list(model.step.values()), _MARKS[k % len(_MARKS)], color=colour, label=name,
                      markersize=4)  # fmt: skip
            axes.plot(
                range(1, most + 1), [model.fitted(n) for n in range(1, most + 1)], "--", color=colour, linewidth=1
            )
        axes.axhline(1, color=GRID, linewidth=1)
        axes.set(
            xlabel="drafts per step",
            ylabel="steps of plain decoding",
            xticks=range(1, max(max(m.step) for _, m in curves) + 1),
        )
        axes.set_ylim(bottom=0)
        axes.legend(frameon=False, fontsize=8)

    return draw


def agreement(results: Results, stats: CellStats) -> float | None:
    """Of a plain cell: mean share of an answer before it leaves the first engine's; None for the first engine itself."""
    same = [c for c in results.cells if not c.load.drafts and (c.task, c.temperature, c.context) == (
        stats.cell.task, stats.cell.temperature, stats.cell.context)]  # fmt: skip
    if not same or same[0].load.engine == stats.cell.load.engine:
        return None
    mine, theirs = (next(r for r in results.records if r.cell == c).tokens for c in (stats.cell, same[0]))
    shares = []
    for a, b in zip(mine, theirs, strict=False):
        at = next((k for k, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
        shares.append(at / max(1, min(len(a), len(b))))
    return sum(shares) / len(shares) if shares else None
