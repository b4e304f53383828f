"""Policies that send running requests away: what they gain, and that they never go in circles nor change a token."""

from __future__ import annotations

from random import Random
from typing import Any

import pytest
from engine_support import VOCAB, Log, make_engine, policies, policy_names, prompt_of, reference_outputs, request, run_to_end, step_bound
from equality_support import recording

from kvlab.engine.cost import Constant
from kvlab.engine.driver import drive
from kvlab.policies.batching import Chunked
from kvlab.policies.registry import by_name
from kvlab.policies.scheduling import Mlfq, SrptOracle
from kvlab.testing.paged_fake import PagedFakeRunner
from kvlab.types import Request
from kvlab.workload.base import WorkloadContext
from kvlab.workload.fixed import FixedWorkload

DISPLACING = {
    "srpt_oracle": {}, "srpt_predicted": {"mean": 6.0, "tau": 0.3}, "mlfq": {"prompt_tokens_per_iteration": 4, "starvation_steps": 9},
}  # fmt: skip


def displaced(log: Log) -> list[tuple[int, str, str]]:
    """(step, request, mode) of each that was sent away by the scheduling policy."""
    return [(plan.step, p.request_id, p.mode) for plan in log.plans for p in plan.preempted if p.cause == "scheduling"]


# ------------------------------------------------------------------------------------------------- what it gains


def served(scheduling: Any, requests: list[Request], mode: str, **limits: Any) -> Log:
    """Requests at their arrival times; a step takes a second."""
    runner = PagedFakeRunner(VOCAB, Constant(1000.0))
    engine, log = make_engine(40, 4, policies(scheduling=scheduling, mode=mode), runner=runner, num_cpu_blocks=40, **limits)
    workload = FixedWorkload(requests)
    workload.start(WorkloadContext(None, VOCAB, 8192, 0))
    drive(engine, workload)
    assert log.outputs == reference_outputs(requests)
    return log


@pytest.mark.parametrize("mode", ["recompute", "swap"])
def test_srpt_waits_less_on_average_than_fcfs(mode: str) -> None:
    """One place; prompts of one step. a (8 outputs) comes at 0, b (2) at 1, c (3) at 2.

    fcfs: a 0-8, b 8-10, c 10-13: 8, 9 and 11 s from arrival to end. srpt: a gives way to b at 1 (7 left against 2), b 1-3, c 3-6, a again
    6-13: 13, 2 and 4 s.
    """
    requests = [request(name, prompt_of(4, seed), output, arrival) for name, seed, output, arrival in
                (("a", 1, 8, 0.0), ("b", 2, 2, 1.0), ("c", 3, 3, 2.0))]  # fmt: skip
    took = {}
    for scheduling in ("fcfs", "sjf_oracle", "srpt_oracle"):
        log = served(scheduling, requests, mode, max_num_seqs=1)
        took[scheduling] = [log.records[name].finish_s - log.records[name].arrival_s for name in "abc"]
        assert displaced(log) == ([(1, "a", mode)] if scheduling == "srpt_oracle" else [])
    assert took == {"fcfs": [8, 9, 11], "sjf_oracle": [8, 9, 11], "srpt_oracle": [13, 2, 4]}


def test_displaceable_share_limits_who_is_sent_away() -> None:
    """a has 8 outputs to come, 1 when b comes and 5 when c does: with a share of 0.5 it gives way to b only, with 0 to nobody."""
    requests = [request(name, prompt_of(4, seed), output, arrival) for name, seed, output, arrival in
                (("a", 1, 8, 0.0), ("b", 2, 2, 1.0), ("c", 3, 1, 7.0))]  # fmt: skip
    gave_way = {share: displaced(served(SrptOracle(share), requests, "swap", max_num_seqs=1)) for share in (1.0, 0.5, 0.0)}
    assert gave_way == {1.0: [(1, "a", "swap"), (7, "a", "swap")], 0.5: [(1, "a", "swap")], 0.0: []}


def test_a_swapped_request_sends_others_away_too() -> None:
    """One place, levels of 1, 2 and 4 iterations; who has waited 3 steps is promoted. b sends a away at 1, and a, swapped out, comes back
    in b's place at 4: it has starved, and b, three outputs on, has sunk to level 2."""
    requests = [request("a", prompt_of(4, 1), 3, 0.0), request("b", prompt_of(4, 2), 9, 1.0)]
    log = served(Mlfq(num_levels=3, starvation_steps=3), requests, "swap", max_num_seqs=1)
    assert displaced(log)[:2] == [(1, "a", "swap"), (4, "b", "swap")]
    assert [(a.request_id, a.kind) for plan in log.plans[:5] for a in plan.admitted] == [("a", "new"), ("b", "new"), ("a", "swapped_in")]


@pytest.mark.parametrize("scheduling", DISPLACING)
def test_nobody_is_sent_away_while_there_is_room(scheduling: str) -> None:
    requests = [request(f"r{i}", prompt_of(4 + 3 * i, i), 9 - i, 0.5 * i) for i in range(6)]
    log = served(by_name("scheduling", scheduling, **DISPLACING[scheduling]), requests, "recompute", max_num_batched_tokens=512)
    assert log.total("num_preemptions") == 0


# ------------------------------------------------------------------------------------------------- no circles


def crowd(draw: Random) -> list[Request]:
    """Seven requests of one, four or two sequences or three beams, which share beginnings; none outgrows twelve blocks of 4."""
    shapes: list[dict[str, Any]] = [{}, {}, {}, {"n": 4, "temperature": 1.0}, {"n": 2, "temperature": 1.0}, {"n": 2, "beam_width": 3}]
    out = []
    for number in range(7):
        shared = draw.randint(0, 9)
        prompt = prompt_of(9, 50)[:shared] + prompt_of(draw.randint(1, 6), 100 + number)
        made = request(f"r{number}", prompt, draw.randint(1, 9), float(number), **draw.choice(shapes))
        made.oracle_output_len = made.sampling.max_tokens
        out.append(made)
    return out


@pytest.mark.slow
@pytest.mark.parametrize("mode", policy_names("preemption/mode"))
@pytest.mark.parametrize("batching", policy_names("batching"))
@pytest.mark.parametrize("scheduling", DISPLACING)
def test_every_random_crowd_is_served_within_bounded_steps(scheduling: str, batching: str, mode: str) -> None:
    """Seeds 0 to 5: arrivals between steps, 12 blocks of 4, at most 4 or 5 sequences, chunks of 4 to 16; tokens as if undisturbed."""
    num_displaced = 0
    for seed in range(6):
        draw = Random(f"{scheduling} {batching} {mode} {seed}")
        requests = crowd(draw)
        policy = by_name("scheduling", scheduling, **DISPLACING[scheduling])
        chosen = policies(scheduling=policy, batching=batching, mode=mode, preemption=draw.choice(policy_names("preemption")))
        engine, log = make_engine(12, 4, chosen, num_cpu_blocks=draw.choice((0, 4, 60)), max_num_seqs=draw.choice((4, 5)),
                                  max_num_batched_tokens=draw.choice((4, 8, 16)), block_bytes=300_000)  # fmt: skip
        for each in requests:
            engine.add_request(each)
            for _ in range(draw.randint(0, 4)):
                engine.step()
        run_to_end(engine, step_bound(requests))
        wanted = reference_outputs(requests)
        ended = [name for name, record in log.records.items() if record.finish_reason != "kv_capacity"]
        assert {name: log.outputs[name] for name in ended} == {name: wanted[name] for name in ended}
        assert len(ended) >= 5
        num_displaced += len(displaced(log))
    if batching == "static":
        assert num_displaced == 0  # nobody asks for a place while a batch runs
    else:
        assert num_displaced >= 1


class Pieces(Chunked):
    """At most 4 tokens of a sequence in a step, though there is room for more."""

    def chunk(self, num_uncomputed: int, budget: int, max_num_batched_tokens: int) -> int:
        return min(num_uncomputed, budget, 4)


@pytest.mark.parametrize("victim", policy_names("preemption"))
@pytest.mark.parametrize("mode", ["recompute", "swap"])
def test_two_long_prompts_that_fit_one_at_a_time(victim: str, mode: str) -> None:
    """Ten blocks of 4, two requests that need 10 and 8, prompts in pieces: both enter, and can't both grow. `short` sends `long` away,
    and is itself preempted for want of blocks (the older one is protected) before its prompt is done: it may not send `long` away
    again until it has got on, or it would do so after each of its tokens."""
    requests = [request("long", prompt_of(28, 1), 12), request("short", prompt_of(28, 2), 3)]
    chosen = policies(scheduling="srpt_oracle", preemption=victim, mode=mode, admission="full_sequence", prefix_cache="none",
                      batching=Pieces())  # fmt: skip
    engine, log = make_engine(10, 4, chosen, num_cpu_blocks=20)
    engine.add_request(requests[0])
    for _ in range(8):
        engine.step()
    assert engine.groups["long"].num_output_tokens == 2
    engine.add_request(requests[1])
    steps = run_to_end(engine, 200)
    assert displaced(log) == [(8, "long", mode)]
    assert steps <= 60
    assert log.outputs == reference_outputs(requests)


@pytest.mark.parametrize("mode", ["recompute", "swap"])
@pytest.mark.parametrize("scheduling", policy_names("scheduling"))
def test_a_replay_of_the_recorded_steps_makes_the_same_plans(scheduling: str, mode: str) -> None:
    """The same objects, reset, over recorded outcomes: what a policy remembers comes from events, and nothing is left of the first run."""
    chosen = policies(scheduling=by_name("scheduling", scheduling, **DISPLACING.get(scheduling, {})), mode=mode)
    requests = crowd(Random("replay"))
    runner: Any = PagedFakeRunner(VOCAB)
    plans = []
    for _ in range(2):
        engine, log = make_engine(12, 4, chosen, runner=runner, num_cpu_blocks=60, max_num_seqs=5, max_num_batched_tokens=8)
        for each in requests:
            engine.add_request(each)
            engine.step()
        run_to_end(engine, step_bound(requests))
        plans.append(log.plans)
        runner = recording(log)
    assert plans[0] == plans[1]
    assert scheduling not in DISPLACING or displaced(log)
