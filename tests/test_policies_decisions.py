"""What the policies of the other seams decide, in situations worked out by hand."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from kvlab.cache.free_blocks import FreeBlocks
from kvlab.policies.admission import FullSequence, ReserveAll, Unlimited, Watermark
from kvlab.policies.base import RegionNeed, VictimView
from kvlab.policies.batching import Chunked, PrefillFirst, Static, Walkthrough
from kvlab.policies.block_sizing import Fixed
from kvlab.policies.compression import Full, Streaming, Window
from kvlab.policies.kv_dtype import Auto, Bf16, Fp8, Fp16, Fp32, Int8
from kvlab.policies.layout import ContiguousMax, ContiguousOracle, ContiguousPow2, Paged, Ring
from kvlab.policies.preemption import LeastComputed, Lifo, Priority
from kvlab.policies.preemption.mode import CheaperOfBoth, Recompute, Swap
from kvlab.policies.prefix_cache import Hash, NoCache, Radix
from kvlab.policies.scheduling import Fcfs, Sjf
from kvlab.policies.scheduling import Priority as PriorityOrder
from kvlab.types import Now, UserError

NOW = Now(0, 0.0)


def group(**fields: Any) -> Any:
    """A group that runs or waits; what a test doesn't name is 0 or 1."""
    defaults: dict[str, Any] = {
        "group_id": 0, "arrival_s": 0.0, "priority": 0, "num_sequences": 1, "num_prompt_tokens": 1, "num_tokens": 1,
        "max_tokens": 1, "num_computed_tokens": 0, "num_blocks": 0, "num_published_tokens": 0,
    }  # fmt: skip
    return SimpleNamespace(**{**defaults, **fields})


# -------------------------------------------------------------------------------------------------------- scheduling

QUEUE = [
    group(group_id=0, arrival_s=3.0, priority=1, num_prompt_tokens=50),
    group(group_id=1, arrival_s=1.0, priority=2, num_prompt_tokens=10),
    group(group_id=2, arrival_s=2.0, priority=1, num_prompt_tokens=50),
    group(group_id=3, arrival_s=4.0, priority=-1, num_prompt_tokens=90),
]


@pytest.mark.parametrize(
    ("policy", "order"),
    [
        (Fcfs(), [1, 2, 0, 3]),  # arrivals 1, 2, 3, 4
        (PriorityOrder(), [3, 2, 0, 1]),  # numbers -1, 1 (arrived at 2), 1 (at 3), 2
        (Sjf(), [1, 2, 0, 3]),  # prompts 10, 50 (arrived at 2), 50 (at 3), 90
    ],
)
def test_order_of_the_queue(policy: Any, order: list[int]) -> None:
    assert [g.group_id for g in sorted(QUEUE, key=lambda g: (policy.key(g, NOW), g.group_id))] == order


def test_sjf_differs_from_fcfs() -> None:
    long_first = [group(group_id=0, arrival_s=0.0, num_prompt_tokens=900), group(group_id=1, arrival_s=1.0, num_prompt_tokens=5)]
    assert min(long_first, key=lambda g: Fcfs().key(g, NOW)).group_id == 0
    assert min(long_first, key=lambda g: Sjf().key(g, NOW)).group_id == 1


# ---------------------------------------------------------------------------------------------------------- batching


def queues(waiting: int = 0, running: int = 0, swapped: int = 0) -> Any:
    lists = {"waiting": [group()] * waiting, "running": [group()] * running, "swapped": [group()] * swapped}
    return SimpleNamespace(**lists, num_waiting=waiting)


@pytest.mark.parametrize(
    ("policy", "idle", "busy", "with_swapped", "only_swapped"),
    [
        (Static(), [["waiting"]], *[[["running", "swapped"]]] * 3),
        (PrefillFirst(), *[[["waiting"], ["running"]]] * 2, *[[["running", "swapped"]]] * 2),
        (Chunked(), *[[["running", "swapped", "waiting"]]] * 4),
        (Walkthrough(), *[[["running", "waiting", "swapped"]]] * 3, [["swapped", "waiting"]]),
    ],
)
def test_phases(policy: Any, idle: Any, busy: Any, with_swapped: Any, only_swapped: Any) -> None:
    def phases(**sizes: int) -> list[list[str]]:
        return [list(phase) for phase in policy.phases(queues(**sizes), NOW)]

    assert phases(waiting=3) == idle
    assert phases(waiting=3, running=2) == busy
    assert phases(waiting=3, running=2, swapped=1) == with_swapped
    assert phases(waiting=3, swapped=1) == only_swapped


@pytest.mark.parametrize(
    ("policy", "fits", "too_long_for_what_is_left", "longer_than_any_step", "budget"),
    [
        (Static(), 40, 0, 0, 2**31 - 1),
        (Walkthrough(), 40, 0, 0, 2**31 - 1),
        (PrefillFirst(), 40, 0, 50, 100),
        (Chunked(), 40, 50, 50, 100),
    ],
)
def test_chunks(policy: Any, fits: int, too_long_for_what_is_left: int, longer_than_any_step: int, budget: int) -> None:
    """50 of 100 tokens are left; prompts of 40, 80 and 300 tokens."""
    assert policy.chunk(40, 50, 100) == fits
    assert policy.chunk(80, 50, 100) == too_long_for_what_is_left
    assert policy.chunk(300, 50, 100) == longer_than_any_step
    assert policy.chunk(1, 1, 100) == 1
    assert policy.token_budget(queues(waiting=2), 100) == budget


# --------------------------------------------------------------------------------------------------------- admission


def entry(num_available: int, needs: dict[int, int], newcomer: Any, running: tuple[Any, ...] = (), first: int = 16) -> Any:
    """An entry that needs `needs[tokens]` blocks."""
    return SimpleNamespace(group=newcomer, kind="new", first_chunk_tokens=first, num_available_blocks=num_available,
                           running=running, blocks_for=needs.__getitem__)  # fmt: skip


POOL = SimpleNamespace(num_blocks=100, num_free=0, num_evictable=0, num_used=100, block_size=16)


@pytest.mark.parametrize(
    ("fraction", "num_available", "answer"),
    [
        # The first chunk needs 4 blocks, the whole prompt of 160 tokens 10.
        (0.0, 4, ""), (0.0, 3, "blocks"), (0.05, 9, ""), (0.05, 8, "watermark"), (0.05, 3, "blocks"),
        (0.059, 9, ""),  # int(0.059 * 100) = 5
        (0.99, 100, "watermark"), (0.96, 100, ""),
    ],
)  # fmt: skip
def test_watermark(fraction: float, num_available: int, answer: str) -> None:
    asked = entry(num_available, {64: 4, 160: 10}, group(num_tokens=160), first=64)
    assert Watermark(fraction).admits(asked, POOL, NOW) == answer


def test_watermark_over_the_full_sequence_and_its_reserve() -> None:
    asked = entry(14, {64: 4, 160: 10}, group(num_tokens=160), first=64)
    assert Watermark(0.05, full_sequence=False).admits(asked, POOL, NOW) == ""
    assert Watermark(0.05, full_sequence=True).admits(asked, POOL, NOW) == "watermark"
    assert Watermark(0.04, full_sequence=True).admits(asked, POOL, NOW) == ""
    assert [Watermark(f).headroom_blocks(POOL) for f in (0, 0.01, 0.019, 0.5)] == [0, 1, 1, 50]
    small = SimpleNamespace(num_blocks=7)
    assert Watermark(0.5).headroom_blocks(small) == 3


def test_full_sequence_and_unlimited() -> None:
    newcomer = group(num_tokens=160)
    needs = {64: 4, 160: 10}
    assert [FullSequence().admits(entry(n, needs, newcomer, first=64), POOL, NOW) for n in (3, 4, 9, 10)] == [
        "blocks", "full_sequence", "full_sequence", "",
    ]  # fmt: skip
    assert Unlimited().admits(entry(0, needs, newcomer, first=64), POOL, NOW) == ""


def test_reserve_all_counts_what_the_running_may_still_take() -> None:
    """B=16. Running: 30 prompt + 34 output tokens are 4 blocks, 2 of them held: 2 to come. The newcomer's worst case is 5."""
    running = (group(num_prompt_tokens=30, max_tokens=34, num_blocks=2),)
    newcomer = group(num_prompt_tokens=40, max_tokens=40, num_tokens=40)
    needs = {40: 3, 80: 5}
    answers = [ReserveAll().admits(entry(n, needs, newcomer, running, first=40), POOL, NOW) for n in (2, 6, 7)]
    assert answers == ["blocks", "reserve_all", ""]


def test_reserve_all_with_parallel_samples() -> None:
    """B=16, n=4: 24 prompt tokens (1 full block, shared) and 24 output tokens are 3 blocks a sequence: 1 + 4 * 2 = 9; 5 held."""
    running = (group(num_prompt_tokens=24, max_tokens=24, num_sequences=4, num_blocks=5),)
    newcomer = group(num_prompt_tokens=8, max_tokens=8, num_tokens=8)
    answers = [ReserveAll().admits(entry(n, {8: 1, 16: 1}, newcomer, running, first=8), POOL, NOW) for n in (4, 5)]
    assert answers == ["reserve_all", ""]


# -------------------------------------------------------------------------------------------------------- preemption

RUNNING = [  # in order of entry
    group(group_id=0, priority=5, num_computed_tokens=40),
    group(group_id=1, priority=1, num_computed_tokens=10),
    group(group_id=2, priority=5, num_computed_tokens=10),
    group(group_id=3, priority=0, num_computed_tokens=70),
]


@pytest.mark.parametrize(
    ("policy", "victims"),
    [
        (Lifo, [3, 2, 1, 0]),
        (Priority, [2, 0, 1, 3]),  # number 5 (latest first), then 1, then 0
        (LeastComputed, [2, 1, 0, 3]),  # 10 (latest first), 40, 70
    ],
)
def test_victims_one_after_the_other(policy: Any, victims: list[int]) -> None:
    candidates, chosen = list(RUNNING), []
    while candidates:
        victim = policy(Recompute()).victim(candidates, NOW)
        chosen.append(victim.group_id)
        candidates.remove(victim)
    assert chosen == victims


def test_modes() -> None:
    """1,000 tokens at 10,000 tokens/s: 100 ms. 63 blocks of 2 MiB there and back at 2 * 10^9 B/s: 132 ms, at 20 * 10^9: 13 ms."""
    victim = VictimView(group(), num_computed_tokens=1000, num_swap_blocks=63, num_free_swap_blocks=63, block_bytes=2 << 20)
    assert Recompute().mode(victim, NOW) == "recompute"
    assert Swap().mode(victim, NOW) == "swap"
    assert CheaperOfBoth(2, 10_000).mode(victim, NOW) == "recompute"
    assert CheaperOfBoth(20, 10_000).mode(victim, NOW) == "swap"
    assert CheaperOfBoth(20, 1e6).mode(victim, NOW) == "recompute"
    assert CheaperOfBoth(20, 10_000).mode(victim._replace(num_free_swap_blocks=62), NOW) == "recompute"


def test_equal_costs_are_computed_again() -> None:
    """One block of 0.5 * 10^9 bytes there and back at 10^9 B/s: a second; 1,000 tokens at 1,000 a second: a second too."""
    victim = VictimView(group(), num_computed_tokens=1000, num_swap_blocks=1, num_free_swap_blocks=1, block_bytes=500_000_000)
    assert CheaperOfBoth(1, 1000).mode(victim, NOW) == "recompute"
    assert CheaperOfBoth(1, 1000).mode(victim._replace(num_computed_tokens=1001), NOW) == "swap"


def test_what_the_prefix_cache_keeps_is_not_computed_again() -> None:
    """As above, 13 ms to swap; of 1,000 tokens 900 are published: 10 ms if all of them stay cached, 55 ms if half of them do."""
    victim = VictimView(group(num_published_tokens=900), 1000, num_swap_blocks=63, num_free_swap_blocks=63, block_bytes=2 << 20)
    assert CheaperOfBoth(20, 10_000).mode(victim, NOW) == "recompute"
    assert CheaperOfBoth(20, 10_000, kept_share=0.5).mode(victim, NOW) == "swap"
    assert CheaperOfBoth(20, 10_000, kept_share=0).mode(victim, NOW) == "swap"


# ------------------------------------------------------------------------------------------------------ prefix cache


def test_hash_is_chained_salted_and_the_same_in_every_process() -> None:
    cache = Hash()
    root = cache.root("")
    first = cache.key(root, [1, 2, 3])
    # sha256(b"kvlab root" + length 0), then sha256(that + 1, 2, 3 as little-endian 32-bit numbers), computed apart.
    assert root.hex() == "c8bfe2fe288fff5a97e426949d1619788178ac8afc6e0fff47068115e563fc5f"
    assert first.hex() == "e1bf3e33518152aa00b49609867e7c63478bc546248eb0fe4dcb249cd6419d24"
    assert cache.key(first, [1, 2, 3]) != first
    assert cache.key(cache.root("salt"), [1, 2, 3]) != first


def test_a_tree_names_blocks_as_the_hash_chain_does() -> None:
    """So that events, traces and replays of both can be compared."""
    assert Radix().root("salt") == Hash().root("salt")
    assert Radix().key(b"parent", [1, 2, 3]) == Hash().key(b"parent", (1, 2, 3))
    assert (Radix.token_tree, Hash.token_tree, NoCache.token_tree) == (True, False, False)


@pytest.mark.parametrize("cache", [Hash(), Radix()])
def test_extra_keys_are_kept_apart(cache: Hash | Radix) -> None:
    """Public case 7: ("ab", "c") is not ("a", "bc"), nor is a missing key an empty one."""
    roots = [cache.root("ab", "c"), cache.root("a", "bc"), cache.root("abc"), cache.root("abc", ""), cache.root("", "abc")]
    assert len(set(roots)) == 5


@pytest.mark.parametrize("token", [-1, 2**32])
def test_a_token_id_that_does_not_fit_is_an_error(token: int) -> None:
    with pytest.raises(OverflowError):
        Hash().key(b"", [token])


def test_no_cache_has_no_keys() -> None:
    assert NoCache.enabled is False
    assert Hash.enabled is True
    with pytest.raises(RuntimeError, match="look at `enabled`"):
        NoCache().key(b"", [1])


# ------------------------------------------------------------------------------------- sizes, places, windows, dtypes


@pytest.mark.parametrize("tokens", [1, 3, 16, 17])
def test_fixed_block_size(tokens: int) -> None:
    assert Fixed(tokens).block_size([], 2048) == tokens
    assert Fixed(tokens).block_size([5, 500], 2048) == tokens


def free_blocks(num_blocks: int, taken: list[int]) -> FreeBlocks:
    free = FreeBlocks(num_blocks)
    free.take(taken)
    return free


def test_paged_takes_the_lowest_ids_and_contiguous_the_lowest_run() -> None:
    free = free_blocks(10, [1, 4, 5])  # free: 0, 2, 3, 6, 7, 8, 9
    assert Paged().place(3, free) == [0, 2, 3]
    assert Paged().place(7, free) == [0, 2, 3, 6, 7, 8, 9]
    assert Paged().place(8, free) is None
    assert ContiguousMax().place(1, free) == [0]
    assert ContiguousMax().place(2, free) == [2, 3]
    assert ContiguousMax().place(3, free) == [6, 7, 8]
    assert ContiguousMax().place(5, free) is None  # seven are free, but no five in a row
    assert len(free) == 7


def test_reservations() -> None:
    """A prompt of 20 in chunks, 70 tokens of output foretold, max_model_len 100, B = 16: 2 blocks are needed now, 3 in the next chunk."""
    need = RegionNeed(2, 20, 75, 70, 100, 16)
    later = need._replace(num_blocks=3)
    reserved = {type(layout): [layout.reserve_blocks(need), layout.reserve_blocks(later)]
                for layout in (Paged(), ContiguousMax(), ContiguousPow2(), ContiguousOracle(), Ring())}  # fmt: skip
    assert reserved == {Paged: [2, 3], ContiguousMax: [7, 7], ContiguousPow2: [2, 4], ContiguousOracle: [6, 6], Ring: [2, 3]}
    assert ContiguousOracle().reserve_blocks(need._replace(oracle_output_len=500)) == 6  # no more than max_tokens: 20 + 75
    assert ContiguousOracle().reserve_blocks(need._replace(num_blocks=9)) == 9  # the oracle erred
    assert [ContiguousPow2().reserve_blocks(need._replace(num_blocks=n)) for n in (1, 2, 5, 8, 9)] == [1, 2, 8, 8, 16]
    with pytest.raises(UserError, match="layout contiguous_oracle"):
        ContiguousOracle().reserve_blocks(need._replace(oracle_output_len=None))
    assert (Paged.shares_blocks, ContiguousMax.shares_blocks) == (True, False)


def test_window_drops_what_no_later_query_reads() -> None:
    """Window 4, 10 tokens computed (0-9): the next query, at 10, reads 7, 8, 9, 10; so 0-6 are dropped."""
    assert [Window(4).num_droppable_tokens(n) for n in (0, 3, 4, 10)] == [0, 0, 1, 7]
    assert [Window(1).num_droppable_tokens(n) for n in (0, 1, 10)] == [0, 1, 10]  # it reads itself alone
    assert (Window(4).attention_window, Window(4).lossless) == (4, False)
    assert (Full().attention_window, Full().lossless, Full().num_droppable_tokens(10_000)) == (None, True, 0)
    assert [policy.num_sink_tokens for policy in (Full(), Window(4), Streaming(2, 4))] == [0, 0, 2]
    assert [Streaming(2, 4).num_droppable_tokens(n) for n in (0, 3, 4, 10)] == [0, 0, 1, 7]  # the engine spares the sinks' blocks
    assert (Streaming(2, 4).attention_window, Streaming(2, 4).lossless) == (4, False)


@pytest.mark.parametrize(
    ("policy", "stored", "lossless_for"),
    [
        (Auto(), ["float64", "float32", "float16", "bfloat16"], [True, True, True, True]),
        (Fp32(), ["float32"] * 4, [False, True, True, True]),
        (Fp16(), ["float16"] * 4, [False, False, True, False]),
        (Bf16(), ["bfloat16"] * 4, [False, False, False, True]),
        (Fp8(), ["float8_e4m3fn"] * 4, [False] * 4),
        (Int8(), ["int8"] * 4, [False] * 4),
    ],
)
def test_storage(policy: Any, stored: list[str], lossless_for: list[bool]) -> None:
    dtypes = ["float64", "float32", "float16", "bfloat16"]
    assert [policy.storage(dtype) for dtype in dtypes] == stored
    assert [policy.lossless_for(dtype) for dtype in dtypes] == lossless_for
    assert policy.lossless is lossless_for[1]


def test_a_prompt_as_long_as_a_step_waits_for_one_and_a_longer_one_is_cut() -> None:
    assert [PrefillFirst().chunk(num_uncomputed, 50, 100) for num_uncomputed in (50, 51, 100, 101)] == [50, 0, 0, 50]


def test_fp8_scales_of_keys_and_of_values_are_not_taken_for_one_another() -> None:
    assert Fp8(k_scale=0.5, v_scale=2.0).scales() == (0.5, 2.0)
    assert Fp8(v_scale=[2, 3]).scales() == (1.0, (2.0, 3.0))
