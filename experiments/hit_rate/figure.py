"""Hit rate over capacity, ten policies and Belady's optimum, on both public Mooncake traces; replay semantics `access`."""

from __future__ import annotations

from typing import Any

import pandas as pd

from kvlab.figures import FigureSpec

TRACES = {"mooncake_conversation": "(a) Mooncake conversation", "mooncake_synthetic": "(b) Mooncake synthetic"}
INFINITE = {"mooncake_conversation": 36.6, "mooncake_synthetic": 64.0}
"""Share of block references that a cache without limit finds (%), a property of the files."""
POLICIES = ("lru", "fifo", "lfu", "clock", "slru", "two_q", "arc", "lirs", "s3fifo", "sieve")


def rates(results: pd.DataFrame) -> pd.DataFrame:
    """By (trace, policy, capacity): prefix hit rate per block (%)."""
    rows = results.assign(rate=100 * results["prefix_hits"] / results["accesses"])
    return rows.set_index(["trace", "policy", "capacity_blocks"])[["rate"]].sort_index()


def draw(results: pd.DataFrame) -> Any:
    """A panel each trace."""
    from kvlab.figures.style import BLACK, PAGE_CM, axes, legend_above, line

    found = rates(results)
    fig, panels = axes(PAGE_CM, 8.5, 1, 2)
    for panel, (trace, title) in zip(panels, TRACES.items(), strict=True):
        optimum = found.loc[(trace, "belady")]
        panel.plot(optimum.index, optimum["rate"], color=BLACK, linewidth=1.8, label="belady (optimal for blocks)")
        for number, policy in enumerate(POLICIES):
            part = found.loc[(trace, policy)]
            panel.plot(part.index, part["rate"], **line(number, linewidth=0.9), label=policy)
        panel.axhline(INFINITE[trace], color=BLACK, linewidth=0.7, linestyle=(0, (1, 2)), label="cache without limit")
        panel.set_title(title)
        panel.set_xscale("log")
        ticks = sorted(results["capacity_blocks"].unique())
        panel.set_xticks(ticks, [f"{n // 1000:,}k" for n in ticks])
        panel.minorticks_off()
        panel.set_xlabel("capacity (blocks of 512 tokens)")
        panel.set_ylim(bottom=0)
    panels[0].set_ylabel("prefix hit rate (% of block references)\nsemantics: access, no warm-up left out")
    legend_above(fig, 6, panels[0].get_legend_handles_labels()[0])
    return fig


def table(results: pd.DataFrame) -> pd.DataFrame:
    """Prefix hit rates (%)."""
    found = rates(results)
    sizes = sorted(results["capacity_blocks"].unique())
    return pd.DataFrame([
        {"trace": trace.removeprefix("mooncake_"), "policy": policy,
         **{f"{n:,}": round(float(found.loc[(trace, policy, n), "rate"]), 1) for n in sizes}}
        for trace in TRACES for policy in ("belady", *POLICIES)
    ])  # fmt: skip


FIGURE = FigureSpec(number="F1", title="Hit rate over capacity, ten policies and belady, on both Mooncake traces", draw=draw, table=table)
