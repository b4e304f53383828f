"""The radix tree in the engine: tokens saved, blocks copied in part, leaves first, duplicates given up. Numbers are worked out by hand."""

from __future__ import annotations

from typing import Any

import pytest
from engine_support import Forcer, Log, make_engine, policies, policy_names, prompt_of, reference_outputs, request, run_to_end, serve
from hypothesis import given, settings
from hypothesis import strategies as st

from kvlab.engine import Engine
from kvlab.engine.runners.simulated import SimulatedRunner
from kvlab.policies.prefix_cache import Hash, Radix
from kvlab.testing.paged_fake import PagedFakeRunner
from kvlab.types import BlockCopy, BlockEvent, Request, UserError


@pytest.mark.parametrize("runner", [PagedFakeRunner, SimulatedRunner])
@pytest.mark.parametrize(
    ("prefix_cache", "block_size", "computed", "copies"),
    [
        ("none", 16, 360, 0),
        ("hash", 16, 168, 0),  # six full blocks of the shared prompt: 120 + 24 + 24
        (Radix(), 16, 168, 0),
        (Radix(), 1, 160, 0),  # 120 + 20 + 20
        (Radix(partial_block_copy=True), 16, 160, 2),  # tokens 96 to 99 of each question's prompt are copied
        (Radix(min_match_tokens=101), 16, 360, 0),
        (Radix(min_match_tokens=97), 16, 360, 0),  # 96 in full blocks are too few
        (Radix(min_match_tokens=97, partial_block_copy=True), 16, 160, 2),  # with those copied there are 100
    ],
)
def test_three_questions_about_one_prompt(runner: Any, prefix_cache: Any, block_size: int, computed: int, copies: int) -> None:
    """A shared prompt of 100 tokens and three questions of 20, one after the other."""
    questions = [request(f"q{i}", [*prompt_of(100), i, *prompt_of(19, 10 + i)], 1) for i in range(3)]
    engine, log = make_engine(600, block_size, policies(prefix_cache=prefix_cache), runner=runner(97))
    for question in questions:
        serve(engine, [question])
    assert log.total("num_prompt_tokens_computed") == computed
    assert log.total("prefix_cache_queries") == 360
    assert log.total("prefix_cache_hits") == sum(record.num_cached_tokens for record in log.records.values()) == 360 - computed
    assert log.total("cow_copies") == copies
    assert log.outputs == reference_outputs(questions)


# ------------------------------------------------------------------------------------------------ partial copies


def copying_engine(num_blocks: int, **seams: Any) -> tuple[Engine, Log]:
    """Blocks of 4, copies of parts."""
    return make_engine(num_blocks, 4, policies(prefix_cache=Radix(partial_block_copy=True), **seams))


FIRST = prompt_of(8, 1)


def like_first(num_shared: int, length: int, name: str = "b") -> Request:
    """A prompt that begins as FIRST does and then differs."""
    return request(name, [*FIRST[:num_shared], (FIRST[num_shared] + 1) % 97, *prompt_of(length - num_shared - 1, 2)], 3)


def test_the_shared_part_of_a_block_is_copied_and_counted() -> None:
    """FIRST fills blocks 0 and 1. A prompt of 7 that shares 6: block 0 is hit, block 2 begins as a copy of 1; one token is computed."""
    engine, log = copying_engine(4)
    serve(engine, [request("a", FIRST, 1)])
    second = like_first(6, 7)
    engine.add_request(second)
    result = engine.step()
    assert result.plan.copies == (BlockCopy(1, 2),)
    assert [(s.first_position, s.num_new_tokens) for s in result.plan.scheduled] == [(6, 1)]
    assert result.plan.admitted[0].num_cached_tokens == result.stats.prefix_cache_hits == 6
    assert [block.ref_count for block in engine.kv.pool.blocks] == [1, 0, 1, 0]  # the source is let go once it is copied
    run_to_end(engine, 10)
    assert log.records["b"].num_cached_tokens == 6
    assert log.outputs["b"] == reference_outputs([second])["b"]


def test_a_whole_prompt_that_is_cached_computes_its_last_token_only() -> None:
    """FIRST again: block 0 and three tokens of block 1, which it then completes: its own copy is given up for block 1."""
    engine, log = copying_engine(4)
    serve(engine, [request("a", FIRST, 1)])
    engine.add_request(request("again", FIRST, 3))
    result = engine.step()
    assert [(s.first_position, s.num_new_tokens) for s in result.plan.scheduled] == [(7, 1)]
    assert engine.sequences[1].table.block_ids == [0, 1]  # type: ignore[union-attr]
    assert (engine.kv.pool.num_used, engine.kv.pool.num_free) == (2, 2)
    assert [block.num_hits for block in engine.kv.pool.blocks[:2]] == [1, 1]  # giving up a duplicate is no hit
    run_to_end(engine, 10)
    assert log.records["again"].num_cached_tokens == 7
    assert log.outputs["again"] == reference_outputs([request("again", FIRST, 3)])["again"]


def test_the_source_is_held_while_blocks_are_found_for_the_copy() -> None:
    """LRU would give up block 2, the source (let go before 1): it is held, so 1 and 0 of the other prompt go instead."""
    engine, log = copying_engine(5)
    serve(engine, [request("a", FIRST, 1)])  # blocks 0, 1
    serve(engine, [request("other", prompt_of(12, 3), 1)])  # blocks 2, 3, 4
    engine.add_request(like_first(6, 11))  # hits 0, copies from 1, needs two blocks
    result = engine.step()
    assert log.blocks_of("evict") == [4, 3]  # without the hold: 1, then 4
    assert result.plan.copies == (BlockCopy(1, 3),)
    run_to_end(engine, 10)
    assert log.records["b"].num_cached_tokens == 6
    assert log.outputs["b"] == reference_outputs([like_first(6, 11)])["b"]


def test_a_copy_takes_no_room_that_the_request_would_not_have_needed() -> None:
    """Two blocks in all, both cached. The request needs one beside its hit, so the source itself goes, and becomes that block."""
    engine, log = copying_engine(2)
    serve(engine, [request("a", FIRST, 1)])
    second = request("b", like_first(6, 7).prompt_token_ids, 2)
    engine.add_request(second)
    result = engine.step()
    assert (log.blocks_of("evict"), result.plan.copies) == ([1], ())
    assert result.plan.admitted[0].num_cached_tokens == 6
    run_to_end(engine, 10)
    assert log.outputs["b"] == reference_outputs([second])["b"]


def test_a_source_that_goes_in_the_same_step_is_copied_before_it_is_written() -> None:
    """Four blocks: 0 is another prompt's, 1 and 2 are FIRST's. 14 tokens that share 6 need three blocks beside the hit on 1, so 0 and
    the source 2 go: the copy 2 -> 0 is done before block 2 is written as the next one of the same table."""
    engine, log = copying_engine(4)
    serve(engine, [request("other", prompt_of(5, 3), 1)])
    serve(engine, [request("a", FIRST, 1)])
    engine.add_request(like_first(6, 14))
    result = engine.step()
    assert sorted(log.blocks_of("evict")) == [0, 2]
    assert result.plan.copies == (BlockCopy(2, 0),)
    assert result.plan.fresh_tables == {2: (1, 0, 2, 3)} or result.plan.tables == {2: (1, 0, 2, 3)}
    assert [(s.first_position, s.num_new_tokens) for s in result.plan.scheduled] == [(6, 8)]
    run_to_end(engine, 10)
    assert log.outputs["b"] == reference_outputs([like_first(6, 14)])["b"]


def test_two_requests_may_copy_from_one_block_in_one_step() -> None:
    engine, log = copying_engine(8)
    serve(engine, [request("a", FIRST, 1)])
    pair = [like_first(6, 8, "b"), like_first(7, 8, "c")]
    for each in pair:
        engine.add_request(each)
    assert engine.step().plan.copies == (BlockCopy(1, 2), BlockCopy(1, 3))
    run_to_end(engine, 10)
    assert [log.records[name].num_cached_tokens for name in "bc"] == [6, 7]
    assert {name: log.outputs[name] for name in "bc"} == reference_outputs(pair)


def test_what_is_found_again_after_a_preemption_is_copied_too() -> None:
    """A request of two streams is preempted and comes back: 'resumed' tokens are preempted_hits, never prefix_cache_hits."""
    engine, log = copying_engine(12)
    forcer = Forcer(engine)
    served = request("a", prompt_of(7), 9, n=2, temperature=1.0)
    engine.add_request(served)
    for _ in range(3):
        engine.step()
    engine.add_request(request("keeps it busy", prompt_of(3, 4), 9))
    forcer.after.append("a")
    run_to_end(engine, 40)
    resumed = [a for plan in log.plans for a in plan.admitted if a.kind == "resumed"]
    assert [a.num_cached_tokens for a in resumed] == [8]
    assert log.total("prefix_cache_hits") == 0
    assert log.outputs["a"] == reference_outputs([served])["a"]


# ------------------------------------------------------------------------------------------- leaves first, locks


class Leaves(Log):
    """Notes evictions of a block that another candidate continued."""

    def __init__(self) -> None:
        super().__init__()
        self.engine: Any = None
        self.num_heads = 0

    def on_block(self, event: BlockEvent) -> None:
        super().on_block(event)
        if event.kind == "evict":
            blocks = self.engine.kv.pool.blocks
            self.num_heads += any(b.content and b.ref_count == 0 and b.parent == blocks[event.block_id].content for b in blocks)


def crowded(prefix_cache: Any, eviction: str) -> Leaves:
    """60 prompts of 3 to 14 tokens over four stems through 9 blocks of 2."""
    log = Leaves()
    engine, _ = make_engine(9, 2, policies(prefix_cache=prefix_cache, eviction=eviction), log=log)
    log.engine = engine
    for number in range(60):
        stem = prompt_of(10, number * 7 % 4)[: number * 5 % 11]
        serve(engine, [request(f"{number}", stem + prompt_of(3 + number % 2, number % 9), 2)])
    assert log.total("num_evicted_blocks") > 20
    return log


@pytest.mark.parametrize("eviction", policy_names("eviction"))
@pytest.mark.parametrize("partial_block_copy", [False, True])
def test_no_block_goes_before_what_continues_it(eviction: str, partial_block_copy: bool) -> None:
    """Under any eviction policy; after each step the tree holds exactly what is cached (an invariant)."""
    assert crowded(Radix(partial_block_copy=partial_block_copy), eviction).num_heads == 0


def test_without_a_tree_heads_do_go_first() -> None:
    """So the test above would notice."""
    assert crowded(Hash(), "fifo").num_heads > 0


def test_leaves_are_chosen_by_the_eviction_policy() -> None:
    """Two paths, B = 4: x in blocks 0, 1 (first in), y in blocks 2, 3, hit once. FIFO's oldest is x's head, LRU's x's tail after y is
    used; both give up x's tail first, then its head, then y's."""
    for eviction in ("fifo", "lru", "lfu"):
        engine, log = make_engine(5, 4, policies(prefix_cache="radix", eviction=eviction))
        for name, seed in (("x", 1), ("y", 2), ("y again", 2)):
            serve(engine, [request(name, prompt_of(9, seed), 1)])
        serve(engine, [request("z", prompt_of(19, 3), 1)])
        assert log.blocks_of("evict") == [1, 0, 3, 2], eviction


def test_a_path_that_is_held_stays() -> None:
    """`a` runs and holds blocks 0, 1 (published first) and 2 of six; three prompts of two blocks come and go meanwhile. The first's tail
    4 goes for the second, which takes 4 and 5; then its head 3 and the second's tail for the third."""
    engine, log = make_engine(6, 4, policies(prefix_cache="radix", eviction="fifo", admission="none"))
    engine.add_request(request("a", prompt_of(9, 1), 4))
    engine.step()
    for number in range(2, 5):
        engine.add_request(request(f"{number}", prompt_of(8, number), 1))
        engine.step()
    assert engine.kv.prefixes.tree is not None
    assert [block_id in engine.kv.prefixes.tree for block_id in (0, 1)] == [True, True]
    assert log.blocks_of("evict") == [4, 3, 5]
    assert list(log.records) == ["2", "3", "a", "4"]


def test_memory_is_bounded_by_what_is_cached() -> None:
    """300 prompts, each under a salt of its own, through 8 blocks: as many nodes and roots as are cached, none left after a reset."""
    engine, log = make_engine(8, 2, policies(prefix_cache="radix"))
    tree = engine.kv.prefixes.tree
    assert tree is not None
    for number in range(300):
        serve(engine, [request(f"{number}", prompt_of(5, number), 1, salt=f"{number}")])
        assert len(tree) == len(engine.kv.pool.by_content) <= 8
        assert len(tree.roots) <= len(tree)
    assert log.total("num_evicted_blocks") > 500
    assert engine.reset_prefix_cache()
    assert (len(tree), tree.roots) == (0, {})


# --------------------------------------------------------------------------------------------- beside the hash chain

PROMPTS = st.lists(
    st.tuples(st.integers(0, 3), st.integers(0, 12), st.lists(st.integers(0, 2), min_size=1, max_size=8), st.integers(1, 5)),
    min_size=2, max_size=14,
)  # fmt: skip


def _requests(drawn: list[tuple[int, int, list[int], int]]) -> list[Request]:
    return [request(f"{i}", prompt_of(12, stem)[:num] + tail, out) for i, (stem, num, tail, out) in enumerate(drawn)]


@settings(deadline=None, max_examples=60, derandomize=True)
@given(PROMPTS, st.sampled_from([1, 2, 4]), st.integers(0, 10), st.booleans())
def test_tree_and_hash_chain_decide_the_same(drawn: Any, size: int, num_more: int, cache_generated: bool) -> None:
    """One request at a time under LRU: the same hits, the same plans, the same blocks evicted in the same order, under equal settings.

    Each prompt ends with a token of its own, so that none is cached as a whole: its last block would be computed twice, and the tree
    would give it up. (That a prefix is too short to be used would do the same, so the threshold is not drawn.)"""
    requests = [request(r.request_id, [*r.prompt_token_ids, 50 + i], r.sampling.max_tokens) for i, r in enumerate(_requests(drawn))]
    num_blocks = max(-(-(len(r.prompt_token_ids) + r.sampling.max_tokens) // size) for r in requests) + num_more
    logs = []
    for policy in (Hash(cache_generated=cache_generated), Radix(cache_generated=cache_generated)):
        engine, log = make_engine(num_blocks, size, policies(prefix_cache=policy, eviction="lru"), max_num_seqs=1)
        serve(engine, requests)
        logs.append(log)
    hashed, tree = logs
    assert [plan.decisions() for plan in tree.plans] == [plan.decisions() for plan in hashed.plans]
    assert [e for e in tree.events if e.kind == "evict"] == [e for e in hashed.events if e.kind == "evict"]
    assert {n: r.num_cached_tokens for n, r in tree.records.items()} == {n: r.num_cached_tokens for n, r in hashed.records.items()}
    assert tree.records == hashed.records


@settings(deadline=None, max_examples=40, derandomize=True)
@given(PROMPTS, st.sampled_from([1, 2, 4]), st.integers(1, 6))
def test_tree_and_hash_chain_find_the_same_among_many_at_once(drawn: Any, size: int, at_once: int) -> None:
    """With room for everything only duplicates differ: a tree gives them up, so it never holds more."""
    requests, cached, used = _requests(drawn), [], []
    for policy in (Hash(), Radix()):
        engine, log = make_engine(400, size, policies(prefix_cache=policy), max_num_seqs=at_once, max_num_batched_tokens=24)
        serve(engine, requests)
        cached.append({name: record.num_cached_tokens for name, record in log.records.items()})
        used.append([stats.kv_blocks_used for stats in log.stats])
    assert cached[0] == cached[1]
    assert all(tree <= chain for chain, tree in zip(*used, strict=True))


# -------------------------------------------------------------------------------------------------------- settings


@pytest.mark.parametrize(
    ("parameters", "message"),
    [({"min_match_tokens": -1}, "at least 0"), ({"min_match_tokens": True}, "at least 0"), ({"min_match_tokens": 1.5}, "at least 0"),
     ({"cache_generated": 1}, "true or false")],
)  # fmt: skip
@pytest.mark.parametrize("policy", [Hash, Radix])
def test_a_setting_out_of_range_is_an_error(policy: Any, parameters: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=rf"{policy.__name__}\.{next(iter(parameters))} = .*{message}"):
        policy(**parameters)


def test_partial_block_copy_is_true_or_false() -> None:
    with pytest.raises(UserError, match=r"Radix\.partial_block_copy = 'yes'.*true or false"):
        Radix(partial_block_copy="yes")  # type: ignore[arg-type]


def test_a_scheduling_policy_is_told_of_tokens_that_will_be_copied() -> None:
    """`PrefixesView.num_cached_tokens`: 6 of a prompt that shares 6, in blocks of 4."""
    for policy, cached in ((Radix(), 4), (Radix(partial_block_copy=True), 6), (Hash(), 4)):
        engine, _ = make_engine(8, 4, policies(prefix_cache=policy))
        serve(engine, [request("a", FIRST, 1)])
        engine.add_request(like_first(6, 8))
        waiting = engine.groups["b"]
        assert engine.scheduler.waiting._prefixes.num_cached_tokens(waiting) == cached
