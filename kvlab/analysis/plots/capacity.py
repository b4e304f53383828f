"""Eviction policies over the cache's capacity, from frames of replays: miss ratio curves, and how far each policy is from belady's."""

from __future__ import annotations

import re

import numpy as np
import pandas as pd
import plotly.graph_objects as go

from kvlab.analysis.template import BLACK, figure, line_style, need, nothing, plot, without_legend
from kvlab.types import UserError, unknown_name

RATES = {
    "block_hit_rate_any": "block hit rate, any block", "block_hit_rate_prefix": "block hit rate, unbroken prefix",
    "token_hit_rate_prefix": "prompt token hit rate, unbroken prefix", "request_hit_rate_any": "mean request hit rate, any block",
    "request_hit_rate_prefix": "mean request hit rate, unbroken prefix",
}  # fmt: skip
"""Hit rates of a replay's row in words: of what, and which blocks count as found."""

OFFLINE = "belady"
MAX_CURVE_POINTS = 400
_FROM = "a frame of replays (kvlab.replay.sweep(...).frame, kvlab.replay.lru_curve(...).frame)"


@plot
def miss_ratio_curve(frame: pd.DataFrame, rate: str = "block_hit_rate_any", title: str | None = None) -> go.Figure:
    """Miss ratio over capacity (blocks, logarithmic), a line a policy; belady dashed in black.

    Args:
        frame: of one trace and one semantics, several policies and capacities; frames of sweeps and of `lru_curve` may be joined with
            `pd.concat`. Where a policy has a capacity twice, the mean is drawn.
        rate: which hit rate, one of `RATES`. belady is a bound for `block_hit_rate_any` with semantics access; otherwise it is a
            reference that another policy may beat, and the legend says so.

    Raises:
        UserError: a missing column, an unknown rate, or several traces, semantics or warm-ups in one frame.
    """
    replays = _checked(frame, rate)
    trace, semantics = _only(replays, "trace"), _only(replays, "semantics")
    fig = figure(title or f"Miss ratio: {_stem(trace)}", 420)
    if replays.empty:
        return nothing(fig, f"no replay has a {rate}")
    order = [p for p in dict.fromkeys(replays["policy"]) if p != OFFLINE] + ([OFFLINE] if (replays["policy"] == OFFLINE).any() else [])
    for number, policy in enumerate(order):
        hits = replays[replays["policy"] == policy].groupby("capacity_blocks")[rate].mean()
        hits = hits.iloc[_evenly_in_log(hits.index.to_numpy(dtype=np.float64))]
        style = line_style(number)
        if policy == OFFLINE:
            style = {"line": {"color": BLACK, "width": 2, "dash": "dash"}, "marker": {"symbol": "circle-open", "size": 7, "color": BLACK}}
        fig.add_scatter(
            x=hits.index, y=1 - hits, name=_offline_name(rate, semantics) if policy == OFFLINE else str(policy),
            mode="lines" if len(hits) > 30 else "lines+markers", hovertemplate="%{y:.3f}", **style,
        )  # fmt: skip
    fig.update_xaxes(title_text=f"capacity (blocks; semantics {semantics})")
    fig.update_xaxes(type="log", tickformatstops=(), dtick=1, tickformat=",d", minor={"dtick": "D1", "ticks": "outside"})
    return fig.update_yaxes(title_text=f"miss ratio<br>(1 − {RATES[rate]})", rangemode="tozero")


@plot
def policy_by_capacity(frame: pd.DataFrame, rate: str = "block_hit_rate_any", title: str | None = None) -> go.Figure:
    """A heat map: a row a policy, a column a capacity, the hit rate in percent in each cell.

    Where the frame has belady, the colour is the gap to it in percentage points and rows are ordered by their mean gap; without it the
    colour is the hit rate. Arguments and errors: see `miss_ratio_curve`.
    """
    replays = _checked(frame, rate)
    trace, semantics = _only(replays, "trace"), _only(replays, "semantics")
    words = RATES[rate]
    heading = title or f"{words[0].upper()}{words[1:]} (%): {_stem(trace)}"
    if replays.empty:
        return nothing(figure(heading, 300), f"no replay has a {rate}")
    table = 100 * replays.pivot_table(index="policy", columns="capacity_blocks", values=rate, aggfunc="mean")
    has_bound = OFFLINE in table.index
    shade = table.rsub(table.loc[OFFLINE], axis=1) if has_bound else table
    order = shade.mean(axis=1).sort_values(ascending=has_bound, kind="stable").index
    table, shade = table.loc[order], shade.loc[order]
    capacities = [f"{c:,}" for c in table.columns]
    # Narrow pages turn long tick labels upright, so there is room for that below cells high enough for the y title.
    upright = 8 * max(map(len, capacities)) if 8 * sum(map(len, capacities)) > 200 else 0
    fig = without_legend(figure(heading, int(np.clip(130 + upright + max(26 * len(order), 130), 260, 1000))))
    what = "gap to belady<br>(points)" if has_bound else "hit rate (%)"
    fig.add_heatmap(
        z=shade.to_numpy(), x=capacities, y=[str(p) for p in order], text=np.round(table.to_numpy(), 1),
        texttemplate="%{text:.1f}", textfont_size=min(12, 95 / len(capacities)), colorscale="Blues", reversescale=not has_bound,
        xgap=1, ygap=1, customdata=table.to_numpy(),
        colorbar={"title": {"text": what, "font": {"size": 12}}, "thickness": 14, "outlinewidth": 0},
        zmin=min(0.0, float(np.nanmin(shade.to_numpy()))),
        hovertemplate="%{y}, %{x} blocks: %{customdata:.2f} % hits, " + what.replace("<br>", " ") + " %{z:.2f}<extra></extra>",
    )  # fmt: skip
    fig.update_layout(hovermode="closest")
    fig.update_xaxes(title_text=f"capacity (blocks; semantics {semantics})", type="category", showgrid=False)
    return fig.update_yaxes(title_text="eviction policy", autorange="reversed", type="category", showgrid=False, dtick=1)


def _checked(frame: pd.DataFrame, rate: str) -> pd.DataFrame:
    """The rows that have the rate."""
    if rate not in RATES:
        raise unknown_name("hit rate", rate, RATES)
    need(frame, ["trace", "policy", "semantics", "capacity_blocks", rate], _FROM)
    rows = frame.dropna(subset=[rate])
    rows = rows.assign(**{rate: rows[rate].astype(float)})
    if "warmup_requests" in rows:
        _only(rows, "warmup_requests")
    return rows[rows["capacity_blocks"] > 0]


def _only(frame: pd.DataFrame, column: str) -> object:
    """The one value of a column; hit rates of different traces, semantics or warm-ups are not comparable."""
    values = list(dict.fromkeys(frame[column]))
    if len(values) > 1:
        raise UserError(f"This frame holds several values of {column}: {', '.join(map(str, values))}. Draw one at a time: "
                        f"frame[frame[{column!r}] == {values[0]!r}].")  # fmt: skip
    return values[0] if values else ""


def _stem(trace: object) -> str:
    """A trace's name without the endings of its file."""
    return re.sub(r"(\.(jsonl?|csv|txt|parquet))?(\.gz)?$", "", str(trace))


def _offline_name(rate: str, semantics: object) -> str:
    is_bound = rate == "block_hit_rate_any" and semantics == "access"
    return f"belady (offline {'bound' if is_bound else 'reference'})"


def _evenly_in_log(capacities: np.ndarray) -> np.ndarray:
    """Places of at most MAX_CURVE_POINTS capacities, evenly spread over their logarithm, both ends kept."""
    if len(capacities) <= MAX_CURVE_POINTS:
        return np.arange(len(capacities))
    wanted = np.geomspace(capacities[0], capacities[-1], MAX_CURVE_POINTS)
    return np.unique(np.clip(np.searchsorted(capacities, wanted), 0, len(capacities) - 1))
