"""Each layout puts blocks where its name says: traces worked out by hand, each passed by one layout alone."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import pytest
from engine_support import make_engine, policies, policy_names, prompt_of, request

Tables = dict[str, list[int]]


class Wave(NamedTuple):
    """Requests that are submitted together, once all before them have ended: (name, prompt, output tokens)."""

    requests: list[tuple[str, Sequence[int], int]]


A, B, C = prompt_of(4, 1), prompt_of(4, 2), prompt_of(7, 3)

# Blocks of 4, a pool of 12, max_model_len 16. `a` and `b` begin in one block and need a second in the second step; `b` ends after three
# tokens with 6 in the pool, and `a` needs a third block for its ninth. When both have ended a prompt of two blocks comes.
TRACE = [Wave([("a", A, 6), ("b", B, 3)]), Wave([("c", C, 1)])]

TABLES: dict[str, Tables] = {
    # The lowest free block: 0 and 1, 2 and 3, then 1 again, which `b` has left.
    "paged": {"a": [0, 2, 1], "b": [1, 3], "c": [0, 1]},
    # 16 tokens each.
    "contiguous_max": {"a": [0, 1, 2, 3], "b": [4, 5, 6, 7], "c": [0, 1, 2, 3]},
    # 4 + 6 = 10 and 4 + 3 = 7 tokens; 7 + 1 = 8.
    "contiguous_oracle": {"a": [0, 1, 2], "b": [3, 4], "c": [0, 1]},
    # The pool is a buddy of 8 and one of 4 behind it, and the smaller that fits is split: 8 and 9. `a` can't double in place, so it moves
    # to 10-11, and `b` doubles to 8-9, over its own place. Four blocks for `a`, which is alone: 8-11, over its own. Two for `c`: 8-9.
    "contiguous_pow2": {"a": [8, 9, 10, 11], "b": [8, 9], "c": [8, 9]},
    # The head goes on: 0, 1, 2, 3, 4. Nothing comes free below it: the slots keep what they served.
    "ring": {"a": [0, 2, 4], "b": [1, 3], "c": [5, 6]},
}


def last_tables(layout: str, waves: Sequence[Wave], num_blocks: int = 12) -> Tables:
    """The last block table of each request."""
    engine, _ = make_engine(num_blocks, 4, policies(layout=layout, prefix_cache="none"), max_model_len=16)
    tables: Tables = {}
    names = [name for wave in waves for name, _, _ in wave.requests]  # one sequence a request: its number is its rank
    for wave in waves:
        for name, prompt, max_tokens in wave.requests:
            engine.add_request(request(name, prompt, max_tokens))
        while engine.has_work:
            plan = engine.step().plan
            for seq_id, block_ids in plan.fresh_tables.items():
                tables[names[seq_id]] = list(block_ids)
            for seq_id, block_ids in plan.tables.items():
                tables[names[seq_id]] += block_ids
    return tables


@pytest.mark.parametrize("owner", policy_names("layout"))
def test_only_the_owner_passes_its_trace(owner: str) -> None:
    assert owner in TABLES, "a new layout needs its row in TABLES"
    passing = [layout for layout in policy_names("layout") if last_tables(layout, TRACE) == TABLES[owner]]
    assert passing == [owner]


def test_a_prompt_that_goes_on_where_another_ended() -> None:
    """Only the ring's slots keep a sequence. `a` leaves 4 + 5 computed tokens; the next prompt is all of it and 3 tokens more."""
    for layout in policy_names("layout"):
        engine, log = make_engine(12, 4, policies(layout=layout, prefix_cache="none"), max_model_len=16)
        engine.add_request(request("a", A, 6))
        while engine.has_work:
            engine.step()
        engine.add_request(request("b", [*A, *log.records["a"].outputs[0][0], 5, 6, 7], 2))
        while engine.has_work:
            engine.step()
        assert log.records["b"].num_cached_tokens == (9 if layout == "ring" else 0)
        assert log.total("prefix_cache_hits") == (9 if layout == "ring" else 0)
        assert log.plans[-2].scheduled[0].num_new_tokens == (13 - 9 if layout == "ring" else 13)
