"""The waiting queue against a plain one that takes every key anew in each step and sorts everything; and how little it asks for."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from random import Random
from types import SimpleNamespace
from typing import Any

import pytest
from engine_support import make_engine, policies, request

from kvlab.engine.queue import WaitingQueue
from kvlab.policies import scheduling
from kvlab.policies.base import PrefixesView, SchedulingPolicy
from kvlab.types import GroupView, IllegalDecision, Now

NOTHING_CACHED: Any = SimpleNamespace(block_size=8, keys=lambda group: (), num_cached_tokens=lambda group: 0, forget=lambda group: None)


class Tide(SchedulingPolicy):
    """Keys that change in every step, and nothing said about it."""

    is_static = False

    def key(self, group: GroupView, now: Now) -> tuple[float, ...]:
        return ((group.num_prompt_tokens * (now.step + 1)) % 11, group.priority)


class Preempting(Tide):
    preempted_first = False


class Waves(SchedulingPolicy):
    """Each group has a wave of its own length: its key holds until the wave ends."""

    is_static = False
    preempted_first = False

    def __init__(self) -> None:
        self.num_asked = 0

    def key(self, group: GroupView, now: Now) -> tuple[float, ...]:
        self.num_asked += 1
        return (now.step // group.num_prompt_tokens % 3,)

    def key_holds_until(self, group: GroupView, now: Now) -> float:
        return (now.step // group.num_prompt_tokens + 1) * group.num_prompt_tokens


class Ages(SchedulingPolicy):
    """By arithmetic, with many ties."""

    is_static = False
    preempted_first = False
    key_is_elementwise = True

    def __init__(self) -> None:
        self.num_asked = 0

    def key(self, group: GroupView, now: Now) -> tuple[float, ...]:
        self.num_asked += 1
        return (-(now.step * group.priority), group.num_prompt_tokens / 4)


class Alternates(SchedulingPolicy):
    """A list, of the latest first, every other step."""

    def key(self, group: GroupView, now: Now) -> tuple[float, ...]:
        return ()

    def order(self, waiting: Sequence[GroupView], prefixes: PrefixesView, now: Now) -> Iterable[GroupView]:
        return waiting if now.step % 2 else waiting[::-1]


class Generates(Alternates):
    """The same, one by one."""

    def __init__(self) -> None:
        self.num_given = 0

    def order(self, waiting: Sequence[GroupView], prefixes: PrefixesView, now: Now) -> Iterable[GroupView]:
        for group in super().order(waiting, prefixes, now):
            self.num_given += 1
            yield group


class Plain:
    """What a queue has to be: all keys anew at the first look in a step, newcomers by their keys, in an ordered queue behind all."""

    def __init__(self, policy: SchedulingPolicy) -> None:
        self.policy = policy
        self.orders = type(policy).order is not SchedulingPolicy.order
        self.front: list[Any] = []
        self.rows: list[tuple[Any, int, Any]] = []
        self.step = -1

    def add(self, group: Any, now: Now) -> None:
        self.rows.append((() if self.orders else self.policy.key(group, now), group.group_id, group))
        if not self.orders:
            self.rows.sort(key=lambda row: row[:2])

    def add_preempted(self, group: Any, now: Now) -> None:
        if self.policy.preempted_first:
            self.front.insert(0, group)
        else:
            self.add(group, now)

    def head(self, now: Now) -> Any:
        if not self.front and self.rows and self.step != now.step:
            self.step = now.step
            groups = sorted((row[2] for row in self.rows), key=lambda group: group.group_id)
            if self.orders:
                self.rows = [((), group.group_id, group) for group in self.policy.order(tuple(groups), NOTHING_CACHED, now)]
            else:
                keyed = [(self.policy.key(group, now), group.group_id, group) for group in groups]
                self.rows = sorted(keyed, key=lambda row: row[:2])
        return self.front[0] if self.front else self.rows[0][2] if self.rows else None

    def remove(self, group: Any) -> None:
        self.front = [other for other in self.front if other is not group]
        self.rows = [row for row in self.rows if row[2] is not group]

    def all(self) -> list[int]:
        return [group.group_id for group in (*self.front, *(row[2] for row in self.rows))]


def group_of(group_id: int, rng: Random) -> Any:
    return SimpleNamespace(group_id=group_id, request_id=f"r{group_id}", arrival_s=group_id * 0.25, priority=rng.randrange(3),
                           tenant="ab"[group_id % 2], num_prompt_tokens=rng.randint(1, 9), max_tokens=rng.randint(1, 9),
                           num_output_tokens=0)  # fmt: skip


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("policy", [Tide, Preempting, Waves, Ages, Alternates, Generates, scheduling.Hrrn, scheduling.Sjf, scheduling.Edf,
                                    scheduling.Vtc, scheduling.Lpm], ids=lambda policy: policy.__name__)  # fmt: skip
def test_the_queue_is_what_a_plain_one_is(policy: type[SchedulingPolicy], seed: int) -> None:
    """Up to 300 wait, so that some are picked, some drawn in a second round and most never; aborts, preemptions, looks in between."""
    rng = Random(seed)
    queue, plain = WaitingQueue(policy(), NOTHING_CACHED), Plain(policy())
    num_made, gone = 0, []
    for step in range(40):
        now = Now(step, step * 0.5)
        for _ in range(rng.choice((0, 1, 5, 120 if len(queue) < 180 else 0))):
            group = group_of(num_made, rng)
            num_made += 1
            queue.add(group, now)
            plain.add(group, now)
        if rng.random() < 0.4 and len(queue):
            left = rng.choice(list(queue))
            queue.remove(left)
            plain.remove(left)
        if rng.random() < 0.2:
            assert [group.group_id for group in queue] == plain.all()
        for _ in range(rng.choice((0, 1, 3, 100))):
            head = plain.head(now)
            assert queue.head(now) is head
            if head is None:
                break
            assert queue.pop_head() is head
            plain.remove(head)
            gone.append(head)
            if rng.random() < 0.1:
                back = gone.pop(rng.randrange(len(gone)))
                queue.add_preempted(back, now)
                plain.add_preempted(back, now)
        assert len(queue) == len(plain.all())
        if rng.random() < 0.3:
            assert [group.group_id for group in queue] == plain.all()


def filled(policy: SchedulingPolicy, num: int = 1000) -> WaitingQueue:
    """A queue of `num` groups that came before step 0."""
    queue, rng = WaitingQueue(policy, NOTHING_CACHED), Random(0)
    for group_id in range(num):
        queue.add(group_of(group_id, rng), Now(0, 0.0))
    return queue


def test_groups_are_asked_again_when_their_keys_may_have_changed() -> None:
    """Waves of 1 to 9 steps over 1,000 groups of which about a ninth has each: at step 7 those of one and of seven tokens are asked."""
    policy = Waves()
    queue = filled(policy)
    sizes = [group.num_prompt_tokens for group in queue]
    for step in range(7):
        queue.head(Now(step, 0.0))
    policy.num_asked = 0
    queue.head(Now(7, 0.0))
    queue.head(Now(7, 0.0))
    assert policy.num_asked == sizes.count(1) + sizes.count(7) == 215


def test_keys_of_arithmetic_are_asked_once_a_step() -> None:
    policy = Ages()
    queue = filled(policy)
    policy.num_asked = 0
    for step in range(1, 4):
        for _ in range(100):
            queue.head(Now(step, 0.0))
            queue.pop_head()
    assert policy.num_asked == 3


def test_an_order_is_drawn_as_far_as_it_is_looked_at() -> None:
    policy = Generates()
    queue = filled(policy)
    assert [queue.head(Now(0, 0.0)).group_id, queue.pop_head().group_id, queue.head(Now(0, 0.0)).group_id] == [999, 999, 998]  # type: ignore[union-attr]
    assert policy.num_given == 2
    queue.head(Now(1, 0.0))
    assert policy.num_given == 3


def test_what_a_policy_says_wrongly_is_its_own_error() -> None:
    class Twice(Generates):
        def order(self, waiting: Sequence[GroupView], prefixes: PrefixesView, now: Now) -> Iterable[GroupView]:
            yield waiting[0]
            yield waiting[0]

    class TooFew(Generates):
        def order(self, waiting: Sequence[GroupView], prefixes: PrefixesView, now: Now) -> Iterable[GroupView]:
            yield from waiting[1:]

    class NotSo(Ages):
        def key(self, group: GroupView, now: Now) -> tuple[float, ...]:
            return (max(group.priority, 1),)

    class NoStep(Waves):
        def key_holds_until(self, group: GroupView, now: Now) -> float:
            return math.nan

    queue = filled(Twice(), 3)
    assert queue.head(Now(0, 0.0)) is queue.pop_head()
    with pytest.raises(IllegalDecision, match="Twice.*an order of 2 groups.*each of the 3 that wait, once"):
        queue.head(Now(0, 0.0))
    short = filled(TooFew(), 3)
    assert short.head(Now(0, 0.0)).group_id == 1  # type: ignore[union-attr]
    with pytest.raises(IllegalDecision, match="TooFew.*an order of 2 groups.*each of the 3 that wait, once"):
        list(short)
    with pytest.raises(IllegalDecision, match="NotSo.*the keys of 3 groups at once"):
        filled(NotSo(), 3).head(Now(0, 0.0))
    with pytest.raises(IllegalDecision, match="NoStep.*holds until nan"):
        filled(NoStep(), 1)


# ------------------------------------------------------------------------------------------------- prefixes of those that wait


@pytest.mark.parametrize("cache", ["hash", "radix"])
@pytest.mark.parametrize("eviction", ["lru", "random"])
def test_what_was_found_of_a_prefix_is_true_in_every_step(cache: str, eviction: str) -> None:
    """60 requests with five common beginnings in a pool that evicts all the time: for every group that waits, what is remembered is
    what a look-up finds; most are remembered from step to step."""
    rng = Random(7)
    engine, _ = make_engine(30, 4, policies(scheduling="dfs_weight", prefix_cache=cache, eviction=eviction), max_num_seqs=3,
                            max_model_len=64)  # fmt: skip
    begins = [[rng.randrange(90) for _ in range(rng.randint(4, 24))] for _ in range(5)]
    for i in range(60):
        engine.add_request(request(f"r{i}", [*rng.choice(begins), *(rng.randrange(90) for _ in range(rng.randint(1, 6)))], 6))
    prefixes = engine.scheduler.waiting._prefixes
    num_looks = num_remembered = num_cached = 0
    while engine.has_work:
        engine.step()
        for group in engine.scheduler.waiting:
            num_remembered += group.group_id in prefixes._found
            num_looks += 1
            seq = group.seqs[0]
            true = engine.kv.match_prefix(seq, len(seq.tokens) - 1).num_tokens
            assert prefixes.num_cached_tokens(group) == true
            assert list(prefixes.keys(group)) == engine.kv.prefix_keys(seq)
            num_cached += true
    assert engine.kv.pool.num_evicted > 100
    assert num_cached > 1000
    assert num_remembered > 0.7 * num_looks
    assert not prefixes._found and not prefixes._whose and not prefixes._keys  # noqa: PT018 - nothing is left of those that have gone
