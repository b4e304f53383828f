"""Statistics that don't flatter: first-time hits apart from those after a preemption, everything counted once, three bands."""

from __future__ import annotations

from typing import Any

import pytest
from engine_support import Forcer, Log, make_engine, policies, prompt_of, reference_outputs, request, run_to_end, serve


@pytest.mark.parametrize("mode", ["recompute", "swap"])
@pytest.mark.parametrize("n", [1, 3])
def test_unique_prompts_have_no_first_time_hits(mode: str, n: int) -> None:
    """Preempted prompts that nobody shares: hits 0 of all prompt tokens; what readmission finds again is counted apart."""
    requests = [request(f"r{i}", prompt_of(9, i), 6, n=n, temperature=1.0) for i in range(4)]
    engine, log = make_engine(12 * n, 4, policies(mode=mode, admission="none"), num_cpu_blocks=40)
    forcer = Forcer(engine)
    for each in requests:
        engine.add_request(each)
    engine.step()
    engine.step()
    forcer.after.append("r3")
    run_to_end(engine, 200)
    assert log.total("num_preemptions") >= 1
    assert log.total("prefix_cache_hits") == 0
    assert log.total("prefix_cache_queries") == 4 * 9
    assert [record.num_cached_tokens for record in log.records.values()] == [0] * 4
    assert 0 < log.total("preempted_hits") < log.total("preempted_queries")
    assert log.outputs == reference_outputs(requests)


def test_what_readmission_finds_again_is_counted_apart() -> None:
    """9 prompt tokens and 3 outputs, 11 of them computed: 2 blocks of 4 are found again of the 12 tokens asked for."""
    engine, log = make_engine(40, 4)
    forcer = Forcer(engine)
    engine.add_request(request("a", prompt_of(9), 6))
    for _ in range(3):
        engine.step()
    forcer.before.append("a")
    run_to_end(engine, 20)
    assert (log.total("prefix_cache_queries"), log.total("prefix_cache_hits")) == (9, 0)
    assert (log.total("preempted_queries"), log.total("preempted_hits")) == (12, 8)
    record = log.records["a"]
    assert (record.num_cached_tokens, record.num_preemptions) == (0, 1)
    assert log.total("recomputed_tokens") == record.num_wasted_tokens == 3  # positions 8, 9, 10
    assert record.num_computed_tokens == 9 + 5 + 3


def _busy() -> tuple[Log, dict[str, Any]]:
    """Shared prefixes, a small pool, a low limit of sequences: refusals, hits and preemptions."""
    requests = {
        f"r{i}": request(f"r{i}", prompt_of(8, i % 2) + prompt_of(1 + i, 10 + i), 5, n=1 + i % 2, temperature=1.0) for i in range(8)
    }
    engine, log = make_engine(11, 4, policies(admission="none", mode="recompute"), max_num_seqs=4, max_num_batched_tokens=12)
    serve(engine, requests.values())
    assert log.total("num_preemptions") >= 1
    assert log.total("prefix_cache_hits") >= 8
    assert sum(len(plan.blocked) for plan in log.plans) >= 5
    return log, requests


def test_everything_is_counted_once() -> None:
    """cached <= prompt; a refused attempt is no second query; a token that was generated counts once, whatever became of its KV."""
    log, requests = _busy()
    assert log.outputs == reference_outputs(requests.values())
    for name, record in log.records.items():
        assert record.num_cached_tokens <= len(requests[name].prompt_token_ids) - 1
        assert record.num_output_tokens == 5 * requests[name].sampling.n
    assert log.total("prefix_cache_queries") == sum(len(r.prompt_token_ids) for r in requests.values())
    assert log.total("prefix_cache_hits") == sum(record.num_cached_tokens for record in log.records.values())
    assert log.total("num_output_tokens") == sum(5 * r.sampling.n for r in requests.values())
    computed = sum(record.num_computed_tokens for record in log.records.values())
    assert computed == log.total("num_prompt_tokens_computed") + log.total("num_generation_tokens")
    assert computed == sum(plan.num_new_tokens for plan in log.plans)
    assert log.total("recomputed_tokens") == sum(record.num_wasted_tokens for record in log.records.values()) > 0


def test_a_request_that_waits_asks_once() -> None:
    """Blocked for several steps with hits in the cache: one query when it is admitted."""
    engine, log = make_engine(5, 4, policies(admission="none"))
    shared = prompt_of(8, 1)
    serve(engine, [request("first", [*shared, 1], 1)])
    serve(engine, [request("long", prompt_of(9, 2), 4), request("again", [*shared, *prompt_of(4, 3)], 3)])
    assert [b.by for plan in log.plans for b in plan.blocked if b.request_id == "again"] == ["blocks"] * 4
    again = [stats for plan, stats in zip(log.plans, log.stats, strict=True) if any(a.request_id == "again" for a in plan.admitted)]
    assert [(stats.prefix_cache_queries, stats.prefix_cache_hits) for stats in again] == [(12, 8)]
    assert log.total("prefix_cache_queries") == 9 + 9 + 12


def test_cached_blocks_that_nobody_holds_are_not_used() -> None:
    """Three bands: a prompt of 9 tokens uses 3 blocks of 4; when it has ended, 2 are cached and 8 free, none is used."""
    engine, log = make_engine(10, 4)
    serve(engine, [request("a", prompt_of(9), 2)])
    bands = [(s.kv_blocks_used, s.kv_blocks_evictable, s.kv_blocks_free) for s in log.stats]
    assert bands == [(3, 0, 7), (0, 2, 8)]
    engine.add_request(request("b", prompt_of(9), 2))
    engine.step()
    assert (log.stats[-1].kv_blocks_used, log.stats[-1].kv_blocks_evictable, log.stats[-1].kv_blocks_free) == (3, 0, 7)


def test_a_shared_block_is_used_once() -> None:
    """n = 3 after 6 tokens: one full block for all, one partial each after the first write; what sharing saves is told."""
    engine, log = make_engine(10, 4)
    engine.add_request(request("a", prompt_of(6), 3, n=3, temperature=1.0))
    engine.step()
    engine.step()
    assert (log.stats[0].kv_blocks_used, log.stats[0].shared_blocks_saved) == (2, 4)
    assert (log.stats[1].kv_blocks_used, log.stats[1].shared_blocks_saved, log.stats[1].cow_copies) == (4, 2, 2)
    assert log.stats[1].internal_fragmentation_tokens == 3  # 7 of 8 slots each
    assert log.stats[1].num_ctx_tokens == 21
