"""Mean and P99 latency over the rank quality of a length predictor, between first come first served and the truth."""

from __future__ import annotations

from typing import Any

import pandas as pd

from kvlab.figures import FigureSpec

PANELS = {"mean_e2el_ms": "mean latency (s)", "median_e2el_ms": "median latency (s)", "p99_e2el_ms": "P99 latency (s)"}
RATES = {7.0: "the device keeps up", 14.0: "more than it can serve"}


def medians(results: pd.DataFrame, rate: float) -> tuple[pd.DataFrame, pd.DataFrame]:
    """At a rate: by tau, and by scheduling for the two bounds: median and range over the seeds (s)."""
    rows = results[results["workload.arrivals.rate"] == rate]
    rows = rows.assign(**{name: rows[name] / 1e3 for name in PANELS})
    statistics = ["median", "min", "max"]
    bounds = rows[rows["scheduling"].notna()].groupby("scheduling")[list(PANELS)].agg(statistics)
    return rows[rows["scheduling"].isna()].groupby("scheduling.tau")[list(PANELS)].agg(statistics), bounds


def draw(results: pd.DataFrame) -> Any:
    """A row of panels each rate; the bounds are level lines."""
    from kvlab.figures.style import PAGE_CM, axes, legend_above, line

    fig, panels = axes(PAGE_CM, 10.0, len(RATES), len(PANELS), sharex=True)
    places = ((rate, text, name, label) for rate, text in RATES.items() for name, label in PANELS.items())
    for panel, (rate, text, name, label) in zip(panels, places, strict=True):
        found, bounds = medians(results, rate)
        part = found[name]
        spread = [part["median"] - part["min"], part["max"] - part["median"]]
        panel.errorbar(part.index, part["median"], yerr=spread, **line(0), label="shortest predicted remaining first")
        panel.axhline(bounds.loc["fcfs"][name]["median"], **line(1, marker=""), label="first come first served")
        panel.axhline(bounds.loc["srpt_oracle"][name]["median"], **line(2, marker=""), label="shortest remaining first (truth)")
        panel.set_ylabel(label)
        panel.set_ylim(bottom=0)
        if name == next(iter(PANELS)):
            panel.set_title(f"{rate:g} requests/s: {text}")
    panels[0].set_xticks(part.index)
    for panel in panels[-len(PANELS) :]:
        panel.set_xlabel("predictor's Kendall tau")
    legend_above(fig, 3, panels[0].get_legend_handles_labels()[0])
    return fig


def table(results: pd.DataFrame) -> pd.DataFrame:
    """Latencies (s), and the mean relative to first come first served."""
    rows = []
    for rate in RATES:
        found, bounds = medians(results, rate)
        base = bounds.loc["fcfs"][("mean_e2el_ms", "median")]
        named = [("fcfs", bounds.loc["fcfs"]), *((f"srpt_predicted, tau {tau:g}", row) for tau, row in found.iterrows()),
                 ("srpt_oracle", bounds.loc["srpt_oracle"])]  # fmt: skip
        rows += [
            {"requests/s": f"{rate:g}", "scheduling": name, **{label: round(row[(key, "median")], 1) for key, label in PANELS.items()},
             "mean / fcfs": round(row[("mean_e2el_ms", "median")] / base, 2)}
            for name, row in named
        ]  # fmt: skip
    return pd.DataFrame(rows)


FIGURE = FigureSpec(
    number="F9",
    title="Latency over the rank quality of a length predictor",
    keep=("mean_e2el_ms", "median_e2el_ms", "p99_e2el_ms", "mean_ttft_ms", "output_token_throughput_per_s", "num_preemptions"),
    draw=draw,
    table=table,
)
