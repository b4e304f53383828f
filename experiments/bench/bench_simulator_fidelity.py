"""A fitted cost model against reality: a real run of SmolLM2 is recorded and fitted, and another workload is both run and simulated.

    python experiments/bench/bench_simulator_fidelity.py

The first workload is run twice, before and after the second: how far these two are apart (`drift`) is what the machine alone does to a
figure, and no simulator can be held to less. Errors are simulated / real - 1.
"""

from __future__ import annotations

import json
import tempfile
from pathlib import Path

import kvlab

COMMON = ("workload=chat", "workload.limit=32", "workload.sampling.max_tokens=16", "workload.sampling.ignore_eos=true")
FIRST = (*COMMON, "workload.concurrency=5")
SECOND = (*COMMON, "workload.concurrency=3", "max_num_batched_tokens=64")
FIGURES = ("output_token_throughput_per_s", "mean_ttft_ms", "median_ttft_ms", "mean_tpot_ms", "mean_e2el_ms")


def differences(run: kvlab.Run, real: kvlab.Run) -> dict[str, float]:
    """Figure by figure, relative to the real run."""
    return {name: round(run.summary[name] / real.summary[name] - 1, 3) for name in FIGURES}


def main() -> None:
    """Print one JSON line."""
    with tempfile.TemporaryDirectory() as folder:
        runs = [kvlab.run(kvlab.compose(*overrides), folder=Path(folder) / name, progress=False)
                for name, overrides in (("before", FIRST), ("other", SECOND), ("after", FIRST))]  # fmt: skip
        fitted = ("runner=simulated", "runner.tokenizer=true", "cost_model=fitted", f"cost_model.run={runs[0].folder}")
        same, other = (kvlab.run(kvlab.compose(*overrides, *fitted), folder=Path(folder) / name, progress=False)
                       for name, overrides in (("same", FIRST), ("unseen", SECOND)))  # fmt: skip
        print(json.dumps({
            "held_out_mape": round(other.summary["step_cost"]["held_out"]["mape"], 3), "same_workload": differences(same, runs[0]),
            "unseen_workload": differences(other, runs[1]), "drift": differences(runs[2], runs[0]),
            "extrapolated_steps": round(other.summary["step_cost"]["extrapolated_steps"], 3),
        }))  # fmt: skip


if __name__ == "__main__":
    main()
