"""Every step takes the same time."""

from __future__ import annotations

from kvlab.engine.cost.base import CostModel, at_least
from kvlab.types import Plan


class Constant(CostModel):
    """Every step takes the same time: for tests, and for figures in steps rather than seconds.

    Args:
        step_ms: milliseconds a step.
    """

    def __init__(self, step_ms: float = 10.0) -> None:
        self.step_ms = at_least(self, "step_ms", step_ms, 0, strict=True)

    def step_s(self, plan: Plan) -> float:
        """The constant."""
        return self.step_ms / 1e3
