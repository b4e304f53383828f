"""Multi-level feedback queue with skip-join."""

from __future__ import annotations

import math
from collections.abc import Sequence

from kvlab.policies.base import SchedulingPolicy, is_whole, require
from kvlab.policies.scheduling._displacing import Displacements
from kvlab.types import GroupView, Now, QueuesView


class _Job:
    """A request's level, its turn there (step and number of joining), and what it has had: iterations at this level."""

    __slots__ = ("joined", "level", "served", "waits_since")

    def __init__(self, level: int, joined: tuple[int, int], step: int) -> None:
        self.level = level
        self.joined = joined
        self.served = 0.0
        self.waits_since: int | None = step  # None: it runs


class Mlfq(SchedulingPolicy):
    """Requests sink from level to level as they are served, and those of a higher level send lower ones away; nobody knows lengths.

    A request joins the highest level whose quantum holds its first iteration (the prompt: skip-join), is demoted one level when it has
    used its quantum up, and is promoted to the first when it has starved. Within a level: first joined, first served.

    Source: FastServe (Wu et al., 2023), https://arxiv.org/abs/2305.05920, algorithm 1.
    Parameters: num_levels: how many there are. quantum: of the first level, in decode iterations. ratio: of each further level's quantum
        to that of the one above; the last has no end. prompt_tokens_per_iteration: prompt tokens that take as long as one decode
        iteration (their profile).
        starvation_steps: waiting for so many engine steps promotes a request to the first level.
    Deviations: time is counted in iterations, not seconds, so that decisions are the same on every machine; what is computed again
        after a preemption is not charged. Requests are sent away only for want of room, and only while they decode; one that did so
        does it again only after a token of its own. Keys and values of those sent away go by the preemption mode (theirs are swapped
        out ahead of need: take mode swap).
    """

    is_static = False
    preempted_first = False

    def __init__(self, num_levels: int = 8, quantum: int = 1, ratio: int = 2, prompt_tokens_per_iteration: int = 256,
                 starvation_steps: int = 500) -> None:  # fmt: skip
        for name, value, least in (("num_levels", num_levels, 1), ("quantum", quantum, 1), ("ratio", ratio, 2),
                                   ("prompt_tokens_per_iteration", prompt_tokens_per_iteration, 1),
                                   ("starvation_steps", starvation_steps, 1)):  # fmt: skip
            whole = is_whole(value)
            require(whole and value >= least, self, name, value, f"a whole number, at least {least}")
        self.num_levels = num_levels
        self.quantum = quantum
        self.ratio = ratio
        self.prompt_tokens_per_iteration = prompt_tokens_per_iteration
        self.starvation_steps = starvation_steps
        self.reset()

    def reset(self) -> None:
        """As new."""
        self._jobs: dict[int, _Job] = {}
        self._recomputing: set[int] = set()
        self._num_joined = 0
        self._displacements = Displacements()

    # ------------------------------------------------------------ order

    def key(self, group: GroupView, now: Now) -> tuple[float, ...]:
        """(level, step and number of joining it)."""
        job = self._job(group, now)
        promoted_at = self._promoted_at(job, now)
        return (job.level, *job.joined) if promoted_at is None else (0, promoted_at, job.joined[1])

    def key_holds_until(self, group: GroupView, now: Now) -> float:
        """Until it starves; in the first level, or promoted, for good."""
        job = self._job(group, now)
        if job.level == 0 or self._promoted_at(job, now) is not None:
            return math.inf
        return now.step + 1 if job.waits_since is None else job.waits_since + self.starvation_steps

    def displaces(self, head: GroupView, running: Sequence[GroupView], now: Now) -> GroupView | None:
        """One of the lowest level, if that is below the head's."""
        return self._displacements.choose(head, running, lambda group: self.key(group, now)[0], now)

    def _promoted_at(self, job: _Job, now: Now) -> int | None:
        """The step at which a waiting request starved; None: it did not."""
        if job.waits_since is None or job.level == 0 or now.step - job.waits_since < self.starvation_steps:
            return None
        return job.waits_since + self.starvation_steps

    # ----------------------------------------------------------- events

    def arrived(self, group: GroupView, queues: QueuesView, now: Now) -> None:
        """It joins the level that its prompt calls for."""
        self._job(group, now)

    def entered(self, group: GroupView, kind: str, now: Now) -> None:
        """A starved request's promotion becomes real when it runs."""
        job = self._job(group, now)
        promoted_at = self._promoted_at(job, now)
        if promoted_at is not None:
            job.level, job.joined, job.served = 0, (promoted_at, job.joined[1]), 0.0
        job.waits_since = None
        if kind == "resumed":
            self._recomputing.add(group.group_id)

    def computed(self, group: GroupView, num_computed_tokens: int, num_output_tokens: int, now: Now) -> None:
        """It has had an iteration, of the length of its tokens; a quantum used up demotes it."""
        job, iterations = self._job(group, now), self._iterations(num_computed_tokens)
        if group.group_id in self._recomputing:
            if not num_output_tokens:
                return
            self._recomputing.discard(group.group_id)
            iterations = 1.0
        job.served += iterations
        if job.level < self.num_levels - 1 and job.served >= self._quantum_of(job.level):
            job.level, job.joined, job.served = job.level + 1, self._turn(now), 0.0

    def preempted(self, group: GroupView, mode: str, now: Now) -> None:
        """It waits again, at its level and with its turn there."""
        self._job(group, now).waits_since = now.step

    def ended(self, group: GroupView, now: Now) -> None:
        """Nothing to remember any more."""
        self._jobs.pop(group.group_id, None)
        self._recomputing.discard(group.group_id)
        self._displacements.forget(group)

    # ------------------------------------------------------------ levels

    def _job(self, group: GroupView, now: Now) -> _Job:
        job = self._jobs.get(group.group_id)
        if job is None:
            first, level = self._iterations(group.num_prompt_tokens), 0
            while level < self.num_levels - 1 and self._quantum_of(level) < first:
                level += 1
            job = self._jobs[group.group_id] = _Job(level, self._turn(now), now.step)
        return job

    def _turn(self, now: Now) -> tuple[int, int]:
        self._num_joined += 1
        return now.step, self._num_joined

    def _quantum_of(self, level: int) -> int:
        return self.quantum * self.ratio**level

    def _iterations(self, num_tokens: int) -> float:
        """How many decode iterations it takes to compute so many tokens of a request."""
        return max(1.0, num_tokens / self.prompt_tokens_per_iteration)
