"""One driver a seam: it feeds random, legal events to a policy, checks each decision, and returns the decisions."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from random import Random
from typing import Any

from kvlab.policies.base import (
    AdmissionPolicy,
    BatchingPolicy,
    BlockSizingPolicy,
    CompressionPolicy,
    KVDtypePolicy,
    LayoutPolicy,
    PreemptionMode,
    PreemptionPolicy,
    PrefixCachePolicy,
    RegionNeed,
    SlotLayout,
    SlotView,
    VictimView,
)  # fmt: skip
from kvlab.testing.eviction import drive_eviction
from kvlab.testing.rules import Rules
from kvlab.testing.scheduling import drive_scheduling
from kvlab.testing.views import Entry, Free, Group, Pool, Queues, no_oracle, random_groups, set_view
from kvlab.types import Now, RequestShape


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
        rules.require(_is_int(budget) and budget >= 1, "token budget", f"{budget!r} of {limit}")
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
    legal = _is_int(chunk) and 0 <= chunk <= min(num_uncomputed, budget)
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
        rules.require(_is_int(headroom) and 0 <= headroom <= num_blocks, "headroom", f"{headroom!r} of {num_blocks} blocks")
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


def drive_prefix_cache(policy: PrefixCachePolicy, rng: Random, rules: Rules) -> list[object]:
    """Keys of prefixes that are easily mistaken for one another."""
    if not policy.enabled:
        return []
    roots = [policy.root(salt) for salt in ("", "a", "b", "ab", "a\0", "ä")]
    tokens = [rng.randint(0, 50_000) for _ in range(4)]
    blocks = [(1, 23), (12, 3), (23, 1), (0,), (0, 0), (256,), (1,), (1, 0), (65_537,), tuple(tokens), (7, *reversed(tokens))]
    firsts = [policy.key(root, block) for root in roots for block in blocks]
    seconds = [policy.key(parent, (1, 23)) for parent in firsts]
    chain = policy.key(policy.key(roots[0], (5, 6)), (7, 8))
    keys = [*roots, *firsts, *seconds, chain, policy.key(roots[0], (5, 6, 7, 8))]
    rules.require(all(isinstance(key, bytes) for key in keys), "keys", "a key is not bytes")
    rules.require(len(set(keys)) == len(keys), "keys", f"{len(keys)} different prefixes have {len(set(keys))} different keys")
    rules.require(policy.key(roots[0], list(blocks[0])) == firsts[0], "keys", "a list and a tuple of the same tokens differ")
    return list(keys)


def drive_block_sizing(policy: BlockSizingPolicy, rng: Random, rules: Rules) -> list[object]:
    """Sizes for random prompts, and for none."""
    prompts = [[], [1], *([rng.randint(1, 4000) for _ in range(rng.randint(1, 9))] for _ in range(4))]
    sizes = [policy.block_size(lens, limit) for lens in prompts for limit in (1, 2048)]
    policy.foresee([RequestShape(n, rng.randint(1, 400), rng.randint(0, n - 1), rng.choice((1, 1, 4))) for n in prompts[-1]])
    sizes += [policy.block_size((), limit) for limit in (1, 2048)]
    lines = list(policy.explain())
    rules.require(all(isinstance(line, str) for line in lines), "block size", f"explain() returned {lines!r}")
    for size in sizes:
        rules.require(_is_int(size) and size >= 1, "block size", f"{size!r}")
    return [*sizes, *lines]


def drive_layout(policy: LayoutPolicy, rng: Random, rules: Rules) -> list[object]:
    """Regions that come, grow and go in a pool; places in random sets of free blocks."""
    rules.require(not (policy.shares_blocks and policy.is_contiguous), "placement", "blocks that are shared can't be consecutive")
    decisions: list[object] = []
    num_blocks = rng.randint(1, 24)
    free, held = Free(range(num_blocks), num_blocks), list[list[int]]()
    for _ in range(30):
        want, ids = rng.randint(0, num_blocks), [block_id for block_id in range(num_blocks) if rng.random() < 0.7]
        decisions.append(_checked_place(policy, want, Free(ids, num_blocks), rules))
        decisions.append(_checked_reservation(policy, want, rng, rules))
        operation = rng.choice(("enter", "enter", "grow", "leave"))
        if operation == "enter":
            placed = _checked_place(policy, rng.randint(1, max(1, num_blocks // 2)), free, rules)
            if placed:
                held.append(placed)
                policy.took(placed)
        elif held:
            old = held.pop(rng.randrange(len(held)))
            new: list[int] | None = []
            if operation == "grow":
                new = policy.regrow(tuple(old), len(old) + rng.randint(1, 4), free)
                decisions.append(new)
                if new is None:
                    new = list(old)
                else:
                    _check_ids(policy, new, free.also(old), f"regrow of {old} among free {free.block_ids} = {new!r}", rules)
                    policy.took([block_id for block_id in new if block_id not in old])
            kept = list[int]() if new is None else new
            held += [kept] if kept else []
            for block_id in [block_id for block_id in reversed(old) if block_id not in kept]:
                policy.gave(block_id)
        free = Free(sorted(set(range(num_blocks)) - {block_id for region in held for block_id in region}), num_blocks)
    if isinstance(policy, SlotLayout):
        decisions += _drive_slots(policy, rng, rules)
    return decisions


def _checked_place(policy: LayoutPolicy, want: int, free: Free, rules: Rules) -> list[int] | None:
    largest = policy.largest_region(free)
    legal = _is_int(largest) and min(1, len(free)) <= largest <= len(free)
    rules.require(legal, "placement", f"largest_region of free {free.block_ids} = {largest!r}")
    rules.require(largest == len(free) or not policy.shares_blocks, "placement", "shared blocks must fit anywhere")
    before = free.block_ids
    place = policy.place(want, free)
    what = f"place({want}) among free {free.block_ids} = {place!r}, largest_region {largest}"
    rules.require((place is not None) == (want <= largest), "placement", what)
    rules.require(policy.place(want, free) == place, "placement", f"{what}; asked again, it answers otherwise")
    if place is not None:
        rules.require(len(place) == want, "placement", what)
        _check_ids(policy, place, free, what, rules)
    rules.require(free.block_ids == before, "read-only", "place changed the free blocks")
    return place


def _check_ids(policy: LayoutPolicy, ids: list[int], free: Free, what: str, rules: Rules) -> None:
    good = len(ids) == len(set(ids)) and all(_is_int(b) and b in free.block_ids for b in ids)
    rules.require(good, "placement", what)
    is_run = not ids or ids == list(range(ids[0], ids[0] + len(ids)))
    rules.require(is_run or not policy.is_contiguous, "placement", f"{what} is not consecutive")


def _checked_reservation(policy: LayoutPolicy, want: int, rng: Random, rules: Rules) -> int:
    need = RegionNeed(want, rng.randint(1, 40), rng.randint(1, 40), rng.randint(1, 40), 128, rng.choice((1, 3, 16)))
    reserved = policy.reserve_blocks(need)
    rules.require(_is_int(reserved) and reserved >= want, "reservation", f"{reserved!r} blocks reserved, {want} needed")
    if "oracle" not in type(policy).__name__.lower():
        blind = policy.reserve_blocks(need._replace(oracle_output_len=None))
        rules.require(blind == reserved, "no oracle", "oracle_output_len was read")
    return reserved


def _drive_slots(policy: SlotLayout, rng: Random, rules: Rules) -> list[object]:
    """Choices among random unused slots."""
    rules.require(_is_int(policy.num_slots) and policy.num_slots >= 1, "slots", f"num_slots = {policy.num_slots!r}")
    chosen: list[object] = []
    for _ in range(20):
        num_tokens, ids = rng.randint(1, 40), sorted(rng.sample(range(8), rng.randint(1, 8)))
        views = [SlotView(i, kept := rng.randint(0, 40), rng.randint(0, min(kept, num_tokens)), rng.randint(-1, 30)) for i in ids]
        for choice in (policy.choose_slot(num_tokens, views), policy.purge_slot(views)):
            rules.require(choice in ids, "slots", f"slot {choice!r} of {ids}")
            chosen.append(choice)
    return chosen


def drive_compression(policy: CompressionPolicy, rng: Random, rules: Rules) -> list[object]:
    """Droppable tokens of a sequence that grows."""
    window = policy.attention_window
    rules.require(window is None or (_is_int(window) and window >= 1), "droppable", f"attention_window = {window!r}")
    rules.require(not (policy.lossless and window is not None), "droppable", "a window loses tokens, yet lossless is true")
    drops: list[int] = []
    for num_computed in (*range(60), *sorted(rng.randint(60, 9000) for _ in range(20))):
        dropped = policy.num_droppable_tokens(num_computed)
        # The next query stands at position num_computed and reads the latest `window` positions, its own included.
        most = 0 if policy.lossless else num_computed if window is None else max(0, num_computed + 1 - window)
        legal = _is_int(dropped) and (drops[-1] if drops else 0) <= dropped <= most
        rules.require(legal, "droppable", f"{dropped!r} of {num_computed} computed tokens; at most {most} are read no more")
        drops.append(dropped)
    return list(drops)


def drive_kv_dtype(policy: KVDtypePolicy, rng: Random, rules: Rules) -> list[object]:
    """Storage for each model dtype."""
    dtypes = ("float64", "float32", "float16", "bfloat16")
    stored = [policy.storage(dtype) for dtype in dtypes]
    known = (*dtypes, "float8_e4m3fn", "int8")
    rules.require(all(storage in known for storage in stored), "storage", f"{dtypes} are stored as {stored}")
    keeps = stored[1] in ("float32", "float64")
    rules.require(keeps or not policy.lossless, "storage", f"lossless is true, but float32 is stored as {stored[1]}")
    return list(stored)


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


DRIVERS: dict[str, Callable[[Any, Random, Rules], list[object]]] = {
    "scheduling": drive_scheduling,
    "batching": drive_batching,
    "admission": drive_admission,
    "preemption": drive_preemption,
    "preemption/mode": drive_mode,
    "eviction": drive_eviction,
    "prefix_cache": drive_prefix_cache,
    "block_sizing": drive_block_sizing,
    "layout": drive_layout,
    "compression": drive_compression,
    "kv_dtype": drive_kv_dtype,
}
