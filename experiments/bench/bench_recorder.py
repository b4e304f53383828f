"""What recording costs a step with 256 running sequences: `python experiments/bench/bench_recorder.py`.

Feeds the recorder decode steps of 256 sequences (a finished request every step) as fast as it takes them and prints the host
time a step, flushes to a temporary folder included, for each choice of what to keep; and how long close() takes.
"""

from __future__ import annotations

import tempfile
import time
from pathlib import Path
from typing import Any

from kvlab.trace import RecordConfig, Recorder
from kvlab.types import BlockEvent, Outcome, Plan, RequestRecord, ScheduledSeq, StepStats

NUM_SEQS, NUM_STEPS, EVENTS_PER_STEP = 256, 20_000, 16

CASES = {
    "steps and requests, in memory": (False, RecordConfig()),
    "steps and requests": (True, RecordConfig()),
    "and outcomes": (True, RecordConfig(outcomes=True)),
    "and outcomes and plans": (True, RecordConfig(outcomes=True, plans=True)),
    f"and {EVENTS_PER_STEP} block events a step": (True, RecordConfig(blocks=True)),
}


def measure(recorder: Recorder, num_steps: int) -> tuple[float, float]:
    """(seconds in the recorder's methods, seconds of close())."""
    scheduled = tuple(ScheduledSeq(i, 1000 + i, 1) for i in range(NUM_SEQS))
    outcome = Outcome(0, tuple((i * 31 % 49152,) for i in range(NUM_SEQS)), execute_s=0.0123456789)
    values: dict[str, Any] = dict.fromkeys(StepStats._fields, 123)
    values |= {"now_s": 0.0, "end_s": 0.01, "admission_blocked_by": "watermark", "execute_ms": 12.3456789}
    stats = StepStats(**values)
    times = tuple(i * 0.0123 for i in range(200))
    request = RequestRecord(
        "request-000123", 0.0, 0.1, 2.5, 500, 200, 0, 700, 0, 0, 0, 0, "length", times, (("queue", 0.0, 0.1), ("decode", 0.1, 2.5)),
        ((tuple(range(200)), "length"),), "", None, 0, 0,
    )  # fmt: skip
    events = [BlockEvent(0, "allocate", "gpu", i, 1, "", "request-000123") for i in range(EVENTS_PER_STEP)]
    spent = 0.0
    for step in range(num_steps):
        plan = Plan(step, step * 0.01, scheduled)
        outcome, stats = outcome._replace(step=step), stats._replace(step=step)
        start = time.perf_counter()
        recorder.on_step(plan, outcome, stats)
        recorder.on_request(request)
        if recorder.wants_block_events:
            for event in events:
                recorder.on_block(event)
        spent += time.perf_counter() - start
    start = time.perf_counter()
    recorder.close()
    return spent, time.perf_counter() - start


def main() -> None:
    """Print a line a case."""
    print(f"{NUM_SEQS} running sequences, {NUM_STEPS} steps, one finished request of 200 tokens a step")
    print(f"{'kept':<34}{'ms a step':>12}{'close() s':>12}")
    for name, (on_disk, record) in CASES.items():
        with tempfile.TemporaryDirectory() as folder:
            spent, closing = measure(Recorder(Path(folder) if on_disk else None, record), NUM_STEPS)
        print(f"{name:<34}{spent / NUM_STEPS * 1e3:>12.4f}{closing:>12.2f}")


if __name__ == "__main__":
    main()
