"""The life of each request as a bar: queue, prefill, decode, preempted, swapped."""

from __future__ import annotations

import re

import numpy as np
import pandas as pd
import plotly.graph_objects as go

from kvlab.analysis.plots.steps import OF_REQUESTS, TIME
from kvlab.analysis.template import BLUE, LIGHT, ORANGE, PURPLE, VERMILLION, figure, need, nothing, plot

STATES = {"queue": LIGHT, "prefill": ORANGE, "decode": BLUE, "preempted": VERMILLION, "swapped": PURPLE}
HATCHES = {
    state: {"shape": shape, "fillmode": "overlay", "fgcolor": "white", "fgopacity": 0.7, "size": 6, "solidity": 0.25}
    for state, shape in (("preempted", "/"), ("swapped", "x"))
}
ENDS = {"refused": "refused", "abort": "aborted", "kv_capacity": "out of KV space"}


@plot
def timeline(requests: pd.DataFrame, title: str = "Requests") -> go.Figure:
    """A bar a request, first arrival on top: waiting, prefill, decode, and what preemption cost it. Marks show ends other than a finish."""
    columns = ["request_id", "arrival_s", "finish_s", "finish_reason", "span_states", "span_starts_s", "span_ends_s"]
    need(requests, columns, OF_REQUESTS)
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
        for state, start, end in zip(states, starts, ends, strict=False)  # a run of another version may lack one of the three
    ]
    return pd.DataFrame(rows, columns=["row", "request_id", "state", "start_s", "end_s"])
