"""Prefix caching: what may be found, when, and what must not be. Block ids are worked out by hand: the lowest free id is taken first."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import pytest
from engine_support import Forcer, make_engine, policies, policy_names, prompt_of, reference_outputs, request, run_to_end, serve

from kvlab.engine import Engine
from kvlab.policies.prefix_cache import Hash, Radix
from kvlab.policies.registry import by_name

both = pytest.mark.parametrize("prefix_cache", ["hash", "radix"])


def _tables(log: Any) -> dict[int, tuple[int, ...]]:
    """seq_id -> the table it was first given."""
    first: dict[int, tuple[int, ...]] = {}
    for plan in log.plans:
        for seq_id, block_ids in plan.fresh_tables.items():
            first.setdefault(seq_id, block_ids)
    return first


@pytest.mark.parametrize(
    ("block_size", "length", "cached"),
    [
        (16, 16, 0),
        (16, 17, 16),
        (16, 31, 16),
        (16, 32, 16),
        (16, 33, 32),
        (16, 48, 32),
        (1, 1, 0),
        (1, 2, 1),
        (1, 5, 4),
        (3, 6, 3),
        (3, 7, 6),
    ],
)
@both
def test_a_prompt_that_is_cached_as_a_whole_still_computes_a_token(block_size: int, length: int, cached: int, prefix_cache: str) -> None:
    """Whole prompt cached: the hit is full blocks and at most length - 1 tokens; the answer is the cold one."""
    engine, log = make_engine(200 // block_size + 10, block_size, policies(prefix_cache=prefix_cache))
    prompt = prompt_of(length)
    for name in ("cold", "warm"):
        serve(engine, [request(name, prompt, 5)])
    assert log.records["cold"].num_cached_tokens == 0
    assert log.records["warm"].num_cached_tokens == cached
    warm = next(plan for plan in log.plans if plan.admitted and plan.admitted[0].request_id == "warm")
    assert [(s.first_position, s.num_new_tokens) for s in warm.scheduled] == [(cached, length - cached)]
    assert log.records["warm"].outputs == log.records["cold"].outputs
    assert len(log.records["warm"].outputs[0][0]) == 5


def _state(engine: Engine) -> tuple[Any, ...]:
    """Free list, reference counts, content map, counters and the order in which eviction would go on."""
    pool = engine.kv.pool
    blocks = [(b.block_id, b.ref_count, b.content, b.num_hits, b.used_tick) for b in pool.blocks]
    return pool.free.lowest(pool.num_blocks), blocks, sorted(pool.by_content), pool.tick, _eviction_order(engine)


def _eviction_order(engine: Engine) -> list[int]:
    pool = copy.deepcopy(engine.kv.pool)
    order: list[int] = []
    pool.on_event = lambda kind, tier, block: order.append(block.block_id) if kind == "evict" else None
    assert pool.allocate(pool.num_available) is not None
    return order


@pytest.mark.parametrize("eviction", policy_names("eviction"))
@both
def test_a_refusal_leaves_no_trace(eviction: str, prefix_cache: str) -> None:
    """4 new blocks are needed and 5 can be had, but 2 of the 5 are the request's own hits: it stays out and nothing has changed."""
    engine, log = make_engine(8, 4, policies(eviction=eviction, admission="none", prefix_cache=prefix_cache))
    shared = prompt_of(9, 1)
    serve(engine, [request("a", shared, 1)])  # blocks 0, 1 stay cached, 2 is free again
    engine.add_request(request("r", prompt_of(9, 2), 3))
    engine.step()
    assert engine.sequences[1].table.block_ids == [2, 3, 4]  # type: ignore[union-attr]
    assert (engine.kv.pool.num_free, engine.kv.pool.num_evictable) == (3, 2)
    before = _state(engine)
    engine.add_request(request("q", shared[:8] + prompt_of(16, 3), 1))
    result = engine.step()
    assert [(b.request_id, b.by) for b in result.plan.blocked] == [("q", "blocks")]
    assert _state(engine) == before
    assert sorted(before[-1]) == [0, 1]
    run_to_end(engine, 20)
    assert log.records["q"].num_cached_tokens == 8
    assert log.records["q"].outputs == reference_outputs([request("q", shared[:8] + prompt_of(16, 3), 1)])["q"]


@pytest.mark.parametrize(("block_size", "num_shared"), [(1, 2), (4, 8), (16, 32)])
@both
def test_two_cold_prompts_in_one_step_share_nothing_unfinished(block_size: int, num_shared: int, prefix_cache: str) -> None:
    """Same-step sharing: a block is findable once it is computed, so both compute all; duplicates keep the first block. Beside a hash
    chain the second keeps its own, unpublished; beside a tree it takes the first's, and its own are free."""
    shared = prompt_of(num_shared, 5)
    pair = [request("a", shared + prompt_of(3, 6), 4), request("b", shared + prompt_of(3, 7), 4)]
    engine, log = make_engine(40, block_size, policies(prefix_cache=prefix_cache))
    for each in pair:
        engine.add_request(each)
    engine.step()
    assert [(s.first_position, s.num_new_tokens) for s in log.plans[0].scheduled] == [(0, num_shared + 3)] * 2
    tables = _tables(log)
    assert not set(tables[0]) & set(tables[1])
    num_duplicates = num_shared // block_size
    held = [set(engine.sequences[seq_id].table.block_ids) for seq_id in (0, 1)]  # type: ignore[union-attr]
    assert len(held[0] & held[1]) == (num_duplicates if prefix_cache == "radix" else 0)
    assert len(held[0] | held[1]) == engine.kv.pool.num_used
    run_to_end(engine, 10)
    assert log.outputs == reference_outputs(pair)
    assert [log.records[name].num_cached_tokens for name in "ab"] == [0, 0]
    shared_contents = [e.content for e in log.events if e.kind == "publish"]
    assert len(shared_contents) == len(set(shared_contents))
    serve(engine, [request("c", shared + prompt_of(3, 8), 1)])
    assert log.records["c"].num_cached_tokens == num_shared
    assert _tables(log)[2][:2] == tables[0][:2]


@both
def test_after_a_hit_the_rest_is_scheduled_to_the_prompts_end(prefix_cache: str) -> None:
    """B = 256, 465 tokens, 256 of them cached: 209 are scheduled, and they end at 465."""
    engine, log = make_engine(8, 256, policies(prefix_cache=prefix_cache))
    prompt = prompt_of(465)
    serve(engine, [request("a", [*prompt[:256], 1], 1)])
    serve(engine, [request("b", prompt, 1)])
    scheduled = log.plans[-1].scheduled[0]
    assert (scheduled.first_position, scheduled.num_new_tokens) == (256, 209)
    assert scheduled.first_position + scheduled.num_new_tokens == 465


@pytest.mark.parametrize("eviction", policy_names("eviction"))
@both
def test_what_was_evicted_is_not_found(eviction: str, prefix_cache: str) -> None:
    """A's cached block goes to B; when A comes back while B runs, it must not find a block that is B's now."""
    engine, log = make_engine(5, 4, policies(eviction=eviction, admission="none", prefix_cache=prefix_cache))
    a, b = prompt_of(5, 1), prompt_of(7, 2)
    serve(engine, [request("a", a, 1)])  # block 0 is cached
    engine.add_request(request("c", prompt_of(9, 3), 3))
    engine.step()
    engine.add_request(request("b", b, 6))
    engine.step()
    tables = _tables(log)
    assert (tables[1], tables[2]) == ((1, 2, 3), (0, 4))  # b has taken a's block 0
    assert log.blocks_of("evict") == [0]
    engine.step()  # c ends
    engine.add_request(request("a again", a, 2))
    engine.step()
    assert _tables(log)[3] == (1, 2)  # c's cached blocks were evicted for it
    run_to_end(engine, 10)
    assert log.records["a again"].num_cached_tokens == 0
    wanted = reference_outputs([request("a again", a, 2), request("b", b, 6)])
    assert {name: log.records[name].outputs for name in wanted} == wanted


@pytest.mark.parametrize(
    ("prefix_cache", "eviction", "evicted", "cached"),
    [("hash", "lru", 2, 8), ("hash", "fifo", 0, 0), ("radix", "lru", 2, 8), ("radix", "fifo", 2, 8)],
)
def test_a_hit_is_the_longest_contiguous_prefix(prefix_cache: str, eviction: str, evicted: int, cached: int) -> None:
    """N = 3, blocks 0, 1, 2 of one finished prompt, another needs one block. The tail goes first (LRU), and the prompt then hits 2
    blocks; where the head goes (FIFO) it hits none, though 1 and 2 are still there. A tree gives up leaves first under any policy."""
    engine, log = make_engine(3, 4, policies(eviction=eviction, prefix_cache=prefix_cache))
    prompt = prompt_of(12)
    serve(engine, [request("a", prompt, 1)])
    assert engine.kv.pool.num_evictable == 3
    serve(engine, [request("b", prompt_of(3, 9), 1)])
    assert log.blocks_of("evict") == [evicted]
    engine.add_request(request("a again", prompt, 1))
    engine.step()
    assert log.records["a again"].num_cached_tokens == cached
    assert log.records["a again"].outputs == log.records["a"].outputs


@pytest.mark.parametrize(
    ("one", "other"),
    [(("ab", "c"), ("a", "bc")), (("", "a"), ("a", "")), (("ab",), ("a", "b")), (("a",), ("a", "")), (("\x00",), ("\x00", "\x00"))],
)
def test_extra_keys_are_kept_apart(one: tuple[str, ...], other: tuple[str, ...]) -> None:
    """Salt and adapter name don't run together: ("ab", "c") is not ("a", "bc")."""
    assert Hash().root(*one) != Hash().root(*other)
    assert Radix().root(*one) != Radix().root(*other)


@pytest.mark.parametrize(("salts", "cached"), [(("", ""), 8), (("x", "x"), 8), (("x", "y"), 0), (("", "x"), 0)])
@both
def test_requests_with_different_salts_share_nothing(salts: tuple[str, str], cached: int, prefix_cache: str) -> None:
    """One prompt, two salts: found under the same one only."""
    engine, log = make_engine(20, 4, policies(prefix_cache=prefix_cache))
    for name, salt in zip("ab", salts, strict=True):
        serve(engine, [request(name, prompt_of(11), 3, salt=salt)])
    assert log.records["b"].num_cached_tokens == cached


@both
def test_the_same_tokens_after_another_prefix_are_another_block(prefix_cache: str) -> None:
    """Keys are chained: block 1 of two prompts is equal token for token, block 0 is not; nothing is shared."""
    engine, log = make_engine(20, 4, policies(prefix_cache=prefix_cache))
    tail = prompt_of(5, 3)
    serve(engine, [request("a", prompt_of(4, 1) + tail, 3)])
    serve(engine, [request("b", prompt_of(4, 2) + tail, 3)])
    assert log.records["b"].num_cached_tokens == 0
    assert log.outputs == reference_outputs([request("a", prompt_of(4, 1) + tail, 3), request("b", prompt_of(4, 2) + tail, 3)])


class OneByteKeys(Hash):
    """Collides whenever the last tokens agree modulo 2."""

    def key(self, parent: bytes, token_ids: Sequence[int]) -> bytes:
        return bytes([token_ids[-1] % 2])


def test_a_key_that_collides_is_noticed_by_these_tests() -> None:
    """Two contents with one key would share KV. SHA-256 over parent and tokens does not collide; if a key does, the paged fake says so."""
    keys = {Hash().key(b"", [token, other]) for token in range(100) for other in range(100)}
    assert len(keys) == 10_000
    assert {len(key) for key in keys} == {32}
    engine, _ = make_engine(20, 4, policies(prefix_cache=OneByteKeys()))
    serve(engine, [request("a", [1, 2, 3, 4, 5], 1)], check=False)
    engine.add_request(request("b", [9, 8, 7, 6, 5], 1))
    with pytest.raises(AssertionError, match="block 0, computed after another prefix"):
        engine.step()


class OneByteNames(Radix):
    """Collides as OneByteKeys does."""

    def key(self, parent: bytes, token_ids: Sequence[int]) -> bytes:
        return bytes([token_ids[-1] % 2])


def test_a_tree_compares_tokens_so_names_that_collide_share_nothing() -> None:
    """The same two prompts: the second finds nothing, keeps its own block, and the first one's stays in the cache."""
    engine, log = make_engine(20, 4, policies(prefix_cache=OneByteNames()))
    requests = [request("a", [1, 2, 3, 4, 5], 1), request("b", [9, 8, 7, 6, 5], 1), request("a again", [1, 2, 3, 4, 9], 1)]
    for each in requests:
        serve(engine, [each], check=False)
    assert [log.records[name].num_cached_tokens for name in ("a", "b", "a again")] == [0, 0, 4]
    assert log.outputs == reference_outputs(requests)


@both
def test_chunks_are_hashed_by_absolute_offset(prefix_cache: str) -> None:
    """200 tokens in chunks of 100, B = 16: after the first chunk 6 blocks are full and published, after the second 12."""
    engine, log = make_engine(40, 16, policies(prefix_cache=prefix_cache), max_num_batched_tokens=100)
    prompt = prompt_of(200)
    engine.add_request(request("a", prompt, 1))
    engine.step()
    assert log.blocks_of("publish") == [0, 1, 2, 3, 4, 5]
    engine.step()
    assert log.blocks_of("publish") == list(range(12))
    whole, whole_log = make_engine(40, 16, policies(prefix_cache=prefix_cache), max_num_batched_tokens=200)
    serve(whole, [request("a", prompt, 1)])
    assert [e.content for e in log.events if e.kind == "publish"] == [e.content for e in whole_log.events if e.kind == "publish"]
    serve(engine, [request("b", prompt, 1)])
    assert log.records["b"].num_cached_tokens == 192
    assert log.records["b"].outputs == log.records["a"].outputs


@pytest.mark.parametrize(
    ("num_shared", "cached", "lost"), [(12, 0, 12), (1, 0, 1), (15, 0, 15), (16, 16, 0), (20, 16, 4), (31, 16, 15), (35, 32, 0)]
)
@both
def test_sharing_below_a_block_is_no_hit_and_is_told(num_shared: int, cached: int, lost: int, prefix_cache: str) -> None:
    """Two prompts of 40 tokens share some, B = 16 (32 tokens of the first are cached): what granularity loses is in the record."""
    engine, log = make_engine(20, 16, policies(prefix_cache=prefix_cache))
    first = [1] * 40
    serve(engine, [request("a", first, 1)])
    serve(engine, [request("b", first[:num_shared] + [2] * (40 - num_shared), 1)])
    assert log.records["b"].num_cached_tokens == cached
    assert log.records["b"].num_shareable_tokens_lost == lost
    copying, copying_log = make_engine(20, 16, policies(prefix_cache=Radix(partial_block_copy=True)))
    serve(copying, [request("a", first, 1)])
    serve(copying, [request("b", first[:num_shared] + [2] * (40 - num_shared), 1)])
    assert copying_log.records["b"].num_cached_tokens == cached + lost
    assert copying_log.records["b"].num_shareable_tokens_lost == 0
    assert copying_log.total("cow_copies") == (1 if lost else 0)
    assert copying_log.outputs == log.outputs


@both
def test_what_granularity_loses_is_counted_at_the_first_admission_only(prefix_cache: str) -> None:
    """20 of 40 tokens shared, B = 16: 4 are lost. Preempted after 8 tokens of its own, the request finds (and loses) the same again."""
    engine, log = make_engine(20, 16, policies(prefix_cache=prefix_cache), max_num_batched_tokens=8)
    serve(engine, [request("a", [1] * 40, 1)])
    engine.add_request(request("b", [1] * 20 + [2] * 20, 1))
    engine.step()
    forcer = Forcer(engine)
    forcer.before.append("b")
    run_to_end(engine, 20)
    record = log.records["b"]
    assert (record.num_preemptions, record.num_cached_tokens, record.num_shareable_tokens_lost) == (1, 16, 4)
    assert (record.num_computed_tokens, record.num_wasted_tokens) == (8 + 24, 8)


@both
def test_a_reset_while_blocks_are_in_use_changes_nothing_and_says_so(prefix_cache: str) -> None:
    """False while a request runs, and everything is still found; True when idle, and then nothing is."""
    engine, log = make_engine(20, 4, policies(prefix_cache=prefix_cache))
    prompt = prompt_of(9)
    serve(engine, [request("a", prompt, 1)])
    engine.add_request(request("b", prompt_of(5, 2), 3))
    engine.step()
    before = _state(engine)
    assert engine.reset_prefix_cache() is False
    assert _state(engine) == before
    run_to_end(engine, 10)
    serve(engine, [request("c", prompt, 1)])
    assert log.records["c"].num_cached_tokens == 8
    assert engine.reset_prefix_cache() is True
    assert (engine.kv.pool.num_free, engine.kv.pool.num_evictable, engine.kv.pool.by_content) == (20, 0, {})
    serve(engine, [request("d", prompt, 1)])
    assert log.records["d"].num_cached_tokens == 0


@both
@pytest.mark.parametrize(("least", "cached"), [(0, 8), (8, 8), (9, 0)])
def test_a_match_that_is_too_short_is_not_used(least: int, cached: int, prefix_cache: str) -> None:
    """8 tokens of a prompt are cached: used unless at least 9 are asked for. The look-up counts as a query all the same."""
    engine, log = make_engine(20, 4, policies(prefix_cache=by_name("prefix_cache", prefix_cache, min_match_tokens=least)))
    serve(engine, [request("a", prompt_of(11), 1)])
    serve(engine, [request("b", prompt_of(11), 3)])
    assert log.records["b"].num_cached_tokens == log.total("prefix_cache_hits") == cached
    assert log.total("prefix_cache_queries") == 22
    assert log.outputs["b"] == reference_outputs([request("b", prompt_of(11), 3)])["b"]


@both
@pytest.mark.parametrize(("cache_generated", "published", "cached"), [(True, [0, 1, 2], 12), (False, [0], 4)])
def test_generated_tokens_are_cached_or_not(cache_generated: bool, published: list[int], cached: int, prefix_cache: str) -> None:
    """B = 4, a prompt of 6 and 7 tokens of output, 12 computed: 3 full blocks, of which the first lies wholly inside the prompt. The
    next turn begins with all 13."""
    policy = by_name("prefix_cache", prefix_cache, cache_generated=cache_generated)
    engine, log = make_engine(20, 4, policies(prefix_cache=policy))
    prompt = prompt_of(6)
    serve(engine, [request("turn 1", prompt, 7)])
    assert log.blocks_of("publish") == published
    second = request("turn 2", [*prompt, *log.outputs["turn 1"][0][0], 1, 2], 3)
    serve(engine, [second])
    assert log.records["turn 2"].num_cached_tokens == cached
    assert log.outputs["turn 2"] == reference_outputs([second])["turn 2"]
    # What was the first turn's output is the second one's prompt: 15 tokens of it are cached now, in 3 full blocks.
    serve(engine, [request("again", second.prompt_token_ids, 1)])
    assert log.records["again"].num_cached_tokens == 12
