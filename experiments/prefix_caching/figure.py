"""Prefix caching on conversations: prompt tokens that must be computed, and TTFT, by eviction policy and pool size."""

from __future__ import annotations

from typing import Any

import pandas as pd

from kvlab.figures import FigureSpec

POLICIES = ("lru", "fifo", "lfu", "s3fifo", "random")
PANELS = {"computed": "computed tokens\n(% of those without caching)", "ttft": "mean TTFT (ms)"}


def measure(run: Any) -> dict[str, Any]:
    """Tokens computed, recomputed ones included."""
    return {"num_computed_tokens": int(run.requests(("num_computed_tokens",))["num_computed_tokens"].sum())}


def rows_of(results: pd.DataFrame) -> pd.DataFrame:
    """Each run beside the run without caching at the same pool and seed: computed tokens in % of that; TTFT (ms)."""
    off = results[results["eviction"].isna()].set_index(["num_blocks", "seed"])["num_computed_tokens"]
    base = [off.loc[key] for key in zip(results["num_blocks"], results["seed"], strict=True)]
    names = results["eviction"].fillna("no caching")
    return results.assign(policy=names, computed=100 * results["num_computed_tokens"] / base, ttft=results["mean_ttft_ms"])


def draw(results: pd.DataFrame) -> Any:
    """Two panels; a line each policy, means of the seeds with their range."""
    from kvlab.figures.style import PAGE_CM, axes, legend_above, line

    rows = rows_of(results)
    fig, panels = axes(PAGE_CM, 7.0, 1, 2)
    for panel, (name, label) in zip(panels, PANELS.items(), strict=True):
        for number, policy in enumerate((*POLICIES, "no caching")):
            part = rows[rows["policy"] == policy].groupby("num_blocks")[name].agg(["mean", "min", "max"])
            spread = [part["mean"] - part["min"], part["max"] - part["mean"]]
            panel.errorbar(part.index, part["mean"], yerr=spread, **line(number), label=policy)
        panel.set_xlabel("pool (blocks of 16 tokens)")
        panel.set_ylabel(label)
        panel.xaxis.set_major_formatter("{x:,.0f}")
    panels[0].set_ylim(0, 105)
    panels[1].set_yscale("log")
    panels[1].set_yticks([20, 50, 100, 200, 500, 1000, 2000], ["20", "50", "100", "200", "500", "1,000", "2,000"])
    panels[1].minorticks_off()
    legend_above(fig, 6, panels[0].get_legend_handles_labels()[0])
    return fig


def table(results: pd.DataFrame) -> pd.DataFrame:
    """Computed tokens (%) and mean TTFT (ms) by policy and pool, means of the seeds."""
    found = rows_of(results).groupby(["policy", "num_blocks"])[["computed", "ttft"]].mean()
    sizes = sorted(found.index.get_level_values(1).unique())
    return pd.DataFrame([
        {"policy": policy, **{f"{size:,} blocks": "{computed:.1f} %, {ttft:,.0f} ms".format(**found.loc[(policy, size)]) for size in sizes}}
        for policy in (*POLICIES, "no caching")
    ])


FIGURE = FigureSpec(
    number="F12",
    title="Prefix caching on conversations: computed tokens and TTFT by policy and pool",
    keep=("prefix_cache_hit_rate_tokens", "mean_ttft_ms", "p99_ttft_ms", "num_preemptions", "num_evicted_blocks",
          "output_token_throughput_per_s"),
    measure=measure,
    draw=draw,
    table=table,
)  # fmt: skip
