"""Policies at work in the engine: what each promises, on one load, beside a policy that does not promise it."""

from __future__ import annotations

from typing import Any

import pytest

from kvlab.engine.config import EngineConfig, PolicySet
from kvlab.engine.engine import Engine
from kvlab.engine.runners.simulated import SimulatedRunner
from kvlab.policies.registry import by_name
from kvlab.types import Plan, Request, SamplingParams


def serve(num_blocks: int, requests: list[Request], limits: dict[str, int] | None = None, **policies: Any) -> list[Plan]:
    """Plans of a run to the end, B=4. Policies by seam."""
    config = EngineConfig(num_blocks, 4, max_model_len=400, **(limits or {}))
    engine = Engine(config, PolicySet(**policies), SimulatedRunner(vocab_size=500))
    for request in requests:
        engine.add_request(request)
    plans = []
    while engine.has_work:
        plans.append(engine.step().plan)
        assert len(plans) < 5000
    assert engine.kv.pool.num_used == 0
    return plans


def load(num_requests: int = 12) -> list[Request]:
    """Prompts of 5 to 16 tokens with shared beginnings, 12 to 20 tokens out, every third with 3 samples."""
    requests = []
    for number in range(num_requests):
        prompt = [*range(1 + number % 8), *[100 + number] * (4 + number % 5)]
        sampling = SamplingParams(n=3 if number % 3 == 2 else 1, temperature=1.0, max_tokens=12 + number % 9, ignore_eos=True)
        requests.append(Request(f"r{number}", prompt, sampling, priority=number % 4))
    return requests


def preempted(plans: list[Plan]) -> list[str]:
    return [victim.request_id for plan in plans for victim in plan.preempted]


@pytest.mark.parametrize("prefix_cache", ["hash", "none"])
@pytest.mark.parametrize("batching", ["chunked", "prefill_first", "static", "walkthrough"])
def test_reserve_all_never_preempts_where_unlimited_does(batching: str, prefix_cache: str) -> None:
    counts = {}
    for admission in ("none", "reserve_all"):
        plans = serve(30, load(), admission=by_name("admission", admission), batching=by_name("batching", batching),
                      prefix_cache=by_name("prefix_cache", prefix_cache))  # fmt: skip
        counts[admission] = len(preempted(plans))
        assert max(len(plan.scheduled) for plan in plans) > 1
    assert counts["reserve_all"] == 0
    assert counts["none"] > 0


def test_a_static_batch_takes_nobody_in_before_it_has_ended() -> None:
    plans = serve(200, load(), {"max_num_seqs": 4}, batching=by_name("batching", "static"))
    running: set[str] = set()
    batches = 0
    ends = {f"r{number}": 12 + number % 9 for number in range(12)}  # steps a request runs: one a token
    left: dict[str, int] = {}
    for plan in plans:
        if plan.admitted:
            assert not left, f"step {plan.step} admits {plan.admitted} beside {left}"
            batches += 1
            left = {entry.request_id: ends[entry.request_id] for entry in plan.admitted}
            running |= set(left)
        left = {name: steps - 1 for name, steps in left.items() if steps > 1}
    assert running == set(ends)
    assert batches >= 4


def test_prefill_first_never_mixes_and_chunked_does() -> None:
    """A step mixes where it computes both a chunk of more than one token and a single one of a group admitted earlier."""

    def mixes(plans: list[Plan]) -> bool:
        return any({s.num_new_tokens > 1 for s in plan.scheduled} == {True, False} for plan in plans)

    requests = [Request(f"r{n}", [n] * 9, SamplingParams(max_tokens=9, ignore_eos=True)) for n in range(6)]
    limits = {"max_num_batched_tokens": 20, "max_num_seqs": 6}
    assert not mixes(serve(60, requests, limits, batching=by_name("batching", "prefill_first")))
    assert mixes(serve(60, requests, limits, batching=by_name("batching", "chunked")))


@pytest.mark.parametrize(
    ("policy", "victim"),
    [("lifo", "d"), ("priority", "b"), ("least_computed", "c")],
)
def test_the_first_victim(policy: str, victim: str) -> None:
    """B=4, 8 blocks, all cold. a (oldest, protected) 5 tokens, b 8 (number 3), c 2, d 7: 2 + 2 + 1 + 2 = 7 blocks.

    The second step writes the 9th token of b (its third block, the last free one); in the third step the 9th of d finds no block.
    """
    shapes = {"a": (5, 0), "b": (8, 3), "c": (2, 1), "d": (7, 0)}
    requests = [
        Request(name, [number * 50 + i for i in range(length)], SamplingParams(max_tokens=9, ignore_eos=True), priority=priority)
        for number, (name, (length, priority)) in enumerate(shapes.items())
    ]
    plans = serve(8, requests, preemption=by_name("preemption", policy), admission=by_name("admission", "none"),
                  prefix_cache=by_name("prefix_cache", "none"))  # fmt: skip
    assert preempted(plans)[0] == victim


def test_swap_moves_what_recompute_forgets() -> None:
    def run(mode: str, num_cpu_blocks: int) -> list[Plan]:
        return serve(30, load(), {"num_cpu_blocks": num_cpu_blocks}, admission=by_name("admission", "none"),
                     preemption=by_name("preemption", "lifo", mode=mode))  # fmt: skip

    swapped, recomputed, no_room = run("swap", 60), run("recompute", 60), run("swap", 0)
    assert {victim.mode for plan in swapped for victim in plan.preempted} == {"swap"}
    assert sum(len(plan.swap_out) for plan in swapped) == sum(len(plan.swap_in) for plan in swapped) > 0
    assert {victim.mode for plan in recomputed for victim in plan.preempted} == {"recompute"}
    assert {(victim.mode, victim.wanted_mode) for plan in no_room for victim in plan.preempted} == {("recompute", "swap")}


@pytest.mark.parametrize(("policy", "order"), [("fcfs", "abcd"), ("priority", "dbca"), ("sjf", "cbda")])
def test_order_of_entry(policy: str, order: str) -> None:
    """One at a time: prompts of 9, 5, 2 and 7 tokens; priorities 4, 2, 3, 1."""
    shapes = {"a": (9, 4), "b": (5, 2), "c": (2, 3), "d": (7, 1)}
    requests = [Request(n, [7] * length, SamplingParams(max_tokens=2), priority=p) for n, (length, p) in shapes.items()]
    plans = serve(20, requests, {"max_num_seqs": 1}, scheduling=by_name("scheduling", policy))
    assert "".join(entry.request_id for plan in plans for entry in plan.admitted) == order
