"""Simulated serving of 2,000 requests of the Azure 2023 conversation trace at their real lengths.

    KVLAB_TRACES=FOLDER python experiments/bench/bench_simulator.py

Goal: under 30 s, memory bounded by the trace. Decisions: one a sequence and step, so the floor is the number of scheduled sequences.
"""

from __future__ import annotations

import json
import resource
import time

from kvlab.engine import Engine, EngineConfig, PolicySet
from kvlab.engine.clock import VirtualClock
from kvlab.engine.cost import ModelShape, Roofline
from kvlab.engine.driver import drive
from kvlab.engine.runners.simulated import SimulatedRunner
from kvlab.trace import Recorder
from kvlab.workload.azure import AzureWorkload
from kvlab.workload.base import WorkloadContext

LLAMA3_8B = ModelShape(6_979_588_096, 525_336_576, 2, 32, 131_072, 4 * 32 * 32 * 128, 131_072 * 16)


def main() -> None:
    """Print one JSON line."""
    cost = Roofline()
    cost.bind(LLAMA3_8B)
    recorder = Recorder(None)
    engine = Engine(EngineConfig(num_blocks=25_000, max_model_len=16_384), PolicySet(), SimulatedRunner(128_256, cost), VirtualClock(),
                    listeners=[recorder])  # fmt: skip
    workload = AzureWorkload("azure_2023_conv", limit=2000, length_scale=1)
    start = time.perf_counter()
    workload.start(WorkloadContext(None, 128_256, 16_384, 0))
    drive(engine, workload)
    wall_s = time.perf_counter() - start
    steps = recorder.steps()
    print(json.dumps({
        "requests": len(recorder.requests()), "steps": len(steps), "wall_s": round(wall_s, 2),
        "scheduled_seqs": int(steps["num_running_seqs"].sum()),
        "simulated_output_tokens_per_wall_s": round(steps["num_output_tokens"].sum() / wall_s),
        "engine_ms_share": round(float(steps[["schedule_ms", "commit_ms"]].sum().sum()) / 1e3 / wall_s, 2),
        "peak_rss_mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024,
    }))  # fmt: skip


if __name__ == "__main__":
    main()
