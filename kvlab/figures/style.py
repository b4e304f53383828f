"""One look for papers' figures: a column of 8.5 cm or a page of 17.5 cm, 8 pt, colours that survive grey printing, bytes that repeat.

The same results, matplotlib and fonts give the same PDF and SVG, byte for byte: no dates, fixed ids, no compression that depends on
the system's zlib; fonts are embedded as TrueType (type 42), glyphs of an SVG are outlines.
"""

from __future__ import annotations

import io
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.container import Container
from matplotlib.figure import Figure

from kvlab.analysis.template import BLACK, BLUE, GREEN, INK, LIGHT, ORANGE, PURPLE, SKY, VERMILLION, YELLOW

__all__ = [
    "BLACK", "BLUE", "COLUMN_CM", "GREEN", "INK", "LIGHT", "LINES", "ORANGE", "PAGE_CM", "PURPLE", "SKY", "VERMILLION", "YELLOW", "axes",
    "legend_above", "line", "render", "style",
]  # fmt: skip

COLUMN_CM, PAGE_CM = 8.5, 17.5
CM = 1 / 2.54
LINES: tuple[dict[str, Any], ...] = (
    {"color": BLUE, "marker": "o", "linestyle": "-"},
    {"color": ORANGE, "marker": "s", "linestyle": "--"},
    {"color": GREEN, "marker": "^", "linestyle": "-."},
    {"color": VERMILLION, "marker": "D", "linestyle": ":"},
    {"color": PURPLE, "marker": "v", "linestyle": "-"},
    {"color": SKY, "marker": "P", "linestyle": "--"},
    {"color": BLACK, "marker": "x", "linestyle": "-."},
    {"color": "#8C6D1F", "marker": "<", "linestyle": ":"},
    {"color": "#666666", "marker": ">", "linestyle": "-"},
    {"color": "#A04000", "marker": "*", "linestyle": "--"},
    {"color": "#004D40", "marker": "h", "linestyle": "-."},
)
"""Lines that differ in colour, marker and dash: neighbours can be told apart without colour."""

RC: Any = {
    "font.family": "DejaVu Sans", "font.size": 8, "axes.titlesize": 8, "axes.labelsize": 8, "xtick.labelsize": 7, "ytick.labelsize": 7,
    "legend.fontsize": 7, "legend.frameon": False, "legend.handlelength": 2.4, "legend.columnspacing": 1.0, "legend.handletextpad": 0.5,
    "axes.spines.top": False, "axes.spines.right": False, "axes.edgecolor": INK, "axes.linewidth": 0.6, "axes.grid": True,
    "axes.axisbelow": True, "grid.color": LIGHT, "grid.linewidth": 0.4, "xtick.color": INK, "ytick.color": INK, "text.color": INK,
    "axes.labelcolor": INK, "xtick.major.width": 0.6, "ytick.major.width": 0.6, "xtick.minor.width": 0.4, "ytick.minor.width": 0.4,
    "lines.linewidth": 1.1, "lines.markersize": 3.6, "errorbar.capsize": 1.5, "hatch.linewidth": 0.5, "axes.titlelocation": "left",
    "pdf.fonttype": 42, "ps.fonttype": 42, "pdf.compression": 0, "svg.fonttype": "path", "svg.hashsalt": "kvlab", "text.usetex": False,
    "axes.formatter.use_mathtext": False, "savefig.dpi": 200, "figure.dpi": 100, "path.simplify": True, "axes.unicode_minus": True,
}  # fmt: skip


@contextmanager
def style() -> Iterator[None]:
    """Matplotlib's defaults with `RC` on top, whatever the user's own settings are; both are put back."""
    with matplotlib.rc_context():
        matplotlib.rcdefaults()
        matplotlib.rcParams.update(RC)
        yield


def axes(width_cm: float, height_cm: float, rows: int = 1, columns: int = 1, **more: Any) -> tuple[Figure, list[Axes]]:
    """A figure (cm) with its panels, row by row. `more`: as for `Figure.subplots` (sharex, width_ratios ...)."""
    fig = Figure(figsize=(width_cm * CM, height_cm * CM), layout="constrained")
    panels = fig.subplots(rows, columns, squeeze=False, **more)
    return fig, [panel for row in np.asarray(panels) for panel in row]


def line(number: int, **more: Any) -> dict[str, Any]:
    """The look of the `number`-th line, for `Axes.plot` and `Axes.errorbar`."""
    return {**LINES[number % len(LINES)], **more}


def legend_above(target: Axes | Figure, columns: int, handles: Sequence[Any] | None = None, **more: Any) -> None:
    """A legend over a panel, or over the whole figure; bars and lines with error bars first, whatever the order of drawing."""
    given: dict[str, Any] = {} if handles is None else {"handles": sorted(handles, key=lambda h: not isinstance(h, Container))}
    if isinstance(target, Figure):
        target.legend(loc="outside upper center", ncols=columns, **given, **more)
    else:
        target.legend(loc="lower left", bbox_to_anchor=(0.0, 1.0), borderaxespad=0.2, ncols=columns, **given, **more)


def render(figure: Figure, png: bool = False) -> dict[str, bytes]:
    """figure.pdf and figure.svg (and figure.png at 200 dpi) as bytes; must be called inside `style()`."""
    out: dict[str, bytes] = {}
    kinds: list[tuple[str, dict[str, Any]]] = [("pdf", {"CreationDate": None}), ("svg", {"Date": None})]
    for kind, metadata in [*kinds, *([("png", {})] if png else [])]:
        buffer = io.BytesIO()
        figure.savefig(buffer, format=kind, metadata=metadata)
        out[f"figure.{kind}"] = buffer.getvalue()
    return out
