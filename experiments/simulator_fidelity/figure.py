"""Simulated against real TTFT, TPOT and E2EL of SmolLM2 on a CPU; the cost model is fitted on the first real run alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pandas as pd

from kvlab.figures import FigureSpec

FIGURES = {"mean_ttft_ms": "TTFT", "mean_tpot_ms": "TPOT", "mean_e2el_ms": "E2EL"}
KEYS = ["max_num_batched_tokens", "concurrency"]


def collect(runs: list[Any]) -> pd.DataFrame:
    """One row a real run: its figures, and those of its simulation with a cost model that was fitted on the first run of all."""
    import kvlab

    rows = []
    for number, run in enumerate(runs):
        simulated = kvlab.compose("runner=simulated", "runner.tokenizer=true", "cost_model=fitted", f"cost_model.run={runs[0].folder}")
        config = {**run.config, "runner": simulated["runner"], "cost_model": simulated["cost_model"]}
        found = kvlab.run(config, folder=Path(runs[0].folder).parent / f"simulated-{number}", progress=False).summary
        if (found["num_steps"], found["num_output_tokens"]) != (run.summary["num_steps"], run.summary["num_output_tokens"]):
            raise AssertionError("the simulator decided otherwise than the real run")
        rows.append({
            "repetition": run.config["seed"], "max_num_batched_tokens": run.config["max_num_batched_tokens"],
            "concurrency": run.config["workload"]["concurrency"], "fitted": number == 0, "num_steps": found["num_steps"],
            "num_output_tokens": found["num_output_tokens"], **{f"real_{key}": run.summary[key] for key in FIGURES},
            **{f"simulated_{key}": found[key] for key in FIGURES},
        })  # fmt: skip
    return pd.DataFrame(rows)


def errors(results: pd.DataFrame) -> pd.DataFrame:
    """By configuration: error (%) of the simulation against the mean of the real runs, and how far these lie apart from it (half their
    range, %)."""
    out = {}
    for key in FIGURES:
        groups = results.groupby(KEYS)
        real = groups[f"real_{key}"].agg(["mean", "min", "max"])
        out[f"error_{key}"] = 100 * (groups[f"simulated_{key}"].mean() / real["mean"] - 1)
        out[f"noise_{key}"] = 100 * (real["max"] - real["min"]) / 2 / real["mean"]
    return pd.DataFrame(out)


def fitted_on(results: pd.DataFrame) -> tuple[int, int]:
    """The configuration that the cost model saw."""
    row = results[results["fitted"]].iloc[0]
    return int(row["max_num_batched_tokens"]), int(row["concurrency"])


def draw(results: pd.DataFrame) -> Any:
    """Errors by configuration; bars: how far two runs of the same configuration differ on this machine."""
    from kvlab.figures.style import BLACK, COLUMN_CM, axes, legend_above, line

    found, seen = errors(results), fitted_on(results)
    order = [seen, *(key for key in found.index if key != seen)]
    fig, (panel,) = axes(COLUMN_CM, 7.0)
    for number, (key, label) in enumerate(FIGURES.items()):
        places = [place + 0.22 * (number - 1) for place in range(len(order))]
        look = line(number, linestyle="none", markersize=5, capsize=2.5)
        panel.errorbar(places, found.loc[order, f"error_{key}"], yerr=found.loc[order, f"noise_{key}"], **look, label=f"mean {label}")
    panel.axhline(0, color=BLACK, linewidth=0.6)
    panel.axvline(0.5, color=BLACK, linewidth=0.6, linestyle=":")
    labels = [f"{budget:,}\n{concurrency} at a time" for budget, concurrency in order]
    panel.set_xticks(range(len(order)), [f"{labels[0]}\n(fitted on it)", *labels[1:]])
    panel.set_xlabel("tokens a step, requests at a time")
    panel.grid(visible=False, axis="x")
    panel.set_ylabel("simulated / real - 1 (%)")
    legend_above(fig, 3, panel.get_legend_handles_labels()[0])
    return fig


def table(results: pd.DataFrame) -> pd.DataFrame:
    """Errors, and half the range of the repeated real runs in brackets (%)."""
    found, seen = errors(results), fitted_on(results)
    return pd.DataFrame([
        {"tokens a step": budget, "at a time": concurrency, "seen": "fitted on it" if (budget, concurrency) == seen else "held out",
         **{f"mean {label}": f"{row[f'error_{key}']:+.1f} % (±{row[f'noise_{key}']:.1f})" for key, label in FIGURES.items()}}
        for (budget, concurrency), row in found.iterrows()
    ])  # fmt: skip


CLOCK = tuple(f"{kind}_{key}" for kind in ("real", "simulated") for key in FIGURES)
FIGURE = FigureSpec(
    number="F11",
    title="Simulator against real runs: error of TTFT, TPOT and E2EL",
    collect=collect,
    draw=draw,
    table=table,
    measured=CLOCK,
)
