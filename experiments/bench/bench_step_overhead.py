"""Host time of a step without the model: scheduling, cache bookkeeping, commit and recording, at 32 to 512 running sequences.

    python experiments/bench/bench_step_overhead.py

At both depths: at depth 1 a step takes off, lands and is planned while another is in flight. Floor: one pass over the running sequences.
Goal: at most 1 ms a step at 256, growing linearly. Medians of decode steps.
"""

from __future__ import annotations

import json
import statistics
import time

import numpy as np

from kvlab.engine import Engine, EngineConfig, PolicySet
from kvlab.engine.clock import VirtualClock
from kvlab.engine.runners.base import Ready
from kvlab.engine.runners.simulated import SimulatedRunner
from kvlab.trace.recorder import Recorder
from kvlab.types import Outcome, Plan, Request, SamplingParams
from kvlab.types.columns import Decodes, OneEach


class ConstantRunner(SimulatedRunner):
    """Token 7 for everyone: what is left is the engine."""

    def submit(self, plan: Plan) -> Ready:
        """One token a sequence, in columns where the plan is."""
        scheduled = plan.scheduled
        num = len(scheduled.seq_ids) if isinstance(scheduled, Decodes) else 0
        others = tuple((7,) if s.num_samples else () for s in (scheduled.rest if isinstance(scheduled, Decodes) else scheduled))
        return Ready(Outcome(plan.step, OneEach(np.full(num, 7), others) if num else others, execute_s=0.01))


def measure(num_seqs: int, depth: int, num_steps: int = 150) -> dict[str, float]:
    """Median milliseconds of decode steps with `num_seqs` running."""
    recorder = Recorder(None)
    engine = Engine(EngineConfig(num_blocks=num_seqs * 40, max_num_seqs=num_seqs, max_num_batched_tokens=10**6, depth=depth),
                    PolicySet(), ConstantRunner(), VirtualClock(), listeners=[recorder])  # fmt: skip
    for i in range(num_seqs):
        prompt = [i + 1, *range(200 + i % 16)]
        engine.add_request(Request(f"r{i}", prompt, SamplingParams(max_tokens=num_steps + 50, ignore_eos=True)))
    engine.step()
    parts: dict[str, list[float]] = {"schedule": [], "commit": [], "total": []}
    for _ in range(num_steps):
        start = time.perf_counter()
        stats = engine.step().stats
        parts["total"].append((time.perf_counter() - start) * 1e3)
        parts["schedule"].append(stats.schedule_ms)
        parts["commit"].append(stats.commit_ms)
    return {name: round(statistics.median(values), 4) for name, values in parts.items()}


if __name__ == "__main__":
    for n in (32, 64, 128, 256, 512):
        for depth in (0, 1):
            print(json.dumps({"num_seqs": n, "depth": depth, **measure(n, depth)}))
