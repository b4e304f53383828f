"""kvlab's simulator beside Vidur (MLSys 2024) on the same lengths: requests that all arrive at once, at most 128 running.

    pip install vidur             (in an environment of its own, Python 3.11)
    VIDUR_PYTHON=THAT_PYTHON python experiments/bench/bench_vs_vidur.py

Vidur's profiles of devices are not in its package, so its tables of predicted times hold a constant here; how it looks them up, its
events, scheduler and metrics are its own, and neither the training of its forests nor its plots and traces are counted. Vidur has no
prefix cache, so kvlab runs with prefix_cache=none here. kvlab makes token ids and keeps every step and request with the times of its
tokens: in a folder of files (`ratio`), or in memory (`ratio_in_memory`); Vidur keeps sketches of its metrics and writes those. Both: chunks
of at most 4,096 tokens a step, blocks of 16. Times are of the processor (user and system), without imports (what they left is out of the
garbage collector's sight), in a process of their own each. Ratios: median, least and most of turns; other work on the machine moves times
by a half. Goal: 5 times Vidur's tokens a second.
"""

from __future__ import annotations

import gc
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

NUM_REQUESTS, PROMPT_LEN, OUTPUT_LEN, MAX_RUNNING, MAX_BATCHED = 1024, 256, 512, 128, 4096
NUM_TURNS = 7


def keep_imports() -> None:
    """What is alive now is not walked through again: a hundred milliseconds that depend on what was imported."""
    gc.collect()
    gc.freeze()


def run_vidur() -> float:
    """In Vidur's environment: seconds."""
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
            replica_scheduler_config=c.VllmSchedulerConfig(batch_size_cap=MAX_RUNNING, max_tokens_in_batch=MAX_BATCHED)),
        request_generator_config=c.SyntheticRequestGeneratorConfig(
            length_generator_config=lengths, interval_generator_config=c.StaticRequestIntervalGeneratorConfig(), num_requests=NUM_REQUESTS),
        metrics_config=c.MetricsConfig(enable_chrome_trace=False, store_plots=False, output_dir=tempfile.mkdtemp()),
    )  # fmt: skip
    keep_imports()
    start = time.process_time()
    simulator = Simulator(config)
    simulator.run()
    return time.process_time() - start


def run_kvlab(in_memory: bool = False) -> float:
    """The same lengths here: seconds."""
    from bench_simulator import simulate

    from kvlab.engine import PolicySet
    from kvlab.policies.prefix_cache import NoCache

    with tempfile.TemporaryDirectory() as folder:
        keep_imports()
        return simulate(NUM_REQUESTS, PROMPT_LEN, OUTPUT_LEN, MAX_RUNNING, None if in_memory else Path(folder), True,
                        policies=PolicySet(prefix_cache=NoCache()), max_batched=MAX_BATCHED)["cpu_s"]  # fmt: skip


def seconds(python: str, name: str) -> float:
    """One measurement."""
    done = subprocess.run([python, __file__, name], capture_output=True, encoding="utf-8")
    if done.returncode:
        raise SystemExit(done.stderr)
    return float(done.stdout.splitlines()[-1])


def main() -> None:
    """Print one JSON line."""
    vidur, tokens = os.environ.get("VIDUR_PYTHON"), NUM_REQUESTS * OUTPUT_LEN
    took: dict[str, list[float]] = {"kvlab": [], "in_memory": [], "vidur": []}
    for _ in range(NUM_TURNS):
        for name, of_name in took.items():
            python = vidur if name == "vidur" else sys.executable
            if python is not None:
                of_name.append(seconds(python, name))
    line: dict[str, object] = {"output_tokens": tokens} | {
        f"{name}_tokens_per_cpu_s": round(tokens / statistics.median(of_name)) for name, of_name in took.items() if of_name}  # fmt: skip
    for key, name in (("ratio", "kvlab"), ("ratio_in_memory", "in_memory")):
        ratios = [theirs / ours for theirs, ours in zip(took["vidur"], took[name], strict=False)]
        figures = [round(of(ratios), 2) for of in (statistics.median, min, max)] if ratios else None
        line[key] = figures or "not measured: set VIDUR_PYTHON to a Python that has vidur"
    print(json.dumps(line))


if __name__ == "__main__":
    runs = {"vidur": run_vidur, "kvlab": run_kvlab, "in_memory": lambda: run_kvlab(in_memory=True)}
    print(runs[sys.argv[1]]()) if sys.argv[1:] else main()
