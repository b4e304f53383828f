"""kvlab's simulator beside Vidur (MLSys 2024) on the same lengths: requests that all arrive at once, at most 128 running.

    pip install vidur             (in an environment of its own, Python 3.11)
    VIDUR_PYTHON=THAT_PYTHON python experiments/bench/bench_vs_vidur.py

Vidur's profiles of devices are not in its package, so its tables of predicted times hold a constant here; how it looks them up, its
events, scheduler and metrics are its own, and neither the training of its forests nor its plots and traces are counted. kvlab hashes
prefixes, makes token ids and records every step into a folder, which Vidur does not. Times are of the processor (user and system), without
imports. Goal: 5 times Vidur's tokens a second.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

NUM_REQUESTS, PROMPT_LEN, OUTPUT_LEN, MAX_RUNNING = 512, 256, 512, 128


def run_vidur() -> None:
    """In Vidur's environment: print seconds as JSON."""
    from collections import defaultdict

    from vidur.config import config as c
    from vidur.execution_time_predictor import ExecutionTimePredictorRegistry
    from vidur.execution_time_predictor.random_forrest_execution_time_predictor import RandomForrestExecutionTimePredictor
    from vidur.simulator import Simulator
    from vidur.types import ExecutionTimePredictorType

    class ConstantTables(RandomForrestExecutionTimePredictor):  # type: ignore[misc]
        """Every kernel takes 0.01 ms."""

        def _load_predictions_from_hf(self) -> object:
            return defaultdict(lambda: defaultdict(lambda: 0.01))

    ExecutionTimePredictorRegistry.unregister(ExecutionTimePredictorType.RANDOM_FORREST)
    ExecutionTimePredictorRegistry.register(ExecutionTimePredictorType.RANDOM_FORREST, ConstantTables)
    lengths = c.FixedRequestLengthGeneratorConfig(max_tokens=4096, prefill_tokens=PROMPT_LEN, decode_tokens=OUTPUT_LEN)
    config = c.SimulationConfig(
        log_level="warning",
        cluster_config=c.ClusterConfig(
            replica_config=c.ReplicaConfig(num_pipeline_stages=1, tensor_parallel_size=1), cache_config=c.CacheConfig(num_blocks=25_000),
            replica_scheduler_config=c.VllmSchedulerConfig(batch_size_cap=MAX_RUNNING, max_tokens_in_batch=4096)),
        request_generator_config=c.SyntheticRequestGeneratorConfig(
            length_generator_config=lengths, interval_generator_config=c.StaticRequestIntervalGeneratorConfig(), num_requests=NUM_REQUESTS),
        metrics_config=c.MetricsConfig(enable_chrome_trace=False, store_plots=False, output_dir=tempfile.mkdtemp()),
    )  # fmt: skip
    start = time.process_time()
    simulator = Simulator(config)
    simulator.run()
    print(json.dumps({"cpu_s": time.process_time() - start, "simulated_s": simulator._time}))


def run_kvlab() -> dict[str, float]:
    """The same lengths here, recorded into a folder."""
    from bench_simulator import simulate

    with tempfile.TemporaryDirectory() as folder:
        return simulate(NUM_REQUESTS, PROMPT_LEN, OUTPUT_LEN, MAX_RUNNING, Path(folder), all_at_once=True)


def main() -> None:
    """Print one JSON line."""
    python = os.environ.get("VIDUR_PYTHON")
    ours = run_kvlab()
    tokens = NUM_REQUESTS * OUTPUT_LEN
    line: dict[str, object] = {"output_tokens": tokens, "kvlab_tokens_per_cpu_s": round(tokens / ours["cpu_s"])}
    if python is None:
        line["vidur"] = "not measured: set VIDUR_PYTHON to a Python that has vidur"
    else:
        done = subprocess.run([python, __file__, "vidur"], capture_output=True, text=True)
        if done.returncode:
            raise SystemExit(done.stderr)
        theirs = json.loads(done.stdout.splitlines()[-1])
        line |= {"vidur_tokens_per_cpu_s": round(tokens / theirs["cpu_s"]), "ratio": round(theirs["cpu_s"] / ours["cpu_s"], 2)}
    print(json.dumps(line))


if __name__ == "__main__":
    run_vidur() if sys.argv[1:] == ["vidur"] else main()
