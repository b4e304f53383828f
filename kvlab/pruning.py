"""Ends a run that can't come out well any more: a listener of the engine, used by `kvlab.search`. The run's folder says "pruned"."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence

from kvlab.objectives import Objective, SoFar, best_possible, dominates
from kvlab.trace.summary import FINISHED
from kvlab.types import BlockEvent, KvlabError, Outcome, Plan, RequestRecord, StepStats

LOOK_EVERY_S = 0.05
_COUNTS = ("num_preemptions", "recomputed_tokens", "num_evicted_blocks", "swapped_out_blocks", "swapped_in_blocks", "cow_copies")


class Hopeless(KvlabError, RuntimeError):
    """A run was ended early: whatever it still did, a finished one would be at least as good in every objective."""


class Pruner:
    """Compares the best that a run can still reach, objective by objective, with the runs that have finished.

    Args:
        objectives: in the order of `finished`. finished: name and losses of each finished run.
        num_requests: of the workload; None (unknown): latencies give no bound.
        most_output_tokens: the most that any run of this workload has put out (with end-of-text tokens it may differ a little between
            policies; simulated runs and ignore_eos put out the same).
        pool_tokens: `kv_pool_tokens` of this run.

    Raises Hopeless from `on_step`.
    """

    wants_block_events = False

    def __init__(
        self, objectives: Sequence[Objective], finished: Sequence[tuple[str, Sequence[float]]], num_requests: int | None,
        most_output_tokens: float, pool_tokens: int,
    ) -> None:  # fmt: skip
        self._objectives, self._finished = objectives, finished
        self._num_requests, self._most, self._pool = num_requests, most_output_tokens, pool_tokens
        self._latencies: dict[str, list[float]] = {"ttft": [], "e2el": []}
        self._totals = dict.fromkeys((*_COUNTS, "num_steps", "peak_running_reqs"), 0.0)
        self._first_arrival_s = math.inf
        self._last_look = time.monotonic()

    def on_step(self, plan: Plan, outcome: Outcome, stats: StepStats) -> None:
        """Count, and now and then look."""
        for name in _COUNTS:
            self._totals[name] += getattr(stats, name)
        self._totals["num_steps"] += 1
        self._totals["peak_running_reqs"] = max(self._totals["peak_running_reqs"], stats.num_running_reqs)
        if time.monotonic() - self._last_look > LOOK_EVERY_S:
            self._last_look = time.monotonic()
            self.look(stats.end_s)

    def on_request(self, record: RequestRecord) -> None:
        """Note a finished request's latencies."""
        self._first_arrival_s = min(self._first_arrival_s, record.arrival_s)
        if record.finish_reason in FINISHED and record.token_times_s:
            self._latencies["ttft"].append(record.token_times_s[0] - record.arrival_s)
            self._latencies["e2el"].append(record.finish_s - record.arrival_s)

    def on_block(self, event: BlockEvent) -> None:
        """Never called."""

    def look(self, now_s: float) -> None:
        """Raise Hopeless if a finished run dominates the best that this one can reach. (Elapsed time counts from the first arrival that
        is known, which is never too early.)"""
        elapsed_s = max(0.0, now_s - self._first_arrival_s) if math.isfinite(self._first_arrival_s) else 0.0
        seen = SoFar(elapsed_s, self._num_requests or 0, self._latencies, self._totals, self._pool)
        best = [best_possible(goal, seen, self._most) for goal in self._objectives]
        for name, losses in self._finished:
            if dominates(losses, best):
                shown = ", ".join(f"{goal} can't be better than {abs(value) if goal.maximize else value:.4g}"
                                  for goal, value in zip(self._objectives, best, strict=True))  # fmt: skip
                raise Hopeless(f"Ended after {elapsed_s:.3g} s: {shown}; run {name} is as good in all of them, and better in one.")
