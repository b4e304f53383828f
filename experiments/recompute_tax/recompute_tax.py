"""Recompute tax by victim: what share of all computed tokens had been computed before, when a request gave way.

    python experiments/recompute_tax/recompute_tax.py          # table and figure.svg from the committed recompute_tax.csv
    python experiments/recompute_tax/recompute_tax.py --run    # simulate again first (about ten minutes on one core)

Drawing needs the package kaleido and a Chromium (BROWSER_PATH names it); without them the table is printed all the same.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

import pandas as pd

import kvlab
from kvlab.analysis.template import BLUE, ORANGE, figure

HERE = Path(__file__).parent
VICTIMS = ("least_computed", "cost_aware", "lifo", "random", "most_blocks", "most_computed")
CACHES = ("none", "hash")
SEEDS = range(7)

SETTING = (
    "runner=simulated", "model=dummy_llama3_8b", "cost_model=h100", "workload=synthetic", "workload.num_requests=120",
    "workload.arrivals={kind: all_at_once}", "workload.prompt_len={kind: uniform, min: 64, max: 1024}",
    "workload.output_len={kind: uniform, min: 64, max: 512}", "num_blocks=720", "block_size=16", "max_num_seqs=256",
    "max_num_batched_tokens=2048", "max_model_len=8192", "admission=full_sequence", "batching=chunked", "scheduling=fcfs",
    "preemption/mode=recompute", "preemption.protect_oldest=false",
)  # fmt: skip
"""Heterogeneous lengths, all there at the start, in a pool that holds a sixth of what they come to. The oldest is not protected: what is
compared is the victim alone."""


def simulate() -> pd.DataFrame:
    """One row a run."""
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        for cache in CACHES:
            for victim in VICTIMS:
                for seed in SEEDS:
                    config = kvlab.compose(*SETTING, f"preemption={victim}", f"prefix_cache={cache}", f"seed={seed}")
                    run = kvlab.run(config, folder=f"{folder}/{cache}-{victim}-{seed}", progress=False)
                    num_computed = int(run.requests()["num_computed_tokens"].sum())
                    rows.append({
                        "prefix_cache": cache, "victim": victim, "seed": seed, "num_preemptions": run.summary["num_preemptions"],
                        "recomputed_tokens": run.summary["recomputed_tokens"], "computed_tokens": num_computed,
                        "duration_s": round(run.summary["duration_s"], 3),
                    })  # fmt: skip
                print(cache, victim, flush=True)
    return pd.DataFrame(rows)


def table(runs: pd.DataFrame) -> pd.DataFrame:
    """Medians over the seeds: tax (fraction), its range, preemptions, recomputed tokens for each, duration (s)."""
    runs = runs.assign(
        tax=runs["recomputed_tokens"] / runs["computed_tokens"],
        tokens_per_preemption=runs["recomputed_tokens"] / runs["num_preemptions"],
    )
    groups = runs.groupby(["prefix_cache", "victim"])
    out = groups[["tax", "num_preemptions", "tokens_per_preemption", "duration_s"]].median()
    out.insert(1, "tax_low", groups["tax"].min())
    out.insert(2, "tax_high", groups["tax"].max())
    return out.reindex([(cache, victim) for cache in CACHES for victim in VICTIMS])


def draw(medians: pd.DataFrame, path: Path) -> None:
    """Bars of the median tax, with the range over the seeds."""
    fig = figure("", 420)
    for cache, name, color in (("none", "no prefix cache", BLUE), ("hash", "prefix cache", ORANGE)):
        part = medians.loc[cache]
        fig.add_bar(
            x=list(part.index), y=100 * part["tax"], name=name, marker_color=color,
            error_y={"type": "data", "array": 100 * (part["tax_high"] - part["tax"]), "arrayminus": 100 * (part["tax"] - part["tax_low"])},
        )  # fmt: skip
    fig.update_xaxes(title_text="who gives way")
    fig.update_yaxes(title_text="recomputed tokens (% of all computed)", rangemode="tozero")
    fig.update_layout(width=900, margin={"t": 40})
    fig.write_image(path)


if __name__ == "__main__":
    if "--run" in sys.argv:
        simulate().to_csv(HERE / "recompute_tax.csv", index=False)
    found = table(pd.read_csv(HERE / "recompute_tax.csv"))
    print(found.round(3).to_string())
    draw(found, HERE / "figure.svg")
