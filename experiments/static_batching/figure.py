"""Throughput of continuous and static batching over the spread of output lengths."""

from __future__ import annotations

from typing import Any

import pandas as pd

from kvlab.figures import FigureSpec

NAMES = {"chunked": "continuous", "static": "static"}


def medians(results: pd.DataFrame) -> pd.DataFrame:
    """By (batching, cv): median and range over the seeds."""
    groups = results.groupby(["batching", "workload.output_len.cv"])
    return groups[["output_token_throughput_per_s", "mean_running_reqs"]].agg(["median", "min", "max"])


def ratios(results: pd.DataFrame) -> pd.DataFrame:
    """By cv: continuous / static throughput, seed by seed; median and range."""
    wide = results.pivot(index=["workload.output_len.cv", "seed"], columns="batching", values="output_token_throughput_per_s")
    return (wide["chunked"] / wide["static"]).groupby(level=0).agg(["median", "min", "max"])


def draw(results: pd.DataFrame) -> Any:
    """(a) throughput of both, (b) their ratio."""
    from kvlab.figures.style import COLUMN_CM, axes, line

    found, ratio = medians(results)["output_token_throughput_per_s"], ratios(results)
    fig, panels = axes(COLUMN_CM, 9.5, 2, 1, sharex=True)
    for number, (batching, label) in enumerate(NAMES.items()):
        part = found.loc[batching]
        spread = [part["median"] - part["min"], part["max"] - part["median"]]
        panels[0].errorbar(part.index, part["median"], yerr=spread, **line(number), label=label)
    panels[1].errorbar(ratio.index, ratio["median"], yerr=[ratio["median"] - ratio["min"], ratio["max"] - ratio["median"]], **line(2))
    panels[0].set_ylabel("output tokens per s\n(simulated)")
    panels[0].legend(loc="lower left")
    panels[1].set_ylabel("continuous / static\nthroughput")
    panels[0].set_title("(a) throughput, 32 sequences at most")
    panels[1].set_title("(b) ratio")
    panels[0].yaxis.set_major_formatter("{x:,.0f}")
    panels[1].set_xticks(ratio.index, [f"{cv:g}" for cv in ratio.index])
    panels[1].set_xlabel("spread of output lengths (std / mean)")
    for panel in panels:
        panel.set_ylim(bottom=0)
    panels[1].axhline(1.0, color="black", linewidth=0.6)
    return fig


def table(results: pd.DataFrame) -> pd.DataFrame:
    """Throughput, mean running requests, ratio."""
    found, ratio = medians(results), ratios(results)
    rows = []
    for cv in ratio.index:
        cells = {"std / mean": cv}
        for batching, label in NAMES.items():
            row = found.loc[(batching, cv)]
            cells[f"{label}: tokens/s"] = round(row[("output_token_throughput_per_s", "median")])
            cells[f"{label}: mean running"] = round(row[("mean_running_reqs", "median")], 1)
        low, middle, high = (ratio.loc[cv, name] for name in ("min", "median", "max"))
        rows.append({**cells, "ratio (range)": f"{middle:.2f} ({low:.2f}-{high:.2f})"})
    return pd.DataFrame(rows)


FIGURE = FigureSpec(
    number="F10",
    title="Continuous against static batching over the spread of output lengths",
    keep=("output_token_throughput_per_s", "mean_running_reqs", "mean_e2el_ms", "p99_e2el_ms", "num_preemptions"),
    draw=draw,
    table=table,
)
