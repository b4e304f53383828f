"""Speed and memory of the simulator: real scheduler, cache and recorder, no model.

    python experiments/bench/bench_simulator.py [speed] [azure] [memory]

speed: 128 requests running at a time, 128 tokens in, 512 out, recorded into a folder. Goal: a million simulated output tokens a minute.
azure: the first 2,000 requests of the Azure 2023 conversation trace at their lengths (KVLAB_TRACES=FOLDER). Goal: under 30 s.
memory: 10,000, 30,000 and 100,000 short requests, each in a process of its own: peak resident memory, and what is alive at the end. Goal:
bounded, so nearly the same for all.
Decisions: one a sequence and step, so the floor is the number of scheduled sequences.
"""

from __future__ import annotations

import gc
import json
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from kvlab.engine import Engine, EngineConfig, PolicySet
from kvlab.engine.clock import VirtualClock
from kvlab.engine.cost import ModelShape, Roofline
from kvlab.engine.driver import drive
from kvlab.engine.runners.simulated import SimulatedRunner
from kvlab.trace import Recorder
from kvlab.types import UserError
from kvlab.workload.azure import AzureWorkload
from kvlab.workload.base import Workload, WorkloadContext
from kvlab.workload.synthetic import SyntheticWorkload

LLAMA3_8B = ModelShape(6_979_588_096, 525_336_576, 2, 32, 131_072, 4 * 32 * 32 * 128, 131_072 * 16)
VOCAB, MAX_LEN = 128_256, 16_384


def serve(workload: Workload, folder: Path | None, max_running: int = 256, policies: PolicySet | None = None, max_batched: int = 2048,
          ) -> dict[str, float]:  # fmt: skip
    """Run a workload to its end, recorded into `folder` (None: in memory); the default policies unless others are given."""
    cost = Roofline()
    cost.bind(LLAMA3_8B)
    start, cpu_start = time.perf_counter(), time.process_time()
    workload.start(WorkloadContext(None, VOCAB, MAX_LEN, 0))
    with Recorder(folder) as recorder:
        config = EngineConfig(num_blocks=25_000, max_model_len=MAX_LEN, max_num_seqs=max_running, max_num_batched_tokens=max_batched)
        engine = Engine(config, policies or PolicySet(), SimulatedRunner(VOCAB, cost), VirtualClock(), listeners=[recorder])  # fmt: skip
        drive(engine, workload)
    wall_s, cpu_s = time.perf_counter() - start, time.process_time() - cpu_start
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss  # before frames are read
    gc.collect()
    alive = len(gc.get_objects())
    steps = recorder.steps()
    num_output = int(steps["num_output_tokens"].sum())
    return {
        "steps": len(steps), "mean_running": round(float(steps["num_running_reqs"].mean()), 1),
        "wall_s": round(wall_s, 2), "cpu_s": round(cpu_s, 3),
        "scheduled_seqs": int(steps["num_scheduled_seqs"].sum()), "output_tokens": num_output,
        "output_tokens_per_wall_s": round(num_output / wall_s),
        "million_output_tokens_per_wall_min": round(num_output * 60 / wall_s / 1e6, 2),
        "million_output_tokens_per_cpu_min": round(num_output * 60 / cpu_s / 1e6, 2),
        "engine_share": round(float(steps[["schedule_ms", "commit_ms"]].sum().sum()) / 1e3 / wall_s, 2),
        "peak_rss_mib": peak // 1024, "live_objects": alive,
    }  # fmt: skip


def simulate(num_requests: int, prompt_len: int, output_len: int, max_running: int, folder: Path | None,
             all_at_once: bool = False, policies: PolicySet | None = None, max_batched: int = 2048) -> dict[str, float]:  # fmt: skip
    """Fixed lengths: closed loop of `max_running`, or all at once with at most so many running."""
    concurrency = None if all_at_once else max_running
    workload = SyntheticWorkload(num_requests, prompt_len, output_len, concurrency=concurrency)
    return serve(workload, folder, max_running, policies, max_batched)


def run_in(name: str, folder: Path) -> dict[str, float]:
    """One of the benchmarks: "speed", "azure" or a number of requests."""
    if name == "speed":
        return simulate(1024, 128, 512, 128, folder)
    if name == "azure":
        return serve(AzureWorkload("azure_2023_conv", limit=2000, length_scale=1), folder)
    return simulate(int(name), 32, 8, 128, folder)


def main(arguments: list[str]) -> None:
    """Print one JSON line a benchmark, each measured in a process of its own."""
    for name in arguments or ["speed", "azure", "memory"]:
        if name == "memory":
            for number in ("10000", "30000", "100000"):
                subprocess.run([sys.executable, __file__, number], check=True)
        elif len(arguments) != 1:
            subprocess.run([sys.executable, __file__, name], check=True)
        else:
            with tempfile.TemporaryDirectory() as folder:
                try:
                    print(json.dumps({"what": name, **run_in(name, Path(folder))}), flush=True)
                except UserError as error:
                    print(json.dumps({"what": name, "not_measured": str(error)}), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
