"""What a step's counts say of the pool: sharing between requests, regions set aside, slots that hold nothing."""

from __future__ import annotations

import pytest

from kvlab.engine import Engine, EngineConfig, PolicySet
from kvlab.engine.clock import VirtualClock
from kvlab.engine.records import make_record
from kvlab.engine.runners.simulated import SimulatedRunner
from kvlab.engine.sequence import Sequence, SequenceGroup
from kvlab.policies.layout import ContiguousMax
from kvlab.policies.prefix_cache import NoCache
from kvlab.types import Request, SamplingParams


def engine_of(num_blocks: int, policies: PolicySet, max_model_len: int = 64, depth: int = 0) -> Engine:
    config = EngineConfig(num_blocks=num_blocks, block_size=4, max_model_len=max_model_len, depth=depth)
    return Engine(config, policies, SimulatedRunner(97), VirtualClock())


def test_requests_with_a_common_prefix_save_blocks() -> None:
    """8 shared tokens are two blocks of 4: held twice, there once."""
    engine = engine_of(20, PolicySet())
    engine.add_request(Request("a", [1, 2, 3, 4, 5, 6, 7, 8, 9], SamplingParams(max_tokens=9, ignore_eos=True)))
    first = engine.step().stats
    assert (first.kv_blocks_used, first.shared_blocks_saved, first.internal_fragmentation_tokens) == (3, 0, 3)
    engine.add_request(Request("b", [1, 2, 3, 4, 5, 6, 7, 8, 10], SamplingParams(max_tokens=9, ignore_eos=True)))
    second = engine.step().stats
    assert second.prefix_cache_hits == 8
    assert (second.kv_blocks_used, second.shared_blocks_saved) == (4, 2)
    assert second.internal_fragmentation_tokens == (12 - 10) + (12 - 9)


def test_samples_of_a_prompt_save_its_blocks() -> None:
    """n = 3 over a prompt of 6 tokens: two blocks held by three sequences until each copies the half-filled one."""
    engine = engine_of(20, PolicySet(prefix_cache=NoCache()))
    engine.add_request(Request("a", [1, 2, 3, 4, 5, 6], SamplingParams(n=3, temperature=1.0, max_tokens=9, ignore_eos=True)))
    forked = engine.step().stats
    assert (forked.kv_blocks_used, forked.shared_blocks_saved, forked.internal_fragmentation_tokens) == (2, 4, 2)
    apart = engine.step().stats
    assert (apart.kv_blocks_used, apart.shared_blocks_saved, apart.cow_copies) == (4, 2, 2)
    assert apart.internal_fragmentation_tokens == 3 * (4 - 3)


def test_regions_set_aside_are_used_and_empty() -> None:
    """contiguous_max, 16 tokens a region, n = 2: from the first chunk on two regions of 4 blocks are used; the spare one is empty."""
    engine = engine_of(12, PolicySet(prefix_cache=NoCache(), layout=ContiguousMax()), max_model_len=16)
    engine.add_request(Request("a", [1, 2, 3, 4, 5, 6], SamplingParams(n=2, temperature=1.0, max_tokens=4, ignore_eos=True)))
    stats = engine.step().stats
    assert (stats.kv_blocks_used, stats.kv_blocks_free, stats.shared_blocks_saved) == (8, 4, 0)
    assert stats.internal_fragmentation_tokens == 2 * 16 - 2 * 6


def test_evicted_blocks_are_those_of_the_step() -> None:
    """Prompts of two blocks, one after the other, on three blocks: the second evicts one, each further one two."""
    engine = engine_of(3, PolicySet())
    evicted = []
    for number in range(4):
        prompt = [10 * number + i for i in range(8)]
        engine.add_request(Request(f"r{number}", prompt, SamplingParams(max_tokens=1, ignore_eos=True)))
        evicted.append(engine.step().stats.num_evicted_blocks)
    assert evicted == [0, 1, 2, 2]


def test_blocks_that_a_step_in_flight_keeps_busy_save_nothing() -> None:
    """Depth 1: a request that stops (its third token ends it) leaves its blocks parked for the step in flight. They are used, held by no
    table, and nobody shares anything."""
    prompt = [1, 2, 3, 4, 5, 6]
    alone = engine_of(20, PolicySet(prefix_cache=NoCache()))
    alone.add_request(Request("a", prompt, SamplingParams(max_tokens=3, ignore_eos=True)))
    while alone.has_work:
        ended = alone.step().finished
    last = ended[0].outputs[0][0][2]
    engine = engine_of(20, PolicySet(prefix_cache=NoCache()), depth=1)
    engine.add_request(Request("a", prompt, SamplingParams(max_tokens=9, ignore_eos=True, stop_token_ids=(last,))))
    engine.add_request(Request("b", [7, 8, 9], SamplingParams(max_tokens=9, ignore_eos=True)))
    seen = []
    while engine.has_work:
        stats = engine.step().stats
        seen.append((stats.step, len(engine.kv.parking), stats.kv_blocks_used, stats.shared_blocks_saved))
    # a holds 2 blocks for 6, 7, 8 tokens, b 1, then 2. When a's third token comes step 3 has been planned, with a third block for a.
    assert seen[2] == (2, 1, 3 + 2, 0)
    assert [saved for _, _, _, saved in seen] == [0] * len(seen)


@pytest.mark.parametrize(
    ("reasons", "told"),
    [(("stop", "length"), "length"), (("length", "kv_capacity", "stop"), "kv_capacity"), (("stop", "abort"), "abort"), (("stop",), "stop")],
)
def test_a_request_whose_sequences_ended_in_several_ways_says_the_most_telling(reasons: tuple[str, ...], told: str) -> None:
    request = Request("r", [1, 2, 3], SamplingParams(max_tokens=4, n=len(reasons), temperature=1.0))
    group = SequenceGroup(0, request, 0, (), 4)
    for stream, reason in enumerate(reasons):
        group.ended_seqs.append(Sequence(stream, group, stream, [1, 2, 3, 9]))
        group.ended_seqs[-1].finish_reason = reason
    assert make_record(group, 2.0, None).finish_reason == told
