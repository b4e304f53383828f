"""llama.cpp's ring of cells and its server's slots, worked out by hand."""

from __future__ import annotations

from typing import Any

import pytest
from engine_support import Log, make_engine, policies, prompt_of, reference_outputs, request, run_to_end, serve

from kvlab.cache.free_blocks import FreeBlocks
from kvlab.engine import Engine
from kvlab.policies.base import SlotView
from kvlab.policies.layout import Ring
from kvlab.types import UserError


def ring_at(head: int) -> Ring:
    ring = Ring()
    ring.took([head - 1])
    return ring


def free_but(num_blocks: int, *taken: int) -> FreeBlocks:
    free = FreeBlocks(num_blocks)
    free.take(taken)
    return free


def test_a_run_is_sought_from_the_head_on_and_then_from_the_start() -> None:
    """32 cells; in the lower half 4, 5, 6, 9 and 13 are taken, in the upper half all but the last two. No run goes over the end."""
    free = free_but(32, 4, 5, 6, 9, 13, *range(16, 30))
    assert ring_at(5).place(2, free) == [7, 8]
    assert ring_at(5).place(3, free) == [10, 11, 12]
    assert ring_at(8).place(2, free) == [10, 11]
    assert ring_at(11).place(2, free) == [11, 12]
    assert ring_at(12).place(2, free) == [14, 15]
    assert ring_at(15).place(2, free) == [30, 31]
    assert ring_at(15).place(3, free) == [0, 1, 2]
    assert ring_at(7).place(4, free) == [0, 1, 2, 3]
    assert ring_at(2).place(4, free) == [0, 1, 2, 3]  # none of 4 from cell 2 on


def test_a_head_with_much_room_before_it_begins_again() -> None:
    """2 cells in use: for one new cell the head may stand at 4, at 5 the search begins at cell 0."""
    free = free_but(16, 14, 15)
    assert ring_at(4).place(1, free) == [4]
    assert ring_at(5).place(1, free) == [0]
    assert ring_at(6).place(2, free) == [6, 7]


def test_where_there_is_no_run_it_is_halved() -> None:
    """Free: 0-2, 4-5, 7. Six cells in a row there are not: three, and the other three one by one; or twice two."""
    free = free_but(8, 3, 6)
    assert ring_at(1).place(6, free) == [0, 1, 2, 4, 5, 7]
    assert ring_at(5).place(4, free) == [0, 1, 4, 5]
    assert Ring().place(7, free) is None
    assert len(free) == 6


def test_freeing_a_lower_cell_takes_the_head_back() -> None:
    ring = ring_at(9)
    ring.gave(11)
    assert ring.place(1, free_but(12, *range(7), 8)) == [9]
    ring.gave(7)
    assert ring.place(1, free_but(12, *range(7), 8)) == [7]


def slot_of(similarity: float, shared: dict[int, int], released: dict[int, int], num_tokens: int = 10) -> int:
    views = [SlotView(i, 20, shared.get(i, 0), released.get(i, -1)) for i in range(4)]
    return Ring(4, similarity).choose_slot(num_tokens, views)


def test_the_slot_of_a_prompt() -> None:
    """The longest common beginning if it is more than the given part of the 10 tokens; else the slot released first, unused ones before."""
    order = {0: 3, 1: 1, 2: 2, 3: 0}
    assert slot_of(0.1, {1: 2, 2: 7}, order) == 2
    assert slot_of(0.7, {1: 2, 2: 7}, order) == 3
    assert slot_of(0.69, {1: 2, 2: 7}, order) == 2
    assert slot_of(0.1, {1: 7, 2: 7}, order) == 1
    assert slot_of(0.0, {1: 2, 2: 7}, order) == 3
    assert slot_of(0.1, {2: 1}, order) == 3
    assert slot_of(0.1, {}, {0: 3, 3: 0}) == 1


@pytest.mark.parametrize(("parameters", "message"), [({"n_parallel": 0}, "n_parallel"), ({"slot_prompt_similarity": 1.5}, r"\[0, 1\]")])
def test_parameters_are_checked(parameters: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        Ring(**parameters)


def ring_engine(num_blocks: int, block_size: int, n_parallel: int, similarity: float = 0.1, **limits: Any) -> tuple[Engine, Log]:
    return make_engine(num_blocks, block_size, policies(layout=Ring(n_parallel, similarity), prefix_cache="none"), **limits)


@pytest.mark.parametrize("block_size", [1, 3, 4, 16])
def test_a_slot_goes_on_after_the_common_beginning(block_size: int) -> None:
    """A conversation: the second prompt is the first with its answer and 5 tokens more; 10 + 3 of the answer's 4 tokens are kept. The
    third shares 8 tokens with it. Blocks may be divided anywhere, they are the slot's own."""
    engine, log = ring_engine(64 // block_size + 4, block_size, 1)
    first = request("first", prompt_of(10, 1), 4)
    serve(engine, [first])
    second = request("second", [*first.prompt_token_ids, *log.records["first"].outputs[0][0], *prompt_of(5, 2)], 4)
    third = request("third", [*first.prompt_token_ids[:8], 1, 2, 3], 4)
    serve(engine, [second])
    serve(engine, [third])
    serve(engine, [request("again", third.prompt_token_ids, 4)])
    cached = [log.records[name].num_cached_tokens for name in ("first", "second", "third", "again")]
    assert cached == [0, 13, 8, 10]  # one token is always computed
    assert (log.total("prefix_cache_hits"), log.total("prefix_cache_queries")) == (31, 10 + 19 + 11 + 11)
    outputs = reference_outputs([first, second, third, request("again", third.prompt_token_ids, 4)])
    assert log.outputs == outputs


def test_slots_keep_what_they_served_until_they_serve_another() -> None:
    """Two slots, cells of one token. `a` and `b` end; `c` is like neither and gets the slot that was released first, whose cells are free
    first; `b` is still there."""
    engine, log = ring_engine(40, 1, 2)
    serve(engine, [request("a", prompt_of(6, 1), 2), request("b", prompt_of(9, 2), 3)])
    assert (engine.kv.pool.num_used, engine.kv.pool.num_evictable) == (0, 7 + 11)
    engine.add_request(request("c", prompt_of(5, 3), 2))
    engine.step()
    assert log.stats[-1].num_evicted_blocks == 7
    assert (engine.kv.pool.num_used, engine.kv.pool.num_evictable) == (5, 11)
    run_to_end(engine, 10)
    serve(engine, [request("a again", prompt_of(6, 1), 2)])
    assert log.records["a again"].num_cached_tokens == 0
    serve(engine, [request("b again", prompt_of(9, 2), 2)])
    assert log.records["b again"].num_cached_tokens == 0  # `a again` took its slot: it had been released before that of `c`


def test_short_of_cells_unused_slots_are_emptied_by_id() -> None:
    """12 cells, three slots; two keep 4 cells each. A prompt of 7 needs the cells of slot 0, though it gets slot 2."""
    engine, log = ring_engine(12, 1, 3)
    serve(engine, [request("a", prompt_of(3, 1), 2), request("b", prompt_of(3, 2), 2)])
    assert [len(slot.block_ids) for slot in engine.kv.regions.slots.idle()] == [4, 4, 0]  # type: ignore[union-attr]
    engine.add_request(request("c", prompt_of(7, 3), 1))
    engine.step()
    assert log.stats[-1].num_evicted_blocks == 4
    assert [len(slot.block_ids) for slot in engine.kv.regions.slots.idle()] == [0, 4, 7]  # type: ignore[union-attr]
    assert log.outputs == reference_outputs([request(name, prompt_of(*shape), output) for name, shape, output in
                                             (("a", (3, 1), 2), ("b", (3, 2), 2), ("c", (7, 3), 1))])  # fmt: skip


def test_no_more_requests_run_than_there_are_slots() -> None:
    """The third waits for a slot, though cells and sequences suffice; n = 3 never finds three."""
    engine, log = ring_engine(40, 1, 2)
    serve(engine, [request(name, prompt_of(4, i), 3) for i, name in enumerate("abc")])
    assert max(stats.num_running_reqs for stats in log.stats) == 2
    assert {stats.admission_blocked_by for stats in log.stats[:2]} == {"slots"}
    with pytest.raises(UserError, match="3 sequences at once, and layout Ring has 2 slots"):
        engine.check_request(request("d", prompt_of(4), 2, n=3))


def test_salts_are_kept_apart_and_a_reset_empties_slots() -> None:
    engine, log = ring_engine(60, 1, 1)
    serve(engine, [request("a", prompt_of(6, 1), 2, salt="x")])
    serve(engine, [request("b", prompt_of(6, 1), 2, salt="y")])
    serve(engine, [request("c", prompt_of(6, 1), 2, salt="y")])
    assert [log.records[name].num_cached_tokens for name in "abc"] == [0, 0, 5]
    assert engine.reset_prefix_cache()
    assert engine.kv.pool.num_free == 60
    serve(engine, [request("d", prompt_of(6, 1), 2, salt="y")])
    assert log.records["d"].num_cached_tokens == 0


def test_an_aborted_request_leaves_what_it_had_computed() -> None:
    engine, log = ring_engine(60, 1, 1)
    engine.add_request(request("a", prompt_of(6, 1), 9))
    for _ in range(3):
        engine.step()
    engine.abort("a")
    assert (engine.kv.pool.num_used, engine.kv.pool.num_evictable) == (0, 8)
    serve(engine, [request("b", prompt_of(6, 1), 2)])
    assert log.records["b"].num_cached_tokens == 5


def test_what_preemption_restores_is_no_hit_of_the_workload() -> None:
    """14 cells for 10 each: `b` gives way to `a` and comes back into its slot."""
    engine, log = ring_engine(14, 1, 2)
    asked = [request("a", prompt_of(4, 1), 7), request("b", prompt_of(4, 2), 7)]
    serve(engine, asked)
    assert log.total("num_preemptions") > 0
    assert log.total("prefix_cache_hits") == 0
    assert log.total("preempted_queries") > 0
    assert log.outputs == reference_outputs(asked)
