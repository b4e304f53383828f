"""Replays a real run: its tokens and step times, under the real scheduler. The plans must come out the same, step for step."""

from __future__ import annotations

from collections.abc import Iterable

from kvlab.engine.clock import RecordedClock
from kvlab.engine.runners.base import DeviceMemory, Ready, RunnerConfig
from kvlab.types import Plan, RecordedStep, UserError


class RecordedRunner:
    """Gives back recorded outcomes in order.

    Args:
        steps: the run's steps, as `kvlab.trace.read_outcomes(folder)` gives them. name: what to call the run in messages.
    """

    def __init__(self, steps: Iterable[RecordedStep], name: str = "the recorded run") -> None:
        self.steps = list(steps)
        self.name = name
        self._next = 0
        self._clock = RecordedClock([(step.now_s, step.end_s) for step in self.steps])

    def clock(self) -> RecordedClock:
        """The run's clock, which goes on with each step that is submitted."""
        return self._clock

    @property
    def kv_bytes_allocated(self) -> int:
        """0: there are no tensors."""
        return 0

    def initialize(self, config: RunnerConfig) -> None:
        """Back to the first step."""
        self._next = 0
        self._clock.restart()

    def device_memory(self) -> DeviceMemory | None:
        """None: nothing is measured."""
        return None

    def close(self) -> None:
        """Nothing to give back."""

    def submit(self, plan: Plan) -> Ready:
        """The recorded outcome of this step.

        Raises:
            UserError: the plan is not the recorded one (another configuration, workload or version), or the recording is over.
        """
        if self._next >= len(self.steps):
            raise UserError(f"{self.name} has {len(self.steps)} steps and this replay needs more: the recorded run was cut short, or the "
                            "configuration, the workload or a policy's code differs.")  # fmt: skip
        step = self.steps[self._next]
        here = tuple(s.seq_id for s in plan.scheduled), tuple(s.num_new_tokens for s in plan.scheduled)
        if here != (step.seq_ids, step.num_new_tokens):
            raise UserError(f"Step {plan.step} of this replay schedules sequences {here[0][:8]} with {here[1][:8]} tokens, {self.name} had "
                            f"{step.seq_ids[:8]} with {step.num_new_tokens[:8]}: the configuration, the workload or a policy's code "
                            "differs.")  # fmt: skip
        self._next += 1
        self._clock.num_decided = self._next
        return Ready(step.outcome)
