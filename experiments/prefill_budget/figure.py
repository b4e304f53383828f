"""Gaps between tokens, time to the first token and throughput over the prefill budget of a step (Sarathi-Serve)."""

from __future__ import annotations

from typing import Any

import pandas as pd

from kvlab.figures import FigureSpec

DEVICES = {"a100": "A100", "h100": "H100"}
QUANTITIES = {"p99_itl_ms": "P99 gap between tokens (ms)", "median_ttft_ms": "median TTFT (ms)"}

TICKS = {"p99_itl_ms": (10, 20, 50, 100, 200), "median_ttft_ms": (50, 100, 200)}


def medians(results: pd.DataFrame) -> pd.DataFrame:
    """By (device, budget): median and range over the seeds; budget 0 stands for whole prompts in steps of their own."""
    rows = results.assign(budget=results["batching.chunk_size"].fillna(0).astype(int))
    names = [*QUANTITIES, "median_itl_ms", "output_token_throughput_per_s"]
    return rows.groupby(["cost_model", "budget"])[names].agg(["median", "min", "max"])


def draw(results: pd.DataFrame) -> Any:
    """Two panels over the budget, a line each device; level lines: whole prompts before decodes."""
    from kvlab.figures.style import COLUMN_CM, axes, legend_above, line

    found = medians(results)
    fig, panels = axes(COLUMN_CM, 11.0, 2, 1, sharex=True)
    for panel, (name, label) in zip(panels, QUANTITIES.items(), strict=True):
        for number, (device, title) in enumerate(DEVICES.items()):
            part = found.loc[device][name]
            budgets = part.loc[[b for b in part.index if b > 0]]
            spread = [budgets["median"] - budgets["min"], budgets["max"] - budgets["median"]]
            panel.errorbar(budgets.index, budgets["median"], yerr=spread, **line(number), label=f"{title}, budget a step")
            level = line(number, marker="", linestyle=((0, (1, 1)), (0, (4, 1, 1, 1)))[number], linewidth=0.9)
            panel.axhline(part.loc[0, "median"], **level, label=f"{title}, whole prompts")
        panel.set_xscale("log", base=2)
        panel.set_yscale("log")
        panel.set_xticks(budgets.index, [f"{b:,}" for b in budgets.index])
        panel.set_ylabel(label)
        panel.set_yticks(TICKS[name], [str(n) for n in TICKS[name]])
        panel.minorticks_off()
    panels[1].set_xlabel("tokens a step may compute")
    legend_above(fig, 2, panels[0].get_legend_handles_labels()[0])
    return fig


def table(results: pd.DataFrame) -> pd.DataFrame:
    """Medians of the seeds."""
    return pd.DataFrame([
        {"device": DEVICES[device], "tokens a step": f"{budget:,}" if budget else "whole prompts first",
         "P99 gap (ms)": round(row[("p99_itl_ms", "median")], 1), "median gap (ms)": round(row[("median_itl_ms", "median")], 1),
         "median TTFT (ms)": round(row[("median_ttft_ms", "median")]),
         "output tokens/s": round(row[("output_token_throughput_per_s", "median")])}
        for (device, budget), row in medians(results).iterrows()
    ])  # fmt: skip


FIGURE = FigureSpec(
    number="F7",
    title="Gaps between tokens over the prefill budget",
    keep=("median_itl_ms", "p99_itl_ms", "median_ttft_ms", "p99_ttft_ms", "output_token_throughput_per_s", "mean_running_reqs",
          "num_preemptions"),
    draw=draw,
    table=table,
)  # fmt: skip
