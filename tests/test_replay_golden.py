"""Published hit counts of two traces, met exactly: two independent implementations agree on each of these numbers."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import pytest

from kvlab.replay import AccessTrace, as_trace, replay
from kvlab.types import UserError
from kvlab.workload.traces import find_trace

# The public Mooncake FAST'25 synthetic trace: policy -> capacity (blocks) -> (object hits, prefix hits).
MOONCAKE = {
    "lru": {1000: (10050, 10050), 5000: (34018, 34018), 10000: (51614, 51614), 30000: (76077, 76077)},
    "fifo": {1000: (9597, 9593), 5000: (32387, 32381), 10000: (48633, 48622), 30000: (72529, 72411)},
    "lfu": {1000: (4885, 4885), 5000: (24049, 24049), 10000: (43602, 43602), 30000: (76290, 76290)},
    "s3fifo": {1000: (10862, 10351), 5000: (35214, 34699), 10000: (50980, 50877), 30000: (73578, 73534)},
    "arc": {1000: (11375, 11097), 5000: (35052, 34611), 10000: (53091, 52864), 30000: (76290, 76290)},
    "sieve": {1000: (4885, 4885), 5000: (24049, 24049), 10000: (43602, 43602), 30000: (76290, 76290)},
    "belady": {1000: (33713, 33713), 5000: (64135, 64135), 10000: (75315, 75315), 30000: (77953, 77953)},
}
# 50,000 single accesses over 2,000 objects, Zipf 0.9: policy -> capacity -> object hits.
ZIPF = {
    "lru": {50: 14560, 200: 25271, 800: 38729},
    "fifo": {50: 12517, 200: 22756, 800: 36654},
    "lfu": {50: 21015, 200: 29063, 800: 40117},
    "sieve": {50: 20863, 200: 29827, 800: 40214},
    "s3fifo": {50: 20755, 200: 29736, 800: 39923},
    "arc": {50: 19914, 200: 28731, 800: 39340},
    "belady": {50: 25931, 200: 35525, 800: 44584},
}


def trace_file(name: str) -> Path:
    """A trace in the folder KVLAB_TRACES, or in shared/data/traces beside the repository."""
    try:
        return find_trace(name)
    except UserError:
        pytest.skip(f"the trace {name} is not there: set KVLAB_TRACES to the folder that holds it")


@cache
def trace(name: str) -> AccessTrace:
    return as_trace(trace_file(name))


@pytest.mark.traces
@pytest.mark.parametrize("policy", MOONCAKE)
def test_hits_on_the_mooncake_trace(policy: str) -> None:
    accesses = trace("mooncake_synthetic.jsonl.gz")
    assert (len(accesses.blocks), accesses.num_accesses, accesses.num_unique_blocks) == (3993, 121877, 43924)
    results = {capacity: replay(accesses, policy, capacity) for capacity in MOONCAKE[policy]}
    assert {capacity: (result.object_hits, result.prefix_hits) for capacity, result in results.items()} == MOONCAKE[policy]


@pytest.mark.traces
@pytest.mark.parametrize("policy", ZIPF)
def test_hits_on_the_zipf_trace(policy: str) -> None:
    accesses = trace("zipf_accesses.txt.gz")
    assert {capacity: replay(accesses, policy, capacity).object_hits for capacity in ZIPF[policy]} == ZIPF[policy]


@pytest.mark.traces
def test_lfu_and_sieve_coincide_on_the_llm_trace_only() -> None:
    """No two of the seven are alike on the Zipf trace."""
    assert MOONCAKE["lfu"] == MOONCAKE["sieve"]
    evicted = {policy: replay(trace("zipf_accesses.txt.gz"), policy, 50).evicted for policy in ZIPF}
    assert len(set(evicted.values())) == len(ZIPF)
