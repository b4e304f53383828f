"""Admission with a reserve that follows the preemptions."""

from __future__ import annotations

from kvlab.policies.base import AdmissionPolicy, EntryView, is_number, is_whole, require
from kvlab.types import GroupView, Now, PoolView


class Adaptive(AdmissionPolicy):
    """A watermark that grows when too many of those it let in had to give way, and shrinks again while nobody has to.

    Every `interval` steps: more than `target` preemptions for each group admitted meanwhile raise the reserve to `factor` times what it
    was (by `step` at least); none at all lower it by `step`; anything between leaves it.

    Source: the feedback rule of Chiu and Jain, Computer Networks and ISDN Systems 1989, https://doi.org/10.1016/0169-7552(89)90019-6
        (retreat by a factor, return by a step), on the reserve of vLLM's watermark. Our own composition: no system is known to use it.
    Parameters: initial: share of the pool kept free at first. minimum: and maximum: its bounds, in [0, 1). target: preemptions per
        admitted group that are put up with. factor: above 1. step: share of the pool, in (0, 1). interval: steps between two decisions.
        full_sequence: test the blocks of the whole known sequence instead of those of its first chunk.
    Deviations: a group that entered before the last rise and gives way after it is not counted: it was let in under another reserve.
    """

    def __init__(self, initial: float = 0.01, minimum: float = 0.0, maximum: float = 0.5, target: float = 0.05, factor: float = 2.0,
                 step: float = 0.01, interval: int = 50, full_sequence: bool = False) -> None:  # fmt: skip
        for name, share in (("minimum", minimum), ("maximum", maximum)):
            require(is_number(share) and 0 <= share < 1, self, name, share, "in [0, 1)")
        require(minimum <= maximum, self, "minimum", minimum, f"at most maximum = {maximum}")
        require(is_number(initial) and minimum <= initial <= maximum, self, "initial", initial, f"in [{minimum}, {maximum}]")
        require(is_number(target) and target >= 0, self, "target", target, "a number of at least 0")
        require(is_number(factor) and factor > 1, self, "factor", factor, "a number above 1")
        require(is_number(step) and 0 < step < 1, self, "step", step, "in (0, 1)")
        is_integer = is_whole(interval)
        require(is_integer and interval >= 1, self, "interval", interval, "a positive integer (steps)")
        require(isinstance(full_sequence, bool), self, "full_sequence", full_sequence, "true or false")
        self.initial = initial
        self.minimum = minimum
        self.maximum = maximum
        self.target = target
        self.factor = factor
        self.step = step
        self.interval = interval
        self.full_sequence = full_sequence
        self.reset()

    def reset(self) -> None:
        """As new."""
        self.fraction = float(self.initial)
        self._until = self.interval  # first step after the present interval
        self._raised_at = 0  # step of the last rise
        self._num_entered = 0
        self._num_preempted = 0

    def entered(self, group: GroupView, kind: str, now: Now) -> None:
        """Count those let in, each time."""
        self._catch_up(now)
        self._num_entered += 1

    def preempted(self, group: GroupView, mode: str, now: Now) -> None:
        """Count it, if the present reserve let it in."""
        self._catch_up(now)
        self._num_preempted += group.admitted_step >= self._raised_at

    def admits(self, entry: EntryView, pool: PoolView, now: Now) -> str:
        """need + int(fraction * N) <= available."""
        self._catch_up(now)
        need = entry.blocks_for(entry.group.num_tokens if self.full_sequence else entry.first_chunk_tokens)
        if need + self.headroom_blocks(pool) <= entry.num_available_blocks:
            return ""
        return "watermark" if need <= entry.num_available_blocks else "blocks"

    def headroom_blocks(self, pool: PoolView) -> int:
        """int(fraction * N), with the fraction of the last decision."""
        return int(self.fraction * pool.num_blocks)

    def _catch_up(self, now: Now) -> None:
        """Decide at the end of each interval that has passed."""
        while now.step >= self._until:
            if self._num_preempted > self.target * self._num_entered:
                self.fraction = min(self.maximum, max(self.fraction * self.factor, self.fraction + self.step))
                self._raised_at = self._until
            elif not self._num_preempted:
                self.fraction = max(self.minimum, self.fraction - self.step)
            self._num_entered = self._num_preempted = 0
            self._until += self.interval
