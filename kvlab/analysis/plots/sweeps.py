"""Many runs in one figure: a summary figure over a number that was swept."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pandas as pd
import plotly.graph_objects as go

from kvlab.analysis.plots.spreads import By, bars_are_over, columns_of, lines_of
from kvlab.analysis.plots.steps import OF_RUNS
from kvlab.analysis.template import figure, legend_room, line_style, need, need_numbers, nothing, panels, plot, without_legend
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

@plot
def compare(frame: pd.DataFrame, x: str, y: str, by: By = None, title: str | None = None) -> go.Figure:
    """A figure of many runs (`runs.frame`): column `y` over the values of `x`, a line for each value of `by` (several columns: for each
    combination of their values).

    Runs that share a place give their mean, with a bar from the smallest to the largest; the x axis says which settings those differ in.

    Raises:
        UserError: a missing column, or one that holds no numbers as `y`.
    """
    need(frame, [x, y, *columns_of(by)], OF_RUNS)
    need_numbers(frame, [y], KNOWN)
    fig = figure(title or f"{KNOWN.get(y, y)} over {x}", 380)
    runs = frame.dropna(subset=[x, y])
    runs = runs.assign(**{y: runs[y].astype(float)})
    lines = lines_of(runs, by)
    if not lines:
        return nothing(fig, f"no run has {' and '.join(dict.fromkeys([x, y, *columns_of(by)]))}")
    for number, (name, group) in enumerate(lines):
        stats = group.groupby(x, sort=True)[y].agg(["mean", "min", "max", "size"])
        fig.add_scatter(x=[str(v) for v in stats.index], y=stats["mean"], name=name, mode="lines+markers", showlegend=by is not None,
                        error_y=_bars(stats, "mean"), **line_style(number))  # fmt: skip
    if by is None:
        without_legend(fig)
    order = [str(v) for v in sorted(runs[x].unique())]
    below = bars_are_over(lines, x, [y], "mean")
    fig.update_xaxes(title_text=(f"{x} ({_UNITS[x]})" if x in _UNITS else x) + below, type="category", categoryorder="array",
                     categoryarray=order)  # fmt: skip
    fig.update_layout(height=380 + 16 * below.count("<br>") + legend_room([name for name, _ in lines]))
    return fig.update_yaxes(title_text=KNOWN.get(y, y), rangemode="tozero")


@plot
def watermark_curve(frame: pd.DataFrame, by: By = None, title: str = "What the watermark buys and costs") -> go.Figure:
    """Preemptions, recomputed tokens and output throughput over the watermark (% of the pool), a line for each value of `by`.

    Low watermarks let in more requests than the pool can carry to their end: some give way and are computed again. High ones leave
    blocks idle. Runs that share a place give their median, with a bar from the smallest to the largest (the x axis says which settings
    those differ in). `frame`: `runs.frame` of a sweep over `watermark`; further panels where it has them: mean requests running, KV cache
    usage.
    """
    columns = ["num_preemptions", "recomputed_tokens", "mean_running_reqs", "mean_kv_cache_usage", "output_token_throughput_per_s"]
    need(frame, ["watermark", "num_preemptions"], OF_RUNS)
    shown = [column for column in columns if column in frame and frame[column].notna().any()]
    need_numbers(frame, ["watermark"], KNOWN)
    runs = frame.assign(watermark=100 * frame["watermark"])
    return _panels(runs, "watermark", shown, by, title, "watermark (% of the pool)")


@plot
def block_size_curve(frame: pd.DataFrame, by: By = None, title: str = "Block size: sharing, waste, step time") -> go.Figure:
    """Prefix cache hit rate, internal fragmentation and mean step time over the block size, a line for each value of `by`.

    Small blocks share more of a prompt and waste fewer slots at its end; large ones mean fewer table entries and longer contiguous
    reads. Runs that share a place give their median, with a bar from the smallest to the largest (the x axis says which settings those
    differ in). `frame`: `runs.frame` of a sweep over `block_size`, at equal `kv_cache_tokens` as a rule.
    """
    columns = ["prefix_cache_hit_rate_tokens", "mean_internal_fragmentation_tokens", "mean_step_ms"]
    need(frame, ["block_size", *columns], OF_RUNS)
    fig = _panels(frame, "block_size", [c for c in columns if frame[c].notna().any()], by, title, "block size (tokens)")
    sizes = sorted(frame["block_size"].dropna().unique())
    if len(sizes) > 1 and sizes[0] > 0:
        fig.update_xaxes(type="log", tickformatstops=(), tickmode="array", tickvals=sizes, ticktext=[f"{size:g}" for size in sizes])
    return fig


def _panels(frame: pd.DataFrame, x: str, columns: Sequence[str], by: By, title: str, x_title: str) -> go.Figure:
    """A panel a column, one below the other; medians over runs that agree in `x` and `by`."""
    need(frame, columns_of(by), OF_RUNS)
    need_numbers(frame, [x, *columns], KNOWN)
    runs = frame.dropna(subset=[x])
    lines = lines_of(runs, by)
    if not lines or not columns:
        return nothing(figure(title, 300), f"no run has {' and '.join([x, *columns_of(by)])} and one of the figures")
    below = bars_are_over(lines, x, columns, "median")
    extra = 16 * below.count("<br>") + legend_room([name for name, _ in lines])
    fig = panels(title, len(columns), 130 + 130 * len(columns) + extra)
    for row, column in enumerate(columns, start=1):
        for number, (name, group) in enumerate(lines):
            stats = group.dropna(subset=[column]).groupby(x, sort=True)[column].agg(["median", "min", "max", "size"])
            fig.add_scatter(
                x=np.asarray(stats.index), y=stats["median"], name=name, mode="lines+markers", legendgroup=name, row=row, col=1,
                showlegend=by is not None and row == 1, error_y=_bars(stats, "median"), **line_style(number),
                hovertemplate=f"%{{y:,.4~g}}<extra>{name}</extra>",
            )  # fmt: skip
        fig.update_yaxes(title_text=_SHORT.get(column, KNOWN.get(column, column)), rangemode="tozero", row=row, col=1)
    if by is None:
        without_legend(fig)
    return fig.update_xaxes(title_text=x_title + below, row=len(columns), col=1)


def _bars(stats: pd.DataFrame, middle: str) -> dict[str, Any] | None:
    """Error bars from the smallest to the largest; None where every place has one run."""
    if not (stats["size"] > 1).any():
        return None
    return {"type": "data", "array": stats["max"] - stats[middle], "arrayminus": stats[middle] - stats["min"], "thickness": 1, "width": 3}
