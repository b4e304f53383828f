"""The simulated runner: array operations and one sequence after the other give the same tokens, those of the fake model."""

from __future__ import annotations

import math
from pathlib import Path
from random import Random

import numpy as np
import pytest

from kvlab.engine import Engine, EngineConfig, PolicySet
from kvlab.engine.clock import RecordedClock, VirtualClock
from kvlab.engine.randomness import mixed, mixed_each
from kvlab.engine.runners import simulated
from kvlab.engine.runners.fake_tokens import FakeModel, hash_tokens
from kvlab.engine.runners.simulated import SimulatedRunner
from kvlab.policies.preemption.lifo import Lifo
from kvlab.policies.preemption.mode.swap import Swap
from kvlab.trace import Recorder
from kvlab.types import Request, SamplingParams

VOCAB = 97
KINDS = (
    {}, {"temperature": 1.0}, {"temperature": 0.7, "n": 3}, {"beam_width": 2}, {"min_tokens": 5, "stop_token_ids": (7,)}, {"seed": -3},
)  # fmt: skip


def serve(folder: Path, few: int, monkeypatch: pytest.MonkeyPatch) -> tuple[dict[str, list[list[int]]], int, int]:
    """Outputs of 60 requests of all kinds that share prefixes, in a pool that swaps; swapped blocks and prefix hits."""
    monkeypatch.setattr(simulated, "FEW", few)
    folder.mkdir()
    with Recorder(folder) as recorder:
        policies = PolicySet(preemption=Lifo(Swap()))
        engine = Engine(EngineConfig(num_blocks=70, num_cpu_blocks=200, block_size=4, max_num_seqs=40, max_model_len=64), policies,
                        SimulatedRunner(VOCAB), VirtualClock(), eos_token_ids=(3,), listeners=[recorder])  # fmt: skip
        draw = Random(5)
        for i in range(60):
            prompt = [1, 2, 3, 4, 5, 6, 7, 8][: draw.choice((0, 4, 8))] + [draw.randrange(VOCAB) for _ in range(draw.randint(1, 9))]
            engine.add_request(Request(f"r{i}", prompt, SamplingParams(max_tokens=draw.randint(1, 24), **KINDS[i % len(KINDS)])))
        while engine.has_work:
            engine.step()
    steps, requests = recorder.steps(), recorder.requests()
    outputs = dict(zip(requests["request_id"], requests["output_token_ids"], strict=True))
    return outputs, int(steps["swapped_out_blocks"].sum()), int(steps["prefix_cache_hits"].sum())


def test_arrays_and_one_by_one_give_the_same_tokens(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    arrays, num_swapped, num_hits = serve(tmp_path / "arrays", 1, monkeypatch)
    assert (num_swapped > 0, num_hits > 0) == (True, True)
    assert len(arrays) == 60
    assert serve(tmp_path / "one", 10**9, monkeypatch)[0] == arrays


def test_a_greedy_token_is_the_hash_of_all_before_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(simulated, "FEW", 1)
    engine = Engine(EngineConfig(num_blocks=20, block_size=4, max_model_len=32), PolicySet(), SimulatedRunner(VOCAB), VirtualClock())
    engine.add_request(Request("a", [5, 9, 2], SamplingParams(max_tokens=6, ignore_eos=True)))
    records = []
    while engine.has_work:
        records += engine.step().finished
    tokens = [5, 9, 2]
    for _ in range(6):
        tokens.append(mixed(hash_tokens(tokens, 0), 0) % VOCAB)
    assert list(records[0].outputs[0][0]) == tokens[3:]


def test_words_are_mixed_alike_one_by_one_and_together() -> None:
    draw = Random(1)
    seeds, numbers = ([draw.getrandbits(64) for _ in range(50)] for _ in range(2))
    together = mixed_each(np.array(seeds, dtype=np.uint64), np.array(numbers, dtype=np.uint64))
    assert together.tolist() == [mixed(s, n) for s, n in zip(seeds, numbers, strict=True)]
    assert FakeModel.hash_each(np.array([4, 9], dtype=np.uint64), np.array([0, 300])).tolist() == [
        hash_tokens([4], 0), hash_tokens([9], 300)]  # fmt: skip


def test_a_virtual_clock_never_goes_back() -> None:
    clock = VirtualClock()
    assert clock.advance(5.0) == 5.0
    clock.wait_until(3.0)
    assert clock.now() == 5.0
    clock.wait_until(7.5)
    assert (clock.now(), clock.advance(0.5)) == (7.5, 8.0)


def test_a_recorded_clock_says_the_recorded_times_and_then_that_everything_is_due() -> None:
    clock = RecordedClock([(0.5, 1.0), (1.25, 2.0)])
    assert clock.now() == 0.5
    clock.num_decided = 1  # depth 1: decided before the first is over
    assert clock.now() == 1.25
    assert (clock.advance(9.0), clock.advance(9.0)) == (1.0, 2.0)
    clock.num_decided = 2
    assert clock.now() == math.inf
    assert clock.advance(9.0) == math.inf
