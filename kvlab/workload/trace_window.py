"""Which part of a trace is run, how fast and how long: the parameters that every trace workload has."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from kvlab.types import UserError
from kvlab.workload.base import WorkloadContext
from kvlab.workload.distributions import number, whole
from kvlab.workload.limits import check_lengths, clip
from kvlab.workload.traces import Floats, Ints, TraceRows, check_and_repair


@dataclass(frozen=True)
class ChosenRows:
    """Requests to run, in order of arrival: row in the trace, arrival (s, the first 0), lengths (tokens) scaled and clipped.

    `reachable_lens`: output lengths within max_model_len.
    """

    rows: Ints
    arrivals_s: Floats
    input_lens: Ints
    output_lens: Ints
    reachable_lens: Ints


class TraceWindow:
    """`time_scale` multiplies arrival times (0.5: twice the rate). `skip`, `limit`: requests; reading stops behind them, so that the
    first ones of a long file are quick to get. A file that is not sorted by arrival is sorted as far as it was read.

    `max_input`, `max_output`: tokens after scaling; longer prompts keep their beginning; notes say how many were clipped.
    """

    def __init__(self, time_scale: float, skip: int, limit: int | None, max_input: int | None, max_output: int | None) -> None:
        """UserError for a value out of range."""
        self.time_scale = number("workload.time_scale", time_scale, 0)
        self.skip = whole("workload.skip", skip, 0)
        self.limit = None if limit is None else whole("workload.limit", limit, 1)
        self.max_input = None if max_input is None else whole("workload.max_input", max_input, 1)
        self.max_output = None if max_output is None else whole("workload.max_output", max_output, 1)

    @property
    def num_rows(self) -> int | None:
        """Requests to read: those skipped and those wanted; None: all."""
        return None if self.limit is None else self.skip + self.limit

    def choose(self, trace: TraceRows, scale: Callable[[Ints], Ints], ctx: WorkloadContext, notes: list[str], advice: str) -> ChosenRows:
        """Check what was read, and take the window out of it. `advice`: how to make prompts shorter. UserError for bad rows."""
        order = check_and_repair(trace, notes)
        rows = order[self.skip :] if self.limit is None else order[self.skip : self.skip + self.limit]
        if not rows.size:
            raise UserError(f"{trace.path} has {len(order)} requests: workload.skip={self.skip} leaves none.")
        inputs = clip("workload.max_input", scale(trace.input_lens[rows]), self.max_input, notes)
        outputs = clip("workload.max_output", scale(trace.output_lens[rows]), self.max_output, notes)
        reachable = check_lengths(ctx, inputs, outputs, notes, advice)
        arrivals_s = (trace.arrivals_s[rows] - trace.arrivals_s[rows[0]]) * self.time_scale
        return ChosenRows(rows, arrivals_s, inputs, outputs, reachable)
