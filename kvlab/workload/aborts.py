"""Clients that leave: a share of requests is aborted some time after arrival, for tests of an engine's clean-up."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kvlab.types import Request, UserError, unknown_name
from kvlab.workload import rng
from kvlab.workload.distributions import mapping, number


class Aborts:
    """`fraction` of the requests get `abort_at_s` = arrival + `after_s` (seconds). Which ones depends on the seed alone."""

    def __init__(self, fraction: float, after_s: float) -> None:
        self.fraction = number("workload.abort.fraction", fraction, 0)
        if self.fraction > 1:
            raise UserError(f"workload.abort.fraction = {fraction!r} is not allowed: 0 to 1.")
        self.after_s = number("workload.abort.after_s", after_s, 0)
        self._draw: rng.CounterRandom | None = None

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> Aborts:
        """From `{fraction: 0.1, after_s: 2.0}`."""
        mapping("workload.abort", config, "{fraction: 0.1, after_s: 2.0}")
        for key in config:
            if key not in ("fraction", "after_s"):
                raise unknown_name("key of workload.abort", str(key), ("fraction", "after_s"))
        if "fraction" not in config or "after_s" not in config:
            raise UserError("workload.abort needs both keys, for example {fraction: 0.1, after_s: 2.0}.")
        return cls(config["fraction"], config["after_s"])

    def start(self, seed: int) -> None:
        """Begin a run."""
        self._draw = rng.CounterRandom(seed, rng.ABORT)

    def apply(self, request: Request, conversation: int) -> None:
        """Set `request.abort_at_s` if it is one of those that leave."""
        assert self._draw is not None
        if self._draw.uniform(conversation * 1_000_003 + request.turn) < self.fraction:
            request.abort_at_s = request.arrival_s + self.after_s
