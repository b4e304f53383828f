"""Time of a step while many requests wait, for every scheduling policy.

    python experiments/bench/bench_waiting_queue.py [NUM_WAITING ...]

At most 64 run; whoever enters is replaced, so the queue keeps its length. Prompts of 64 to 191 tokens, half of which begin with one of 32
prompts of 64 tokens; 8 tenants, 4 priorities, outputs of 4 to 35 tokens; the default prefix cache and eviction. Both batching styles:
running requests first (chunked) and prompts first (prefill_first). Medians over steps of processor time, and ratios to fcfs with the same
batching in the same run.

Floor: who enters is looked at, and a few more find their places in the queue. Beyond it: one number for each that waits where all keys
change with time (hrrn: ten nanoseconds in a column, a microsecond in Python); one look at each where the whole queue is ordered (vtc, lpm,
dfs_weight). Goal: at most 10 ms a step at 8,000.
"""

from __future__ import annotations

import json
import random
import statistics
import sys
import time

from kvlab.engine import Engine, EngineConfig, PolicySet
from kvlab.engine.clock import VirtualClock
from kvlab.engine.runners.base import Ready
from kvlab.engine.runners.simulated import SimulatedRunner
from kvlab.policies import batching, scheduling
from kvlab.policies.base import BatchingPolicy, SchedulingPolicy
from kvlab.types import Outcome, Plan, Request, SamplingParams

MAX_RUNNING = 64


class ConstantRunner(SimulatedRunner):
    """Token 7 for everyone, in 10 ms: what is left is the engine."""

    def submit(self, plan: Plan) -> Ready:
        """One token a sequence."""
        return Ready(Outcome(plan.step, tuple((7,) if s.num_samples else () for s in plan.scheduled), execute_s=0.01))


class Requests:
    """An endless supply, the same for each policy."""

    def __init__(self) -> None:
        self._rng = random.Random(0)
        self._beginnings = [[self._rng.randrange(1000) for _ in range(64)] for _ in range(32)]
        self._num_made = 0

    def next(self, at_s: float) -> Request:
        """One that arrives at `at_s`."""
        rng, number = self._rng, self._num_made
        self._num_made += 1
        first = rng.choice(self._beginnings) if rng.random() < 0.5 else [rng.randrange(1000) for _ in range(64)]
        prompt = [*first, *(rng.randrange(1000) for _ in range(rng.randrange(128)))]
        sampling = SamplingParams(max_tokens=rng.randint(4, 35), ignore_eos=True)
        return Request(f"r{number}", prompt, sampling, arrival_s=at_s, tenant=f"t{rng.randrange(8)}", priority=rng.randrange(4))


def measure(policy: SchedulingPolicy, style: BatchingPolicy, num_waiting: int, num_steps: int = 60, num_first: int = 20) -> float:
    """Median milliseconds of a step, after `num_first` of them."""
    config = EngineConfig(num_blocks=MAX_RUNNING * 16, max_num_seqs=MAX_RUNNING, max_num_batched_tokens=2048)
    engine = Engine(config, PolicySet(scheduling=policy, batching=style), ConstantRunner(), VirtualClock())
    requests, times = Requests(), list[float]()
    for step in range(num_first + num_steps):
        while len(engine.scheduler.waiting) < num_waiting:
            engine.add_request(requests.next(engine.clock.now()))
        start = time.process_time()
        engine.step()
        if step >= num_first:
            times.append((time.process_time() - start) * 1e3)
    return statistics.median(times)


def main(arguments: list[str]) -> None:
    """Print one JSON line a batching style and length of the queue."""
    policies: list[type[SchedulingPolicy]] = sorted((getattr(scheduling, name) for name in scheduling.__all__), key=lambda c: c.__name__)
    for num_waiting in [int(argument) for argument in arguments] or [1_000, 8_000, 32_000]:
        for style in (batching.Chunked, batching.PrefillFirst):
            ms = {policy.__name__: measure(policy(), style(), num_waiting) for policy in policies}
            ratios = {name: round(value / ms["Fcfs"], 1) for name, value in ms.items()}
            print(json.dumps({"num_waiting": num_waiting, "batching": style.__name__, "ms": {n: round(v, 2) for n, v in ms.items()},
                              "to_fcfs": ratios}), flush=True)  # fmt: skip


if __name__ == "__main__":
    main(sys.argv[1:])
