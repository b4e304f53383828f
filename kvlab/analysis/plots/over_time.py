"""A run over time: tokens a second, queue lengths, and what the cache had to throw out or move."""

from __future__ import annotations

import numpy as np
import pandas as pd
import plotly.graph_objects as go

from kvlab.analysis.plots.steps import OF_STEPS, TIME, counts, held, rate, spans, stretches, thinned
from kvlab.analysis.template import BLUE, ORANGE, PURPLE, SKY, VERMILLION, figure, need, nothing, panels, plot, without_legend

QUEUES = (("num_running_reqs", "running", BLUE, "solid"), ("num_waiting_reqs", "waiting", ORANGE, "dash"),
          ("num_swapped_reqs", "swapped out", PURPLE, "dot"))  # fmt: skip

EVENTS = (
    (("num_preemptions", "preemptions", VERMILLION),),
    (("swapped_out_blocks", "blocks swapped out", PURPLE), ("swapped_in_blocks", "blocks swapped in", SKY)),
    (("num_evicted_blocks", "blocks evicted", BLUE),),
    (("recomputed_tokens", "tokens recomputed", ORANGE),),
)
"""A panel each."""
EVENT_AXES = ("preemptions", "blocks swapped", "blocks evicted", "tokens<br>recomputed")


@plot
def throughput(steps: pd.DataFrame, num_bins: int | None = None, title: str = "Throughput") -> go.Figure:
    """Output tokens and prompt tokens a second over time, averaged over `num_bins` equal stretches (default: half the steps, at most 80).

    A step's tokens are spread evenly over the step, so that the area under the line is the number of tokens.
    """
    need(steps, ["end_s", "step_ms", "num_output_tokens", "num_prompt_tokens_computed"], OF_STEPS)
    fig = without_legend(panels(title, 2, 440).update_layout(showlegend=False))
    if steps.empty or not steps["step_ms"].sum() > 0:
        return nothing(fig, "no step that took time was recorded")
    start, end = spans(steps)
    edges = stretches(start, end, num_bins)
    drawn = (("num_output_tokens", "output", BLUE), ("num_prompt_tokens_computed", "prompt", ORANGE))
    for row, (column, name, color) in enumerate(drawn, start=1):
        values = rate(start, end, steps[column].to_numpy(), edges)
        fig.add_scatter(
            x=edges, y=[*values, values[-1]], name=name, mode="lines", row=row, col=1, fill="tozeroy",
            line={"width": 1.5, "color": color, "shape": "hv"}, hovertemplate=f"%{{y:,.1f}} {name} tokens/s<extra></extra>",
        )  # fmt: skip
        fig.update_yaxes(title_text=f"{name} tokens/s", rangemode="tozero", row=row, col=1)
    return fig.update_xaxes(title_text=TIME, row=2, col=1)


@plot
def queues(steps: pd.DataFrame, title: str = "Queues") -> go.Figure:
    """Requests running, waiting and swapped out after each step. Above 4,000 steps the one with most requests of each stretch is drawn."""
    need(steps, ["end_s", "step_ms", *(column for column, _, _, _ in QUEUES)], OF_STEPS)
    fig = figure(title, 360)
    if steps.empty:
        return nothing(fig, "no step was recorded")
    total = steps.assign(_total=sum(steps[column] for column, _, _, _ in QUEUES))
    time, shown = held(thinned(total, "_total"))
    for column, name, color, dash in QUEUES:
        if column == "num_swapped_reqs" and not steps[column].any():
            continue
        fig.add_scatter(
            x=time, y=shown[column], name=name, mode="lines", line={"width": 2, "color": color, "dash": dash, "shape": "hv"},
            hovertemplate="%{y:,} requests",
        )  # fmt: skip
    fig.update_xaxes(title_text=TIME)
    return fig.update_yaxes(title_text="requests", rangemode="tozero")


@plot
def events(steps: pd.DataFrame, num_bins: int | None = None, title: str = "What the full pool costs") -> go.Figure:
    """Preemptions, swapped and evicted blocks and recomputed tokens over time: sums over equal stretches (see `throughput`).

    Kinds that never happened have no panel; a run without any says so.
    """
    need(steps, ["end_s", "step_ms", *(column for kind in EVENTS for column, _, _ in kind)], OF_STEPS)
    kinds = [(kind, axis) for kind, axis in zip(EVENTS, EVENT_AXES, strict=True) if any(steps[c].any() for c, _, _ in kind)]
    if not kinds:
        return nothing(figure(title, 240), "nobody was preempted, nothing was swapped or evicted" if len(steps) else "no step was recorded")
    fig = panels(title, len(kinds), 120 + 130 * len(kinds)).update_layout(barmode="stack", bargap=0.1)
    start, end = spans(steps)
    edges = stretches(start, end, num_bins)
    for row, (kind, axis) in enumerate(kinds, start=1):
        for column, name, color in kind:
            fig.add_bar(
                x=(edges[:-1] + edges[1:]) / 2, y=counts(end, steps[column].to_numpy(), edges), name=name, row=row, col=1,
                width=0.9 * (edges[1] - edges[0]) if edges[1] > edges[0] else None,
                marker={"color": color, "line": {"width": 0}, "pattern": {"shape": "/" if column == "swapped_in_blocks" else ""}},
                hovertemplate=f"%{{y:,}} {name}<extra></extra>", showlegend=len(kind) > 1,
            )  # fmt: skip
        most = np.sum([counts(end, steps[column].to_numpy(), edges) for column, _, _ in kind], axis=0).max()
        fig.update_yaxes(title_text=axis, rangemode="tozero", dtick=1 if most <= 5 else None, row=row, col=1)  # half of one is none
    if not any(len(kind) > 1 for kind, _ in kinds):
        without_legend(fig)
    return fig.update_xaxes(title_text=f"{TIME}, stretches of {edges[1] - edges[0]:.3g} s", row=len(kinds), col=1)
