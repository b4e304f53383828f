"""Regions that nobody shares, and blocks that leave an attention window: forks, preemption and aborts between any two steps."""

from __future__ import annotations

from typing import Any

import pytest
from engine_support import Forcer, make_engine, policies, policy_names, prompt_of, reference_outputs, request, run_to_end, serve

from kvlab.engine import Engine
from kvlab.policies.base import CompressionPolicy
from kvlab.policies.compression import Streaming, Window
from kvlab.testing.invariants import check_invariants
from kvlab.types import IllegalDecision, Request, UserError

SAMPLINGS: list[dict[str, Any]] = [{}, {"n": 3, "temperature": 1.0}, {"n": 2, "beam_width": 3}]


REGIONS = [name for name in policy_names("layout") if name != "paged"]


@pytest.mark.parametrize("mode", ["recompute", "swap"])
@pytest.mark.parametrize("layout", REGIONS)
@pytest.mark.parametrize("sampling", SAMPLINGS, ids=["greedy", "n=3", "beams"])
def test_regions_through_a_preemption_between_any_two_steps(mode: str, layout: str, sampling: dict[str, Any]) -> None:
    """A prompt of 6 in chunks of 3, 5 tokens out, regions of up to 4 blocks: between the chunks (the forks' regions are kept, and empty),
    right after the fork (their copies are still to be done), when a region has just been outgrown (so are its moves) and later."""
    asked = request("a", prompt_of(6), 5, **sampling)
    other = request("b", prompt_of(3, 2), 9)
    wanted = reference_outputs([asked, other], max_model_len=16)
    for step in range(1, 6):
        engine, log = make_engine(
            24, 4, policies(layout=layout, prefix_cache="none", mode=mode), num_cpu_blocks=16, max_model_len=16,
            max_num_batched_tokens=4
        )  # fmt: skip
        forcer = Forcer(engine)
        engine.add_request(asked)
        for _ in range(step):
            engine.step()
            check_invariants(engine)
        engine.add_request(other)
        forcer.before.append("a")
        run_to_end(engine, 60)
        assert [p.mode for plan in log.plans for p in plan.preempted] == [mode]
        assert log.outputs == wanted, step


def test_an_abort_between_chunks_gives_all_regions_back() -> None:
    """n = 3 holds three regions from its first chunk on; gone, the whole pool is free."""
    engine, log = make_engine(12, 4, policies(layout="contiguous_max", prefix_cache="none"), max_model_len=16, max_num_batched_tokens=4)
    engine.add_request(request("a", prompt_of(6), 5, n=3))
    engine.step()
    assert log.stats[0].kv_blocks_used == 12
    engine.abort("a")
    assert engine.kv.pool.num_free == 12
    run_to_end(engine, 1)


def test_a_region_lies_in_consecutive_blocks_and_a_fork_is_copied() -> None:
    """Regions 0-3, 4-7 and 8-11; the two forks get copies of the two blocks that the prompt has filled."""
    engine, log = make_engine(12, 4, policies(layout="contiguous_max", prefix_cache="none"), max_model_len=16)
    asked = request("a", prompt_of(6), 3, n=3, temperature=1.0)
    serve(engine, [asked])
    assert log.plans[0].fresh_tables == {0: (0, 1, 2, 3)}
    assert log.plans[1].fresh_tables == {1: (4, 5, 6, 7), 2: (8, 9, 10, 11)}
    assert [tuple(copy) for copy in log.plans[1].copies] == [(0, 4), (1, 5), (0, 8), (1, 9)]
    assert log.outputs == reference_outputs([asked])


@pytest.mark.parametrize(
    ("seams", "limits", "message"),
    [({"prefix_cache": "hash"}, {"max_model_len": 16}, "prefix_cache=none"), ({}, {"max_model_len": 49}, "13 blocks"),
     ({"compression": Window(3)}, {"max_model_len": 16}, "compression=full")],
)  # fmt: skip
def test_what_regions_cannot_do_is_refused(seams: dict[str, Any], limits: dict[str, Any], message: str) -> None:
    """Sharing, a region larger than the pool, giving blocks back in the middle."""
    with pytest.raises(UserError, match=message):
        make_engine(12, 4, policies(layout="contiguous_max", **{"prefix_cache": "none", **seams}), **limits)


class Own(CompressionPolicy):
    """Somebody's own: any window, any sinks; `spared` tokens of the window are dropped too early."""

    lossless = False

    def __init__(self, window: Any, sinks: Any, spared: int = 0) -> None:
        self.attention_window, self.num_sink_tokens, self.spared = window, sinks, spared

    def num_droppable_tokens(self, num_computed_tokens: int) -> int:
        return max(0, num_computed_tokens - 3 + self.spared)


@pytest.mark.parametrize(
    ("window", "sinks", "message"),
    [
        *[(window, 0, rf"Own\.attention_window = {window!r} is not allowed: a positive integer") for window in (0, -1, True, 4.0, "4")],
        *[(4, sinks, rf"Own\.num_sink_tokens = {sinks!r} is not allowed: 0 or a positive integer") for sinks in (None, -1, True, 2.0, "2")],
        (None, 2, "Own.num_sink_tokens = 2 without a window is not allowed"),
    ],
)
def test_a_window_or_sinks_that_are_no_numbers_are_named_before_a_run(window: Any, sinks: Any, message: str) -> None:
    with pytest.raises(UserError, match=message):
        make_engine(12, 4, policies(compression=Own(window, sinks)))


def test_a_window_is_not_lossless() -> None:
    own = Own(4, 0)
    own.lossless = True  # type: ignore[misc]
    with pytest.raises(UserError, match="Own says lossless = True and has a window"):
        make_engine(12, 4, policies(compression=own))


def test_a_policy_that_drops_what_the_next_query_sees_is_stopped() -> None:
    """Window 4 after 10 tokens: the next query, at 10, sees 7 on. 8 may not go, whatever the blocks; nothing may without a window."""
    asked = request("a", prompt_of(10), 6)
    for window, spared, most in ((4, 1, 7), (None, 0, 0)):
        engine, _ = make_engine(12, 4, policies(compression=Own(window, 0, spared)))
        with pytest.raises(IllegalDecision, match=rf"Own made .* num_droppable_tokens\(10\) = {7 + spared}\. Allowed: .* at most {most}:"):
            serve(engine, [asked])
    engine, log = make_engine(12, 4, policies(compression=Own(4, 0)))
    serve(engine, [asked])
    assert log.outputs == reference_outputs([asked], window=Window(4))


def tables_of_each_step(engine: Engine, asked: Request) -> list[list[int]]:
    """The block table of the only request after each of its steps; empty once it has ended."""
    engine.add_request(asked)
    tables: list[list[int]] = []
    for _ in range(asked.sampling.max_tokens):
        engine.step()
        check_invariants(engine)
        tables.append(list(engine.sequences[0].table.block_ids) if engine.sequences else [])  # type: ignore[union-attr]
    return tables


def test_blocks_that_leave_the_window_come_free() -> None:
    """Window 5, B = 4, prompt of 10: positions 6 on are seen by the next query, so block 0 goes; block 1 when position 12 is next."""
    engine, log = make_engine(8, 4, policies(compression=Window(5)))
    assert tables_of_each_step(engine, request("a", prompt_of(10), 6)) == [[1, 2], [1, 2], [2], [2, 3], [2, 3], []]
    assert [plan.scheduled[0].num_dropped_tokens for plan in log.plans] == [0, 4, 4, 8, 8, 8]
    assert [(s.num_ctx_tokens, s.internal_fragmentation_tokens) for s in log.stats[:-1]] == [(6, 2), (7, 1), (4, 0), (5, 3), (6, 2)]
    assert log.records["a"].outputs == reference_outputs([request("a", prompt_of(10), 6)], window=Window(5))["a"]


def test_blocks_between_the_sinks_and_the_window_come_free() -> None:
    """2 sinks, window 3, B = 4, prompt of 10: the next query sees 0, 1 and 8 to 10, so block 1 goes and block 0 stays; block 2 (8 to 11)
    goes when position 14 is next, which sees 12 to 14. Slots are counted through: position 10 is slot 6 of [0, 2]."""
    engine, log = make_engine(8, 4, policies(compression=Streaming(2, 3)))
    # Block 1 is cached: what was never used is taken first.
    assert tables_of_each_step(engine, request("a", prompt_of(10), 6)) == [[0, 2], [0, 2], [0, 2], [0, 2, 3], [0, 3], []]
    assert [plan.scheduled[0].num_dropped_tokens for plan in log.plans] == [0, 4, 4, 4, 4, 8]
    assert [(s.num_ctx_tokens, s.internal_fragmentation_tokens) for s in log.stats[:-1]] == [(6, 2), (7, 1), (8, 0), (9, 3), (6, 2)]
    assert log.records["a"].outputs == reference_outputs([request("a", prompt_of(10), 6)], window=Streaming(2, 3))["a"]
    assert log.records["a"].outputs != reference_outputs([request("a", prompt_of(10), 6)], window=Window(3))["a"]


def test_a_prefix_is_found_whatever_its_holder_has_dropped() -> None:
    """Blocks of 2, one sink, window 2: a prompt of 12 is computed whole, then blocks 1 to 4 go, published and free to be evicted. The same
    prompt finds 5 of its 6 blocks (11 tokens at most) in either cache."""
    for cache in ("hash", "radix"):
        engine, log = make_engine(20, 2, policies(compression=Streaming(1, 2), prefix_cache=cache))
        for name in "ab":
            serve(engine, [request(name, prompt_of(12), 5)])
        assert [log.records[name].num_cached_tokens for name in "ab"] == [0, 10]
        assert log.plans[1].scheduled[0].num_dropped_tokens == 8
        assert log.records["a"].outputs == log.records["b"].outputs == reference_outputs(
            [request("a", prompt_of(12), 5)], window=Streaming(1, 2))["a"]  # fmt: skip


@pytest.mark.parametrize("mode", ["recompute", "swap"])
@pytest.mark.parametrize("sampling", SAMPLINGS, ids=["greedy", "n=3", "beams"])
@pytest.mark.parametrize("compression", [Window(1), Window(3), Window(6), Streaming(1, 1), Streaming(3, 2), Streaming(5, 4)], ids=vars)
def test_a_window_through_a_preemption_between_any_two_steps(mode: str, sampling: dict[str, Any], compression: Window | Streaming) -> None:
    """Dropped blocks stay dropped in swap; after a recomputation they are dropped again; forks have what they need."""
    asked = request("a", prompt_of(9), 6, **sampling)
    wanted = reference_outputs([asked], window=compression)
    for block_size in (1, 2, 4):
        for step in range(1, 7):
            engine, log = make_engine(
                60, block_size, policies(compression=compression, mode=mode), num_cpu_blocks=60, max_num_batched_tokens=5
            )  # fmt: skip
            forcer = Forcer(engine)
            engine.add_request(asked)
            for _ in range(step):
                engine.step()
                check_invariants(engine)
            forcer.before.append("a")
            run_to_end(engine, 60)
            assert forcer.num_forced == 1
            assert log.outputs == wanted, (block_size, step)
