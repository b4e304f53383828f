"""One look for all figures: colours that the colour-blind and a grey printer can tell apart, units on every axis."""

from __future__ import annotations

import numbers
import textwrap
from collections.abc import Callable, Iterable, Sequence
from functools import wraps
from typing import ParamSpec

import pandas as pd
import plotly.graph_objects as go
from plotly.subplots import make_subplots

from kvlab.types import UserError

# Okabe and Ito's palette (https://jfly.uni-koeln.de/color/), ordered so that neighbours differ in lightness too.
BLUE, SKY, ORANGE, VERMILLION, GREEN, PURPLE, YELLOW, BLACK = (
    "#0072B2", "#56B4E9", "#E69F00", "#D55E00", "#009E73", "#CC79A7", "#F0E442", "#000000",
)  # fmt: skip
COLORWAY = (BLUE, ORANGE, GREEN, VERMILLION, PURPLE, SKY, BLACK)
DASHES = ("solid", "dash", "dot", "dashdot", "longdash", "longdashdot")
SYMBOLS = ("circle", "square", "diamond", "cross", "triangle-up", "x", "star")
TITLE_WIDTH = 54
"""Characters of a title that 480 pixels hold."""
_TOP, _TITLE_LINE = 72, 18

EVEN_DIGITS = (
    {"dtickrange": [0.99, 99_999], "value": ",.0f"},
    *({"dtickrange": [0.99 * 10.0**-n, 0.99 * 10.0 ** (1 - n)], "value": f",.{n}f"} for n in range(1, 7)),
)
"""Ticks of one axis with equally many decimals (0.50, 0.55, 0.60; 9,800, 10,000), by the distance between them: zooming in keeps them
right. Axes of many more keep k, M and B. Not for logarithmic axes."""

LIGHT, GRID, INK = "#E3E3E3", "#ECECEC", "#222222"

_AXIS = {
    "showline": True, "linecolor": INK, "linewidth": 1, "ticks": "outside", "tickcolor": INK, "ticklen": 4, "gridcolor": GRID,
    "zeroline": False, "title": {"standoff": 8, "font": {"size": 13}}, "automargin": True,
}  # fmt: skip

TEMPLATE = go.layout.Template(
    layout={
        "font": {"family": "DejaVu Sans, Verdana, Arial, sans-serif", "size": 13, "color": INK},
        "title": {"x": 0.01, "xanchor": "left", "y": 1, "yanchor": "top", "pad": {"t": 14}, "font": {"size": 15}},
        "paper_bgcolor": "white", "plot_bgcolor": "white", "colorway": COLORWAY, "hovermode": "x unified",
        "xaxis": _AXIS, "yaxis": _AXIS, "margin": {"l": 70, "r": 20, "t": _TOP, "b": 52},
        # The empty legend title keeps a line free for the figure's title where the legend takes several rows.
        "legend": {"orientation": "h", "x": 0, "xanchor": "left", "y": 1.02, "yanchor": "bottom", "traceorder": "normal",
                   "title": {"text": "&nbsp;", "side": "top", "font": {"size": 13}}},
    }
)  # fmt: skip


_P = ParamSpec("_P")


def plot(draw: Callable[_P, go.Figure]) -> Callable[_P, go.Figure]:
    """A plotting function whose figures are the same for the same frame: traces get fixed uids (plotly.js would draw random ones)."""

    @wraps(draw)
    def drawn(*args: _P.args, **kwargs: _P.kwargs) -> go.Figure:
        fig = draw(*args, **kwargs)
        for number, trace in enumerate(fig.data):
            trace.uid = f"{draw.__name__}-{number}"
        return fig

    return drawn


def figure(title: str, height: int) -> go.Figure:
    """An empty figure in the common look; as wide as the page."""
    return _titled(go.Figure(layout={"height": height, "xaxis": {}, "yaxis": {}}), title)


def panels(title: str, num_rows: int, height: int, share_x: bool = True) -> go.Figure:
    """`num_rows` axes one below the other in the common look, with one x axis (the lowest shows it) unless told otherwise."""
    fig = make_subplots(rows=num_rows, cols=1, shared_xaxes=share_x, vertical_spacing=min(0.08, 0.3 / num_rows))
    return _titled(fig.update_layout(height=height), title)


def grid(title: str, num_rows: int, num_columns: int, height: int) -> go.Figure:
    """Axes of their own in rows and columns, in the common look."""
    fig = make_subplots(rows=num_rows, cols=num_columns, vertical_spacing=0.3 / num_rows, horizontal_spacing=0.16)
    return _titled(fig.update_layout(height=height), title)


def without_legend(fig: go.Figure) -> go.Figure:
    """The room that the template keeps for a legend, given back."""
    return fig.update_layout(margin_t=_TOP - 24 + _more_lines(fig))


def legend_room(names: Sequence[str]) -> int:
    """Height (pixels) that a legend of these names takes beyond two rows on a page of 480 pixels, at most 800."""
    in_a_row = max(1, 370 // (50 + 8 * max(map(len, names), default=0)))
    return min(800, 19 * max(0, -(-len(names) // in_a_row) - 2))


def _titled(fig: go.Figure, title: str) -> go.Figure:
    """In the common look and under its title, wrapped where 480 pixels don't hold it, with digits of linear axes that line up."""
    lines = [title] if "<" in title else textwrap.wrap(title, TITLE_WIDTH) or [title]
    fig.update_layout(template=TEMPLATE, title_text="<br>".join(lines))
    if len(lines) > 1:
        fig.update_layout(margin_t=_TOP + _more_lines(fig), title_pad_t=14 + _more_lines(fig) // 2)
        fig.update_layout(legend_title_text="<br>".join(["&nbsp;"] * len(lines)))
    even = {"tickformatstops": EVEN_DIGITS, "hoverformat": ",.7~g"}
    return fig.update_xaxes(even).update_yaxes(even)


def _more_lines(fig: go.Figure) -> int:
    """Pixels that the lines of a title after its first one take."""
    return _TITLE_LINE * str(fig.layout.title.text).count("<br>")


def need(frame: pd.DataFrame, columns: Sequence[str], what: str) -> None:
    """Raise a UserError that names the missing columns when a frame is not what a plot needs."""
    if not hasattr(frame, "columns"):
        hint = ": a run's are run.steps() and run.requests(), a sweep's is runs.frame" if hasattr(frame, "steps") else ""
        raise UserError(f"This plot needs {what}, and was given {type(frame).__name__}, which is no frame{hint}.")
    missing = [c for c in columns if c not in frame.columns]
    if missing:
        raise UserError(f"This plot needs {what}; the frame given has no column {', '.join(missing)}.")


def need_numbers(frame: pd.DataFrame, columns: Sequence[str], figures: Iterable[str] = ()) -> None:
    """Raise a UserError that names columns of numbers (known `figures` first) when one that is to be drawn holds something else."""
    for column in columns:
        if not _holds_numbers(frame[column]):
            valid = [str(c) for c in frame.columns if _holds_numbers(frame[c]) and frame[c].notna().any()]
            valid = [*(c for c in figures if c in valid), *(c for c in valid if c not in set(figures))]
            more = f", ... ({len(valid) - 12} more)" if len(valid) > 12 else ""
            raise UserError(f"The column {column!r} holds no numbers. Columns of numbers: {', '.join(valid[:12]) or 'none'}{more}.")


def _holds_numbers(column: pd.Series) -> bool:
    """True of an empty one too: nothing in it is anything else."""
    values = column.dropna()
    return bool(pd.api.types.is_numeric_dtype(column) or values.map(lambda v: isinstance(v, numbers.Real)).all())


def line_style(number: int) -> dict[str, object]:
    """Colour, dash and marker of the `number`-th line of a figure: three ways to tell it from its neighbours, two of them in grey."""
    return {
        "line": {"color": COLORWAY[number % len(COLORWAY)], "width": 2, "dash": DASHES[number % len(DASHES)]},
        "marker": {"symbol": SYMBOLS[number % len(SYMBOLS)], "size": 7, "color": COLORWAY[number % len(COLORWAY)]},
    }


def nothing(fig: go.Figure, text: str) -> go.Figure:
    """The figure with a note in its middle instead of data."""
    fig.add_annotation(text=text, x=0.5, y=0.5, xref="paper", yref="paper", showarrow=False, font={"size": 14})
    return fig.update_xaxes(visible=False).update_yaxes(visible=False)
