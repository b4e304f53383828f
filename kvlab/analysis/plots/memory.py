"""Where the KV cache's memory goes: over time, and as shares of the pool."""

from __future__ import annotations

import pandas as pd
import plotly.graph_objects as go

from kvlab.analysis.plots.steps import OF_STEPS, TIME, held, thinned
from kvlab.analysis.template import BLUE, GREEN, LIGHT, ORANGE, PURPLE, SKY, VERMILLION, figure, need, nothing, plot
from kvlab.types import UserError

BANDS = (("kv_blocks_used", "used", BLUE), ("kv_blocks_evictable", "cached (evictable)", SKY), ("kv_blocks_free", "free", LIGHT))

SHARES = (
    ("tokens_percent", "token states", BLUE, ""),
    ("kept_percent", "cached (evictable)", SKY, "."),
    ("reserved_percent", "reserved, empty", ORANGE, "/"),
    ("partly_filled_percent", "in partly filled blocks", PURPLE, "x"),
    ("fragmented_percent", "external fragmentation", VERMILLION, "\\"),
    ("free_percent", "free", LIGHT, ""),
)
"""Column, name, colour and hatch of each part of a pool."""

_SHARE_COLUMNS = (
    "step_ms", "num_waiting_reqs", "kv_blocks_total", "kv_blocks_used", "kv_blocks_evictable", "kv_blocks_free", "kv_blocks_reserved",
    "internal_fragmentation_tokens", "external_fragmentation_blocks",
)  # fmt: skip


@plot
def memory_bands(steps: pd.DataFrame, title: str = "KV cache") -> go.Figure:
    """The pool's blocks over time in three bands that add up to it: held by requests, cached but evictable, free.

    The state after a step's commit is drawn over the whole step. The dashed line is the watermark: admission leaves the blocks above
    it to running requests. Above 4,000 steps the fullest step of each stretch is drawn, so that peaks stay.
    """
    need(steps, ["end_s", "step_ms", "watermark_blocks", "kv_blocks_total", *(c for c, _, _ in BANDS)], OF_STEPS)
    fig = figure(title, 380)
    if steps.empty:
        return nothing(fig, "no step was recorded")
    time, shown = held(thinned(steps, "kv_blocks_used"))
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


def pool_shares(steps: pd.DataFrame, block_size: int, while_waiting: bool = True) -> dict[str, float]:
    """Parts of the pool in percent, means over time: the columns that `fragmentation` draws. They add up to 100.

    Args:
        steps: of one run. block_size: tokens per block of that run.
        while_waiting: only over steps after which somebody waits (all steps, where nobody ever does): a pool that nobody wants more of
            is not wasted.

    Raises:
        UserError: no steps, steps without a pool, or a missing column.
    """
    need(steps, _SHARE_COLUMNS, OF_STEPS)
    busy = steps[steps["num_waiting_reqs"] > 0] if while_waiting else steps
    busy = busy if len(busy) else steps
    if not (busy["kv_blocks_total"] > 0).any():
        raise UserError("These steps have no pool to take shares of: none was recorded, or kv_blocks_total is 0 throughout.")
    weight = busy["step_ms"] / busy["step_ms"].sum() if busy["step_ms"].sum() > 0 else pd.Series(1 / len(busy), index=busy.index)
    reserved = block_size * busy["kv_blocks_reserved"]
    parts = {
        "tokens": block_size * busy["kv_blocks_used"] - busy["internal_fragmentation_tokens"],
        "reserved": reserved,
        "partly_filled": busy["internal_fragmentation_tokens"] - reserved,
        "kept": block_size * busy["kv_blocks_evictable"],
        "fragmented": block_size * busy["external_fragmentation_blocks"],
        "free": block_size * (busy["kv_blocks_free"] - busy["external_fragmentation_blocks"]),
    }
    total = block_size * busy["kv_blocks_total"]
    return {f"{name}_percent": float((100 * part / total * weight).sum()) for name, part in parts.items()}


@plot
def fragmentation(frame: pd.DataFrame, by: str = "layout", title: str = "Where the KV cache goes") -> go.Figure:
    """A stacked bar for each value of `by`: shares of the pool in percent, means over the rows that agree in it (seeds).

    After figure 2 of Kwon et al., "Efficient memory management for large language model serving with PagedAttention", SOSP 2023.
    Deviations: their "internal fragmentation" (never used until the request ends) and "reservation" (used later) are told apart by
    what the future brings; here a slot is "reserved" in a block that has no token yet, and "in partly filled blocks" beside tokens.
    Their "others" is shown as what it is: cached or free.
    """
    columns = [column for column, _, _, _ in SHARES]
    need(frame, [by, *columns], "a frame with a row a run and the pool's shares (kvlab.analysis.plots.pool_shares)")
    fig = figure(title, 420)
    if frame.empty:
        return nothing(fig, "no run to show")
    order = list(dict.fromkeys(frame[by]))
    means = frame.groupby(by, sort=False)[columns].mean().reindex(order)
    names = [str(value) for value in order]
    for column, name, color, hatch in SHARES:
        values = means[column]
        fig.add_bar(
            x=names, y=values, name=name, text=[f"{v:.1f}" if v >= 6 else "" for v in values], textposition="inside", textangle=0,
            insidetextanchor="middle", insidetextfont={"color": "white" if color in (BLUE, GREEN) else "black"},
            marker={"color": color, "line": {"width": 0.5, "color": "white"},
                    "pattern": {"shape": hatch, "fgcolor": "white", "size": 6, "solidity": 0.3, "fillmode": "overlay"}},
            hovertemplate=f"{name}: %{{y:.1f}} % of the pool<extra></extra>",
        )  # fmt: skip
    fig.update_layout(barmode="stack", hovermode="closest", bargap=0.35)
    fig.update_xaxes(title_text=by, type="category")
    return fig.update_yaxes(title_text="share of the KV cache (%)", range=[0, 100.5])
