"""A policy is what its name says, in the engine's own trace: which block goes, how many, and in which order requests run."""

from __future__ import annotations

from typing import Any

import pytest
from engine_support import Log, make_engine, policies, policy_names, prompt_of, reference_outputs, request, serve

from kvlab.engine import PolicySet
from kvlab.policies.registry import SEAMS, by_name
from kvlab.types import UserError

# Capacity 3: the accesses before D is inserted -> the content that each policy gives up for it.
EVICTED = {
    ("A", "A", "A", "B", "C"): {"lru": "A", "fifo": "A", "lfu": "B", "mru": "C", "filo": "C",
        "clock": "B", "sieve": "B", "slru": "B", "two_q": "A", "arc": "B",
        "lirs": "A", "s3fifo": "B", "w_tinylfu": "C", "gdsf": "B",
        "leaf_first": "A", "length_aware": "B", "never_hit_first": "B", "cost_aware": "B", "queue_informed": "A",
        "ttl": "B", "tlru": "A", "marconi": "A", "pinned": "B"},
    ("A", "A", "A", "B", "C", "A"): {"lru": "B", "fifo": "A", "lfu": "B", "mru": "A", "filo": "C",
        "clock": "B", "sieve": "B", "slru": "B", "two_q": "A", "arc": "B",
        "lirs": "B", "s3fifo": "B", "w_tinylfu": "C", "gdsf": "B",
        "leaf_first": "B", "length_aware": "B", "never_hit_first": "B", "cost_aware": "B", "queue_informed": "B",
        "ttl": "B", "tlru": "B", "marconi": "B", "pinned": "B"},
    ("A", "B", "C", "C", "A"): {"lru": "B", "fifo": "A", "lfu": "B", "mru": "A", "filo": "C",
        "clock": "B", "sieve": "B", "slru": "B", "two_q": "A", "arc": "B",
        "lirs": "B", "s3fifo": "A", "w_tinylfu": "B", "gdsf": "B",
        "leaf_first": "B", "length_aware": "B", "never_hit_first": "B", "cost_aware": "B", "queue_informed": "B",
        "ttl": "B", "tlru": "B", "marconi": "B", "pinned": "B"},
    ("B", "A", "A", "B", "B", "C", "C", "A"): {"lru": "B", "fifo": "B", "lfu": "C", "mru": "A", "filo": "C",
        "clock": "B", "sieve": "B", "slru": "B", "two_q": "B", "arc": "B",
        "lirs": "B", "s3fifo": "B", "w_tinylfu": "C", "gdsf": "C",
        "leaf_first": "B", "length_aware": "C", "never_hit_first": "B", "cost_aware": "C", "queue_informed": "B",
        "ttl": "B", "tlru": "B", "marconi": "B", "pinned": "B"},
}
PROMPTS = {name: prompt_of(5, 100 + i) for i, name in enumerate("ABCD")}


def _evictions(eviction: str, accesses: tuple[str, ...]) -> tuple[str, Log]:
    """Each access is a prompt of one full block and a token: 4 blocks hold three cached ones and the partial one of who runs."""
    engine, log = make_engine(4, 4, policies(eviction=eviction))
    of: dict[str, str] = {}
    for number, name in enumerate((*accesses, "D")):
        before = len(log.events)
        serve(engine, [request(f"{number}{name}", PROMPTS[name], 1)])
        of.update({e.content: name for e in log.events[before:] if e.kind == "publish"})
    evicted = [of[e.content] for e in log.events if e.kind == "evict"]
    hits = sum(name in accesses[:i] for i, name in enumerate(accesses))
    assert log.total("prefix_cache_hits") == 4 * hits
    assert log.total("num_evicted_blocks") == len(evicted) == 1
    return evicted[0], log


@pytest.mark.parametrize("eviction", policy_names("eviction"))
@pytest.mark.parametrize("accesses", EVICTED, ids="".join)
def test_each_eviction_policy_gives_up_its_own_block(eviction: str, accesses: tuple[str, ...]) -> None:
    """Capacity 3, A A A B C, then D: LRU and FIFO give up A, LFU B, MRU and FILO C; with one more A, LRU gives up B, FIFO still A.

    Policies that look at more than hits and ages are alike here; tests/test_distinguishing_eviction.py tells all of them apart. Of the four
    blocks one may be pinned, by the block with most hits, and of those the one used last."""
    evicted, _ = _evictions(eviction, accesses)
    if eviction == "random":
        assert evicted in "ABC"
        assert evicted == _evictions(eviction, accesses)[0]
    else:
        assert evicted == EVICTED[accesses][eviction], "a new policy needs its rows in EVICTED"


def test_random_eviction_draws_among_all_candidates() -> None:
    """Over seeds each of three cached blocks goes about as often."""
    gone = []
    for seed in range(60):
        engine, log = make_engine(4, 4, policies(eviction=by_name("eviction", "random", seed=seed)))
        for name in "ABCD":
            serve(engine, [request(name, PROMPTS[name], 1)])
        gone += log.blocks_of("evict")
    assert sorted(set(gone)) == [0, 1, 2]
    assert all(10 <= gone.count(block) <= 30 for block in (0, 1, 2))


@pytest.mark.parametrize("eviction", policy_names("eviction"))
@pytest.mark.parametrize("missing", [0, 1, 2, 5])
def test_eviction_frees_as_many_blocks_as_are_missing(eviction: str, missing: int) -> None:
    """6 blocks are cached and 2 are free: a prompt of 2 + `missing` blocks evicts exactly `missing`, not everything."""
    engine, log = make_engine(8, 4, policies(eviction=eviction))
    for number in range(3):
        serve(engine, [request(f"{number}", prompt_of(9, number), 1)])
    assert (engine.kv.pool.num_evictable, engine.kv.pool.num_free) == (6, 2)
    engine.add_request(request("new", prompt_of(4 * (2 + missing), 9), 1))
    engine.step()
    assert len(log.blocks_of("evict")) == missing
    assert log.stats[-1].num_evicted_blocks == missing


@pytest.mark.parametrize("seam", list(SEAMS))
def test_an_unknown_policy_name_lists_the_valid_ones_and_the_nearest(seam: str) -> None:
    """ "lrru" is an error that says what there is and what was probably meant."""
    for name in policy_names(seam):
        wrong = name[:-1] + name[-1] * 2
        with pytest.raises(UserError) as error:
            by_name(seam, wrong)
        assert f"Did you mean {name!r}?" in str(error.value)
        assert all(valid in str(error.value) for valid in policy_names(seam))


def test_a_policy_in_the_wrong_seam_is_refused() -> None:
    """A name or a policy of another seam where an object of this one is needed."""
    for wrong in ("lru", policies().scheduling, type(policies().eviction)):
        with pytest.raises(UserError, match="eviction"):
            PolicySet(eviction=wrong)  # type: ignore[arg-type]


# Three requests of (prompt, priority) in order of arrival, served one at a time -> the order of their ends.
ORDER = {"fcfs": ["long", "low", "short"], "priority": ["long", "short", "low"], "sjf": ["short", "low", "long"]}
ORDER |= dict.fromkeys(("lpm", "dfs_weight", "edf", "hrrn", "vtc", "sjf_oracle", "srpt_oracle"), ORDER["fcfs"])
"""Nothing is shared, tenants, goals and output lengths are the same: these serve in order of arrival here (what tells them apart is in
test_distinguishing_scheduling.py)."""
DRAWN = ["long", "short", "low"]
ORDER |= {"mlfq": ["short", "long", "low"], "random": DRAWN, "sjf_predicted": DRAWN, "srpt_predicted": DRAWN}
"""mlfq: each has a turn for its first token, and short is still there when all have had one. The others draw 0.33, 0.64, 0.90."""


@pytest.mark.parametrize("scheduling", policy_names("scheduling"))
def test_each_scheduling_policy_serves_in_its_own_order(scheduling: str) -> None:
    """A long prompt of priority 0, then one of priority 2, then a short one of priority 1."""
    engine, log = make_engine(40, 4, policies(scheduling=scheduling), max_num_seqs=1)
    requests = [request("long", prompt_of(20, 1), 2, 0.0, 0), request("low", prompt_of(9, 2), 2, 0.1, 2),
                request("short", prompt_of(5, 3), 2, 0.2, 1)]  # fmt: skip
    serve(engine, requests)
    assert list(log.records) == ORDER[scheduling], "a new policy needs its row in ORDER"
    assert log.outputs == reference_outputs(requests)


# Four running requests; the first is the oldest. (name, prompt tokens, priority) -> who gives way first.
# At the first preemption b and d have 10 tokens each in 3 blocks, 8 of them published, c has 4 in 1, all published (it loses nothing).
VICTIM = {"lifo": "d", "priority": "b", "least_computed": "c", "most_computed": "d", "most_blocks": "d", "cost_aware": "c", "random": "d"}


@pytest.mark.parametrize("victim", policy_names("preemption"))
def test_each_preemption_policy_picks_its_own_victim(victim: str) -> None:
    """b is least important, c has computed the least, d came last; a is the oldest and never gives way."""
    engine, log = make_engine(10, 4, policies(preemption=victim, admission="none"))
    requests = [request("a", prompt_of(11, 1), 9, priority=9), request("b", prompt_of(9, 2), 4, priority=5),
                request("c", prompt_of(3, 3), 9, priority=0), request("d", prompt_of(9, 4), 4, priority=1)]  # fmt: skip
    serve(engine, requests)
    first = next(p.request_id for plan in log.plans for p in plan.preempted)
    assert first == VICTIM[victim], "a new policy needs its row in VICTIM"
    assert log.records["a"].num_preemptions == 0
    assert log.outputs == reference_outputs(requests)


# What the steps of two prompts of 6 tokens (budget 4) compute: tokens per scheduled sequence.
STEPS = {
    "chunked": [[4], [2, 2], [1, 3], [1, 1], [1, 1], [1], [1]],
    "prefill_first": [[4], [4], [2, 2], [1, 1], [1, 1], [1, 1]],
    "decode_first": [[4], [2], [1, 3], [1, 3], [1, 1], [1], [1]],
    "sarathi": [[4], [2, 2], [1, 3], [1, 1], [1, 1], [1], [1]],
    "split_prefill_first": [[4], [2, 2], [4], [1, 1], [1, 1], [1, 1]],
    "waiting_served": [[4], [4], [2, 2], [1, 1], [1, 1], [1, 1]],
    "static": [[6, 6], [1, 1], [1, 1], [1, 1]],
    "walkthrough": [[6, 6], [1, 1], [1, 1], [1, 1]],
}
"""Chunked mixes decodes of the first with chunks of the second, 4 tokens in all; prefill_first takes waiting prompts first, alone, and
what no step could hold goes on beside the others; static and walkthrough know no token limit. decode_first takes nobody new while a
prompt is half computed, split_prefill_first lets it go before decodes; sarathi's budget and waiting_served's numbers tell nothing apart
here (see test_distinguishing_batching.py)."""


@pytest.mark.parametrize("batching", policy_names("batching"))
def test_each_batching_policy_makes_its_own_steps(batching: str) -> None:
    """Two prompts of 6 tokens and 4 outputs each, four tokens a step."""
    engine, log = make_engine(40, 4, policies(batching=batching), max_num_batched_tokens=4)
    serve(engine, [request("a", prompt_of(6, 1), 4), request("b", prompt_of(6, 2), 4)])
    steps = [[s.num_new_tokens for s in plan.scheduled] for plan in log.plans]
    assert steps == STEPS[batching], "a new policy needs its row in STEPS"


def test_static_batching_admits_nobody_while_a_batch_runs_and_walkthrough_does() -> None:
    """A third request comes while two run."""
    admitted = {}
    for batching in ("static", "walkthrough"):
        engine, log = make_engine(40, 4, policies(batching=batching))
        engine.add_request(request("a", prompt_of(6, 1), 4))
        engine.add_request(request("b", prompt_of(6, 2), 6))
        engine.step()
        serve(engine, [request("c", prompt_of(6, 3), 4)])
        admitted[batching] = [(a.request_id, plan.step) for plan in log.plans for a in plan.admitted]
    assert admitted["static"] == [("a", 0), ("b", 0), ("c", 6)]
    assert admitted["walkthrough"] == [("a", 0), ("b", 0), ("c", 1)]


# Who asks is a prompt of 16 in chunks of 7: 2 blocks now, 4 in all (5 with its output token). Who runs holds 3 of at last 5.
@pytest.mark.parametrize(
    ("admission", "parameters", "steps"),
    [("none", {}, {6: 1, 7: 1}), ("watermark", {"fraction": 0.0}, {6: 1, 7: 1}), ("watermark", {"fraction": 0.5}, {6: 9, 7: 9}),
     ("watermark", {"fraction": 0.0, "full_sequence": True}, {6: 9, 7: 1}), ("full_sequence", {}, {6: 9, 7: 1}),
     ("none", {"full_sequence": True}, {6: 9, 7: 1}), ("adaptive", {}, {6: 1, 7: 1}), ("adaptive", {"full_sequence": True}, {6: 9, 7: 1}),
     # reserve_all: 5 + 2 to come of 7 free. expected_output: 20 tokens and in step 4, its 4th output there, 0.697 * 5: 23.5 of 24 free.
     # past_future: 12 + 16 held and 2 * 1 when who asks ends: 30 of 32.
     ("reserve_all", {}, {6: 9, 7: 9, 9: 9, 10: 1}), ("expected_output", {}, {7: 9, 8: 9, 9: 4, 10: 1}),
     ("past_future", {}, {6: 9, 7: 9, 8: 1})],
)  # fmt: skip
def test_each_admission_policy_lets_in_at_its_own_step(admission: str, parameters: dict[str, Any], steps: dict[int, int]) -> None:
    """Pools of 6 to 10 blocks of 4. 8 + 9 tokens run until step 8, then a prompt of 16 asks: at once, or when that has ended."""
    for num_blocks, step in steps.items():
        engine, log = make_engine(
            num_blocks, 4, policies(admission=by_name("admission", admission, **parameters)), max_num_batched_tokens=8
        )
        engine.add_request(request("runs", prompt_of(8, 1), 9))
        engine.step()
        serve(engine, [request("asks", prompt_of(16, 2), 1)])
        admitted = [(a.request_id, plan.step) for plan in log.plans for a in plan.admitted if a.kind == "new"]
        assert admitted == [("runs", 0), ("asks", step)]


def test_every_admission_policy_has_a_row_above() -> None:
    """A new policy is added to the table."""
    assert policy_names("admission") == ["adaptive", "expected_output", "full_sequence", "none", "past_future", "reserve_all", "watermark"]
