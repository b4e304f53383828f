"""Recompute tax by victim over the pool's size: what share of all computed tokens had been computed before, when a request gave way."""

from __future__ import annotations

from typing import Any

import pandas as pd

from kvlab.figures import FigureSpec

VICTIMS = ("least_computed", "lifo", "random", "most_computed")
RFC = {400: 78.8, 800: 57.9, 1600: 32.2, 2800: 0.0}
"""Blocks of 4,200 -> recompute tax (%) that vLLM's RFC 54644 reports for lifo. Its lengths are not given."""
CACHES = {"none": "(a) no prefix cache", "hash": "(b) prefix cache"}


def measure(run: Any) -> dict[str, Any]:
    """Computed tokens, for the tax."""
    return {"num_computed_tokens": int(run.requests(("num_computed_tokens",))["num_computed_tokens"].sum())}


def taxes(results: pd.DataFrame) -> pd.DataFrame:
    """By (prefix_cache, victim, num_blocks): median and range of the tax (%), median preemptions and tokens lost each time."""
    rows = results.assign(
        tax=100 * results["recomputed_tokens"] / results["num_computed_tokens"],
        lost=results["recomputed_tokens"] / results["num_preemptions"].where(results["num_preemptions"] > 0),
    )
    groups = rows.groupby(["prefix_cache", "preemption", "num_blocks"])
    out = groups["tax"].agg(["median", "min", "max"])
    return out.assign(num_preemptions=groups["num_preemptions"].median(), lost=groups["lost"].median())


def draw(results: pd.DataFrame) -> Any:
    """Two panels, without and with a prefix cache; a line each victim."""
    from kvlab.figures.style import BLACK, PAGE_CM, axes, legend_above, line

    found = taxes(results)
    fig, panels = axes(PAGE_CM, 7.0, 1, 2, sharey=True)
    for panel, (cache, title) in zip(panels, CACHES.items(), strict=True):
        for number, victim in enumerate(VICTIMS):
            part = found.loc[(cache, victim)]
            spread = [part["median"] - part["min"], part["max"] - part["median"]]
            panel.errorbar(part.index, part["median"], yerr=spread, **line(number), label=victim)
        panel.set_title(title)
        panel.set_xlabel("pool (blocks of 16 tokens; all need 4,200)")
        panel.set_xticks([400, 800, 1600, 2800, 4200], ["400", "800", "1,600", "2,800", "4,200"])
    panels[0].plot(list(RFC), list(RFC.values()), color=BLACK, marker="x", markersize=6, linestyle="none", zorder=5,
                   label="lifo in vLLM's RFC 54644 (other lengths)")  # fmt: skip
    panels[0].set_ylabel("recompute tax\n(% of all computed tokens)")
    panels[0].set_ylim(0, 100)
    legend_above(fig, 5, panels[0].get_legend_handles_labels()[0])
    return fig


def table(results: pd.DataFrame) -> pd.DataFrame:
    """Tax by victim and pool without a prefix cache, and with one at the smallest pool."""
    found = taxes(results)
    rows = []
    for victim in VICTIMS:
        part = found.loc[("none", victim)]
        sizes = {f"{n:,} blocks": f"{part.loc[n, 'median']:.1f} % ({part.loc[n, 'min']:.1f}-{part.loc[n, 'max']:.1f})" for n in part.index}
        lost, cached = part.loc[400, "lost"], found.loc[("hash", victim, 400), "median"]
        rows.append({"victim": victim, **sizes, "tokens lost each time, 400": f"{lost:.0f}", "with a prefix cache, 400": f"{cached:.1f} %"})
    theirs = {f"{n:,} blocks": f"{RFC[n]:.1f} %" if n in RFC else "-" for n in found.loc[("none", "lifo")].index}
    return pd.DataFrame([*rows, {"victim": "lifo, RFC 54644", **theirs}])


FIGURE = FigureSpec(
    number="F4",
    title="Recompute tax by victim over the pool's size",
    keep=("num_preemptions", "recomputed_tokens", "num_output_tokens", "duration_s"),
    measure=measure,
    draw=draw,
    table=table,
)
