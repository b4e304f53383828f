"""Mean and P99 latency over the rank quality of a length predictor, between first come first served and the truth."""

from __future__ import annotations

from typing import Any

import pandas as pd

from kvlab.figures import FigureSpec

PANELS = {"mean_e2el_ms": "mean latency (s)", "median_e2el_ms": "median latency (s)", "p99_e2el_ms": "P99 latency (s)"}


def medians(results: pd.DataFrame) -> tuple[pd.DataFrame, pd.DataFrame]:
    """By tau, and by scheduling for the two bounds: median and range over the seeds (s)."""
    rows = results.assign(**{name: results[name] / 1e3 for name in PANELS})
    statistics = ["median", "min", "max"]
    bounds = rows[rows["scheduling"].notna()].groupby("scheduling")[list(PANELS)].agg(statistics)
    return rows[rows["scheduling"].isna()].groupby("scheduling.tau")[list(PANELS)].agg(statistics), bounds


def draw(results: pd.DataFrame) -> Any:
    """Three panels; the bounds are level lines."""
    from kvlab.figures.style import PAGE_CM, axes, legend_above, line

    found, bounds = medians(results)
    fig, panels = axes(PAGE_CM, 6.2, 1, 3)
    for panel, (name, label) in zip(panels, PANELS.items(), strict=True):
        part = found[name]
        spread = [part["median"] - part["min"], part["max"] - part["median"]]
        panel.errorbar(part.index, part["median"], yerr=spread, **line(0), label="shortest predicted remaining first")
        panel.axhline(bounds.loc["fcfs"][name]["median"], **line(1, marker=""), label="first come first served")
        panel.axhline(bounds.loc["srpt_oracle"][name]["median"], **line(2, marker=""), label="shortest remaining first (truth)")
        panel.set_xlabel("predictor's Kendall tau")
        panel.set_ylabel(label)
        panel.set_ylim(bottom=0)
    legend_above(fig, 3, panels[0].get_legend_handles_labels()[0])
    return fig


def table(results: pd.DataFrame) -> pd.DataFrame:
    """Latencies (s), and the mean relative to first come first served."""
    found, bounds = medians(results)
    base = bounds.loc["fcfs"][("mean_e2el_ms", "median")]
    named = [("fcfs", bounds.loc["fcfs"]), *((f"srpt_predicted, tau {tau:g}", row) for tau, row in found.iterrows()),
             ("srpt_oracle", bounds.loc["srpt_oracle"])]  # fmt: skip
    return pd.DataFrame([
        {"scheduling": name, **{label: round(row[(key, "median")], 1) for key, label in PANELS.items()},
         "mean / fcfs": round(row[("mean_e2el_ms", "median")] / base, 2)}
        for name, row in named
    ])  # fmt: skip


FIGURE = FigureSpec(
    number="F9",
    title="Latency over the rank quality of a length predictor",
    keep=("mean_e2el_ms", "median_e2el_ms", "p99_e2el_ms", "mean_ttft_ms", "output_token_throughput_per_s", "num_preemptions"),
    draw=draw,
    table=table,
)
