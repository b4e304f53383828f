"""Workloads through the real engine on a virtual clock: every request ends, conversations extend, closed loops hold."""

from __future__ import annotations

import pytest
from workload_helpers import context

from kvlab.engine.clock import VirtualClock
from kvlab.engine.config import EngineConfig, PolicySet
from kvlab.engine.driver import drive
from kvlab.engine.engine import Engine
from kvlab.engine.runners.simulated import SimulatedRunner
from kvlab.types import BlockEvent, Outcome, Plan, RequestRecord, StepStats
from kvlab.workload import MultiTurnWorkload, PromptWorkload, SyntheticWorkload, Workload


class Seen:
    """A listener that keeps all records and the highest number of requests in the engine."""

    wants_block_events = False

    def __init__(self) -> None:
        self.records: list[RequestRecord] = []
        self.most = 0

    def on_step(self, plan: Plan, outcome: Outcome, stats: StepStats) -> None:
        self.most = max(self.most, stats.num_running_reqs + stats.num_waiting_reqs + stats.num_swapped_reqs)

    def on_request(self, record: RequestRecord) -> None:
        self.records.append(record)

    def on_block(self, event: BlockEvent) -> None:
        raise AssertionError("not wanted")


def run(workload: Workload, num_blocks: int = 200) -> Seen:
    seen = Seen()
    config = EngineConfig(num_blocks=num_blocks, block_size=8, max_num_seqs=16, max_num_batched_tokens=256, max_model_len=2048)
    engine = Engine(config, PolicySet(), SimulatedRunner(vocab_size=500), VirtualClock(), listeners=[seen], vocab_size=500)
    workload.start(context(vocab_size=500, max_model_len=2048, seed=3))
    drive(engine, workload)
    assert workload.exhausted
    return seen


def test_conversations_find_what_was_said_in_the_cache() -> None:
    seen = run(MultiTurnWorkload(3, 3, prompt_len=40, turn_len=10, output_len=8, think_s=0.5))
    by_id = {r.request_id: r for r in seen.records}
    assert len(by_id) == 9
    assert [by_id[f"session-0-turn-{t}"].num_prompt_tokens for t in range(3)] == [40, 58, 76]
    # Turn 1 hits the full blocks of prompt and answer: 47 of 48 tokens were computed (not the last one), 5 blocks of 8.
    assert [by_id[f"session-0-turn-{t}"].num_cached_tokens for t in range(3)] == [0, 40, 64]
    for turn in (1, 2):
        assert by_id[f"session-0-turn-{turn}"].arrival_s == by_id[f"session-0-turn-{turn - 1}"].finish_s + 0.5


@pytest.mark.parametrize("num_blocks", [200, 24])
def test_a_closed_loop_keeps_its_concurrency_in_the_engine(num_blocks: int) -> None:
    lens = {"kind": "uniform", "min": 5, "max": 60}
    seen = run(SyntheticWorkload(40, lens, {"kind": "uniform", "min": 1, "max": 20}, concurrency=5), num_blocks)
    assert len(seen.records) == 40
    assert {r.finish_reason for r in seen.records} == {"length"}
    assert seen.most <= 5
    finishes = {r.finish_s for r in seen.records}
    later = [r for r in seen.records if r.arrival_s > 0]
    assert len(later) == 35
    assert all(r.arrival_s in finishes for r in later)


def test_aborted_requests_end_and_the_loop_goes_on() -> None:
    seen = run(SyntheticWorkload(40, 30, 50, concurrency=4, abort={"fraction": 0.5, "after_s": 0.01}))
    reasons = [r.finish_reason for r in seen.records]
    assert len(reasons) == 40
    assert 10 <= reasons.count("abort") <= 30
    assert reasons.count("abort") + reasons.count("length") == 40


def test_a_prompt_that_never_fits_is_refused_and_the_others_are_served() -> None:
    seen = run(SyntheticWorkload(12, {"kind": "uniform", "min": 100, "max": 300}, 4, concurrency=2), num_blocks=25)
    reasons = [(r.num_prompt_tokens > 200, r.finish_reason) for r in seen.records]
    assert set(reasons) <= {(True, "refused"), (False, "length"), (False, "kv_capacity")}
    assert {r for _, r in reasons} >= {"refused", "length"}
    assert len(reasons) == 12


def test_the_bundled_chats_run_without_a_tokenizer() -> None:
    seen = run(PromptWorkload(limit=6, sampling={"max_tokens": 5}))
    assert [r.num_output_tokens for r in seen.records] == [5] * 6
