"""Drivers of the seams that say what a cache holds, and where: prefix_cache, block_sizing, layout, compression, kv_dtype."""

from __future__ import annotations

from random import Random

from kvlab.policies.base import (
    BlockSizingPolicy,
    CompressionPolicy,
    KVDtypePolicy,
    LayoutPolicy,
    PrefixCachePolicy,
    RegionNeed,
    SlotLayout,
    SlotView,
)
from kvlab.testing.rules import Rules, is_int
from kvlab.testing.views import Free
from kvlab.types import RequestShape


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
        rules.require(is_int(size) and size >= 1, "block size", f"{size!r}")
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
    legal = is_int(largest) and min(1, len(free)) <= largest <= len(free)
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
    good = len(ids) == len(set(ids)) and all(is_int(b) and b in free.block_ids for b in ids)
    rules.require(good, "placement", what)
    is_run = not ids or ids == list(range(ids[0], ids[0] + len(ids)))
    rules.require(is_run or not policy.is_contiguous, "placement", f"{what} is not consecutive")


def _checked_reservation(policy: LayoutPolicy, want: int, rng: Random, rules: Rules) -> int:
    need = RegionNeed(want, rng.randint(1, 40), rng.randint(1, 40), rng.randint(1, 40), 128, rng.choice((1, 3, 16)))
    reserved = policy.reserve_blocks(need)
    rules.require(is_int(reserved) and reserved >= want, "reservation", f"{reserved!r} blocks reserved, {want} needed")
    if "oracle" not in type(policy).__name__.lower():
        blind = policy.reserve_blocks(need._replace(oracle_output_len=None))
        rules.require(blind == reserved, "no oracle", "oracle_output_len was read")
    return reserved


def _drive_slots(policy: SlotLayout, rng: Random, rules: Rules) -> list[object]:
    """Choices among random unused slots."""
    rules.require(is_int(policy.num_slots) and policy.num_slots >= 1, "slots", f"num_slots = {policy.num_slots!r}")
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
    rules.require(window is None or (is_int(window) and window >= 1), "droppable", f"attention_window = {window!r}")
    rules.require(not (policy.lossless and window is not None), "droppable", "a window loses tokens, yet lossless is true")
    sinks = policy.num_sink_tokens
    rules.require(is_int(sinks) and sinks >= 0, "droppable", f"num_sink_tokens = {sinks!r}")
    rules.require(window is not None or not sinks, "droppable", f"num_sink_tokens = {sinks} without a window: every token is seen")
    drops: list[int] = []
    for num_computed in (*range(60), *sorted(rng.randint(60, 9000) for _ in range(20))):
        dropped = policy.num_droppable_tokens(num_computed)
        # The next query stands at position num_computed and reads the latest `window` positions, its own included; without one, all.
        most = 0 if policy.lossless or window is None else max(0, num_computed + 1 - window)
        legal = is_int(dropped) and (drops[-1] if drops else 0) <= dropped <= most
        rules.require(legal, "droppable", f"{dropped!r} of {num_computed} computed tokens; at most {most} are read no more")
        drops.append(dropped)
    later = policy.attention_window, policy.num_sink_tokens
    rules.require(later == (window, sinks), "droppable", f"attention_window and num_sink_tokens were {window}, {sinks} and are now "
                  f"{later[0]}, {later[1]}: they are read once")  # fmt: skip
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
