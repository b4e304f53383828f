"""Where the memory goes, by layout and block size: parts of the pool while somebody waits, beside figure 2 of Kwon et al. (SOSP 2023)."""

from __future__ import annotations

from typing import Any

import pandas as pd

from kvlab.figures import FigureSpec

LAYOUTS = {"contiguous_max": "Orca\nmax", "contiguous_pow2": "Orca\npow2", "contiguous_oracle": "Orca\noracle", "paged": "paged"}
PAPER = {"contiguous_max": 20.4, "contiguous_pow2": 26.8, "contiguous_oracle": 38.2, "paged": 96.3}
"""Useful part (%) in figure 2 of the paper: another trace and rate, shape only."""
PARTS = {"tokens": "tokens", "reserved": "reserved, empty", "partly_filled": "in partly filled blocks",
         "fragmented": "external fragmentation", "free": "free"}  # fmt: skip


def measure(run: Any) -> dict[str, Any]:
    """Means over time while somebody waits: requests running, and parts of the pool (%)."""
    steps = run.steps()
    busy = steps[steps["num_waiting_reqs"] > 0]
    weight = busy["step_ms"] / busy["step_ms"].sum()
    size = run.config["block_size"]
    reserved = size * busy["kv_blocks_reserved"]
    parts = {
        "tokens": busy["num_ctx_tokens"], "reserved": reserved, "partly_filled": busy["internal_fragmentation_tokens"] - reserved,
        "fragmented": size * busy["external_fragmentation_blocks"],
        "free": size * (busy["kv_blocks_free"] - busy["external_fragmentation_blocks"]),
    }  # fmt: skip
    total = size * busy["kv_blocks_total"]
    shares = {name: 100 * float((part / total * weight).sum()) for name, part in parts.items()}
    num_computed = int(run.requests(("num_computed_tokens",))["num_computed_tokens"].sum())
    return {"num_running": float((busy["num_running_reqs"] * weight).sum()), **shares, "num_computed_tokens": num_computed}


def medians(results: pd.DataFrame) -> pd.DataFrame:
    """By (layout, block_size): medians over the seeds."""
    rows = results.assign(recomputed=100 * results["recomputed_tokens"] / results["num_computed_tokens"])
    return rows.drop(columns="seed").groupby(["layout", "block_size"]).median()


def draw(results: pd.DataFrame) -> Any:
    """(a) layouts at 16 tokens a block, (b) block sizes of the paged layout: stacked parts of the pool."""
    from kvlab.figures.style import BLACK, BLUE, LIGHT, ORANGE, PAGE_CM, SKY, axes, legend_above

    found = medians(results)
    looks = {"tokens": (BLUE, ""), "reserved": ("white", "////"), "partly_filled": (ORANGE, ""), "fragmented": (SKY, "...."),
             "free": (LIGHT, "")}  # fmt: skip
    fig, panels = axes(PAGE_CM, 8.0, 1, 2, sharey=True)
    sizes = sorted(size for layout, size in found.index if layout == "paged")
    bars = ([((layout, 16), label) for layout, label in LAYOUTS.items()], [(("paged", size), str(size)) for size in sizes])
    for panel, keys in zip(panels, bars, strict=True):
        rows = found.loc[[key for key, _ in keys]]
        bottom = pd.Series(0.0, index=rows.index)
        for part, label in PARTS.items():
            color, hatch = looks[part]
            panel.bar(range(len(rows)), rows[part], bottom=bottom, color=color, hatch=hatch, edgecolor=BLACK, linewidth=0.4, width=0.65,
                      label=label)  # fmt: skip
            bottom = bottom + rows[part]
        panel.set_xticks(range(len(keys)), [label for _, label in keys])
        panel.grid(visible=False, axis="x")
    panels[0].plot(range(4), [PAPER[layout] for layout in LAYOUTS], color=BLACK, marker="D", markersize=5, markerfacecolor="white",
                   linestyle="none", label="useful in Kwon et al., figure 2\n(other trace and rate)")  # fmt: skip
    panels[0].set_title("(a) layouts, blocks of 16 tokens")
    panels[1].set_title("(b) paged, by block size")
    panels[1].set_xlabel("block size (tokens)")
    panels[0].set_ylabel("share of the pool (%)")
    panels[0].set_ylim(0, 100.5)
    legend_above(fig, 3, panels[0].get_legend_handles_labels()[0])
    return fig


def table(results: pd.DataFrame) -> pd.DataFrame:
    """Medians of the seeds by layout and block size."""
    return pd.DataFrame([
        {"layout": layout, "block size": size, "running": round(row["num_running"], 1),
         **{label + " (%)": round(row[part], 1) for part, label in PARTS.items()},
         "useful in the paper (%)": PAPER[layout] if size == 16 else "-", "output tokens/s": round(row["output_token_throughput_per_s"]),
         "recomputed (%)": round(row["recomputed"], 1)}
        for (layout, size), row in medians(results).iterrows()
    ])  # fmt: skip


FIGURE = FigureSpec(number="F3", title="Where the memory goes, by layout and block size", draw=draw, measure=measure, table=table,
                    keep=("output_token_throughput_per_s", "num_preemptions", "recomputed_tokens"))  # fmt: skip
