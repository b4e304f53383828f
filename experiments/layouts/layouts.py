"""Layouts at one memory size: how many requests run, where the memory goes, and what comes out per second.

    python experiments/layouts/layouts.py          # table from the committed layouts.csv
    python experiments/layouts/layouts.py --run    # simulate again first (about five minutes on one core)
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path
from typing import Any

import pandas as pd

import kvlab

HERE = Path(__file__).parent
LAYOUTS = {
    "contiguous_max": (), "contiguous_pow2": (), "contiguous_oracle": (), "paged": (),
    "ring": ("layout.n_parallel=256",),
}  # fmt: skip
SEEDS = range(5)
BLOCK_SIZE = 16
SETTING = (
    "runner=simulated", "model=dummy_llama3_8b", "cost_model=h100", "workload=synthetic", "workload.num_requests=400",
    "workload.arrivals={kind: all_at_once}", "workload.prompt_len={kind: lognormal, mean: 161, cv: 1.2, min: 4, max: 1024}",
    "workload.output_len={kind: lognormal, mean: 338, cv: 1.0, min: 2, max: 1024}", "kv_cache_tokens=32768", f"block_size={BLOCK_SIZE}",
    "max_model_len=2048", "max_num_seqs=256", "max_num_batched_tokens=2048", "prefix_cache=none", "admission=full_sequence",
    "preemption=lifo", "preemption/mode=recompute",
)  # fmt: skip
"""Lengths as ShareGPT's in the paper on paged attention (mean 161 in, 338 out), all there at the start; the pool holds 16 times the longest
sequence."""


def waste(steps: pd.DataFrame) -> dict[str, float]:
    """Means over time while somebody waits: requests running, and parts of the pool (%)."""
    busy = steps[steps["num_waiting_reqs"] > 0]
    weight = busy["step_ms"] / busy["step_ms"].sum()

    def mean(column: Any) -> float:
        return float((column * weight).sum())

    total = BLOCK_SIZE * busy["kv_blocks_total"]
    reserved = BLOCK_SIZE * busy["kv_blocks_reserved"]
    parts = {
        "tokens": busy["num_ctx_tokens"],
        "reserved": reserved,
        "partly_filled": busy["internal_fragmentation_tokens"] - reserved,
        "kept": BLOCK_SIZE * busy["kv_blocks_evictable"],
        "fragmented": BLOCK_SIZE * busy["external_fragmentation_blocks"],
        "free": BLOCK_SIZE * (busy["kv_blocks_free"] - busy["external_fragmentation_blocks"]),
    }
    shares = {f"{name}_percent": round(100 * mean(part / total), 2) for name, part in parts.items()}
    return {"num_running": round(mean(busy["num_running_reqs"]), 1), **shares}


def simulate() -> pd.DataFrame:
    """One row a run."""
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        for layout, more in LAYOUTS.items():
            for seed in SEEDS:
                config = kvlab.compose(*SETTING, f"layout={layout}", *more, f"seed={seed}")
                run = kvlab.run(config, folder=f"{folder}/{layout}-{seed}", progress=False)
                steps, requests = run.steps(), run.requests()
                num_again, num_computed = int(steps["recomputed_tokens"].sum()), int(requests["num_computed_tokens"].sum())
                rows.append({
                    "layout": layout, "seed": seed, **waste(steps),
                    "output_tokens_per_s": round(float(requests["num_output_tokens"].sum()) / run.summary["duration_s"], 1),
                    "num_preemptions": run.summary["num_preemptions"],
                    "recomputed_percent": round(100 * num_again / num_computed, 2),
                    "relocated_blocks": int(steps["relocated_blocks"].sum()),
                })  # fmt: skip
            print(layout, flush=True)
    return pd.DataFrame(rows)


def table(runs: pd.DataFrame) -> pd.DataFrame:
    """Medians over the seeds."""
    return runs.drop(columns="seed").groupby("layout").median().reindex(list(LAYOUTS))


def main(arguments: list[str]) -> None:
    """Simulate where asked, print the table."""
    path = HERE / "layouts.csv"
    if "--run" in arguments:
        simulate().to_csv(path, index=False)
    with pd.option_context("display.width", 200, "display.max_columns", 20):
        print(table(pd.read_csv(path)).T.to_string())


if __name__ == "__main__":
    main(sys.argv[1:])
