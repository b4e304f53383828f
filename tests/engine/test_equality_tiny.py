"""No lossless policy changes a token: the tiny model in float64, real attention, real paged tensors, pools that are far too small.

Each case must be token-identical to an undisturbed run, and must show that what it claims happened did happen. `make test` runs a
pairwise covering array of the policies, the marker `full` an array that covers all triples.
"""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache
from typing import Any

import pytest
import torch
from engine_support import Log, Outputs, policies, policy_names, serve
from equality_support import Case, Watch, complete, covering_array, kv_by_position, modes, name_of, tiny, tiny_engine, tuples_of

from kvlab.engine import Engine
from kvlab.policies.admission import FullSequence, Unlimited, Watermark
from kvlab.policies.preemption.mode import CheaperOfBoth
from kvlab.policies.registry import by_name
from kvlab.types import Request, SamplingParams

SEED = 20
BLOCK_SIZES = (1, 3, 16, 17, 32)
MIN_GAP = 1e-6
SMALL_BUDGET = 16
MAX_MODEL_LEN = 96
AGAIN = ("again", "once more")

# ------------------------------------------------------------------------- what is served

KINDS: dict[str, list[dict[str, Any]]] = {
    "greedy": [{}],
    "samples": [{"n": 4, "temperature": 1.0}],
    "beams": [{"beam_width": 3, "n": 3}, {"beam_width": 3, "n": 2, "length_penalty": 0.5}],
    "mixed": [{}, {"n": 4, "temperature": 0.9, "top_p": 0.9}, {"repetition_penalty": 1.2}, {"beam_width": 3, "n": 1},
              {"n": 2, "temperature": 1.2, "min_p": 0.02, "presence_penalty": 0.5}],
}  # fmt: skip
PREFIX = [(7 * i * i + 3 * i + 11) % 256 for i in range(34)]
"""More than one block of 32: there is something to hit at every block size."""


def requests_of(kind: str) -> list[Request]:
    """Ten prompts of 40 to 46 tokens with a common beginning, 26 to 31 tokens out: each crosses a border of 32 while it decodes.

    Neither priorities nor lengths are in the order of submission, so that every order of service is another one.
    """
    out = []
    for number in range(10):
        tail = [(number * 37 + 5 * i) % 256 for i in range(6 + number * 3 % 7)]
        sampling = SamplingParams(max_tokens=26 + number * 5 % 6, ignore_eos=True, seed=number, **KINDS[kind][number % len(KINDS[kind])])
        out.append(Request(f"{kind}-{number}", PREFIX + tail, sampling, priority=number * 7 % 10))
    return out


def num_streams(request: Request) -> int:
    return request.sampling.num_sequences


@lru_cache
def undisturbed(kind: str) -> dict[str, Outputs]:
    """Outputs with blocks for everybody, no cache, no preemption, whole prompts. The best two logits are never too close to tell."""
    engine, log = tiny_engine(2000, 16, policies(prefix_cache="none"), max_model_len=MAX_MODEL_LEN, max_num_batched_tokens=4096)
    with Watch(tiny()) as watch:
        serve(engine, requests_of(kind), check=False)
    assert log.total("num_preemptions") == log.total("prefix_cache_hits") == log.total("recomputed_tokens") == 0
    assert len(log.plans[0].scheduled) == 10
    assert all(entry.num_samples for plan in log.plans for entry in plan.scheduled), "some prompt was cut"
    assert watch.smallest_gap() >= MIN_GAP
    return log.outputs


def blocks_of(request: Request, block_size: int) -> int:
    """Blocks of a request at its end, when its streams share no more than the full blocks of the prompt."""
    num_prompt = len(request.prompt_token_ids)
    shared = num_prompt // block_size
    return shared + num_streams(request) * (-(-(num_prompt + request.sampling.max_tokens) // block_size) - shared)


def small_pool(requests: list[Request], block_size: int) -> int:
    """Blocks for the largest request alone, and for some prompts to start together that can't grow together."""
    prompts = sorted(-(-len(r.prompt_token_ids) // block_size) for r in requests)
    return max(*(blocks_of(r, block_size) for r in requests), sum(prompts[-4:]) + 2)


# ----------------------------------------------------------------- preempting combinations

ADMISSION = {
    "none": Unlimited, "watermark_0": lambda: Watermark(0.0), "watermark_0.1": lambda: Watermark(0.1),
    "watermark_0.1_full": lambda: Watermark(0.1, full_sequence=True), "full_sequence": FullSequence,
    "reserve_all": lambda: by_name("admission", "reserve_all"),
}  # fmt: skip

PAGED: dict[str, tuple[Any, ...]] = {
    "block_size": BLOCK_SIZES,
    "prefix_cache": tuple(policy_names("prefix_cache")),
    "eviction": tuple(policy_names("eviction")),
    "mode": tuple(policy_names("preemption/mode")),
    "batching": tuple(policy_names("batching")),
    "budget": (SMALL_BUDGET, 512),
    "admission": ("none", "watermark_0", "watermark_0.1", "watermark_0.1_full", "full_sequence"),
    "scheduling": tuple(policy_names("scheduling")),
    "preemption": tuple(policy_names("preemption")),
    "kind": tuple(KINDS),
}
HAS_BUDGET = ("chunked", "prefill_first")


def is_valid(case: Case) -> bool:
    """Where a policy would have nothing to decide, one of its seam stands for all."""
    if case.get("prefix_cache") == "none" and case.get("eviction", "lru") != "lru":
        return False
    return case.get("batching", "chunked") in HAS_BUDGET or case.get("budget", 512) == 512


def engine_for(case: Case, num_blocks: int, **seams: Any) -> tuple[Engine, Log]:
    """The engine of a case. CheaperOfBoth is told of speeds at which both ways pay, now one and now the other."""
    chosen = {name: case[name] for name in ("prefix_cache", "batching", "scheduling") if name in case}
    mode = CheaperOfBoth(swap_gb_per_s=0.05, prefill_tokens_per_s=22_000) if case.get("mode") == "cheaper_of_both" else case.get("mode")
    policy_set = policies(admission=ADMISSION[case["admission"]](), eviction=case.get("eviction", "lru"), mode=mode or "recompute",
                          preemption=case.get("preemption", "lifo"), **{**chosen, **seams})  # fmt: skip
    return tiny_engine(num_blocks, case["block_size"], policy_set, num_cpu_blocks=4 * num_blocks, max_model_len=MAX_MODEL_LEN,
                       max_num_batched_tokens=case.get("budget", 512))  # fmt: skip


def check_fired(case: Case, log: Log) -> None:
    """What the case is about did happen."""
    if case["prefix_cache"] == "hash":
        assert log.total("prefix_cache_hits") > 0, "no hit"
        assert log.total("num_evicted_blocks") > 0, "no eviction"
    if case["budget"] == SMALL_BUDGET:
        assert any(entry.num_samples == 0 for plan in log.plans for entry in plan.scheduled), "no prompt in more than one chunk"
    first = [entry.request_id for plan in log.plans for entry in plan.admitted if entry.kind == "new"]
    submitted = [*(request.request_id for request in requests_of(case["kind"])), *AGAIN]
    assert sorted(first) == sorted(submitted)
    assert (first == submitted) == (case["scheduling"] == "fcfs"), "not the order of the scheduling policy"
    if "0.1" in case["admission"]:
        assert any(entry.by == "watermark" for plan in log.plans for entry in plan.blocked), "the watermark kept nobody out"
    if case["kind"] != "greedy":
        assert log.total("cow_copies") > 0 or case["block_size"] == 1, "no copy-on-write"
        assert max(stats.shared_blocks_saved for stats in log.stats) > 0, "nothing shared"


def check_tokens(case: Case, engine: Engine, log: Log) -> None:
    """Serve the case's requests; tokens as undisturbed. Then the last one twice more: the second finds what the first has left."""
    serve(engine, requests_of(case["kind"]), check=False)
    assert log.outputs == undisturbed(case["kind"])
    assert engine.kv.pool.num_used == engine.kv.cpu_pool.num_used == 0
    last = requests_of(case["kind"])[-1]
    for name in AGAIN:
        serve(engine, [replace(last, request_id=name)], check=False)
        assert log.records[name].outputs == undisturbed(case["kind"])[last.request_id]
    full_blocks = (len(last.prompt_token_ids) - 1) // case["block_size"]
    assert log.records[AGAIN[1]].num_cached_tokens == (full_blocks * case["block_size"] if case["prefix_cache"] == "hash" else 0)


def check_preempting(case: Case) -> None:
    engine, log = engine_for(case, small_pool(requests_of(case["kind"]), case["block_size"]))
    check_tokens(case, engine, log)
    check_fired(case, log)
    assert log.total("num_preemptions") > 0, "no preemption"
    if case["mode"] == "recompute":
        assert log.total("recomputed_tokens") > 0
        assert set(modes(log)) == {"recompute"}
    if case["mode"] == "swap":
        assert log.total("swapped_out_blocks") > 0
        assert log.total("swapped_in_blocks") > 0
        assert "swap" in modes(log)


PAIRWISE = covering_array(PAGED, is_valid, SEED)


def test_the_array_covers_every_pair_that_can_occur() -> None:
    """Counted anew: every pair of values is in some case, or can't be completed."""
    import itertools
    from random import Random

    covered = set().union(*(tuples_of(case, 2) for case in PAIRWISE))
    assert all(is_valid(case) for case in PAIRWISE)
    missing = [pair for a, b in itertools.combinations(sorted(PAGED), 2) for pair in itertools.product([(a, v) for v in PAGED[a]],
               [(b, v) for v in PAGED[b]]) if pair not in covered]  # fmt: skip
    assert all(complete(PAGED, dict(pair), is_valid, Random(0)) is None for pair in missing)
    assert {frozenset(pair) for pair in missing} == {
        frozenset({("prefix_cache", "none"), ("eviction", name)}) for name in PAGED["eviction"] if name != "lru"
    } | {frozenset({("batching", name), ("budget", SMALL_BUDGET)}) for name in PAGED["batching"] if name not in HAS_BUDGET}
    print(f"seed {SEED}: {len(PAIRWISE)} cases cover {len(covered)} pairs")


@pytest.mark.parametrize("case", PAIRWISE, ids=name_of)
def test_preempted_swapped_chunked_and_cached_tokens_are_the_same(case: Case) -> None:
    check_preempting(case)
