"""Allocation and accounting: what is counted is what is taken, a request that can't fit says so, forks and swap are all or nothing."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from random import Random
from typing import Any

import pytest
from engine_support import (
    Forcer,
    make_engine,
    policies,
    policy_names,
    prompt_of,
    reference_outputs,
    request,
    run_to_end,
    serve,
    step_bound,
)

from kvlab.cache.pool import BlockPool
from kvlab.engine import Engine
from kvlab.policies.admission import Watermark
from kvlab.policies.base import EvictionPolicy
from kvlab.policies.eviction import Lru, Pinned
from kvlab.policies.layout import Paged
from kvlab.trace import Recorder
from kvlab.types import RequestTooLong, ScheduledSeq, UserError

# ------------------------------------------------------------------ predicate equals action


def _snapshot(engine: Engine) -> tuple[Any, ...]:
    kv = engine.kv
    tables = [(s.seq_id, tuple(s.table.block_ids) if s.table else None, s.num_computed) for s in engine.sequences.values()]
    return [
        (pool.free.lowest(pool.num_blocks), [(b.ref_count, b.content, b.num_hits) for b in pool.blocks], pool.tick, pool.num_evicted)
        for pool in (kv.pool, kv.cpu_pool)
    ], tables, list(kv.pending_copies), {k: list(v) for k, v in kv.regions.spare.items()} if kv.regions else {}  # fmt: skip


class Watch:
    """Compares each predicate of an engine's KV manager with the action it stands before, and the state around a refusal."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.results: Counter[tuple[str, bool]] = Counter()
        kv = engine.kv
        self._wrap(kv, "enter", lambda group, hits, num_tokens, *_: kv.can_enter(group, hits, num_tokens))
        self._wrap(kv, "grow", kv.can_grow)
        self._wrap(kv.swapper, "swap_in", kv.swapper.can_swap_in)
        self._wrap(kv.swapper, "swap_out", lambda group: kv.swapper.num_swap_blocks(group) <= kv.cpu_pool.num_available)

    def _wrap(self, owner: Any, name: str, predicate: Any) -> None:
        action = getattr(owner, name)

        def watched(*arguments: Any) -> Any:
            promised, before = bool(predicate(*arguments)), _snapshot(self.engine)
            available = self.engine.kv.pool.num_available
            needed = self.engine.kv.num_to_grow(*arguments) if name == "grow" else None
            done = action(*arguments)
            assert (done is not None and done is not False) == promised, f"{name}: predicate {promised}, action {done}"
            if not promised:
                assert _snapshot(self.engine) == before, f"a refused {name} changed something"
            elif needed is not None:
                # A copy's source may come free (and stay cached), so no more than `needed` is gone.
                assert available - needed <= self.engine.kv.pool.num_available <= available
            self.results[name, promised] += 1
            return done

        setattr(owner, name, watched)


PINS: dict[str, Callable[[], EvictionPolicy]] = {"none": Lru, "pinned": lambda: Pinned(min_hits=1, max_fraction=0.6)}


@pytest.mark.parametrize(("layout", "pins"), [*((name, "none") for name in policy_names("layout")), ("paged", "pinned")])
def test_what_the_predicates_promise_is_what_happens(layout: str, pins: str) -> None:
    """`can_x` is true exactly when `x` succeeds, over random runs; a refusal changes nothing. (Accounts are checked at each step.)"""
    totals: Counter[tuple[str, bool]] = Counter()
    draw = Random(f"watch {layout}")
    for round_ in range(25):
        size, blocks = draw.choice([1, 3, 4]), draw.randint(6, 12)
        limits: dict[str, Any] = {"num_cpu_blocks": draw.choice([0, 4, 30]), "max_num_batched_tokens": draw.choice([6, 20])}
        if layout != "paged":
            limits["max_model_len"] = 2 * size
        engine, _ = make_engine(blocks, size, policies(layout=layout, prefix_cache="hash" if layout == "paged" else "none",
                                                       mode="swap", admission="none", eviction=PINS[pins]()), **limits)  # fmt: skip
        watch, forcer = Watch(engine), Forcer(engine)
        requests = [
            request(f"{round_}.{i}", prompt_of(draw.randint(1, size * (3 if layout == "paged" else 1)), i % 3), draw.randint(1, 2 * size),
                    n=draw.choice([1, 1, 2, 3]), temperature=1.0) for i in range(7)
        ]  # fmt: skip
        for each in requests:
            engine.add_request(each)
            engine.step()
            if draw.random() < 0.3:
                forcer.before.append(draw.choice(requests).request_id)
        run_to_end(engine, step_bound(requests, 10))
        totals += watch.results
    wanted = [(name, ok) for name in ("enter", "swap_out") for ok in (True, False)] + [("swap_in", True), ("grow", True)]
    wanted += [("grow", False)] if layout == "paged" else []
    assert not [case for case in wanted if not totals[case]], f"never seen: {totals}"


@pytest.mark.parametrize("pins", PINS)
def test_a_pools_accounts_hold_over_random_operations(pins: str) -> None:
    """BlockPool alone: allocate, share, publish, hit, release, reset. free + evictable + referenced = N, references as counted here.

    A pinned block that no table holds is neither free nor evictable; asked for them the policy gives all its pins up."""
    draw = Random("pool")
    num_refused_for_pins = 0
    for num_blocks in (1, 2, 5, 9):
        policy = PINS[pins]()
        pool = BlockPool("gpu", num_blocks, 4, policy, Paged())
        tables: list[list[int]] = []
        for number in range(600):
            operation = draw.randrange(6) if pins == "none" else draw.choice((0, 1, 2, 3, 3, 4, 4, 4, 4, 5, 6))
            held = sorted({b for table in tables for b in table})
            if operation == 0:
                wanted = draw.randint(0, num_blocks + 1)
                can = wanted <= pool.num_available
                num_unheld = num_blocks - len(held)
                got = pool.allocate(wanted)
                assert (got is not None) == can == (wanted <= num_unheld - pool.num_pinned)
                num_refused_for_pins += not can and wanted <= num_unheld
                tables += [got] if got else []
            elif operation == 1 and tables:
                tables.append(list(draw.choice(tables)))
                for block in tables[-1]:
                    pool.share(block)
            elif operation == 2 and held:
                block = draw.choice(held)
                if not pool.blocks[block].content:
                    assert pool.publish(block, b"%d" % number, None, 0)
            elif operation == 3 and pool.by_content:
                block_id = pool.find(draw.choice(sorted(pool.by_content)))
                assert block_id is not None
                pool.hit([block_id])
                tables.append([block_id])
            elif operation == 4 and tables:
                pool.release(reversed(tables.pop(draw.randrange(len(tables)))), preempted=draw.random() < 0.5)
            elif operation == 5:
                assert pool.reset_cache() is (not held)
            elif operation == 6:
                had_pins = pool.num_pinned > 0
                assert pool.give_up_pins() is had_pins
                assert pool.num_pinned == 0
            counts = Counter(b for table in tables for b in table)
            assert [b.ref_count for b in pool.blocks] == [counts[i] for i in range(num_blocks)]
            free = pool.free.lowest(num_blocks)
            assert len(free) == len(set(free)) == pool.num_free
            pinned = [b.block_id for b in pool.blocks if b.content and not b.ref_count and policy.is_pinned(b.block_id)]
            assert len(pinned) == pool.num_pinned <= (0 if pins == "none" else int(0.6 * num_blocks))
            assert pool.num_used == len(counts) + len(pinned)
            assert pool.num_free + pool.num_evictable + pool.num_used == num_blocks
            assert {b.content for b in pool.blocks if b.content} == pool.by_content.keys()
    assert (num_refused_for_pins > 0) == (pins == "pinned")


# -------------------------------------------------------------- requests that can never fit


@pytest.mark.parametrize("length", [801, 912])
def test_a_prompt_that_can_never_fit_is_refused_at_submission(length: int) -> None:
    """N = 50, B = 16: the message holds the blocks needed, those there are and the longest that fits; the others are served."""
    engine, log = make_engine(50, 16)
    small = request("small", prompt_of(20), 5)
    engine.add_request(small)
    with pytest.raises(RequestTooLong) as error:
        engine.add_request(request("big", prompt_of(length), 5))
    for number in (length, -(-length // 16), 50, 800):
        assert str(number) in str(error.value)
    assert list(engine.groups) == ["small"]
    run_to_end(engine, 20)
    assert log.outputs == reference_outputs([small])


@pytest.mark.parametrize("batching", policy_names("batching"))
@pytest.mark.parametrize(
    ("length", "max_tokens", "num_output", "reason"),
    [(799, 1, 1, "length"), (799, 2, 2, "length"), (799, 3, 2, "kv_capacity"), (800, 1, 1, "length"), (800, 2, 1, "kv_capacity"),
     (790, 11, 11, "length"), (790, 100, 11, "kv_capacity")],
)  # fmt: skip
def test_a_request_that_outgrows_the_pool_ends_and_says_why(batching: str, length: int, max_tokens: int, num_output: int,
                                                            reason: str) -> None:  # fmt: skip
    """A prompt of p tokens in 800 slots gets 800 - p + 1 tokens: the last one is never computed. No hang, nor at the others' cost."""
    engine, log = make_engine(50, 16, policies(batching=batching))
    both = [request("big", prompt_of(length, 1), max_tokens), request("small", prompt_of(20, 2), 6)]
    serve(engine, both)
    wanted = reference_outputs(both)
    tokens, why = log.records["big"].outputs[0]
    assert (tokens, why) == (wanted["big"][0][0][:num_output], reason)
    assert log.records["big"].finish_reason == reason
    assert log.records["small"].outputs == wanted["small"]


def test_the_longest_output_is_bounded_by_max_model_len() -> None:
    """A prompt as long as max_model_len leaves no room for a token and is refused; one token shorter gets one token."""
    engine, log = make_engine(50, 16, max_model_len=32)
    with pytest.raises(RequestTooLong, match="31"):
        engine.add_request(request("too long", prompt_of(32), 5))
    serve(engine, [request("fits", prompt_of(31), 5)])
    assert [(len(tokens), reason) for tokens, reason in log.records["fits"].outputs] == [(1, "length")]


# ------------------------------------------------------------------- watermark, small pools


@pytest.mark.parametrize("fraction", [-0.01, 1, 1.0, 1.5, float("nan"), float("inf"), "0.1", True, None])
def test_a_watermark_outside_its_range_is_refused(fraction: Any) -> None:
    """[0, 1) is allowed; the message says so."""
    with pytest.raises(UserError, match=r"\[0, 1\)"):
        Watermark(fraction)


@pytest.mark.parametrize("full_sequence", [False, True])
def test_a_watermark_that_blocks_everything_admits_the_first_alone(full_sequence: bool) -> None:
    """int(0.99 * 10) = 9 of 10 blocks: the first enters because nothing runs, the second when the first has ended."""
    engine, log = make_engine(10, 4, policies(admission=Watermark(0.99, full_sequence)))
    serve(engine, [request("a", prompt_of(9, 1), 4), request("b", prompt_of(9, 2), 4)])
    assert [(a.request_id, plan.step) for plan in log.plans for a in plan.admitted] == [("a", 0), ("b", 4)]
    assert [plan.blocked[0].by for plan in log.plans[:4]] == ["watermark"] * 4
    assert [plan.watermark_blocks for plan in log.plans] == [9] * 8


def test_running_sequences_may_use_the_reserve() -> None:
    """A watermark of 2 of 4 blocks gates entry only: a running request grows to all 4 without giving way."""
    engine, log = make_engine(4, 4, policies(admission=Watermark(0.5)))
    serve(engine, [request("a", prompt_of(4), 12)])
    assert log.records["a"].finish_reason == "length"
    assert max(stats.kv_blocks_used for stats in log.stats) == 4
    assert log.total("num_preemptions") == 0


@pytest.mark.parametrize("watermark", [0.0, 0.5])
@pytest.mark.parametrize(
    ("num_blocks", "block_size", "length", "max_tokens", "num_output", "reason"),
    [(1, 1, 1, 1, 1, "length"), (1, 1, 1, 2, 1, "kv_capacity"), (1, 4, 3, 2, 2, "length"), (1, 4, 3, 3, 2, "kv_capacity"),
     (1, 4, 4, 1, 1, "length"), (2, 1, 1, 2, 2, "length"), (2, 1, 2, 2, 1, "kv_capacity"), (2, 4, 5, 4, 4, "length")],
)  # fmt: skip
def test_the_smallest_pools(watermark: float, num_blocks: int, block_size: int, length: int, max_tokens: int, num_output: int,
                            reason: str) -> None:  # fmt: skip
    """N = 1 and N = 2 serve what fits in them, one after the other."""
    engine, log = make_engine(num_blocks, block_size, policies(admission=Watermark(watermark)))
    requests = [request(name, prompt_of(length, i), max_tokens) for i, name in enumerate("abc")]
    serve(engine, requests)
    wanted = reference_outputs(requests)
    assert log.outputs == {name: ((wanted[name][0][0][:num_output], reason),) for name in "abc"}
    assert all(0 <= s.kv_blocks_used <= s.kv_blocks_total == num_blocks for s in log.stats)
    with Recorder(None) as recorder:
        for plan, outcome, stats in zip(log.plans, log.outcomes, log.stats, strict=True):
            recorder.on_step(plan, outcome, stats)
    usage = recorder.steps()["kv_cache_usage"].tolist()
    assert usage == [s.kv_blocks_used / num_blocks for s in log.stats]


# -------------------------------------------------------------------------- forks


@pytest.mark.parametrize("beams", [False, True])
@pytest.mark.parametrize(("num_blocks", "num_output", "reason"), [(1, 1, "kv_capacity"), (3, 1, "kv_capacity"), (4, 3, "length")])
def test_a_fork_without_space_is_all_or_none(beams: bool, num_blocks: int, num_output: int, reason: str) -> None:
    """Four streams share a partial block of 2 tokens; writing on needs 3 copies at once. Without them all four end, with them none."""
    sampling: dict[str, Any] = {"n": 4, "beam_width": 4} if beams else {"n": 4, "temperature": 1.0}
    engine, log = make_engine(num_blocks, 4)
    serve(engine, [request("a", prompt_of(2), 3, **sampling)])
    assert [(len(tokens), why) for tokens, why in log.records["a"].outputs] == [(num_output, reason)] * 4
    assert [len(plan.copies) for plan in log.plans][:2] == [0, 3 if num_blocks == 4 else 0]


def test_a_fork_without_space_makes_the_newest_give_way_as_a_whole() -> None:
    """Beside an older request, the group of four without room for its copies is preempted with all its sequences, and comes back."""
    both = [request("old", prompt_of(7, 1), 6), request("four", prompt_of(2, 2), 3, n=4, temperature=1.0)]
    engine, log = make_engine(5, 4)
    serve(engine, both)
    assert log.outputs == reference_outputs(both)
    assert next((p.request_id, plan.step, p.num_blocks) for plan in log.plans for p in plan.preempted) == ("four", 1, 1)
    assert log.plans[1].scheduled == (ScheduledSeq(0, 7, 1),)


@pytest.mark.parametrize(("num_blocks", "steps_of_four"), [(5, 4), (4, 1)])
def test_n_sequences_at_a_block_boundary_need_n_blocks(num_blocks: int, steps_of_four: int) -> None:
    """Prompt of one full block, n = 4: the next step needs 4 new blocks. With 5 in the pool all four go on, with 4 none does."""
    engine, log = make_engine(num_blocks, 4)
    serve(engine, [request("a", prompt_of(4), 4, n=4, temperature=1.0)])
    sizes = [len(plan.scheduled) for plan in log.plans if plan.scheduled]
    assert sizes == [1] + [4] * (steps_of_four - 1)
    assert {reason for _, reason in log.records["a"].outputs} == {"length" if num_blocks == 5 else "kv_capacity"}
    assert max(stats.kv_blocks_used for stats in log.stats) == (5 if num_blocks == 5 else 1)


def test_a_beam_search_that_was_cut_short_says_so() -> None:
    """Beams outgrow the pool: whatever hypotheses there are, even if all of them ended by EOS, the request ended for capacity."""
    engine, log = make_engine(4, 4, vocab_size=12, eos=(3,))
    serve(engine, [request("a", prompt_of(5, 0, 12), 40, beam_width=3, n=3, ignore_eos=False)])
    assert log.records["a"].finish_reason == "kv_capacity"
    assert {reason for _, reason in log.records["a"].outputs} == {"kv_capacity", "stop"}
    engine, log = make_engine(3, 2, vocab_size=23, eos=(3,))
    serve(engine, [request("b", prompt_of(5, 1000, 23), 4, beam_width=2, ignore_eos=False)])
    assert log.records["b"].outputs == (((3,), "stop"),)
    assert log.records["b"].finish_reason == "kv_capacity"


# --------------------------------------------------------------------------- swap


@pytest.mark.parametrize(
    ("num_cpu_blocks", "mode", "num_moved"), [(0, "recompute", 0), (2, "recompute", 0), (3, "swap", 3), (9, "swap", 3)]
)
def test_swap_falls_back_to_recompute(num_cpu_blocks: int, mode: str, num_moved: int) -> None:
    """A victim of 3 blocks and swap space for 0, 2, 3, 9: too little means recompute, recorded beside what was wanted. Same tokens."""
    pair = [request("old", prompt_of(8, 1), 8), request("new", prompt_of(8, 2), 8)]
    engine, log = make_engine(6, 4, policies(mode="swap", admission="none"), num_cpu_blocks=num_cpu_blocks)
    serve(engine, pair)
    preempted = [(p.request_id, p.mode, p.wanted_mode, p.num_blocks) for plan in log.plans for p in plan.preempted]
    assert preempted == [("new", mode, "swap", 3)]
    assert (log.total("swapped_out_blocks"), log.total("swapped_in_blocks")) == (num_moved, num_moved)
    assert log.records["new"].num_swaps == (1 if mode == "swap" else 0)
    assert log.outputs == reference_outputs(pair)


def test_swapping_a_group_of_four_copies_a_shared_block_once() -> None:
    """n = 4 after a prompt of 6, B = 4: 1 shared block and 4 of their own, 5 in all, go out and come back once each."""
    both = [request("old", prompt_of(5, 1), 12), request("four", prompt_of(6, 2), 5, n=4, temperature=1.0)]
    engine, log = make_engine(20, 4, policies(mode="swap", admission="none"), num_cpu_blocks=10)
    forcer = Forcer(engine)
    for each in both:
        engine.add_request(each)
    engine.step()
    engine.step()
    forcer.after.append("four")
    engine.step()
    out = log.plans[2].swap_out
    assert len(out) == len({t.source for t in out}) == len({t.destination for t in out}) == 5
    assert [t.num_tokens for t in out] == [4, 3, 3, 3, 3]  # 6 + 1 tokens computed: positions 4 to 6 in a block of their own
    run_to_end(engine, 40)
    assert log.total("swapped_in_blocks") == 5
    assert log.outputs == reference_outputs(both)
    assert log.records["four"].num_swaps == 1


def test_four_that_share_their_last_block_come_back_with_copies() -> None:
    """Swapped out right after the fork, the four share a partial block: it moves once, and three get copies of it on return."""
    both = [request("old", prompt_of(5, 1), 12), request("four", prompt_of(6, 2), 5, n=4, temperature=1.0)]
    engine, log = make_engine(20, 4, policies(mode="swap", admission="none"), num_cpu_blocks=10)
    forcer = Forcer(engine)
    for each in both:
        engine.add_request(each)
    engine.step()
    forcer.before.append("four")
    engine.step()
    assert [t.num_tokens for t in log.plans[1].swap_out] == [4, 2]
    run_to_end(engine, 40)
    back = [t for plan in log.plans for t in plan.swap_in]
    assert len({t.source for t in back}) == 2
    assert len({t.destination for t in back}) == 5
    assert log.outputs == reference_outputs(both)
