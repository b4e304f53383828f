"""Drivers of the seams that say which requests run, and how far: batching, admission, preemption and its mode."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random

from kvlab.policies.base import AdmissionPolicy, BatchingPolicy, PreemptionMode, PreemptionPolicy, VictimView
from kvlab.testing.rules import Rules, is_int
from kvlab.testing.views import Entry, Group, Pool, Queues, no_oracle, random_groups, set_view
from kvlab.types import Now


def drive_batching(policy: BatchingPolicy, rng: Random, rules: Rules) -> list[object]:
    """Phases, orders and chunks for random queues, among events as an engine tells them."""
    decisions: list[object] = []
    num_groups = 0
    for step in range(12):
        now = Now(step, float(step))
        sizes = [rng.choice((0, 0, rng.randint(1, 4))) for _ in range(3)]
        groups = random_groups(rng, sum(sizes), num_groups)
        num_groups += len(groups)
        cut = sizes[0] + sizes[1]
        queues = Queues(waiting=tuple(groups[: sizes[0]]), running=tuple(groups[sizes[0] : cut]), swapped=tuple(groups[cut:]))
        with no_oracle(groups, policy, rules):
            _tell_who_came(policy, queues, now)
            phases = [tuple(phase) for phase in policy.phases(queues, now)]
            _check_phases(phases, queues, rules)
            limit = rng.randint(1, 64)
            budget = policy.token_budget(queues, limit)
            order = [group.group_id for group in policy.running_order(queues.running, now)]
            same = sorted(order) == [group.group_id for group in queues.running]
            rules.require(same, "running order", f"{len(queues.running)} groups run, the order is {order}")
        rules.require(is_int(budget) and budget >= 1, "token budget", f"{budget!r} of {limit}")
        says = "a policy that goes beyond the limit says has_token_limit = False"
        rules.require(budget <= limit or not policy.has_token_limit, "token budget", f"{budget} of {limit}: {says}")
        chunks = [_checked_chunk(policy, rng.randint(1, 100), rng.randint(1, limit), limit, rules) for _ in range(8)]
        for num_uncomputed in (1, limit, limit + 1, 10 * limit):
            chunk = _checked_chunk(policy, num_uncomputed, budget, limit, rules)
            rules.require(chunk >= 1, "progress", f"chunk({num_uncomputed}, {budget}, {limit}) = 0 on a fresh budget")
        _tell_who_left(policy, queues, rng.random() < 0.5, now)
        decisions.append((phases, budget, order, chunks))
    return decisions


def _tell_who_came(policy: BatchingPolicy, queues: Queues, now: Now) -> None:
    for group in (*queues.running, *queues.swapped, *queues.waiting):
        policy.arrived(group, queues, now)
    for group in (*queues.running, *queues.swapped):
        policy.entered(group, "new", now)
    for group in queues.swapped:
        policy.preempted(group, "swap", now)


def _tell_who_left(policy: BatchingPolicy, queues: Queues, enters: bool, now: Now) -> None:
    """Who waits may enter; then all that run compute, and all leave."""
    running = (*queues.running, *(queues.waiting if enters else ()))
    for group in running[len(queues.running) :]:
        policy.entered(group, "new", now)
    for group in running:
        policy.computed(group, group.num_uncomputed_tokens, group.num_sequences, now)
    for group in (*queues.running, *queues.swapped, *queues.waiting):
        policy.ended(group, now)


def _check_phases(phases: Sequence[tuple[str, ...]], queues: Queues, rules: Rules) -> None:
    names = ("running", "waiting", "swapped")
    for phase in phases:
        legal = all(name in names for name in phase) and len(set(phase)) == len(phase)
        rules.require(legal, "phases", f"{phase!r} is no order of {names}")
    served = {name for phase in phases for name in phase}
    filled = [name for name in names if getattr(queues, name)]
    if queues.running:
        rules.require("running" in served, "work conserving", f"{len(queues.running)} groups run, phases are {phases!r}")
    elif filled:
        served_one = any(name in served for name in filled)
        rules.require(served_one, "work conserving", f"only {filled} hold groups, phases are {phases!r}")


def _checked_chunk(policy: BatchingPolicy, num_uncomputed: int, budget: int, limit: int, rules: Rules) -> int:
    chunk = policy.chunk(num_uncomputed, budget, limit)
    legal = is_int(chunk) and 0 <= chunk <= min(num_uncomputed, budget)
    rules.require(legal, "chunk range", f"chunk({num_uncomputed}, {budget}, {limit}) = {chunk!r}")
    return chunk


def drive_admission(policy: AdmissionPolicy, rng: Random, rules: Rules) -> list[object]:
    """Answers for random entries into random pools, among events as an engine tells them."""
    answers: list[object] = []
    story = _Story(policy, rng)
    for step in range(20):
        num_blocks, block_size = rng.randint(1, 64), rng.choice((1, 3, 16))
        num_free = rng.randint(0, num_blocks)
        num_evictable = rng.randint(0, num_blocks - num_free)
        pool = Pool(num_blocks=num_blocks, num_free=num_free, num_evictable=num_evictable,
                    num_used=num_blocks - num_free - num_evictable, block_size=block_size)  # fmt: skip
        now = Now(step, float(step))
        running = story.go_on(now)
        group = story.newcomer(now)
        num_hits = rng.randint(0, num_evictable)
        entry = Entry(group=group, kind=rng.choice(("new", "resumed", "swapped_in")), num_hits=num_hits, block_size=block_size,
                      first_chunk_tokens=rng.randint(1, group.num_tokens), running=running,
                      num_available_blocks=num_free + num_evictable - num_hits, rules=rules)  # fmt: skip
        with no_oracle([group, *running], policy, rules):
            answer = policy.admits(entry, pool, now)
            if running and answer:
                policy.ended(group, now)  # the client left
            else:
                story.enter(group, entry.kind, now)
        rules.require(isinstance(answer, str), "admission answer", f"admits returned {answer!r}")
        headroom = policy.headroom_blocks(pool)
        rules.require(is_int(headroom) and 0 <= headroom <= num_blocks, "headroom", f"{headroom!r} of {num_blocks} blocks")
        answers.append((answer, headroom))
    return answers


def drive_preemption(policy: PreemptionPolicy, rng: Random, rules: Rules) -> list[object]:
    """Victims among random candidates, among events as an engine tells them."""
    mode, protect = getattr(policy, "mode", None), getattr(policy, "protect_oldest", None)
    legal = isinstance(mode, PreemptionMode) and isinstance(protect, bool)
    rules.require(legal, "mode", f"mode is {mode!r}, protect_oldest {protect!r}: call super().__init__(mode, protect_oldest)")
    victims: list[object] = []
    story = _Story(policy, rng)
    for step in range(20):
        now = Now(step, float(step))
        while len(story.running) < rng.randint(1, 8):
            story.enter(story.newcomer(now), "new", now)
        groups = story.go_on(now) or (story.enter(story.newcomer(now), "new", now),)
        with no_oracle(groups, policy, rules):
            victim = policy.victim(groups, now)
        rules.require(any(victim is group for group in groups), "victim", f"{victim!r} is none of {len(groups)} candidates")
        victims.append(victim.group_id)
        if rng.random() < 0.7:
            story.give_way(victim, now)  # type: ignore[arg-type]
    return victims


class _Story:
    """Requests that come, run, give way and end, told to a policy in an engine's order of events."""

    def __init__(self, policy: AdmissionPolicy | PreemptionPolicy, rng: Random) -> None:
        self.policy = policy
        self.rng = rng
        self.running: list[Group] = []
        self._num_groups = 0

    def newcomer(self, now: Now) -> Group:
        """A group that arrives."""
        (group,) = random_groups(self.rng, 1, self._num_groups)
        self._num_groups += 1
        self.policy.arrived(group, Queues(waiting=(), running=tuple(self.running), swapped=()), now)
        return group

    def enter(self, group: Group, kind: str, now: Now) -> Group:
        """It enters running."""
        set_view(group, admitted_step=now.step)
        self.running.append(group)
        self.policy.entered(group, kind, now)
        return group

    def go_on(self, now: Now) -> tuple[Group, ...]:
        """Running groups compute; some give way, some end. Those that still run."""
        for group in tuple(self.running):
            happens = self.rng.random()
            if happens < 0.1:
                self.give_way(group, now)
                continue
            num_output = self.rng.randint(0, group.num_sequences)
            set_view(group, num_output_tokens=min(group.max_tokens, group.num_output_tokens + (num_output > 0)))
            set_view(group, num_tokens=group.num_prompt_tokens + group.num_output_tokens)
            self.policy.computed(group, self.rng.randint(1, 9), num_output, now)
            if happens > 0.8:
                self.running.remove(group)
                self.policy.ended(group, now)
        return tuple(self.running)

    def give_way(self, group: Group, now: Now) -> None:
        """It is preempted, and its client leaves."""
        self.running.remove(group)
        self.policy.preempted(group, self.rng.choice(("recompute", "swap")), now)
        self.policy.ended(group, now)


def drive_mode(policy: PreemptionMode, rng: Random, rules: Rules) -> list[object]:
    """Modes of random victims."""
    modes: list[object] = []
    for step in range(20):
        groups = random_groups(rng, 1)
        num_tokens, num_blocks, num_free = rng.randint(0, 4000), rng.randint(0, 250), rng.choice((0, 100, 1000))
        victim = VictimView(groups[0], num_tokens, num_blocks, num_free, 2 ** rng.randint(10, 22))
        with no_oracle(groups, policy, rules):
            mode = policy.mode(victim, Now(step, float(step)))
        rules.require(mode in ("recompute", "swap"), "mode", f"mode returned {mode!r}")
        modes.append(mode)
    return modes
