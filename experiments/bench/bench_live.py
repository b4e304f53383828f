"""What watching a run live costs: `python experiments/bench/bench_live.py`.

The same simulated run (no model, so that a step is nothing but decisions and bookkeeping: the worst case) with and without the widget, one
after the other in turn, in one process; prints the ratio of the medians, and how often the widget was told.
"""

from __future__ import annotations

import os
import statistics
import tempfile
import time
from pathlib import Path

import kvlab
from kvlab.notebook import live

PAIRS = 7


def serve(folder: Path, watched: bool) -> tuple[float, int]:
    """(seconds of CPU, updates) of one run. CPU time: other processes of the machine are not counted."""
    config = kvlab.compose("runner=simulated", "model=dummy_llama3_8b", "cost_model=h100", "workload=synthetic", "workload.num_requests=600",
                           "num_blocks=4000", "kv_cache_tokens=null")  # fmt: skip
    view = live()
    start = time.process_time()
    kvlab.run(config, folder=folder, listeners=[view] if watched else [], progress=False)
    spent = time.process_time() - start
    return spent, view._num_updates


def main() -> None:
    """Print the medians and their ratio."""
    times: dict[bool, list[float]] = {False: [], True: []}
    updates = 0
    with tempfile.TemporaryDirectory() as folder:
        serve(Path(folder) / "warm", True)
        for i in range(PAIRS):
            for watched in (bool(i % 2), not i % 2):
                spent, num = serve(Path(folder) / f"{i}-{watched}", watched)
                times[watched].append(spent)
                updates += num
    plain, watched_s = statistics.median(times[False]), statistics.median(times[True])
    ratios = sorted(b / a for a, b in zip(times[False], times[True], strict=True))
    print(f"{PAIRS} pairs on {os.cpu_count()} cores: {plain:.2f} s of CPU without, {watched_s:.2f} s with the widget ({updates / PAIRS:.0f} updates a run)")
    print(f"ratio of the medians {watched_s / plain:.3f}; ratios of the pairs {ratios[0]:.3f} to {ratios[-1]:.3f}")


if __name__ == "__main__":
    main()
