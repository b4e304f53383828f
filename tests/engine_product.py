"""The full product of lossless policies over the fake model: what a case is made of, and what must have happened in it.

A case serves four requests that crowd each other out, then the same prompt twice. It passes only if the tokens are those of an
undisturbed engine *and* its mechanism acted: a case without the preemption, swap, eviction, hit or chunk that it claims proves nothing.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from random import Random
from typing import Any, NamedTuple

from engine_support import Forcer, Log, Outputs, copy_of, make_engine, policies, policy_names, prompt_of, reference_outputs, request

from kvlab.engine import Engine
from kvlab.policies.admission import Watermark
from kvlab.policies.preemption.mode import CheaperOfBoth
from kvlab.testing.invariants import check_drained
from kvlab.types import Request

BLOCK_SIZES = (1, 3, 16, 17, 32)
WATERMARKS = (0.0, 0.1)
CPU_BLOCKS = 200
MAX_STEPS = 1500


class Case(NamedTuple):
    """One combination."""

    block_size: int
    batching: str
    prefix_cache: str
    eviction: str
    mode: str
    watermark: float
    scheduling: str
    victim: str
    layout: str


BASE = {
    "batching": ("static", "prefill_first", "chunked", "walkthrough"), "eviction": ("lru", "fifo", "lfu", "random"),
    "scheduling": ("fcfs", "priority", "sjf"), "preemption": ("lifo", "priority", "least_computed"),
    "layout": ("paged", "contiguous_max"), "prefix_cache": ("none", "hash"),
}  # fmt: skip
"""The full product of these runs in every test run: 6,480 cases. A whole product of all policies would be a million."""


def cases(block_size: int, batching: str) -> Iterator[Case]:
    """The full product of BASE for one block size and batching; none for a batching outside it."""
    if batching in BASE["batching"]:
        yield from _product(block_size, batching, BASE)


def cases_with(seam: str, name: str) -> Iterator[Case]:
    """The full product of BASE with one policy in the place of its seam's."""
    for block_size in BLOCK_SIZES:
        for batching in (name,) if seam == "batching" else BASE["batching"]:
            yield from _product(block_size, batching, {**BASE, seam: (name,)})


def random_cases(seed: int, num_cases: int) -> Iterator[Case]:
    """Draws from the whole product of all policies."""
    rng = Random(seed)
    names = {seam: policy_names(seam) for seam in BASE}
    for _ in range(num_cases):
        drawn = {seam: (rng.choice(of_seam),) for seam, of_seam in names.items()}
        if rng.random() < 0.5:
            drawn["layout"] = ("paged",)
        if drawn["layout"] != ("paged",):
            drawn["prefix_cache"] = ("none",)
        drawn_cases = list(_product(rng.choice(BLOCK_SIZES), drawn["batching"][0], drawn))
        yield rng.choice(drawn_cases)


def _product(block_size: int, batching: str, names: Mapping[str, Sequence[str]]) -> Iterator[Case]:
    """All combinations that differ: without a cache nothing is evicted, and a layout that can't share takes none."""
    lies = [("none", "lru", layout) for layout in names["layout"]] if "none" in names["prefix_cache"] else []
    if "paged" in names["layout"]:
        lies += [(cache, eviction, "paged") for cache in names["prefix_cache"] if cache != "none" for eviction in names["eviction"]]
    others = itertools.product(policy_names("preemption/mode"), WATERMARKS, names["scheduling"], names["preemption"])
    for (prefix_cache, eviction, layout), (mode, watermark, scheduling, victim) in itertools.product(lies, others):
        yield Case(block_size, batching, prefix_cache, eviction, mode, watermark, scheduling, victim, layout)


class Sizes(NamedTuple):
    """Prompt length and output length of the crowd, and the pool that is too small for it."""

    prompt: int
    output: int
    num_blocks: int
    budget: int


def sizes(block_size: int) -> Sizes:
    """Four prompts of two blocks fit (five are left over for four samples' copies); what the first grows to fills the pool.

    The first, n = 4, holds 1 + 4 * 2 blocks when it passes its second boundary (with blocks of one token: 6 + 4 * 5). A step takes
    three prompts and a half.
    """
    prompt = 6 if block_size == 1 else block_size + 1
    budget = 3 * prompt + 2 + prompt // 2
    return Sizes(prompt, 6, 27, budget) if block_size == 1 else Sizes(prompt, block_size + 3, 10, budget)


@cache
def crowd(block_size: int) -> tuple[Request, ...]:
    """The first is first in any order: earliest, most important, shortest."""
    size = sizes(block_size)
    first = prompt_of(size.prompt, 1)
    return (
        request("four", first, size.output, 0.0, 0, n=4, temperature=1.0),
        request("greedy", first[:block_size] + prompt_of(size.prompt - block_size + 1, 2), size.output, 0.1, 3),
        request("beams", prompt_of(size.prompt + 1, 3), size.output, 0.2, 2, n=2, beam_width=3),
        request("sampled", prompt_of(size.prompt, 4), size.output, 0.3, 1, temperature=1.0),
    )


@cache
def twins(block_size: int) -> tuple[Request, ...]:
    """Served one after the other when the crowd has gone: the second finds the first's blocks."""
    prompt = prompt_of(sizes(block_size).prompt, 5)
    return request("twin", prompt, 2), request("twin again", prompt, 2)


@cache
def expected(block_size: int) -> dict[str, Outputs]:
    """What an undisturbed engine says. It depends on the block size only through the lengths of the prompts."""
    return reference_outputs([*crowd(block_size), *twins(block_size)])


def run(case: Case) -> tuple[Log, Counter[str]]:
    """Serve a case; its counts."""
    size = sizes(case.block_size)
    num_blocks, limits = size.num_blocks, dict[str, Any]()
    if case.layout != "paged":
        limits["max_model_len"] = size.prompt + size.output + 2
        region = -(-limits["max_model_len"] // case.block_size)
        if case.layout == "contiguous_pow2":
            region = 1 << (region - 1).bit_length()
        num_blocks = 11 * region  # 4 + 3 + 1 + 1 regions, and what the watermark keeps
    how = CheaperOfBoth(swap_gb_per_s=1.0, prefill_tokens_per_s=1e8) if case.mode == "cheaper_of_both" else case.mode
    seams = {"scheduling": case.scheduling, "batching": case.batching, "prefix_cache": case.prefix_cache, "eviction": case.eviction,
             "layout": case.layout, "preemption": case.victim}  # fmt: skip
    # A victim's tokens against its blocks: above four fifths of a block's worth each, moving them is said to be cheaper.
    engine, log = make_engine(num_blocks, case.block_size, policies(mode=how, admission=Watermark(case.watermark), **seams),
                              num_cpu_blocks=CPU_BLOCKS, max_num_batched_tokens=size.budget, max_num_seqs=16,
                              block_bytes=4 * case.block_size, **limits)  # fmt: skip
    for each in crowd(case.block_size):
        engine.add_request(copy_of(each))
    _to_end(engine, Forcer(engine) if case.layout != "paged" else None)
    for each in twins(case.block_size):
        engine.add_request(copy_of(each))
        _to_end(engine, None)
    check_drained(engine)
    return log, _counts(log)


def _to_end(engine: Engine, forcer: Forcer | None) -> None:
    """There is room for all regions, so nobody gives way by itself: the `forcer` makes each but the oldest do so once."""
    for _ in range(MAX_STEPS):
        if not engine.has_work:
            return
        running = engine.scheduler.running
        if forcer is not None and running:
            oldest = min(running, key=lambda g: g.admission_order)
            forcer.after += [g.request_id for g in running if g is not oldest and not g.num_preemptions and g.num_output_tokens >= 2]
        engine.step()
    raise AssertionError(f"{len(engine.groups)} requests unfinished after {MAX_STEPS} steps")


def _counts(log: Log) -> Counter[str]:
    counts: Counter[str] = Counter(cases=1, steps=len(log.plans))
    for column in ("num_preemptions", "swapped_out_blocks", "swapped_in_blocks", "num_evicted_blocks", "cow_copies", "prefix_cache_hits",
                   "recomputed_tokens", "relocated_blocks"):  # fmt: skip
        counts[column] = log.total(column)
    for plan in log.plans:
        for preempted in plan.preempted:
            counts[f"preempted by {preempted.mode}"] += 1
            # Swap space that is read in a step is not written in it: who is sent away after others came back is computed again.
            counts["sent away too late to swap"] += preempted.cause == "scheduling" and preempted.mode != preempted.wanted_mode
        counts["blocked by watermark"] += sum(b.by == "watermark" for b in plan.blocked)
    chunks = Counter(s.seq_id for plan in log.plans for s in plan.scheduled if not s.num_samples)
    counts["prompts in chunks"] = len(chunks)
    return counts


def check(case: Case, log: Log, counts: Counter[str]) -> None:
    """The tokens, and the mechanisms that the case is about."""
    wanted = expected(case.block_size)
    assert log.outputs == wanted, f"{case}: {[name for name in wanted if log.outputs[name] != wanted[name]]} differ"
    fired = {"a preemption": counts["num_preemptions"]}
    spared = [name for name in ("greedy", "beams", "sampled") if not log.records[name].num_preemptions]
    last = max(record.first_scheduled_s or 0.0 for name, record in log.records.items() if not name.startswith("twin"))
    alone = [name for name in spared if log.records[name].first_scheduled_s == last and log.records["four"].finish_s <= last]
    if case.scheduling in BASE["scheduling"]:  # elsewhere the oldest is another one, or sent away
        fired["a preemption of all but the oldest"] = set(spared) <= set(alone)
    if case.mode == "swap":
        fired |= {"swap out": counts["swapped_out_blocks"], "swap in": counts["swapped_in_blocks"]}
        assert counts["preempted by swap"] + counts["sent away too late to swap"] == counts["num_preemptions"], case
    if case.mode == "recompute":
        fired["recomputation"] = counts["recomputed_tokens"] or counts["preempted by recompute"]
        assert counts["swapped_out_blocks"] == counts["sent away too late to swap"] == 0, case
    if case.prefix_cache != "none":
        fired |= {"a hit": counts["prefix_cache_hits"], "an eviction": counts["num_evicted_blocks"]}
        assert log.records["twin again"].num_cached_tokens == (sizes(case.block_size).prompt - 1) // case.block_size * case.block_size, case
    if case.layout == "ring":
        fired["a slot that goes on"] = counts["prefix_cache_hits"]
        assert log.records["twin again"].num_cached_tokens == sizes(case.block_size).prompt - 1, case
    if case.layout == "contiguous_pow2":
        fired["a region that moves"] = counts["relocated_blocks"]
    if case.batching == "chunked":
        fired["more than one chunk"] = counts["prompts in chunks"]
    quiet = [what for what, happened in fired.items() if not happened]
    assert not quiet, f"{case} proves nothing about {quiet} ({dict(counts)})"
