"""Two runs, before and after: summary figures with their relative change, and a column step by step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd
import plotly.graph_objects as go

from kvlab.analysis.plots.steps import MAX_POINTS, OF_STEPS
from kvlab.analysis.plots.sweeps import KNOWN
from kvlab.analysis.template import BLUE, INK, ORANGE, VERMILLION, figure, need, nothing, panels, plot
from kvlab.trace.schema import STEPS
from kvlab.types import UserError, unknown_name

BETTER = {
    "request_throughput_per_s": 1, "request_goodput_per_s": 1, "output_token_throughput_per_s": 1, "total_token_throughput_per_s": 1,
    "duration_s": -1, "mean_ttft_ms": -1, "p99_ttft_ms": -1, "mean_tpot_ms": -1, "p99_tpot_ms": -1, "mean_itl_ms": -1, "p99_itl_ms": -1,
    "mean_e2el_ms": -1, "p99_e2el_ms": -1, "mean_queue_time_ms": -1, "prefix_cache_hit_rate_tokens": 1, "num_preemptions": -1,
    "recomputed_tokens": -1, "num_evicted_blocks": -1, "swapped_out_blocks": -1, "mean_kv_cache_usage": 0, "mean_running_reqs": 0,
    "mean_internal_fragmentation_tokens": -1, "mean_step_ms": 0,
}  # fmt: skip
"""Summary figures that `difference` shows, and which way is better (1 up, -1 down, 0 neither)."""

NEUTRAL = "#8C8C8C"


@plot
def difference(
    before: Mapping[str, Any], after: Mapping[str, Any], figures: Sequence[str] | None = None, title: str = "After against before"
) -> go.Figure:
    """Relative change of summary figures (%), a bar each with both values beside it.

    Blue is better, hatched vermilion is worse, grey is neither. A figure that was 0 has no relative change: both values stand there
    without a bar. Figures that one of the runs does not define are left out.

    Args:
        before, after: `run.summary` of two runs. figures: keys of summary figures, in the order to show; None: those of `BETTER`.

    Raises:
        UserError: an unknown figure.
    """
    for key in figures or ():
        if key not in KNOWN:
            raise unknown_name("summary figure", key, KNOWN)
    wanted = list(BETTER) if figures is None else list(figures)
    keys = [key for key in wanted if _is_number(before.get(key)) and _is_number(after.get(key))]
    if figures is None:
        keys = [key for key in keys if before[key] or after[key]]
    fig = figure(title, int(np.clip(120 + 28 * len(keys), 240, 900)))
    if not keys:
        return nothing(fig, "the two runs have no figure in common")
    for name, color, hatch, sign in (("better", BLUE, "", 1), ("worse", VERMILLION, "/", -1), ("neither", NEUTRAL, ".", 0)):
        rows = [key for key in keys if before[key] and np.sign((after[key] - before[key]) * BETTER.get(key, 0)) == sign]
        if rows:
            fig.add_bar(
                orientation="h", y=[KNOWN[key] for key in rows], x=[100 * (after[key] / before[key] - 1) for key in rows], name=name,
                marker={"color": color, "pattern": {"shape": hatch, "fgcolor": "white", "size": 6, "solidity": 0.3, "fillmode": "overlay"}},
                customdata=[[before[key], after[key]] for key in rows],
                hovertemplate="%{y}: %{customdata[0]:,.5~g} before, %{customdata[1]:,.5~g} after (%{x:+.1f} %)<extra></extra>",
            )  # fmt: skip
    for key in keys:
        fig.add_annotation(
            x=1.01, xref="paper", xanchor="left", y=KNOWN[key], yref="y", showarrow=False, font={"size": 11},
            text=f"{_short(before[key])} → {_short(after[key])}",
        )  # fmt: skip
    fig.update_layout(barmode="overlay", hovermode="closest", bargap=0.3, margin_r=120)
    fig.update_xaxes(title_text="change (%)", zeroline=True, zerolinecolor=INK, zerolinewidth=1)
    order = [KNOWN[key] for key in keys]
    return fig.update_yaxes(type="category", categoryorder="array", categoryarray=order, range=[len(order) - 0.5, -0.5], showgrid=False,
                            tickfont={"size": 11})  # fmt: skip


@plot
def step_difference(before: pd.DataFrame, after: pd.DataFrame, column: str = "kv_blocks_used", title: str | None = None) -> go.Figure:
    """A column of two runs step by step, and after minus before where both have the step.

    Steps are aligned by number, not by time: two runs of one workload part where a decision differs. Above 4,000 steps every so-many-th
    is drawn.

    Raises:
        UserError: a frame without `step` or the column, or a column that is no number.
    """
    need(before, ["step", column], OF_STEPS)
    need(after, ["step", column], OF_STEPS)
    unit = next((c.unit for c in STEPS if c.name == column), "-")
    for frame in (before, after):
        if not pd.api.types.is_numeric_dtype(frame[column]):
            raise UserError(f"{column} is no number and has no difference; take a numeric column of the steps, e.g. kv_blocks_used.")
    fig = panels(title or f"{column}, step by step", 2, 440)
    if before.empty or after.empty:
        return nothing(fig, "one of the two runs has no steps")
    sides = [frame[["step", column]] for frame in (before, after)]
    both = sides[0].merge(sides[1], on="step", how="outer", suffixes=("_before", "_after")).sort_values("step")
    both = both.iloc[:: -(-len(both) // MAX_POINTS)]
    for name, color, dash in (("before", ORANGE, "dash"), ("after", BLUE, "solid")):
        fig.add_scatter(x=both["step"], y=both[f"{column}_{name}"].astype(float), name=name, mode="lines", row=1, col=1,
                        line={"color": color, "width": 1.5, "dash": dash, "shape": "hv"}, hovertemplate="%{y:,.4~g}")  # fmt: skip
    change = (both[f"{column}_after"] - both[f"{column}_before"]).astype(float)
    fig.add_scatter(x=both["step"], y=change, name="after - before", mode="lines", fill="tozeroy", showlegend=False, row=2, col=1,
                    line={"color": INK, "width": 1, "shape": "hv"}, hovertemplate="%{y:+,.4~g}")  # fmt: skip
    label = unit if unit != "-" else column
    fig.update_yaxes(title_text=label, rangemode="tozero", row=1, col=1)
    fig.update_yaxes(title_text=f"after - before<br>({label})", zeroline=True, zerolinecolor=INK, row=2, col=1)
    return fig.update_xaxes(title_text="step", row=2, col=1)


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float, np.integer, np.floating)) and not isinstance(value, bool) and bool(np.isfinite(value))


def _short(value: float) -> str:
    return f"{value:,}" if isinstance(value, int) else f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"
