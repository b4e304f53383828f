"""No lossless policy changes a token: the tiny model in float64, real attention, real paged tensors, pools that are far too small.

Each case must be token-identical to an undisturbed run, and must show that what it claims happened did happen. `make test` runs a
pairwise covering array of the policies, the marker `full` further arrays and a large sample.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache
from random import Random
from typing import Any

import pytest
import torch
from engine_support import Log, Outputs, policies, policy_names, serve
from equality_support import Case, Factors, Watch, complete, covering_array, kv_by_position, modes, name_of, tiny, tiny_engine, tuples_of

from kvlab.engine import Engine
from kvlab.policies.admission import Adaptive, ExpectedOutput, FullSequence, PastFuture, Unlimited, Watermark
from kvlab.policies.base import SchedulingPolicy
from kvlab.policies.layout import Ring
from kvlab.policies.preemption.mode import CheaperOfBoth
from kvlab.policies.registry import by_name, list_policies
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

    Neither priorities nor lengths nor tenants are in the order of submission, so that every order of service is another one.
    """
    out = []
    for number in range(10):
        tail = [(number * 37 + 5 * i) % 256 for i in range(6 + number * 3 % 7)]
        sampling = SamplingParams(max_tokens=26 + number * 5 % 6, ignore_eos=True, seed=number, **KINDS[kind][number % len(KINDS[kind])])
        out.append(Request(f"{kind}-{number}", PREFIX + tail, sampling, priority=number * 7 % 10,
                           tenant="ab"[number % 3 == 0], oracle_output_len=sampling.max_tokens))  # fmt: skip
    return out


def num_streams(request: Request) -> int:
    return request.sampling.num_sequences


@lru_cache
def undisturbed_run(kind: str, lossy: str = "") -> tuple[dict[str, Outputs], torch.Tensor]:
    """Outputs with blocks for everybody, no cache, no preemption, whole prompts; and the prompts' last logits [10, V].

    The best two logits are never too close to tell.
    """
    policy_set = policies(prefix_cache="none", **LOSSY.get(lossy, {}))
    engine, log = tiny_engine(2000, 16, policy_set, max_model_len=MAX_MODEL_LEN, max_num_batched_tokens=4096)
    with Watch(tiny()) as watch:
        serve(engine, requests_of(kind), check=False)
    assert log.total("num_preemptions") == log.total("prefix_cache_hits") == log.total("recomputed_tokens") == 0
    assert len(log.plans[0].scheduled) == 10
    assert all(entry.num_samples for plan in log.plans for entry in plan.scheduled), "some prompt was cut"
    assert watch.smallest_gap() >= MIN_GAP
    return log.outputs, watch.logits[0]


def undisturbed(kind: str) -> dict[str, Outputs]:
    """The outputs that every lossless combination must give."""
    return undisturbed_run(kind)[0]


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
    "adaptive": lambda: Adaptive(initial=0.0, interval=5), "expected_output": ExpectedOutput, "past_future": PastFuture,
    "reserve_all": lambda: by_name("admission", "reserve_all"),
}  # fmt: skip

SCHEDULING: dict[str, dict[str, Any]] = {"edf": {"ttft_ms_per_prompt_token": 1.0}, "mlfq": {"prompt_tokens_per_iteration": 43}}
"""Parameters with which requests as alike as these are told apart."""

PAGED: dict[str, tuple[Any, ...]] = {
    "block_size": BLOCK_SIZES,
    "prefix_cache": tuple(policy_names("prefix_cache")),
    "eviction": tuple(policy_names("eviction")),
    "mode": tuple(policy_names("preemption/mode")),
    "batching": tuple(policy_names("batching")),
    "budget": (SMALL_BUDGET, 512),
    "admission": ("none", "watermark_0", "watermark_0.1", "watermark_0.1_full", "full_sequence", "adaptive"),
    "scheduling": tuple(policy_names("scheduling")),
    "preemption": tuple(policy_names("preemption")),
    "kind": tuple(KINDS),
}
CACHES = [name for name in PAGED["prefix_cache"] if name != "none"]
HAS_BUDGET = tuple(name for name in policy_names("batching") if name not in ("static", "walkthrough", "decode_first"))
"""decode_first takes nobody while a prompt is half computed: with prompts above the budget hardly two ever run together."""


def is_valid(case: Case) -> bool:
    """Where a policy would have nothing to decide, one of its seam stands for all."""
    if case.get("prefix_cache") == "none" and case.get("eviction", "lru") != "lru":
        return False
    return case.get("batching", "chunked") in HAS_BUDGET or case.get("budget", 512) == 512


def engine_for(case: Case, num_blocks: int, **seams: Any) -> tuple[Engine, Log]:
    """The engine of a case. CheaperOfBoth is told of speeds at which both ways pay, now one and now the other."""
    chosen = {name: case[name] for name in ("prefix_cache", "batching") if name in case}
    chosen["scheduling"] = by_name("scheduling", case["scheduling"], **SCHEDULING.get(case["scheduling"], {}))
    mode = CheaperOfBoth(swap_gb_per_s=0.05, prefill_tokens_per_s=22_000) if case.get("mode") == "cheaper_of_both" else case.get("mode")
    policy_set = policies(admission=ADMISSION[case["admission"]](), eviction=case.get("eviction", "lru"), mode=mode or "recompute",
                          preemption=case.get("preemption", "lifo"), **{**chosen, **seams})  # fmt: skip
    return tiny_engine(num_blocks, case["block_size"], policy_set, num_cpu_blocks=4 * num_blocks, max_model_len=MAX_MODEL_LEN,
                       max_num_batched_tokens=case.get("budget", 512))  # fmt: skip


def check_order(case: Case, log: Log) -> None:
    """First come first served is the order of submission; no other policy's is (all begin alike, so whom those that look at prefixes
    prefer hangs on what is cached)."""
    first = [entry.request_id for plan in log.plans for entry in plan.admitted if entry.kind == "new"]
    submitted = [*(request.request_id for request in requests_of(case["kind"])), *AGAIN]
    assert sorted(first) == sorted(submitted)
    if case["scheduling"] not in ("lpm", "dfs_weight"):
        assert (first == submitted) == (case["scheduling"] == "fcfs"), "not the order of the scheduling policy"


def check_fired(case: Case, log: Log) -> None:
    """What the case is about did happen."""
    if case["prefix_cache"] != "none":
        assert log.total("prefix_cache_hits") > 0, "no hit"
        assert log.total("num_evicted_blocks") > 0, "no eviction"
    if case["budget"] == SMALL_BUDGET:
        assert any(entry.num_samples == 0 for plan in log.plans for entry in plan.scheduled), "no prompt in more than one chunk"
    check_order(case, log)
    if "0.1" in case["admission"]:
        assert all(plan.watermark_blocks > 0 for plan in log.plans), "no reserve"  # whom it keeps out: see the test below
    if case["kind"] != "greedy":
        assert log.total("cow_copies") > 0 or case["block_size"] == 1, "no copy-on-write"
        assert max(stats.shared_blocks_saved for stats in log.stats) > 0, "nothing shared"


def check_tokens(case: Case, engine: Engine, log: Log) -> None:
    """Serve the case's requests; tokens as undisturbed. Then, with an empty cache, the last one twice: the second finds the first's."""
    serve(engine, requests_of(case["kind"]), check=False)
    assert log.outputs == undisturbed(case["kind"])
    assert engine.kv.pool.num_held == engine.kv.cpu_pool.num_used == 0
    last = requests_of(case["kind"])[-1]
    assert engine.reset_prefix_cache()
    for name in AGAIN:
        serve(engine, [replace(last, request_id=name)], check=False)
        assert log.records[name].outputs == undisturbed(case["kind"])[last.request_id]
    most = len(last.prompt_token_ids) - 1
    cached = most if case.get("layout") == "ring" else most // case["block_size"] * case["block_size"] * (case["prefix_cache"] != "none")
    assert log.records[AGAIN[1]].num_cached_tokens == cached


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


@pytest.mark.parametrize("case", PAIRWISE, ids=name_of)
def test_preempted_swapped_chunked_and_cached_tokens_are_the_same(case: Case) -> None:
    check_preempting(case)


@pytest.mark.parametrize("block_size", BLOCK_SIZES)
@pytest.mark.parametrize("admission", ["watermark_0", "watermark_0.1", "watermark_0.1_full"])
def test_a_watermark_keeps_somebody_out_and_changes_no_token(block_size: int, admission: str) -> None:
    case = {"block_size": block_size, "prefix_cache": "none", "batching": "chunked", "budget": SMALL_BUDGET, "admission": admission,
            "scheduling": "fcfs", "mode": "recompute", "kind": "greedy"}  # fmt: skip
    engine, log = engine_for(case, small_pool(requests_of("greedy"), block_size))
    check_tokens(case, engine, log)
    assert any(entry.by == "watermark" for plan in log.plans for entry in plan.blocked) == ("0.1" in admission)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("admission", ["expected_output", "past_future"])
def test_an_admission_that_looks_ahead_keeps_somebody_out_and_changes_no_token(admission: str, kind: str) -> None:
    """With a prefix cache, in a pool that holds a group and a half: they may prevent every preemption, so none is asked for."""
    case = {"block_size": 3, "prefix_cache": "hash", "batching": "chunked", "budget": SMALL_BUDGET, "admission": admission,
            "scheduling": "fcfs", "mode": "swap", "kind": kind}  # fmt: skip
    engine, log = engine_for(case, 3 * max(blocks_of(request, 3) for request in requests_of(kind)) // 2)
    check_tokens(case, engine, log)
    assert any(entry.by == admission for plan in log.plans for entry in plan.blocked)


def test_the_cheaper_of_both_is_now_one_and_now_the_other() -> None:
    case = {"block_size": 17, "prefix_cache": "none", "batching": "prefill_first", "budget": SMALL_BUDGET, "admission": "watermark_0",
            "scheduling": "sjf", "preemption": "priority", "mode": "cheaper_of_both", "kind": "mixed"}  # fmt: skip
    engine, log = engine_for(case, small_pool(requests_of("mixed"), 17))
    check_tokens(case, engine, log)
    assert set(modes(log)) == {"recompute", "swap"}


# ---------------------------------------------------- everybody but the oldest is preempted


@pytest.mark.parametrize("block_size", BLOCK_SIZES)
@pytest.mark.parametrize("mode", ["recompute", "swap"])
@pytest.mark.parametrize("prefix_cache", ["none", "hash"])
def test_everybody_but_the_protected_oldest_is_preempted(block_size: int, mode: str, prefix_cache: str) -> None:
    """Four prompts start in a pool that one of them fills at its end."""
    num_prompt = max(6, block_size)
    total = 5 * num_prompt
    requests = [Request(f"r{i}", [(i * 31 + 7 * j * j) % 256 for j in range(num_prompt)],
                        SamplingParams(max_tokens=total - num_prompt, ignore_eos=True)) for i in range(4)]  # fmt: skip
    outputs = []
    for is_disturbed in (False, True):
        policy_set = policies(prefix_cache=prefix_cache if is_disturbed else "none", mode=mode, admission="none")
        engine, log = tiny_engine(-(-total // block_size) if is_disturbed else 1000, block_size, policy_set, num_cpu_blocks=1000,
                                  max_model_len=total, max_num_batched_tokens=512)  # fmt: skip
        with Watch(tiny()) as watch:
            serve(engine, requests, check=False)
        assert watch.smallest_gap() >= MIN_GAP
        outputs.append(log.outputs)
        gave_way = [log.records[r.request_id].num_preemptions > 0 for r in requests]
        assert gave_way == ([False, True, True, True] if is_disturbed else [False] * 4)
    assert set(modes(log)) == {mode}
    assert outputs[0] == outputs[1]


# ------------------------------------------------------------------- nobody is preempted

FIXED = ("contiguous_max", "contiguous_oracle")
"""Layouts whose regions are never outgrown."""

STAYING = tuple(row.name for row in list_policies("scheduling") if row.cls.displaces is SchedulingPolicy.displaces)
"""Orders of the queue that send no running request away."""

RESERVED: dict[str, tuple[Any, ...]] = {
    "layout": (*FIXED, "paged"),
    "block_size": BLOCK_SIZES,
    "prefix_cache": PAGED["prefix_cache"],
    "batching": PAGED["batching"],
    "budget": PAGED["budget"],
    "admission": tuple(ADMISSION),
    "scheduling": STAYING,
    "kind": tuple(KINDS),
}


def is_reserved(case: Case) -> bool:
    """Either the layout gives a region of its own to each sequence (and shares nothing), or admission counts the worst case."""
    if case.get("layout") in FIXED and case.get("prefix_cache") in CACHES:
        return False
    if case.get("layout") == "paged" and case.get("admission", "reserve_all") != "reserve_all":
        return False
    return is_valid(case) and not (case.get("prefix_cache") in CACHES and case.get("admission", "reserve_all") != "reserve_all")


def check_reserved(case: Case) -> None:
    """Room for two groups at most: the others wait, and nobody is ever preempted."""
    requests, size = requests_of(case["kind"]), case["block_size"]
    region = -(-MAX_MODEL_LEN // size)
    contiguous = case["layout"] in FIXED
    num_blocks = (2 * max(map(num_streams, requests)) + 1) * region if contiguous else 2 * max(blocks_of(r, size) for r in requests) + 1
    engine, log = engine_for(case, num_blocks, layout=case["layout"])
    check_tokens(case, engine, log)
    check_order(case, log)
    assert log.total("num_preemptions") == log.total("recomputed_tokens") == log.total("swapped_out_blocks") == 0
    assert any(entry.by for plan in log.plans for entry in plan.blocked), "nobody waited"
    if contiguous:
        tables: dict[int, list[int]] = {}
        for plan in log.plans:
            for seq_id, block_ids in plan.fresh_tables.items():
                tables[seq_id] = list(block_ids)
            for seq_id, block_ids in plan.tables.items():
                tables.setdefault(seq_id, []).extend(block_ids)
        assert len(tables) >= len(requests)
        assert all(ids == list(range(ids[0], ids[0] + len(ids))) for ids in tables.values()), "a region with a gap"
        assert all(stats.shared_blocks_saved == 0 for stats in log.stats)


PAIRWISE_RESERVED = covering_array(RESERVED, is_reserved, SEED)


@pytest.mark.parametrize("case", PAIRWISE_RESERVED, ids=name_of)
def test_regions_and_reservations_change_no_token(case: Case) -> None:
    check_reserved(case)


@pytest.mark.parametrize(("factors", "valid", "cases"), [(PAGED, is_valid, PAIRWISE), (RESERVED, is_reserved, PAIRWISE_RESERVED)],
                         ids=["preempting", "reserved"])  # fmt: skip
def test_the_arrays_cover_every_pair_that_can_occur(factors: Factors, valid: Callable[[Case], bool], cases: list[Case]) -> None:
    """Counted anew. A pair is missing only where no case can hold it."""
    assert all(valid(case) for case in cases)
    covered = set().union(*(tuples_of(case, 2) for case in cases))
    pairs = {pair for a, b in itertools.combinations(sorted(factors), 2)
             for pair in itertools.product([(a, value) for value in factors[a]], [(b, value) for value in factors[b]])}  # fmt: skip
    missing = pairs - covered
    assert covered <= pairs
    assert all(complete(factors, dict(pair), valid, Random(0)) is None for pair in missing)
    lost = {tuple(sorted(pair)) for pair in missing}
    budgets = {(("batching", name), ("budget", SMALL_BUDGET)) for name in PAGED["batching"] if name not in HAS_BUDGET}
    evictions = {(("eviction", name), ("prefix_cache", "none")) for name in PAGED["eviction"] if name != "lru"}
    shared = {(("layout", layout), ("prefix_cache", name)) for layout in FIXED for name in CACHES}
    waiting = {(("admission", name), other) for name in ADMISSION if name != "reserve_all"
               for other in (("layout", "paged"), *(("prefix_cache", cache) for cache in CACHES))}  # fmt: skip
    assert lost == (budgets | evictions if factors is PAGED else budgets | shared | waiting)
    print(f"seed {SEED}: {len(cases)} cases cover {len(covered)} pairs")


# ----------------------------------------------------------------- regions that are outgrown

GROWING: dict[str, tuple[Any, ...]] = {
    "layout": tuple(name for name in policy_names("layout") if name not in RESERVED["layout"]),
    "block_size": BLOCK_SIZES,
    "mode": PAGED["mode"],
    "batching": PAGED["batching"],
    "budget": PAGED["budget"],
    "admission": ("none", "watermark_0.1", "full_sequence"),
    "scheduling": ("fcfs", "sjf"),
    "preemption": ("lifo", "least_computed"),
    "kind": tuple(KINDS),
}


def check_growing(case: Case) -> None:
    """Two of the largest groups can start together (a watermark of 0.1 of the pool included) and not end: regions are outgrown, others
    give way, come back and are outgrown again."""
    case = {**case, "prefix_cache": "none"}
    requests, size = requests_of(case["kind"]), case["block_size"]
    first, last = [max(-(-(len(r.prompt_token_ids) + more * r.sampling.max_tokens) // size) for r in requests) for more in (0, 1)]
    streams = max(map(num_streams, requests))
    if case["layout"] == "contiguous_pow2":
        first, last = (1 << (num - 1).bit_length() for num in (first, last))
    engine, log = engine_for(case, max((streams + 1) * last, int((2 * streams * first + 1) / 0.88)), layout=case["layout"])
    check_tokens(case, engine, log)
    check_order(case, log)
    assert log.total("num_preemptions") > 0, "no preemption"
    assert case["budget"] != SMALL_BUDGET or any(entry.num_samples == 0 for plan in log.plans for entry in plan.scheduled)
    assert all(stats.shared_blocks_saved == 0 for stats in log.stats)
    grown = [seq_id for plan in log.plans for seq_id in plan.tables]
    assert grown or log.total("relocated_blocks"), "no region was outgrown"
    assert case["kind"] == "greedy" or log.total("cow_copies") > 0, "no fork was copied"


@pytest.mark.parametrize("case", covering_array(GROWING, is_valid, SEED), ids=name_of)
def test_outgrown_regions_and_slots_change_no_token(case: Case) -> None:
    check_growing(case)


# ---------------------------------------------------------------------- the full product

NUM_SAMPLED = 200
OTHER_SEEDS = (SEED + 1,)
"""The whole product of PAGED has tens of millions of cases of half a second. Further arrays cover all pairs in other company; so many more
are drawn."""


@lru_cache
def thorough() -> list[Case]:
    draw = Random(SEED)
    sampled = [complete(PAGED, {}, is_valid, draw) for _ in range(NUM_SAMPLED)]
    arrays = [case for seed in OTHER_SEEDS for case in covering_array(PAGED, is_valid, seed)]
    return arrays + [case for case in sampled if case is not None]


@pytest.mark.full
@pytest.mark.parametrize("part", range(20))
def test_pairs_in_other_company_and_a_large_sample(part: int) -> None:
    for case in thorough()[part::20]:
        print(name_of(case))
        check_preempting(case)


@pytest.mark.full
def test_pairs_in_other_company_without_preemption() -> None:
    for case in [case for seed in OTHER_SEEDS for case in covering_array(RESERVED, is_reserved, seed)]:
        print(name_of(case))
        check_reserved(case)


@pytest.mark.full
def test_pairs_in_other_company_of_outgrown_regions() -> None:
    for case in [case for seed in OTHER_SEEDS for case in covering_array(GROWING, is_valid, seed)]:
        print(name_of(case))
        check_growing(case)


# --------------------------------------------------------------- lossy, but of one mind

LOSSY: dict[str, dict[str, Any]] = {
    "window": {"compression": by_name("compression", "window", size=20)},
    "streaming": {"compression": by_name("compression", "streaming", sinks=3, size=20)},
    "fp16": {"kv_dtype": "fp16"},
    "bf16": {"kv_dtype": "bf16"},
    "fp8": {"kv_dtype": by_name("kv_dtype", "fp8", k_scale=0.01, v_scale=0.01)},
    "int8": {"kv_dtype": "int8"},
}


@pytest.mark.parametrize("what", list(LOSSY))
@pytest.mark.parametrize(
    ("block_size", "batching", "mode"),
    [(1, "chunked", "swap"), (3, "walkthrough", "recompute"), (16, "chunked", "recompute"), (17, "prefill_first", "swap"),
     (32, "chunked", "swap"), (3, "chunked", "cheaper_of_both")],
)  # fmt: skip
def test_what_a_lossy_policy_loses_does_not_depend_on_the_others(what: str, block_size: int, batching: str, mode: str) -> None:
    case = {"block_size": block_size, "batching": batching, "mode": mode, "admission": "watermark_0", "budget": SMALL_BUDGET,
            "prefix_cache": "none" if what in ("window", "streaming") else "hash", "scheduling": "sjf", "kind": "mixed"}  # fmt: skip
    requests = requests_of("mixed")
    engine, log = engine_for(case, small_pool(requests, block_size), **LOSSY[what])
    serve(engine, requests, check=False)
    outputs, logits = undisturbed_run("mixed", what)
    assert log.outputs == outputs
    assert not logits.equal(undisturbed_run("mixed")[1]), "nothing was lost"
    assert what == "fp16" or outputs != undisturbed("mixed"), "no token differs"  # float16 is too good for these
    assert log.total("num_preemptions") > 0
    assert mode == "cheaper_of_both" or mode in modes(log)
    dropped = any(entry.num_dropped_tokens for plan in log.plans for entry in plan.scheduled)
    # Sinks keep block 0: of blocks of 32, none is behind it and before the window.
    assert dropped == (what == "window" or (what == "streaming" and block_size < 32)), "what left the window was kept"
    if batching == "chunked":
        assert any(entry.num_samples == 0 for plan in log.plans for entry in plan.scheduled)


# --------------------------------------------------------------------------- bit for bit

Bits = tuple[list[Any], list[torch.Tensor], dict[int, torch.Tensor]]


@lru_cache
def bits(block_size: int, layout: str) -> Bits:
    """What was scheduled in each step, all logits, and K and V by position of everyone alive after 22 steps. Nobody waits for blocks."""
    requests = requests_of("mixed")
    region = -(-MAX_MODEL_LEN // block_size)
    num_blocks = 2 * region * (sum(map(num_streams, requests)) + 3)  # powers of two, too
    layouts = Ring(n_parallel=64) if layout == "ring" else layout
    policy_set = policies(prefix_cache="none", admission="none", layout=layouts)
    engine, log = tiny_engine(num_blocks, block_size, policy_set, max_model_len=MAX_MODEL_LEN, max_num_batched_tokens=100)
    for request in requests:
        engine.add_request(request)
    kv = {}
    with Watch(tiny()) as watch:
        while engine.has_work:
            result = engine.step()
            if result.plan.step == 22:
                kv = kv_by_position(engine, engine.sequences.values())
    assert log.total("num_preemptions") == 0
    assert any(entry.num_samples == 0 for plan in log.plans for entry in plan.scheduled)
    assert (log.total("cow_copies") > 0) == (layout != "paged" or block_size > 1)
    assert log.outputs == undisturbed("mixed")
    return [plan.scheduled for plan in log.plans], watch.logits, kv


@pytest.mark.parametrize(("block_size", "layout"), [(1, "paged"), (3, "paged"), (17, "paged"), (32, "paged"), (3, "contiguous_max"),
                                                    (16, "contiguous_max"), (3, "contiguous_oracle"), (16, "contiguous_pow2"),
                                                    (3, "contiguous_pow2"), (1, "ring"), (16, "ring")])  # fmt: skip
def test_the_same_plan_gives_the_same_bits_at_every_block_size_and_layout(block_size: int, layout: str) -> None:
    """Copy-on-write too: with blocks of 1 nothing is copied, with regions all of it is."""
    scheduled, logits, kv = bits(block_size, layout)
    expected_scheduled, expected_logits, expected_kv = bits(16, "paged")
    assert scheduled == expected_scheduled
    assert len(logits) == len(expected_logits) > 30
    assert all(a.equal(b) for a, b in zip(logits, expected_logits, strict=True))
    assert kv.keys() == expected_kv.keys()
    assert len(kv) > 15
    assert all(kv[seq_id].equal(expected_kv[seq_id]) for seq_id in kv)
    assert all(float(tensor.abs().sum()) > 0 for tensor in kv.values())


@pytest.mark.parametrize("block_size", BLOCK_SIZES)
@pytest.mark.parametrize("kind", ["greedy", "samples", "beams"])
def test_swap_fork_and_copy_on_write_move_bits_and_change_none(block_size: int, kind: str) -> None:
    """K and V of a computed position are the same bits for as long as its sequence lives, wherever they go; forks begin with them."""
    requests = requests_of(kind)
    case = {"block_size": block_size, "prefix_cache": "hash", "batching": "chunked", "budget": 512, "admission": "watermark_0",
            "scheduling": "fcfs", "mode": "swap", "kind": kind}  # fmt: skip
    engine, log = engine_for(case, small_pool(requests, block_size))
    for request in requests:
        engine.add_request(request)
    seen: dict[int, torch.Tensor] = {}
    prompts: dict[int, torch.Tensor] = {}  # group -> K and V of its prompt
    away: set[int] = set()
    num_back = num_forks = 0
    while engine.has_work:
        engine.step()
        running = [seq for group in engine.scheduler.running for seq in group.seqs]
        for seq_id, tensor in kv_by_position(engine, running).items():
            seq = engine.sequences[seq_id]
            if seq_id in seen:
                before = seen[seq_id]
                assert tensor[:, :, : before.shape[2]].equal(before)
                num_back += seq_id in away
                away.discard(seq_id)
            elif seq.group.group_id in prompts:
                num_forks += 1
            if seq.num_computed >= seq.num_prompt:
                prompt = prompts.setdefault(seq.group.group_id, tensor[:, :, : seq.num_prompt])
                assert tensor[:, :, : seq.num_prompt].equal(prompt)
            seen[seq_id] = tensor
        away |= {seq.seq_id for group in engine.scheduler.swapped for seq in group.seqs}
    assert set(modes(log)) == {"swap"}
    assert num_back > 0
    assert (num_forks > 0) == (kind != "greedy")
    assert log.outputs == undisturbed(kind)
