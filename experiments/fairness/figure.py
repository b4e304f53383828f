"""Service that two tenants receive over time, first come first served and by virtual token counters."""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd

from kvlab.figures import FigureSpec

BIN_S = 1.0
INPUT_WEIGHT, OUTPUT_WEIGHT = 1.0, 2.0
"""Service of a token, as in the VTC paper."""
NAMES = {"fcfs": "(a) first come first served", "vtc": "(b) virtual token counters (VTC)"}


def measure(run: Any) -> pd.DataFrame:
    """One row a tenant and second: service received (weighted tokens) until its end, while requests still arrive."""
    requests = run.requests(("tenant", "arrival_s", "token_times_s", "num_prompt_tokens"))
    edges = np.arange(0.0, requests["arrival_s"].max() + BIN_S, BIN_S)
    rows = []
    for tenant, group in requests.groupby("tenant", sort=True):
        first = np.array([times[0] for times in group["token_times_s"]])
        prompts = np.histogram(first, edges, weights=INPUT_WEIGHT * group["num_prompt_tokens"])[0]
        outputs = np.histogram(np.concatenate(list(group["token_times_s"])), edges)[0] * OUTPUT_WEIGHT
        asked = np.histogram(group["arrival_s"], edges)[0]
        columns = {"tenant": tenant, "time_s": edges[1:], "service": np.cumsum(prompts + outputs), "arrived": np.cumsum(asked)}
        rows.append(pd.DataFrame(columns))
    return pd.concat(rows, ignore_index=True)


def draw(results: pd.DataFrame) -> Any:
    """Accumulated service of both tenants under each scheduler, and its difference."""
    from kvlab.figures.style import PAGE_CM, axes, legend_above, line

    fig, panels = axes(PAGE_CM, 6.5, 1, 3, width_ratios=(1, 1, 1))
    for panel, (scheduling, title) in zip(panels, NAMES.items(), strict=False):
        part = results[results["scheduling"] == scheduling]
        for number, (tenant, label) in enumerate((("heavy", "tenant with 75 % of the requests"), ("light", "tenant with 25 %"))):
            own = part[part["tenant"] == tenant]
            panel.plot(own["time_s"], own["service"] / 1e3, **line(number, markevery=8), label=label)
        panel.set_title(title)
        panel.set_ylabel("service (1,000 weighted tokens)")
    for number, (scheduling, _) in enumerate(NAMES.items()):
        both = results[results["scheduling"] == scheduling].pivot(index="time_s", columns="tenant", values="service")
        panels[2].plot(both.index, (both["heavy"] - both["light"]) / 1e3, **line(number + 2, markevery=8), label=scheduling)
    panels[2].set_title("(c) heavy minus light")
    panels[2].set_ylabel("difference (1,000 tokens)")
    panels[2].legend(loc="upper left")
    for panel in panels:
        panel.set_xlabel("time (s, simulated)")
        panel.set_ylim(bottom=0)
    panels[1].set_ylim(panels[0].get_ylim())
    legend_above(fig, 2, panels[0].get_legend_handles_labels()[0])
    return fig


def table(results: pd.DataFrame) -> pd.DataFrame:
    """Service when the last request arrives."""
    rows = []
    for scheduling in NAMES:
        both = results[results["scheduling"] == scheduling].pivot(index="time_s", columns="tenant", values="service")
        end = both.iloc[-1]
        rows.append({
            "scheduling": scheduling, "heavy (1,000 tokens)": round(end["heavy"] / 1e3), "light (1,000 tokens)": round(end["light"] / 1e3),
            "heavy / light": round(end["heavy"] / end["light"], 2),
            "largest difference (1,000 tokens)": round((both["heavy"] - both["light"]).abs().max() / 1e3, 1),
        })  # fmt: skip
    return pd.DataFrame(rows)


FIGURE = FigureSpec(number="F8", title="Service received by two tenants, fcfs against vtc", draw=draw, measure=measure, table=table)
