"""What the explorer hears of a real run while it goes: curves so far, a few times a second."""

from __future__ import annotations

import time
from collections.abc import Callable

import numpy as np

from kvlab.notebook.explorer_plot import STEP_COLUMNS, Curves, curves_of
from kvlab.types import Outcome, Plan, RequestRecord, StepStats

LIVE_EVERY_S = 0.3


class Live:
    """Listener that hands what it has so far to `show` a few times a second, without waiting for the run's folder."""

    wants_block_events = False

    def __init__(self, show: Callable[[Curves, str], None]) -> None:
        self._show = show
        self._steps: list[tuple[float, ...]] = []
        self._arrivals: list[float] = []
        self._times: list[tuple[float, ...]] = []
        self._tokens = self._waiting = self._running = 0
        self._next_s = 0.0

    def told(self) -> str:
        """How far it is, in words."""
        took = self._steps[-1][1] - self._steps[0][0] if self._steps else 0.0
        rate = f", {self._tokens / took:.1f} tokens/s" if took > 0 else ""
        return f"{len(self._times)} done, {self._running} running, {self._waiting} waiting; step {len(self._steps)}, {took:.1f} s{rate}"

    def on_step(self, plan: Plan, outcome: Outcome, stats: StepStats) -> None:
        """Collect; draw when the last picture is LIVE_EVERY_S old."""
        self._steps.append(tuple(getattr(stats, name) for name in STEP_COLUMNS))
        self._tokens += stats.num_output_tokens
        self._waiting, self._running = stats.num_waiting_reqs, stats.num_running_reqs
        if time.monotonic() >= self._next_s:
            self._show(curves_of(np.array(self._steps, dtype=np.float64), self._arrivals, self._times), self.told())
            self._next_s = time.monotonic() + LIVE_EVERY_S

    def on_request(self, record: RequestRecord) -> None:
        """Latencies are those of requests that ended."""
        self._arrivals.append(record.arrival_s)
        self._times.append(record.token_times_s)

    def on_block(self, event: object) -> None:
        """Never called."""
