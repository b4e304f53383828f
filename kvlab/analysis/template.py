"""One look for all figures: colours that the colour-blind and a grey printer can tell apart, units on every axis."""

from __future__ import annotations

from collections.abc import Callable, Sequence
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
        "xaxis": _AXIS, "yaxis": _AXIS, "margin": {"l": 70, "r": 20, "t": 72, "b": 52},
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
    return go.Figure(layout={"template": TEMPLATE, "title": {"text": title}, "height": height})


def panels(title: str, num_rows: int, height: int, share_x: bool = True) -> go.Figure:
    """`num_rows` axes one below the other in the common look, with one x axis (the lowest shows it) unless told otherwise."""
    fig = make_subplots(rows=num_rows, cols=1, shared_xaxes=share_x, vertical_spacing=min(0.08, 0.3 / num_rows))
    return fig.update_layout(template=TEMPLATE, title_text=title, height=height)


def need(frame: pd.DataFrame, columns: Sequence[str], what: str) -> None:
    """Raise a UserError that names the missing columns when a frame is not what a plot needs."""
    if not hasattr(frame, "columns"):
        hint = ": a run's are run.steps() and run.requests(), a sweep's is runs.frame" if hasattr(frame, "steps") else ""
        raise UserError(f"This plot needs {what}, and was given {type(frame).__name__}, which is no frame{hint}.")
    missing = [c for c in columns if c not in frame.columns]
    if missing:
        raise UserError(f"This plot needs {what}; the frame given has no column {', '.join(missing)}.")


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
