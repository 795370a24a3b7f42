"""Pages and plots that need nothing else: one HTML file, styles and SVG inside."""

from __future__ import annotations

import html
import io
import platform
from collections.abc import Callable, Sequence
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from converter.errors import EnvironmentFailure

INK, BLUE, ORANGE, GRID = "#1d2733", "#2563a8", "#c2762b", "#d9dee5"
_STYLE = """
:root { color-scheme: light; }
body { font: 15px/1.5 system-ui, sans-serif; color: #1d2733; background: #fff; margin: 0 auto; max-width: 62rem;
       padding: 2rem 1.5rem 4rem; }
h1 { font-size: 1.5rem; margin: 0 0 .2rem; overflow-wrap: anywhere; }
h2 { font-size: 1.15rem; margin: 2.2rem 0 .3rem; padding-top: 1rem; border-top: 1px solid #d9dee5; }
h3 { font-size: 1rem; margin: 1.6rem 0 .2rem; overflow-wrap: anywhere; }
p { margin: .3rem 0; } .quiet { color: #5b6878; }
.verdict { font-weight: 600; padding: .1rem .55rem; border-radius: .3rem; white-space: nowrap; }
.passed { background: #dff1e3; color: #17602c; } .failed { background: #fbdedb; color: #99201a; }
.inconclusive { background: #fdeecb; color: #7a5200; } .skipped { background: #e8ebef; color: #4c5868; }
table { border-collapse: collapse; margin: .8rem 0; font-size: .92rem; }
th, td { text-align: left; padding: .25rem .9rem .25rem 0; border-bottom: 1px solid #e8ebef; vertical-align: top; }
th { font-weight: 600; } td.n, th.n { text-align: right; font-variant-numeric: tabular-nums; }
.wide { overflow-x: auto; } code { font-size: .92em; overflow-wrap: anywhere; }
.plots { display: flex; flex-wrap: wrap; gap: 1rem; margin: .8rem 0; } .plots svg { max-width: 100%; height: auto; }
li { margin: .2rem 0; }
"""


def document(title: str, body: str) -> str:
    """A whole page around a body."""
    return (
        "<!doctype html><html lang=en><head><meta charset=utf-8>"
        "<meta name=viewport content='width=device-width, initial-scale=1'>"
        f"<title>{text(title)}</title><style>{_STYLE}</style></head><body>"
        f"{body}<h2>Made with</h2><p class=quiet>{text(environment())}</p></body></html>\n"
    )


def text(value: object) -> str:
    """Escaped."""
    return html.escape(str(value))


def badge(verdict: str) -> str:
    """passed, failed, inconclusive or skipped, in its colour."""
    return f"<span class='verdict {verdict}'>{verdict}</span>"


def table(header: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """Numbers stand to the right."""

    def cell(value: object, tag: str) -> str:
        number = isinstance(value, int | float) and not isinstance(value, bool)
        shown = f"{value:,.4g}" if isinstance(value, float) else f"{value:,}" if number else text(value)
        return f"<{tag}{' class=n' if number else ''}>{shown}"

    first = rows[0] if rows else header
    heads = "".join(
        f"<th{' class=n' if isinstance(v, int | float) else ''}>{text(h)}" for h, v in zip(header, first, strict=True)
    )
    body = "".join("<tr>" + "".join(cell(v, "td") for v in row) + "</tr>" for row in rows)
    return f"<div class=wide><table><tr>{heads}</tr>{body}</table></div>"


def plots(*figures: str) -> str:
    return f"<div class=plots>{''.join(figures)}</div>"


def figure(draw: Callable[[Any], None], title: str, width: float = 5.4, height: float = 3.1) -> str:
    """An SVG element with text as text."""
    svg = picture(draw, title, width, height).decode()
    return svg[svg.index("<svg") :]


def picture(
    draw: Callable[[Any], None], title: str, width: float = 5.4, height: float = 3.1, kind: str = "svg"
) -> bytes:
    """A plot as a file, "svg" or "png"; the same plot has the same bytes. width, height: inches."""
    try:
        import matplotlib as mpl
    except ImportError as error:
        raise EnvironmentFailure(
            "plots need matplotlib", hint="pip install 'convert-mtp[llamacpp]' or 'convert-mtp[verify]'"
        ) from error
    from matplotlib.figure import Figure

    look: dict[Any, Any] = {
        "svg.fonttype": "none", "svg.hashsalt": "convert-mtp", "font.family": "sans-serif", "font.size": 10,
        "text.color": INK, "axes.labelcolor": INK, "xtick.color": INK, "ytick.color": INK, "axes.edgecolor": INK,
    }  # fmt: skip
    with mpl.rc_context(look):
        canvas = Figure(figsize=(width, height), layout="constrained")
        axes = canvas.subplots()
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(axis="y", color=GRID, linewidth=0.8)
        axes.set_axisbelow(True)
        axes.set_title(title, loc="left", fontsize=11)
        draw(axes)
        out = io.BytesIO()
        canvas.savefig(out, format=kind, dpi=150, metadata={"Date": None} if kind == "svg" else {"Software": None})
    return out.getvalue()


def environment() -> str:
    found = []
    for package in ("convert-mtp", "torch", "transformers", "xllamacpp"):
        try:
            found.append(f"{package} {version(package)}")
        except PackageNotFoundError:
            continue
    return f"{', '.join(found)}; Python {platform.python_version()}, {platform.system()} {platform.machine()}"
