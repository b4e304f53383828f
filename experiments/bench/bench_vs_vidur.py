"""kvlab's simulator beside Vidur (MLSys 2024) on the same lengths: requests that all arrive at once, at most 128 running.

    pip install vidur             (in an environment of its own, Python 3.11)
    VIDUR_PYTHON=THAT_PYTHON python experiments/bench/bench_vs_vidur.py

Vidur's profiles of devices are not in its package, so its predictor of step times is replaced by a constant here: that leaves its
events, scheduler and metrics, less than it really does. Plots and traces are off. kvlab runs with a roofline, prefix hashing and recording into a folder: more than Vidur
does. Neither side's imports are counted. Goal: at least 5 times Vidur's tokens a second.
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
    from vidur._native.entities import ExecutionTime
    from vidur.config import config as c
    from vidur.execution_time_predictor import ExecutionTimePredictorRegistry
    from vidur.simulator import Simulator
    from vidur.types import ExecutionTimePredictorType

    class ConstantTime:
        """A step of 1 ms, whatever is in it."""

        def __init__(self, **_: object) -> None:
            self.time = ExecutionTime(32, *([0.0] * 8), 1 / 32, *([0.0] * 5))

        def get_execution_time(self, batch: object, stage: int) -> object:
            return self.time

    ExecutionTimePredictorRegistry.unregister(ExecutionTimePredictorType.RANDOM_FORREST)
    ExecutionTimePredictorRegistry.register(ExecutionTimePredictorType.RANDOM_FORREST, ConstantTime)
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
    start = time.perf_counter()
    simulator = Simulator(config)
    simulator.run()
    print(json.dumps({"wall_s": time.perf_counter() - start, "simulated_s": simulator._time}))


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
    line: dict[str, object] = {"output_tokens": tokens, "kvlab_tokens_per_wall_s": round(tokens / ours["wall_s"])}
    if python is None:
        line["vidur"] = "not measured: set VIDUR_PYTHON to a Python that has vidur"
    else:
        done = subprocess.run([python, __file__, "vidur"], capture_output=True, text=True)
        if done.returncode:
            raise SystemExit(done.stderr)
        theirs = json.loads(done.stdout.splitlines()[-1])
        line |= {"vidur_tokens_per_wall_s": round(tokens / theirs["wall_s"]), "ratio": round(theirs["wall_s"] / ours["wall_s"], 2)}
    print(json.dumps(line))


if __name__ == "__main__":
    run_vidur() if sys.argv[1:] == ["vidur"] else main()
