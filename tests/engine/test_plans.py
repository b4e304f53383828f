"""Plans are plain data: they say no more than what is new, survive pickling, and don't depend on who carries them out."""

from __future__ import annotations

import pickle
from random import Random
from typing import Any

import pytest
from engine_support import VOCAB, Log, make_engine, policies, policy_names, prompt_of, request, serve

from kvlab.engine.runners.simulated import SimulatedRunner
from kvlab.testing.paged_fake import PagedFakeRunner
from kvlab.types import Plan


def test_a_plan_tells_a_runner_only_what_is_new() -> None:
    """A prompt of 6 in blocks of 4, 5 tokens out: the whole row once, then a block when position 8 is reached, then nothing."""
    engine, log = make_engine(20, 4)
    serve(engine, [request("a", prompt_of(6), 5)])
    assert [plan.fresh_tables for plan in log.plans] == [{0: (0, 1)}, {}, {}, {}, {}]
    assert [plan.tables for plan in log.plans] == [{}, {}, {}, {0: (2,)}, {}]
    assert [len(plan.starts) for plan in log.plans] == [1, 0, 0, 0, 0]
    serve(engine, [request("b", prompt_of(3, 2), 1)])
    assert log.plans[5].released == (0,)
    assert log.plans[5].fresh_tables == {1: (2,)}  # blocks 0 and 1 are cached


def _busy(runner: Any, seams: dict[str, Any], seed: int) -> Log:
    draw = Random(seed)
    engine, log = make_engine(14, 3, policies(**seams), runner=runner, num_cpu_blocks=20, max_num_batched_tokens=9, block_bytes=10**6)
    requests = [
        request(
            f"r{i}", prompt_of(3, i % 2) + prompt_of(draw.randint(1, 5), i), draw.randint(1, 6), priority=draw.randint(0, 2),
            **draw.choice([{}, {"n": 2, "temperature": 1.0}, {"beam_width": 2}]),
        ) for i in range(8)
    ]  # fmt: skip
    serve(engine, requests, check=False)
    return log


@pytest.mark.parametrize("mode", policy_names("preemption/mode"))
@pytest.mark.parametrize("batching", policy_names("batching"))
def test_the_same_requests_give_the_same_plans_under_every_runner(mode: str, batching: str) -> None:
    """Decisions and tokens step for step: a second run, and a runner that keeps no cache at all."""
    preempted = 0
    for seed in range(4):
        seams = {"mode": mode, "batching": batching, "admission": "none", "eviction": "random"}
        logs = [_busy(runner, seams, seed) for runner in (PagedFakeRunner(VOCAB), PagedFakeRunner(VOCAB), SimulatedRunner(VOCAB))]
        preempted += logs[0].total("num_preemptions")
        for other in logs[1:]:
            assert [plan.decisions() for plan in other.plans] == [plan.decisions() for plan in logs[0].plans]
            assert [outcome.tokens for outcome in other.outcomes] == [outcome.tokens for outcome in logs[0].outcomes]
            assert other.outputs == logs[0].outputs
    assert preempted > 0


def test_a_plan_survives_pickling() -> None:
    """Equal after a way through bytes, and its decisions too."""
    log = _busy(PagedFakeRunner(VOCAB), {"mode": "swap", "admission": "none"}, 1)
    for plan in log.plans:
        again: Plan = pickle.loads(pickle.dumps(plan))
        assert again == plan
        assert again.decisions() == plan.decisions()
