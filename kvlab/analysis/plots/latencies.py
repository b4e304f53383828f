"""Latencies of finished requests: their distributions, and their percentiles side by side."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import pandas as pd
import plotly.graph_objects as go

from kvlab.analysis.plots.steps import OF_REQUESTS
from kvlab.analysis.template import VERMILLION, grid, line_style, need, nothing, plot
from kvlab.trace.summary import FINISHED, Goals
from kvlab.types import UserError, unknown_name

KINDS = {"ttft": "TTFT", "tpot": "TPOT", "itl": "ITL", "e2el": "E2EL", "queue_time": "queue time"}
"""Latencies by key. ITL: every gap between successive tokens of a request's first sequence, pooled over requests."""

SHOWN = ("ttft", "tpot", "itl", "e2el")
PERCENTILES = (50, 90, 95, 99)
MAX_POINTS = 1000


@plot
def latency(
    requests: pd.DataFrame, kinds: Sequence[str] = SHOWN, by: str | None = None, goals: Goals | None = None, title: str = "Latency"
) -> go.Figure:
    """Empirical distributions: the share of requests (ITL: of gaps) that took at most so long; marks at the 50th, 90th and 99th percentile.

    Args:
        requests: `run.requests()`, or `runs.requests("eviction")` of several runs with `by="eviction"`, a line each. Only requests
            that finished (stop, length) count, as in the summary.
        kinds: of `KINDS`. goals: drawn as dashed lines.

    Raises:
        UserError: an unknown kind, a missing column.
    """
    panels = _panels(requests, kinds, by)
    fig = _grid(kinds, title)
    if not panels:
        return nothing(fig, "no request finished with a latency to show")
    for kind, row, col, unit, factor, lines in panels:
        shows_names = by is not None and (row, col) == (1, 1)
        for number, (name, seconds) in enumerate(lines):
            values = np.sort(seconds) * factor
            if not len(values):
                continue
            style = line_style(number)
            share = np.arange(1, len(values) + 1) / len(values) * 100
            kept = np.unique(np.linspace(0, len(values) - 1, min(MAX_POINTS, len(values))).astype(int))
            fig.add_scatter(
                x=[values[0], *values[kept]], y=[0, *share[kept]], mode="lines", name=name, legendgroup=name, row=row, col=col,
                line={**style["line"], "shape": "hv"}, showlegend=shows_names,  # type: ignore[dict-item]
                hovertemplate=f"%{{y:.1f}} % within %{{x:.4~g}} {unit}<extra>{name}</extra>",
            )  # fmt: skip
            marks = np.percentile(values, (50, 90, 99))
            fig.add_scatter(
                x=marks, y=[50, 90, 99], mode="markers", marker=style["marker"], showlegend=False, row=row, col=col, legendgroup=name,
                name=name, hovertemplate=f"P%{{y}}: %{{x:.4~g}} {unit}<extra>{name}</extra>",
            )  # fmt: skip
        goal = getattr(goals, f"{kind}_ms", None)
        if goal is not None:
            fig.add_vline(x=goal * factor / 1e3, line={"color": VERMILLION, "dash": "dash", "width": 1.5}, row=row, col=col)
        fig.update_xaxes(title_text=f"{KINDS[kind]} ({unit})", rangemode="tozero", nticks=4, row=row, col=col)
        fig.update_yaxes(title_text="gaps (%)" if kind == "itl" else "requests (%)", range=[0, 102], row=row, col=col)
    return fig.update_layout(hovermode="closest")


@plot
def latency_percentiles(requests: pd.DataFrame, kinds: Sequence[str] = SHOWN, by: str | None = None,
                        title: str = "Latency percentiles") -> go.Figure:  # fmt: skip
    """The 50th, 90th, 95th and 99th percentile of each latency, a line for each value of `by`. Arguments and errors: see `latency`."""
    panels = _panels(requests, kinds, by)
    fig = _grid(kinds, title)
    if not panels:
        return nothing(fig, "no request finished with a latency to show")
    for kind, row, col, unit, factor, lines in panels:
        shows_names = by is not None and (row, col) == (1, 1)
        for number, (name, seconds) in enumerate(lines):
            if not len(seconds):
                continue
            fig.add_scatter(
                x=[f"P{p}" for p in PERCENTILES], y=np.percentile(seconds, PERCENTILES) * factor, name=name, legendgroup=name,
                mode="lines+markers", row=row, col=col, showlegend=shows_names, **line_style(number),
                hovertemplate=f"%{{x}}: %{{y:.4~g}} {unit}<extra>{name}</extra>",
            )  # fmt: skip
        fig.update_xaxes(type="category", row=row, col=col)
        fig.update_yaxes(title_text=f"{KINDS[kind]} ({unit})", rangemode="tozero", row=row, col=col)
    return fig.update_layout(hovermode="closest")


def _grid(kinds: Sequence[str], title: str) -> go.Figure:
    num_rows = -(-len(kinds) // 2)
    return grid(title, num_rows, min(2, len(kinds)), 130 + 220 * num_rows)


class _Panel(NamedTuple):
    """A latency's place in the grid, its unit, and what a line shows: (name, seconds, NaN left out) for each value of `by`."""

    kind: str
    row: int
    col: int
    unit: str
    factor: float
    lines: list[tuple[str, np.ndarray]]


def _panels(requests: pd.DataFrame, kinds: Sequence[str], by: str | None) -> list[_Panel]:
    """One a kind; none where there is nothing to show in any."""
    if not kinds:
        raise UserError(f"kinds is empty; give some of {', '.join(KINDS)}.")
    for kind in kinds:
        if kind not in KINDS:
            raise unknown_name("latency", kind, KINDS)
    columns = ["token_times_s" if kind == "itl" else f"{kind}_s" for kind in kinds]
    need(requests, ["finish_reason", *columns, *([by] if by else [])], OF_REQUESTS)
    done = requests[requests["finish_reason"].isin(FINISHED)]
    parts = [("", done)] if by is None else [(f"{by} = {value!s}", part) for value, part in done.groupby(by, sort=True)]
    panels = []
    for place, kind in enumerate(kinds):
        lines = [(name, _seconds(part, kind)) for name, part in parts]
        panels.append(_Panel(kind, place // 2 + 1, place % 2 + 1, *_unit([seconds for _, seconds in lines]), lines))
    return panels if any(len(seconds) for panel in panels for _, seconds in panel.lines) else []


def _seconds(requests: pd.DataFrame, kind: str) -> np.ndarray:
    if kind == "itl":
        gaps = [np.diff(np.asarray(times, dtype=np.float64)) for times in requests["token_times_s"]]
        return np.concatenate(gaps) if gaps else np.empty(0)
    values = requests[f"{kind}_s"].to_numpy(dtype=np.float64)
    return values[~np.isnan(values)]


def _unit(seconds: Sequence[np.ndarray]) -> tuple[str, float]:
    """Milliseconds, or seconds where the longest is above ten of them; one unit for all lines of a panel."""
    longest = max((float(values.max()) for values in seconds if len(values)), default=0.0)
    return ("s", 1.0) if longest > 10 else ("ms", 1e3)
