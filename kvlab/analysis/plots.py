"""Frames of a run to figures: memory over time, throughput over time, the life of each request, and runs side by side."""

from __future__ import annotations

import re

import numpy as np
import pandas as pd
import plotly.graph_objects as go
from plotly.subplots import make_subplots

from kvlab.analysis.template import (
    BLUE,
    COLORWAY,
    LIGHT,
    ORANGE,
    PURPLE,
    SKY,
    TEMPLATE,
    VERMILLION,
    figure,
    need,
    nothing,
)
from kvlab.trace.summary import FIGURES

MAX_POINTS = 4000
"""More steps than this are thinned: no screen shows more, and a notebook stays small."""

TIME = "time (s, engine's clock)"

BANDS = (("kv_blocks_used", "used", BLUE), ("kv_blocks_evictable", "cached (evictable)", SKY), ("kv_blocks_free", "free", LIGHT))

STATES = {"queue": LIGHT, "prefill": ORANGE, "decode": BLUE, "preempted": VERMILLION, "swapped": PURPLE}
HATCHES = {
    state: {"shape": shape, "fillmode": "overlay", "fgcolor": "white", "fgopacity": 0.7, "size": 6, "solidity": 0.25}
    for state, shape in (("preempted", "/"), ("swapped", "x"))
}
ENDS = {"refused": "refused", "abort": "aborted", "kv_capacity": "out of KV space"}


def memory_bands(steps: pd.DataFrame, title: str = "KV cache") -> go.Figure:
    """The pool's blocks over time in three bands that add up to it: held by requests, cached but evictable, free.

    The state after a step's commit is drawn over the whole step. The dashed line is the watermark: admission leaves the blocks above
    it to running requests. Above 4,000 steps the fullest step of each stretch is drawn, so that peaks stay.
    """
    need(steps, ["end_s", "step_ms", "watermark_blocks", "kv_blocks_total", *(c for c, _, _ in BANDS)], "a frame of steps (run.steps())")
    fig = figure(title, 380)
    if steps.empty:
        return nothing(fig, "no step was recorded")
    shown = _thinned(steps, "kv_blocks_used")
    time = np.stack([shown["end_s"] - shown["step_ms"] / 1e3, shown["end_s"]], axis=1).ravel()
    shown = shown.loc[shown.index.repeat(2)]  # start and end of each step; between steps the state stays
    for column, name, color in BANDS:
        fig.add_scatter(
            x=time, y=shown[column], name=name, stackgroup="blocks", mode="lines", fillcolor=color,
            line={"width": 0.5, "color": color, "shape": "hv"}, hovertemplate="%{y:,} blocks",
        )  # fmt: skip
    if (shown["watermark_blocks"] > 0).any():
        fig.add_scatter(
            x=time, y=shown["kv_blocks_total"] - shown["watermark_blocks"], name="watermark", mode="lines",
            line={"width": 2, "color": VERMILLION, "dash": "dash", "shape": "hv"}, hovertemplate="%{y:,} blocks",
        )  # fmt: skip
    fig.update_xaxes(title_text=TIME)
    return fig.update_yaxes(title_text="KV blocks", rangemode="tozero")


def _thinned(steps: pd.DataFrame, peak: str) -> pd.DataFrame:
    """At most MAX_POINTS rows: of each stretch of steps the one with the largest `peak`."""
    if len(steps) <= MAX_POINTS:
        return steps
    stretch = np.arange(len(steps)) * MAX_POINTS // len(steps)
    return steps.loc[steps.groupby(stretch)[peak].idxmax()]


def throughput(steps: pd.DataFrame, num_bins: int | None = None, title: str = "Throughput") -> go.Figure:
    """Output tokens and prompt tokens a second over time, averaged over `num_bins` equal stretches (default: half the steps, at most 80).

    A step's tokens are spread evenly over the step, so that the area under the line is the number of tokens.
    """
    need(steps, ["end_s", "step_ms", "num_output_tokens", "num_prompt_tokens_computed"], "a frame of steps (run.steps())")
    panels = (("num_output_tokens", "output", BLUE), ("num_prompt_tokens_computed", "prompt", ORANGE))
    fig = make_subplots(rows=2, cols=1, shared_xaxes=True, vertical_spacing=0.08)
    fig.update_layout(template=TEMPLATE, title_text=title, height=440, showlegend=False, margin_t=48)
    if steps.empty or not steps["step_ms"].sum() > 0:
        return nothing(fig, "no step that took time was recorded")
    end = steps["end_s"].to_numpy()
    start = end - steps["step_ms"].to_numpy() / 1e3
    edges = np.linspace(start[0], end[-1], (num_bins or int(np.clip(len(steps) // 2, 1, 80))) + 1)
    for row, (column, name, color) in enumerate(panels, start=1):
        rate = _rate(start, end, steps[column].to_numpy(), edges)
        fig.add_scatter(
            x=edges, y=np.append(rate, rate[-1]), name=name, mode="lines", row=row, col=1, fill="tozeroy",
            line={"width": 1.5, "color": color, "shape": "hv"}, hovertemplate=f"%{{y:,.1f}} {name} tokens/s<extra></extra>",
        )  # fmt: skip
        fig.update_yaxes(title_text=f"{name} tokens/s", rangemode="tozero", row=row, col=1)
    return fig.update_xaxes(title_text=TIME, row=2, col=1)


def _rate(start: np.ndarray, end: np.ndarray, tokens: np.ndarray, edges: np.ndarray) -> np.ndarray:
    """Tokens a second between successive edges; step i makes its tokens evenly between start[i] and end[i]."""
    done = np.cumsum(tokens, dtype=np.float64)
    knots = np.stack([start, end], axis=1).ravel()
    made = np.stack([done - tokens, done], axis=1).ravel()
    return np.diff(np.interp(edges, knots, made)) / np.diff(edges)


def timeline(requests: pd.DataFrame, title: str = "Requests") -> go.Figure:
    """A bar a request, first arrival on top: waiting, prefill, decode, and what preemption cost it. Marks show ends other than a finish."""
    columns = ["request_id", "arrival_s", "finish_s", "finish_reason", "span_states", "span_starts_s", "span_ends_s"]
    need(requests, columns, "a frame of requests (run.requests())")
    by_id = requests.iloc[sorted(range(len(requests)), key=[_natural(i) for i in requests["request_id"]].__getitem__)]
    ordered = by_id.sort_values("arrival_s", kind="stable", ignore_index=True)
    num = len(ordered)
    fig = figure(title, int(np.clip(150 + 22 * num, 300, 900)))
    if not num:
        return nothing(fig, "no request was recorded")
    spans = _spans(ordered)
    for state, color in STATES.items():
        of_state = spans[spans["state"] == state]
        if of_state.empty:
            continue
        fig.add_bar(
            orientation="h", y=of_state["row"], base=of_state["start_s"], x=of_state["end_s"] - of_state["start_s"], name=state,
            width=0.8 if num <= 60 else 1.0, customdata=of_state[["request_id", "start_s", "end_s"]].to_numpy(),
            marker={"color": color, "line": {"width": 0}, "pattern": HATCHES.get(state)},
            hovertemplate="%{customdata[0]}: " + state + " %{x:.3f} s (%{customdata[1]:.3f} to %{customdata[2]:.3f} s)<extra></extra>",
        )  # fmt: skip
    for reason, name in ENDS.items():
        ended = ordered[ordered["finish_reason"] == reason]
        if len(ended):
            fig.add_scatter(
                x=ended["finish_s"], y=ended.index, name=name, mode="markers", customdata=ended["request_id"],
                marker={"symbol": {"refused": "x", "abort": "cross"}.get(reason, "square"), "size": 8, "color": "black"},
                hovertemplate="%{customdata}: " + name + " at %{x:.3f} s<extra></extra>",
            )  # fmt: skip
    fig.update_layout(barmode="overlay", hovermode="closest", bargap=0)
    fig.update_xaxes(title_text=TIME)
    rows = np.arange(num) if num <= 40 else np.unique(np.linspace(0, num - 1, 9).astype(int))
    label = "request" if num <= 40 else f"{num} requests in order of arrival"
    ids = [str(i) if len(str(i)) <= 16 else str(i)[:15] + "…" for i in ordered["request_id"].iloc[rows]]
    return fig.update_yaxes(title_text=label, range=[num - 0.4, -0.6], tickvals=rows, ticktext=ids, showgrid=False)


def _natural(request_id: str) -> list[tuple[int, int, str]]:
    """Sort key under which "prompt-10" comes after "prompt-9"."""
    return [(0, int(part), "") if part.isdecimal() else (1, 0, part) for part in re.split(r"(\d+)", str(request_id))]


def _spans(requests: pd.DataFrame) -> pd.DataFrame:
    """One row a span: row (position of its request), request_id, state, start_s, end_s."""
    columns = [requests[c].tolist() for c in ("request_id", "span_states", "span_starts_s", "span_ends_s")]
    rows = [
        (row, request_id, state, start, end)
        for row, (request_id, states, starts, ends) in enumerate(zip(*columns, strict=True))
        for state, start, end in zip(states, starts, ends, strict=True)
    ]
    return pd.DataFrame(rows, columns=["row", "request_id", "state", "start_s", "end_s"])


def compare(frame: pd.DataFrame, x: str, y: str, by: str | None = None, title: str | None = None) -> go.Figure:
    """A figure of many runs (`runs.frame`): column `y` over the values of `x`, a line for each value of `by`.

    Runs that agree in `x` and `by` give their mean, with a bar from the smallest to the largest.
    """
    need(frame, [x, y, *([by] if by else [])], "a frame with one row a run (runs.frame)")
    known = {f.key: f"{f.title} ({f.unit})" if f.unit else f.title for f in FIGURES}
    fig = figure(title or f"{known.get(y, y)} over {x}", 380)
    runs = frame.dropna(subset=[x, y])
    if runs.empty:
        return nothing(fig, f"no run has both {x} and {y}")
    groups = [(None, runs)] if by is None else list(runs.groupby(by, sort=True))
    for (value, group), color in zip(groups, COLORWAY * (len(groups) // len(COLORWAY) + 1), strict=False):
        stats = group.groupby(x, sort=True)[y].agg(["mean", "min", "max", "size"])
        spread = {"type": "data", "array": stats["max"] - stats["mean"], "arrayminus": stats["mean"] - stats["min"]}
        fig.add_scatter(
            x=[str(v) for v in stats.index], y=stats["mean"], name=f"{by} = {value!s}", mode="lines+markers",
            line={"color": color, "width": 2}, marker={"size": 9, "symbol": len(fig.data)}, showlegend=by is not None,
            error_y=spread if (stats["size"] > 1).any() else None,
        )  # fmt: skip
    order = [str(v) for v in sorted(runs[x].unique())]
    fig.update_xaxes(title_text=x, type="category", categoryorder="array", categoryarray=order)
    return fig.update_yaxes(title_text=known.get(y, y), rangemode="tozero")
