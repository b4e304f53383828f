"""A toy engine for scheduling policies, with places instead of blocks: requests come, enter in the policy's order, send others away,
give way, come back and end, and the policy hears of it all in an engine's order of events."""

from __future__ import annotations

import math
from random import Random

from kvlab.engine.order_sources import Columns, keys_of_all
from kvlab.policies.base import SchedulingPolicy
from kvlab.testing.rules import Rules
from kvlab.testing.views import Group, Prefixes, Queues, no_oracle, random_groups, set_view
from kvlab.types import IllegalDecision, Now


def drive_scheduling(policy: SchedulingPolicy, rng: Random, rules: Rules) -> list[object]:
    """Serve random requests to the end; what was decided in each step."""
    groups = random_groups(rng, rng.randint(1, 9))
    for group in groups:
        set_view(group, num_output_tokens=0, num_computed_tokens=0, num_tokens=group.num_prompt_tokens, max_tokens=rng.randint(1, 7),
                 num_uncomputed_tokens=group.num_prompt_tokens, num_preemptions=0, admitted_step=-1, num_blocks=0)  # fmt: skip
    rng.shuffle(groups)
    work = sum(group.num_prompt_tokens + group.max_tokens for group in groups)
    max_steps = 20 + work * (len(groups) + 1)
    play = _Play(policy, rng, rules)
    with no_oracle(tuple(groups), policy, rules):
        step = 0
        while groups or play.waiting or play.running:
            rules.require(step < max_steps, "drains", f"{len(play.waiting)} requests wait and {len(play.running)} run after {step} steps")
            now = Now(step, step * 0.5)
            while groups and rng.random() < 0.7:
                play.arrive(groups.pop(), now)
            play.step(now)
            step += 1
    return play.decisions


class _Play:
    """The queue, the places and what happens in a step."""

    def __init__(self, policy: SchedulingPolicy, rng: Random, rules: Rules) -> None:
        self.policy = policy
        self.rng = rng
        self.rules = rules
        self.waiting: list[Group] = []
        self.front: list[Group] = []  # those of `waiting` that stand before all others
        self.running: list[Group] = []
        self.num_places = rng.choice((1, 1, 2, 3))
        self.mode = rng.choice(("recompute", "recompute", "swap"))
        self.prefixes = Prefixes(rng)
        self.decisions: list[object] = []
        self._orders = type(policy).order is not SchedulingPolicy.order
        self._displaces = type(policy).displaces is not SchedulingPolicy.displaces
        self._held_keys: dict[int, tuple[tuple[float, ...], float]] = {}  # of those that wait: key, and the step until which it holds
        rules.require(not (self._displaces and policy.preempted_first), "displacement", "it displaces, and preempted_first is True")

    def arrive(self, group: Group, now: Now) -> None:
        """A request is submitted."""
        queues = Queues(waiting=tuple(self.waiting), running=tuple(self.running), swapped=())
        self.policy.arrived(group, queues, now)
        self.waiting.append(group)

    def step(self, now: Now) -> None:
        """Order the queue, fill the places, compute."""
        queue = self._queue(now)
        self.decisions.append([group.group_id for group in queue])
        newcomers: list[Group] = []
        while queue:
            head = queue[0]
            if len(self.running) >= self.num_places and not self._make_room(head, queue, newcomers, now):
                break
            queue.remove(head)
            self._enter(head, now)
            newcomers.append(head)
        self._compute(now)

    # --------------------------------------------------------------- order

    def _queue(self, now: Now) -> list[Group]:
        others = sorted((group for group in self.waiting if group not in self.front), key=lambda group: group.group_id)
        if not self._orders:
            keys = {group.group_id: self._key(group, now) for group in others}
            if self.policy.key_is_elementwise:
                self._check_columns(others, list(keys.values()), now)
            return self.front + sorted(others, key=lambda group: (keys[group.group_id], group.group_id))
        ordered = list(self.policy.order(tuple(others), self.prefixes, now))
        same = len(ordered) == len(others) and {id(group) for group in ordered} == {id(group) for group in others}
        self.rules.require(same, "order", f"{len(others)} groups wait, the order is {ordered!r}")
        return self.front + ordered  # type: ignore[operator]

    def _key(self, group: Group, now: Now) -> tuple[float, ...]:
        key = self.policy.key(group, now)
        numbers = isinstance(key, tuple) and all(isinstance(part, (int, float)) and part == part for part in key)
        self.rules.require(numbers, "total order", f"key of group {group.group_id} is {key!r}")
        if group in self.waiting:
            held, until = self._held_keys.get(group.group_id, (key, math.inf))
            rule = "static key" if self.policy.is_static else "held key"
            self.rules.require(key == held or now.step >= until, rule, f"group {group.group_id} waits: {held} became {key}")
            step = math.inf if self.policy.is_static else self.policy.key_holds_until(group, now)
            self._held_keys[group.group_id] = key, step
        return key

    def _check_columns(self, groups: list[Group], keys: list[tuple[float, ...]], now: Now) -> None:
        """All at once is what each is by itself."""
        together: object
        try:
            parts = keys_of_all(self.policy, Columns(groups), now)  # type: ignore[arg-type]
            together = [tuple(row) for row in zip(*(part.tolist() for part in parts), strict=True)]
        except IllegalDecision as error:
            together = str(error)
        self.rules.require(together == keys or not groups, "elementwise key", f"{keys} one by one, as arrays {together}")

    # --------------------------------------------------------------- places

    def _make_room(self, head: Group, queue: list[Group], newcomers: list[Group], now: Now) -> bool:
        """Somebody may be sent away for the head of the queue."""
        candidates = tuple(group for group in self.running if group not in newcomers)
        victim = self.policy.displaces(head, candidates, now) if self._displaces and candidates else None
        if victim is None:
            return False
        found = next((group for group in candidates if group is victim), None)
        self.rules.require(found is not None, "displacement", f"{victim!r} is none of {len(candidates)} running groups")
        assert found is not None
        behind = (self._key(head, now), head.group_id) < (self._key(found, now), found.group_id)
        what = f"group {found.group_id} gives way to {head.group_id} and stands before it in the queue"
        self.rules.require(behind, "displacement", what)
        self.decisions.append(("displaced", found.group_id, head.group_id))
        self._give_way(found, now)
        queue.append(found)
        return True

    def _enter(self, group: Group, now: Now) -> None:
        kind = "new" if group.admitted_step < 0 else "swapped_in" if group.num_computed_tokens else "resumed"
        self.waiting.remove(group)
        if group in self.front:
            self.front.remove(group)
        self._held_keys.pop(group.group_id, None)
        set_view(group, admitted_step=now.step)
        self.running.append(group)
        self.policy.entered(group, kind, now)

    def _give_way(self, group: Group, now: Now) -> None:
        self.running.remove(group)
        set_view(group, num_preemptions=group.num_preemptions + 1)
        if self.mode == "recompute":
            set_view(group, num_computed_tokens=0, num_uncomputed_tokens=group.num_tokens + group.num_sequences - 1)
        self.waiting.append(group)
        if self.policy.preempted_first:
            self.front.insert(0, group)
        self.policy.preempted(group, self.mode, now)

    # -------------------------------------------------------------- compute

    def _compute(self, now: Now) -> None:
        """A token each, or a chunk of the prompt; some end, and now and then one gives way to another's growth."""
        self._leave(now)
        for group in tuple(self.running):
            num = min(group.num_uncomputed_tokens, self.rng.randint(4, 12))
            num_left = group.num_uncomputed_tokens - num
            num_output = 0 if num_left else group.num_sequences
            grown = group.num_output_tokens + (1 if num_output else 0)
            set_view(group, num_computed_tokens=group.num_computed_tokens + num, num_output_tokens=grown,
                     num_tokens=group.num_prompt_tokens + grown, num_uncomputed_tokens=num_left or group.num_sequences)  # fmt: skip
            self.policy.computed(group, num, num_output, now)
            if grown >= group.max_tokens:
                self.running.remove(group)
                self.policy.ended(group, now)

    def _leave(self, now: Now) -> None:
        """A client goes away, or blocks are short and the latest gives way: now and then, as long as that can't hide a livelock."""
        happens = self.rng.random() if now.step < 40 else 1.0
        if happens < 0.03 and self.waiting:
            group = self.rng.choice(self.waiting)
            self.waiting.remove(group)
            if group in self.front:
                self.front.remove(group)
            self.policy.ended(group, now)
        elif happens < 0.1 and len(self.running) > 1:
            self._give_way(self.running[-1], now)
