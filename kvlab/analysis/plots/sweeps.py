"""Many runs in one figure: a summary figure over a number that was swept."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pandas as pd
import plotly.graph_objects as go

from kvlab.analysis.plots.steps import OF_RUNS
from kvlab.analysis.template import COLORWAY, figure, line_style, need, nothing, panels, plot
from kvlab.trace.summary import FIGURES

KNOWN = {f.key: f"{f.title} ({f.unit})" if f.unit else f.title for f in FIGURES}
"""Key of a summary figure -> its title with the unit."""

_SHORT = {
    "num_preemptions": "preemptions", "recomputed_tokens": "recomputed<br>(tokens)", "mean_running_reqs": "running<br>(requests)",
    "mean_kv_cache_usage": "KV cache used<br>(fraction)", "output_token_throughput_per_s": "output<br>(tokens/s)",
    "prefix_cache_hit_rate_tokens": "prefix cache<br>hit rate", "mean_internal_fragmentation_tokens": "internal fragm.<br>(tokens)",
    "mean_step_ms": "mean step<br>(ms)",
}  # fmt: skip
"""Axis titles for panels that are too low for the whole name."""


_UNITS = {
    "block_size": "tokens", "num_blocks": "blocks", "num_cpu_blocks": "blocks", "kv_cache_tokens": "tokens",
    "watermark": "fraction of the pool", "max_num_batched_tokens": "tokens a step", "max_num_seqs": "sequences",
}  # fmt: skip
"""Numbers that are swept."""

_NUM_SYMBOLS = 53
"""plotly knows markers of numbers 0 to 52 and a few more."""


@plot
def compare(frame: pd.DataFrame, x: str, y: str, by: str | None = None, title: str | None = None) -> go.Figure:
    """A figure of many runs (`runs.frame`): column `y` over the values of `x`, a line for each value of `by`.

    Runs that agree in `x` and `by` give their mean, with a bar from the smallest to the largest.
    """
    need(frame, [x, y, *([by] if by else [])], OF_RUNS)
    fig = figure(title or f"{KNOWN.get(y, y)} over {x}", 380)
    runs = frame.dropna(subset=[x, y])
    if runs.empty:
        return nothing(fig, f"no run has both {x} and {y}")
    groups = [(None, runs)] if by is None else list(runs.groupby(by, sort=True))
    for (value, group), color in zip(groups, COLORWAY * (len(groups) // len(COLORWAY) + 1), strict=False):
        stats = group.groupby(x, sort=True)[y].agg(["mean", "min", "max", "size"])
        spread = {"type": "data", "array": stats["max"] - stats["mean"], "arrayminus": stats["mean"] - stats["min"]}
        fig.add_scatter(
            x=[str(v) for v in stats.index], y=stats["mean"], name=f"{by} = {value!s}", mode="lines+markers",
            line={"color": color, "width": 2}, marker={"size": 9, "symbol": len(fig.data) % _NUM_SYMBOLS}, showlegend=by is not None,
            error_y=spread if (stats["size"] > 1).any() else None,
        )  # fmt: skip
    order = [str(v) for v in sorted(runs[x].unique())]
    fig.update_xaxes(title_text=f"{x} ({_UNITS[x]})" if x in _UNITS else x, type="category", categoryorder="array", categoryarray=order)
    return fig.update_yaxes(title_text=KNOWN.get(y, y), rangemode="tozero")


@plot
def watermark_curve(frame: pd.DataFrame, by: str | None = None, title: str = "What the watermark buys and costs") -> go.Figure:
    """Preemptions, recomputed tokens and output throughput over the watermark (% of the pool), a line for each value of `by`.

    Low watermarks let in more requests than the pool can carry to their end: some give way and are computed again. High ones leave
    blocks idle. Runs that agree (seeds) give their median, with a bar from the smallest to the largest. `frame`: `runs.frame` of a
    sweep over `watermark`; further panels where it has them: mean requests running, KV cache usage.
    """
    columns = ["num_preemptions", "recomputed_tokens", "mean_running_reqs", "mean_kv_cache_usage", "output_token_throughput_per_s"]
    need(frame, ["watermark", "num_preemptions"], OF_RUNS)
    shown = [column for column in columns if column in frame and frame[column].notna().any()]
    runs = frame.assign(watermark=100 * frame["watermark"])
    return _panels(runs, "watermark", shown, by, title, "watermark (% of the pool)")


@plot
def block_size_curve(frame: pd.DataFrame, by: str | None = None, title: str = "Block size: sharing, waste, step time") -> go.Figure:
    """Prefix cache hit rate, internal fragmentation and mean step time over the block size, a line for each value of `by`.

    Small blocks share more of a prompt and waste fewer slots at its end; large ones mean fewer table entries and longer contiguous
    reads. Runs that agree (seeds) give their median, with a bar from the smallest to the largest. `frame`: `runs.frame` of a sweep
    over `block_size`, at equal `kv_cache_tokens` as a rule.
    """
    columns = ["prefix_cache_hit_rate_tokens", "mean_internal_fragmentation_tokens", "mean_step_ms"]
    need(frame, ["block_size", *columns], OF_RUNS)
    fig = _panels(frame, "block_size", [c for c in columns if frame[c].notna().any()], by, title, "block size (tokens)")
    sizes = sorted(frame["block_size"].dropna().unique())
    if len(sizes) > 1 and sizes[0] > 0:
        fig.update_xaxes(type="log", tickmode="array", tickvals=sizes, ticktext=[f"{size:g}" for size in sizes])
    return fig


def _panels(frame: pd.DataFrame, x: str, columns: Sequence[str], by: str | None, title: str, x_title: str) -> go.Figure:
    """A panel a column, one below the other; medians over runs that agree in `x` and `by`."""
    if by is not None:
        need(frame, [by], OF_RUNS)
    runs = frame.dropna(subset=[x])
    if runs.empty or not columns:
        return nothing(figure(title, 300), f"no run has {x} and one of the figures")
    fig = panels(title, len(columns), 130 + 130 * len(columns))
    groups = [(None, runs)] if by is None else list(runs.groupby(by, sort=True))
    for row, column in enumerate(columns, start=1):
        for number, (value, group) in enumerate(groups):
            stats = group.dropna(subset=[column]).groupby(x, sort=True)[column].agg(["median", "min", "max", "size"])
            spread = {"type": "data", "array": stats["max"] - stats["median"], "arrayminus": stats["median"] - stats["min"],
                      "thickness": 1, "width": 3}  # fmt: skip
            name = f"{by} = {value!s}"
            fig.add_scatter(
                x=np.asarray(stats.index), y=stats["median"], name=name, mode="lines+markers", legendgroup=name, row=row, col=1,
                showlegend=by is not None and row == 1, error_y=spread if (stats["size"] > 1).any() else None, **line_style(number),
                hovertemplate=f"%{{y:,.4~g}}<extra>{name if by else ''}</extra>",
            )  # fmt: skip
        fig.update_yaxes(title_text=_SHORT.get(column, KNOWN.get(column, column)), rangemode="tozero", row=row, col=1)
    if by is None:
        fig.update_layout(margin_t=48)
    return fig.update_xaxes(title_text=x_title, row=len(columns), col=1)
