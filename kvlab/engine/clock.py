"""The engine's clock: wall time, virtual time, or the times of a recorded run. Policies see it through `Now` only."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from typing import Protocol


class Clock(Protocol):
    """Seconds since the run's start."""

    def now(self) -> float:
        """The time at which the next step is decided."""

    def advance(self, execute_s: float) -> float:
        """A step that took `execute_s` has been carried out; returns the time after it."""

    def wait_until(self, at_s: float) -> None:
        """Nothing to do before `at_s`."""


class WallClock:
    """Real time; waiting sleeps."""

    def __init__(self) -> None:
        self._start = time.perf_counter()

    def now(self) -> float:
        """Seconds since the clock was made."""
        return time.perf_counter() - self._start

    def advance(self, execute_s: float) -> float:
        """Time has passed by itself."""
        return self.now()

    def wait_until(self, at_s: float) -> None:
        """Sleep."""
        time.sleep(max(0.0, at_s - self.now()))


class VirtualClock:
    """Simulated time: moves by what steps cost, and jumps over idle time."""

    def __init__(self) -> None:
        self._now_s = 0.0

    def now(self) -> float:
        """Simulated seconds."""
        return self._now_s

    def advance(self, execute_s: float) -> float:
        """Add the step's cost."""
        self._now_s += execute_s
        return self._now_s

    def wait_until(self, at_s: float) -> None:
        """Jump."""
        self._now_s = max(self._now_s, at_s)


class RecordedClock:
    """The clock of a recorded run: step i is decided at `times[i][0]` and is over at `times[i][1]`.

    Steps may be decided before earlier ones are over (depth 1): whoever submits them raises `num_decided`.

    After the last step everything is due: whatever the recorded run had left ended there without a step (refused, aborted). A replay
    that wants another step hears from the recorded runner that there is none.
    """

    def __init__(self, times: Sequence[tuple[float, float]]) -> None:
        self._times = times
        self._step = 0
        self.num_decided = 0

    def now(self) -> float:
        """Recorded time of the step about to be decided; infinity after the last."""
        return self._times[self.num_decided][0] if self.num_decided < len(self._times) else math.inf

    def restart(self) -> None:
        """Before the first step."""
        self._step = self.num_decided = 0

    def advance(self, execute_s: float) -> float:
        """Recorded end of the step."""
        end_s = self._times[self._step][1] if self._step < len(self._times) else self.now()
        self._step += 1
        return end_s

    def wait_until(self, at_s: float) -> None:
        """The next recorded time already includes the wait."""
