"""LRU at all capacities in one pass: by hand, against replays one by one, and the published hits of a real trace."""

from __future__ import annotations

import time
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from test_replay_golden import MOONCAKE, ZIPF, trace_file

from kvlab.policies.eviction import Lru
from kvlab.replay import AccessTrace, as_trace, lru_curve, replay
from kvlab.replay.curve import greater_before, stack_distances
from kvlab.types import UserError


def test_stack_distances_by_hand() -> None:
    """a b c a: three ids since the last a, itself counted. b: c, a and b. b again: 1. c: a, b and c."""
    assert stack_distances(np.array([0, 1, 2, 0, 1, 1, 2])).tolist() == [0, 0, 0, 3, 3, 1, 3]
    assert stack_distances(np.zeros(0, dtype=np.int64)).tolist() == []
    assert greater_before(np.array([3, 1, 4, 0, 2])).tolist() == [0, 1, 0, 3, 2]


def test_curve_by_hand() -> None:
    """Requests [a b], [a c], [b c]: distances 2 for a; 3 for b (a, c between); then c was used a moment ago, with b since: 2.

    At 2 blocks a hits, and c as an object: its request missed b before it. At 3 blocks all three hit. Tokens: blocks of 512, the last
    request has 600, of which c holds 88.
    """
    trace = AccessTrace("t", [["a", "b"], ["a", "c"], ["b", "c"]], [0.0] * 3, [1024, 1024, 600])
    curve = lru_curve(trace)
    assert curve.capacities.tolist() == [1, 2, 3]
    assert curve.object_hits.tolist() == [0, 2, 3]
    assert curve.prefix_hits.tolist() == [0, 1, 3]
    assert curve.hit_tokens is not None
    assert curve.hit_tokens.tolist() == [0, 512, 1112]
    assert curve.request_hit_rate.tolist() == pytest.approx([0, 1 / 6, 1 / 2])
    assert (curve.at(2), curve.at(1000)) == ((2, 1), (3, 3))
    warm = lru_curve(trace, warmup=2)
    assert (warm.requests, warm.accesses, warm.tokens) == (1, 2, 600)
    assert (warm.object_hits.tolist(), warm.prefix_hits.tolist()) == ([0, 1, 2], [0, 0, 2])
    assert list(curve.frame["block_hit_rate_prefix"]) == pytest.approx([0, 1 / 6, 1 / 2])
    with pytest.raises(UserError, match="capacity = 0 is not allowed"):
        curve.at(0)
    with pytest.raises(UserError, match="warmup = 3 leaves none of the 3 requests"):
        lru_curve(trace, warmup=3)


@settings(max_examples=30, deadline=None)
@given(requests=st.lists(st.lists(st.integers(0, 12), max_size=9), min_size=1, max_size=25), warmup=st.integers(0, 3))
def test_the_curve_is_what_replays_give_one_by_one(requests: list[list[int]], warmup: int) -> None:
    """Also with ids twice in a request, and requests without blocks."""
    if warmup >= len(requests):
        return
    curve = lru_curve(requests, warmup)
    for capacity in range(1, len(curve.capacities) + 2):
        result = replay(requests, Lru, capacity, warmup=warmup)
        assert curve.at(capacity) == (result.object_hits, result.prefix_hits)
        if capacity <= len(curve.capacities):
            assert curve.request_hit_rate[capacity - 1] == pytest.approx(result.request_hit_rate)


@pytest.mark.traces
def test_published_hits_lie_on_the_curve() -> None:
    curve = lru_curve(trace_file("mooncake_synthetic.jsonl.gz"))
    assert {capacity: curve.at(capacity) for capacity in MOONCAKE["lru"]} == MOONCAKE["lru"]
    zipf = lru_curve(trace_file("zipf_accesses.txt.gz"))
    assert {capacity: zipf.at(capacity)[0] for capacity in ZIPF["lru"]} == ZIPF["lru"]


@pytest.mark.traces
def test_all_capacities_of_the_conversation_trace_take_less_than_two_seconds() -> None:
    trace = as_trace(trace_file("mooncake_conversation.jsonl.gz"))
    start = time.process_time()
    curve = lru_curve(trace)
    assert time.process_time() - start < 2.0
    assert (len(curve.capacities), curve.at(182_790)) == (182_790, (105_710, 105_710))
    result = replay(trace, "lru", 20_000, warmup=0.1)
    warm = lru_curve(trace, warmup=0.1)
    assert warm.at(20_000) == (result.object_hits, result.prefix_hits)
    assert warm.token_hit_rate is not None
    assert warm.token_hit_rate[19_999] == result.token_hit_rate


def test_a_curve_of_words(tmp_path: Path) -> None:
    path = tmp_path / "words.txt"
    path.write_text("a\nb\na\nc\na\nb\n", encoding="utf-8")
    curve = lru_curve(path)
    assert (curve.object_hits.tolist(), curve.hit_tokens) == ([0, 2, 3], None)
