"""Preemptions against the admission watermark: the measurement of vLLM's pull request 44594 in simulation, nothing fitted.

    python experiments/watermark_curve/watermark_curve.py          # table and figure.svg from the committed watermark_curve.csv
    python experiments/watermark_curve/watermark_curve.py --run    # simulate again first (about twenty minutes on two cores)

Drawing needs the package kaleido and a Chromium (BROWSER_PATH names it); without them the table is printed all the same.
"""

from __future__ import annotations

import sys
import tempfile
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import pandas as pd

import kvlab
from kvlab.analysis.template import BLACK, BLUE, ORANGE, figure

HERE = Path(__file__).parent
MEASURED = {0.0: 1065, 0.02: 400, 0.05: 187, 0.10: 168, 0.15: 168}
"""Watermark -> preemptions that the pull request reports for vLLM on a GPU."""
SEEDS = range(5)
BUDGETS = (8192, 2048)
"""Tokens a step. The pull request doesn't say; 8192 is assumed, 2048 shown beside it."""

SETTING = (
    "runner=simulated", "model=dummy_llama3_8b", "cost_model=h100", "workload=synthetic", "workload.num_requests=450",
    "workload.concurrency=128", "workload.arrivals={kind: all_at_once}", "workload.prompt_len={kind: uniform, min: 800, max: 1200}",
    "workload.output_len={kind: uniform, min: 4000, max: 6000}", "workload.ignore_eos=true", "block_size=16", "num_blocks=18724",
    "max_num_seqs=256", "max_model_len=8192", "scheduling=fcfs", "batching=chunked", "admission=watermark", "preemption=lifo",
    "preemption/mode=recompute", "prefix_cache=none",
)  # fmt: skip
"""299,584 KV tokens, 450 requests in a closed loop of 128. The watermark is tested against the blocks of the first chunk."""


def simulate_one(point: tuple[int, float, int]) -> dict[str, Any]:
    """One run: (token budget, watermark, seed) -> a row."""
    budget, watermark, seed = point
    with tempfile.TemporaryDirectory() as folder:
        config = kvlab.compose(*SETTING, f"max_num_batched_tokens={budget}", f"watermark={watermark}", f"seed={seed}")
        summary = kvlab.run(config, folder=Path(folder) / "run", progress=False).summary
    assert summary["num_finished"] == 450
    return {
        "max_num_batched_tokens": budget, "watermark": watermark, "seed": seed, "num_preemptions": summary["num_preemptions"],
        "recomputed_tokens": summary["recomputed_tokens"], "num_output_tokens": summary["num_output_tokens"],
        "mean_running_reqs": round(summary["mean_running_reqs"], 3), "mean_kv_cache_usage": round(summary["mean_kv_cache_usage"], 5),
    }  # fmt: skip


def simulate() -> pd.DataFrame:
    """One row a run, in the order of the points."""
    points = [(budget, watermark, seed) for budget in BUDGETS for watermark in MEASURED for seed in SEEDS]
    rows = []
    with ProcessPoolExecutor(2) as pool:
        for row in pool.map(simulate_one, points):
            rows.append(row)
            print(row, flush=True)
    return pd.DataFrame(rows)


def table(runs: pd.DataFrame) -> pd.DataFrame:
    """Preemptions by budget and watermark: median and range over the seeds, what vLLM measured, and their ratio."""
    groups = runs.groupby(["max_num_batched_tokens", "watermark"])["num_preemptions"]
    out = groups.agg(["median", "min", "max"]).reindex([(b, w) for b in BUDGETS for w in MEASURED])
    out["vllm"] = [MEASURED[w] for _, w in out.index]
    out["ratio"] = out["median"] / out["vllm"]
    return out


def draw(medians: pd.DataFrame, path: Path) -> None:
    """Medians with the range over the seeds, and the measurement."""
    fig = figure("", 420)
    for budget, color, dash in ((8192, BLUE, "solid"), (2048, ORANGE, "dash")):
        part = medians.loc[budget]
        spread = {"type": "data", "array": part["max"] - part["median"], "arrayminus": part["median"] - part["min"]}
        fig.add_scatter(x=100 * part.index, y=part["median"], name=f"simulated, {budget:,} tokens a step (assumed)", mode="lines+markers",
                        line={"color": color, "dash": dash}, error_y=spread)  # fmt: skip
    fig.add_scatter(x=[100 * w for w in MEASURED], y=list(MEASURED.values()), name="measured on vLLM (pull request 44594)", mode="markers",
                    marker={"color": BLACK, "symbol": "x", "size": 10})  # fmt: skip
    fig.update_xaxes(title_text="watermark (% of the pool's blocks)")
    fig.update_yaxes(title_text="preemptions (logarithmic)", type="log", tickvals=[100, 150, 200, 300, 500, 1000, 2000, 3000])
    fig.update_layout(width=900, margin={"t": 40})
    fig.write_image(path)


if __name__ == "__main__":
    if "--run" in sys.argv:
        simulate().to_csv(HERE / "watermark_curve.csv", index=False)
    found = table(pd.read_csv(HERE / "watermark_curve.csv"))
    print(found.round(2).to_string())
    draw(found, HERE / "figure.svg")
