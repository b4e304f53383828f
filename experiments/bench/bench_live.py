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
from typing import Any

import kvlab
from kvlab.notebook import live
from kvlab.notebook.live_view import LiveView

PAIRS = 9


class Timed:
    """A listener that hands everything on and adds up the time of its thread that this takes."""

    wants_block_events = False

    def __init__(self, view: LiveView) -> None:
        self._view = view
        self.spent_s = 0.0

    def on_step(self, *heard: Any) -> None:
        """Hand on."""
        start = time.thread_time()
        self._view.on_step(*heard)
        self.spent_s += time.thread_time() - start

    def on_request(self, record: Any) -> None:
        """Hand on."""
        self._view.on_request(record)

    def on_block(self, event: Any) -> None:
        """Not asked for."""


def serve(folder: Path, watched: bool) -> tuple[float, float, int]:
    """(seconds of CPU, those in the listener, updates) of one run. CPU time: other processes are not counted."""
    config = kvlab.compose("runner=simulated", "model=dummy_llama3_8b", "cost_model=h100", "workload=synthetic", "num_blocks=4000",
                           "workload.num_requests=600", "kv_cache_tokens=null")  # fmt: skip
    view = live()
    timed = Timed(view)
    start = time.process_time()
    kvlab.run(config, folder=folder, listeners=[timed] if watched else [], progress=False)
    return time.process_time() - start, timed.spent_s, view.num_updates


def main() -> None:
    """Print the medians, their ratio, and the listener's own share."""
    times: dict[bool, list[float]] = {False: [], True: []}
    shares, updates = [], 0
    with tempfile.TemporaryDirectory() as folder:
        serve(Path(folder) / "warm", True)
        for i in range(PAIRS):
            for watched in (bool(i % 2), not i % 2):
                spent, own, num = serve(Path(folder) / f"{i}-{watched}", watched)
                times[watched].append(spent)
                updates += num
                if watched:
                    shares.append(own / spent)
    plain, seen = min(times[False]), min(times[True])
    ratios = [b / a for a, b in zip(times[False], times[True], strict=True)]
    print(f"{PAIRS} pairs on {os.cpu_count()} cores, {updates / PAIRS:.0f} updates a run")
    print(f"CPU of a run, the quickest of {PAIRS}: {plain:.2f} s without, {seen:.2f} s with the widget: ratio {seen / plain:.3f}")
    print(f"ratios of the pairs: median {statistics.median(ratios):.3f}, {min(ratios):.3f} to {max(ratios):.3f}")
    print(f"the listener's own share of the run: median {statistics.median(shares):.2%}, largest {max(shares):.2%}")


if __name__ == "__main__":
    main()
