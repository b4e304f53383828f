"""Preemptions, recompute tax, TTFT and throughput over the admission watermark, beside what vLLM's pull request 44594 measured."""

from __future__ import annotations

from typing import Any

import pandas as pd

from kvlab.figures import FigureSpec

MEASURED = {0.0: 1065, 0.02: 400, 0.05: 187, 0.10: 168, 0.15: 168}
"""Watermark -> preemptions that the pull request reports for vLLM on a GPU."""
BUDGETS = (8192, 2048)
"""Tokens a step. The pull request doesn't say; 8,192 is assumed, 2,048 shown beside it."""


def measure(run: Any) -> dict[str, Any]:
    """Computed tokens, for the tax."""
    return {"num_computed_tokens": int(run.requests(("num_computed_tokens",))["num_computed_tokens"].sum())}


def medians(results: pd.DataFrame) -> pd.DataFrame:
    """By (budget, watermark): median and range over the seeds of each quantity that is drawn."""
    rows = results.assign(
        tax=100 * results["recomputed_tokens"] / results["num_computed_tokens"], ttft_s=results["mean_ttft_ms"] / 1e3,
        throughput=results["output_token_throughput_per_s"],
    )  # fmt: skip
    groups = rows.groupby(["max_num_batched_tokens", "watermark"])[["num_preemptions", "tax", "ttft_s", "throughput"]]
    return groups.agg(["median", "min", "max"])


def draw(results: pd.DataFrame) -> Any:
    """Four panels, a line each token budget."""
    from kvlab.figures.style import BLACK, PAGE_CM, axes, legend_above, line

    found = medians(results)
    fig, panels = axes(PAGE_CM, 10.5, 2, 2, sharex=True)
    names = (("num_preemptions", "preemptions\n(log scale)"), ("tax", "recomputed tokens\n(% of all computed)"),
             ("ttft_s", "mean TTFT (s, simulated)"), ("throughput", "output tokens per s\n(simulated)"))  # fmt: skip
    for panel, (name, label) in zip(panels, names, strict=True):
        for number, budget in enumerate(BUDGETS):
            part = found.loc[budget][name]
            spread = [part["median"] - part["min"], part["max"] - part["median"]]
            panel.errorbar(100 * part.index, part["median"], yerr=spread, **line(number), label=f"simulated, {budget:,} tokens a step")
        panel.set_ylabel(label)
        if name != "num_preemptions":
            panel.set_ylim(bottom=0)
        if name == "throughput":
            panel.yaxis.set_major_formatter("{x:,.0f}")
    panels[0].plot([100 * w for w in MEASURED], list(MEASURED.values()), color=BLACK, marker="x", markersize=6, linestyle="none",
                   label="measured on vLLM (pull request 44594)")  # fmt: skip
    panels[0].set_yscale("log")
    panels[0].set_yticks([100, 200, 500, 1000, 2000], ["100", "200", "500", "1,000", "2,000"])
    panels[0].minorticks_off()
    panels[0].set_xticks([100 * w for w in MEASURED])
    for panel in panels[2:]:
        panel.set_xlabel("watermark (% of the pool's blocks)")
    legend_above(fig, 3, panels[0].get_legend_handles_labels()[0])
    return fig


def table(results: pd.DataFrame) -> pd.DataFrame:
    """Preemptions beside the measurement."""
    found = medians(results)

    def cell(budget: int, watermark: float) -> str:
        row = found.loc[(budget, watermark)]["num_preemptions"]
        return f"{row['median']:,.0f} ({row['min']:,.0f}-{row['max']:,.0f}), {row['median'] / MEASURED[watermark]:.2f}"

    def tax(watermark: float) -> str:
        return f"{found.loc[(8192, watermark)]['tax']['median']:.1f} %"

    return pd.DataFrame([
        {"watermark": w, "vLLM": measured, **{f"{b:,} tokens a step: median (range), ratio": cell(b, w) for b in BUDGETS},
         "tax (8,192)": tax(w)}
        for w, measured in MEASURED.items()
    ])  # fmt: skip


FIGURE = FigureSpec(
    number="F2",
    title="Preemptions, recompute tax, TTFT and throughput over the admission watermark",
    keep=("num_preemptions", "recomputed_tokens", "num_output_tokens", "mean_ttft_ms", "p99_ttft_ms", "output_token_throughput_per_s",
          "mean_running_reqs", "mean_kv_cache_usage"),
    measure=measure,
    draw=draw,
    table=table,
)  # fmt: skip
