"""The plots of a release: quality by size, acceptance by draft position, speedups by type and task."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from bench.matrix import LLAMA_CPP
from bench.report import best_speedups
from release.facts import Facts, FileFacts
from release.make import HEADS
from verify.html import BLUE, INK, ORANGE, figure, picture

_COLOURS = (BLUE, ORANGE, "#3d8b5f", "#8a5aa8", "#b0413e", "#5b6878", "#7a7a1f", "#2f9ea3", "#a0527a", "#4f6d1f")
_MARKS = "osD^vP*X<>"
_KINDS = ("svg", "png")


@dataclass(frozen=True)
class Plot:
    """words: what it shows, for those who do not see it. width, height: inches."""

    name: str
    title: str
    words: str
    draw: Callable[[Any], None]
    width: float = 6.4
    height: float = 3.4

    def svg(self) -> str:
        """An element of a page."""
        return figure(self.draw, self.title, self.width, self.height)

    def files(self) -> dict[str, bytes]:
        """By name."""
        return {f"{self.name}.{k}": picture(self.draw, self.title, self.width, self.height, k) for k in _KINDS}


def plots_of(facts: Facts) -> list[Plot]:
    """Those that there are figures for."""
    found = [_quality(_trunks(facts)), _acceptance(facts), _speed(facts)]
    return [plot for plot in found if plot is not None]


def _trunks(facts: Facts) -> list[FileFacts]:
    """One file of every type of the trunk."""
    return facts.of_kind("bundled") or facts.of_kind("trunk")


def _quality(files: Sequence[FileFacts]) -> Plot | None:
    unit, scale = ("GB", 1e9) if max((f.file.size for f in files), default=0) > 1e9 else ("MB", 1e6)
    known = [(f.file.size / scale, f.level("logits")["kld_mean"], f.file.type) for f in files if f.level("logits")]
    if len(known) < 2:
        return None

    def draw(axes: Any) -> None:
        positive = [k for _, k, _ in known if k > 0]
        floor = min(positive, default=1e-6) / 3
        axes.plot([s for s, _, _ in known], [max(k, floor) for _, k, _ in known], "o", color=BLUE)
        for size, kld, kind in known:
            axes.annotate(kind, (size, max(kld, floor)), (5, 4), textcoords="offset points", fontsize=9)
        axes.set(xlabel=f"size, {unit}", ylabel="mean KL divergence, nats", yscale="log")
        axes.margins(x=0.18, y=0.2)
        axes.grid(axis="both", which="major", color="#d9dee5", linewidth=0.8)

    words = ", ".join(f"{kind} {kld:.2g} nats at {size:.3g} {unit}" for size, kld, kind in known)
    return Plot("quality", "Distance from the source by size", f"Mean KL divergence: {words}.", draw)


def _acceptance(facts: Facts) -> Plot | None:
    known = [(f.file.type, f.acceptance) for f in facts.of_kind("bundled") if f.acceptance]
    known += [(f"sidecar {f.file.type}", f.acceptance) for f in facts.of_kind(*HEADS) if f.acceptance]
    source = next((f.acceptance_of_source for f in facts.published if f.acceptance_of_source), [])
    if not known:
        return None

    def draw(axes: Any) -> None:
        for k, (name, shares) in enumerate(known):
            colour, mark = _COLOURS[k % len(_COLOURS)], _MARKS[k % len(_MARKS)]
            places = range(1, len(shares) + 1)
            axes.plot(
                places, [100 * s for s in shares], f"{mark}-", color=colour, label=name, linewidth=1, markersize=5
            )
        if source:
            shares = [100 * s for s in source]
            axes.plot(range(1, len(source) + 1), shares, "--", color=INK, label="source", linewidth=1)
        most = max(len(shares) for _, shares in known)
        axes.set(xlabel="draft", ylabel="accepted, %", ylim=(0, 100), xticks=range(1, most + 1))
        axes.legend(frameon=False, fontsize=8, loc="upper left", bbox_to_anchor=(1, 1))

    words = "; ".join(f"{name} {', '.join(f'{s:.0%}' for s in shares)}" for name, shares in known)
    return Plot("acceptance", "Drafts accepted, by position", f"Drafts accepted by position: {words}.", draw)


def _speed(facts: Facts) -> Plot | None:
    if facts.measured is None:
        return None
    names = {path: file.type for path, file in facts.measured.files.items()}
    results = facts.measured.report.results
    draw = best_speedups(results, LLAMA_CPP, names)
    if draw is None:
        return None
    best = {
        name: max((s.speedup.value for s in results.drafting if s.cell.load.file == path and s.speedup), default=0.0)
        for path, name in names.items()
    }
    words = ", ".join(f"{n} up to {v:.2f}x" for n, v in best.items())
    return Plot("speed", "Best speedup over plain decoding", f"Speedup over plain decoding: {words}.", draw, 6.4,
                1.1 + 0.6 * len(names))  # fmt: skip
