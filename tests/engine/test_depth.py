"""Depth 1: a plan is made and submitted while the last one runs. The tokens are those of depth 0, nothing in flight is written by somebody
else, and the plans are the same real, recorded and simulated."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import engine_product
import engine_support
import pandas as pd
import pytest
import torch
from engine_support import Forcer, Log, make_engine, policies, policy_names, prompt_of, reference_outputs, request, run_to_end, serve
from equality_support import tiny, tiny_engine
from test_recorded import EOS, REAL, SIMULATED, check_everything_happened

import kvlab
from kvlab.engine import Engine, EngineConfig
from kvlab.engine.runners.base import RunnerConfig
from kvlab.engine.runners.simulated import SimulatedRunner
from kvlab.engine.runners.torch_runner import TorchRunner
from kvlab.policies.compression import Streaming, Window
from kvlab.policies.layout import ContiguousPow2
from kvlab.policies.prefix_cache import Radix
from kvlab.policies.scheduling import Vtc
from kvlab.testing.invariants import check_invariants
from kvlab.testing.late import LateRunner
from kvlab.testing.paged_fake import PagedFakeRunner
from kvlab.trace.plans import read_plans
from kvlab.types import LATE, Plan, SamplingParams, ScheduledSeq, SeqStart, UserError

VOCAB = engine_support.VOCAB


def deep_engine(num_blocks: int, block_size: int, *args: Any, **more: Any) -> tuple[Engine, Log]:
    """An engine at depth 1 over a runner whose steps run when their outcome is asked for."""
    more = {"depth": 1, "runner": LateRunner(PagedFakeRunner(more.get("vocab_size", VOCAB))), **more}
    return make_engine(num_blocks, block_size, *args, **more)


# ------------------------------------------------------------------ what happens, by hand


def test_steps_overlap_and_a_token_is_named_late() -> None:
    """A prompt of 3, 3 tokens out: the last is known to be the last, so nothing is computed in vain; a step of nothing ends it."""
    engine, log = deep_engine(10, 4)
    assert serve(engine, [request("a", [1, 2, 3], 3)]) == 3
    assert [(tuple(plan.scheduled), tuple(plan.token_ids)) for plan in log.plans] == [
        ((ScheduledSeq(0, 0, 3),), ((1, 2, 3),)),
        ((ScheduledSeq(0, 3, 1),), ((LATE,),)),
        ((ScheduledSeq(0, 4, 1),), ((LATE,),)),
        ((), ()),
    ]
    assert engine.runner.most_in_flight == 2  # type: ignore[attr-defined]
    assert [stats.num_output_tokens for stats in log.stats] == [1, 1, 1, 0]
    assert log.outputs == reference_outputs([request("a", [1, 2, 3], 3)])


def test_a_stop_is_seen_one_step_late_and_the_extra_token_dropped() -> None:
    plain = reference_outputs([request("a", [1, 2, 3], 8)])["a"][0][0]
    stopping = request("a", [1, 2, 3], 8, ignore_eos=False)
    engine, log = deep_engine(10, 2, eos=(plain[3],))
    serve(engine, [stopping])
    first = plain.index(plain[3])
    assert log.outputs["a"] == ((plain[: first + 1], "stop"),)
    assert sum(len(plan.scheduled) for plan in log.plans) == first + 2  # one more than at depth 0
    assert sum(stats.num_output_tokens for stats in log.stats) == first + 1
    assert log.records["a"].num_computed_tokens == 3 + first
    assert len(log.records["a"].token_times_s) == first + 1


def test_blocks_of_what_has_ended_come_free_when_the_step_that_touches_them_has_landed() -> None:
    """Two blocks of 2: "a" stops with its first token while a step with its next one is in flight; "b" needs both blocks."""
    token = reference_outputs([request("a", [1, 2, 3], 1)])["a"][0][0][0]
    engine, log = deep_engine(2, 2, policies(prefix_cache="none", admission="none"), eos=(token,))
    engine.add_request(request("a", [1, 2, 3], 9, ignore_eos=False))
    engine.add_request(request("b", [4, 5, 6], 1))
    first = engine.step()
    assert [record.request_id for record in first.finished] == ["a"]
    assert (engine.kv.pool.num_used, engine.kv.pool.num_free) == (2, 0)  # step 1 writes into the second
    check_invariants(engine)
    engine.step()  # plan 2 is made while step 1 runs
    assert [plan.blocked[0].by for plan in log.plans[2:]] == ["in_flight"]
    assert engine.kv.pool.num_free == 2
    run_to_end(engine, 9)
    assert log.plans[3].fresh_tables == {1: (0, 1)}


def test_who_waits_for_a_victims_blocks_gets_them_before_anybody_enters() -> None:
    """Four blocks of 1 and no watermark: "b" gives way to "a" while its step is in flight, and must not come back before "a" has grown."""
    requests = [request("a", [1], 3), request("b", [2], 3)]
    engine, log = deep_engine(4, 1, policies(prefix_cache="none", admission="none", batching="prefill_first"))
    serve(engine, requests)
    assert log.outputs == reference_outputs(requests)
    assert log.total("num_preemptions") <= 2


def test_a_preempted_group_drops_its_token_in_flight_and_samples_it_again() -> None:
    for mode in ("recompute", "swap"):
        requests = [request("a", prompt_of(5), 8, temperature=1.0), request("b", prompt_of(4, 1), 8, n=2, temperature=1.0)]
        engine, log = deep_engine(40, 2, policies(mode=mode, prefix_cache="none"), num_cpu_blocks=40)
        forcer = Forcer(engine)
        for each in requests:
            engine.add_request(each)
        while engine.has_work:
            if len(log.plans) in (3, 7):
                forcer.after = ["a", "b"]
            engine.step()
            check_invariants(engine)
        assert log.outputs == reference_outputs(requests)
        assert [p.mode for plan in log.plans for p in plan.preempted] == [mode] * forcer.num_forced
        assert forcer.num_forced >= 3


def test_an_abort_takes_the_token_in_flight_along() -> None:
    engine, log = deep_engine(10, 2)
    engine.add_request(request("a", [1, 2, 3], 20))
    engine.add_request(request("b", [4], 4))
    for _ in range(3):
        engine.step()
    record = engine.abort("a")
    assert record is not None
    assert record.outputs[0] == (reference_outputs([request("a", [1, 2, 3], 20)])["a"][0][0][:3], "abort")
    check_invariants(engine)
    run_to_end(engine, 20)
    assert log.outputs["b"] == reference_outputs([request("b", [4], 4)])["b"]


def test_a_group_that_outgrows_the_pool_keeps_the_tokens_it_has_at_depth_0() -> None:
    """6 blocks of 2 hold a prompt of 5 and 7 tokens; the eighth was sampled and can't be computed."""
    for make in (make_engine, deep_engine):
        engine, log = make(6, 2)
        serve(engine, [request("a", prompt_of(5), 30)])
        (tokens, reason), = log.outputs["a"]
        assert (len(tokens), reason) == (8, "kv_capacity")


def test_depth_is_0_or_1() -> None:
    for depth in (2, -1, True, "1"):
        with pytest.raises(UserError, match=r"depth = .* is not allowed: 0 \(a plan waits"):
            EngineConfig(4, depth=depth)  # type: ignore[arg-type]
    with pytest.raises(UserError, match="depth = 2 is not allowed"):
        kvlab.run(kvlab.compose("depth=2"), progress=False)


def test_a_late_runner_sees_a_block_that_is_reused_in_flight() -> None:
    """The check that the tests here rely on."""
    start = SeqStart(0, 0, "admit", SamplingParams(), 0, 0, 2, (1, 2))
    other = start._replace(seq_id=1, group_id=1)
    runner = LateRunner(PagedFakeRunner(VOCAB))
    runner.initialize(RunnerConfig(4, 0, 2, 8, 64, depth=1))
    runner.submit(Plan(0, 0.0, (ScheduledSeq(0, 0, 2),), ((1, 2),), (start,), {}, {0: (3,)}))
    with pytest.raises(AssertionError, match=r"step 1 writes \(tier, slot\) .*'gpu', 6.*which step 0, in flight, touches"):
        runner.submit(Plan(1, 0.0, (ScheduledSeq(1, 0, 2),), ((1, 2),), (other,), {}, {1: (3,)}, (0,)))


# ------------------------------------------------------------------ every policy


@pytest.fixture
def everything_late(monkeypatch: pytest.MonkeyPatch) -> None:
    for block_size in engine_product.BLOCK_SIZES:
        engine_product.expected(block_size)  # by the undisturbed engine at depth 0
    monkeypatch.setattr(engine_product, "make_engine", deep_engine)


@pytest.mark.slow
@pytest.mark.usefixtures("everything_late")
def test_draws_from_the_product_of_all_policies_change_no_token() -> None:
    """Nothing in flight is written by somebody else (the runner looks), and the mechanisms that a case is about act."""
    totals: Counter[str] = Counter()
    for case in engine_product.random_cases(11, 80):
        log, counts = engine_product.run(case)
        assert log.outputs == engine_product.expected(case.block_size), case
        totals += counts
    for what in ("num_preemptions", "swapped_in_blocks", "cow_copies", "num_evicted_blocks", "prefix_cache_hits", "recomputed_tokens",
                 "relocated_blocks", "prompts in chunks", "blocked by watermark"):  # fmt: skip
        assert totals[what] > 0, what


@pytest.mark.full
@pytest.mark.usefixtures("everything_late")
def test_many_draws_from_the_product_of_all_policies() -> None:
    for case in engine_product.random_cases(12, 3_000):
        log, _ = engine_product.run(case)
        assert log.outputs == engine_product.expected(case.block_size), case


def scene(seed: int) -> tuple[dict[str, Any], dict[str, Any], list[Any]]:
    """Sizes, policies and requests of a small, crowded pool with everything in it: samples, beams, stops, windows, partial copies."""
    draw = Random(seed)
    layout = draw.choice(["paged", "paged", *policy_names("layout")])
    cache: Any = draw.choice(["none", "hash", Radix(partial_block_copy=True)]) if layout == "paged" else "none"
    seams = {"layout": layout, "prefix_cache": cache, "mode": draw.choice(["recompute", "swap"]), "admission": "none",
             "batching": draw.choice(policy_names("batching")), "eviction": draw.choice(policy_names("eviction")),
             "scheduling": draw.choice(policy_names("scheduling")), "preemption": draw.choice(policy_names("preemption"))}  # fmt: skip
    if layout == "paged" and draw.random() < 0.3:
        size = draw.choice((4, 9))
        seams["compression"] = Streaming(draw.choice((1, 4)), size) if draw.random() < 0.5 else Window(size)
    limits = {"num_cpu_blocks": draw.choice((0, 12, 40)), "max_num_batched_tokens": draw.choice((7, 20)), "max_model_len": 24,
              "block_bytes": 10**6}  # fmt: skip
    requests = [
        request(f"r{i}", prompt_of(3, i % 2) + prompt_of(draw.randint(1, 6), i), draw.randint(1, 8), priority=draw.randint(0, 2),
                ignore_eos=draw.random() < 0.5,
                **draw.choice([{}, {"n": 3, "temperature": 1.0}, {"beam_width": 2}, {"temperature": 1.0}])) for i in range(7)
    ]  # fmt: skip
    return seams, limits, requests


@pytest.mark.slow
def test_random_scenes_keep_the_invariants_and_the_tokens() -> None:
    """After every step, with aborts, forced preemption, ends of text and pools that are too small."""
    eos, totals = (3, 11), Counter[str]()
    for seed in range(60):
        seams, limits, requests = scene(seed)
        draw = Random(seed)
        window = seams.get("compression")
        expected = reference_outputs(requests, window=window, eos=eos, max_model_len=24)
        engine, log = deep_engine(draw.choice((26, 40)), 3, policies(**seams), eos=eos, **limits)
        forcer, aborted = Forcer(engine), set[str]()
        for each in requests:
            try:
                engine.add_request(each)
            except UserError:
                aborted.add(each.request_id)
        for _ in range(3_000):
            if not engine.has_work:
                break
            if draw.random() < 0.1 and engine.groups:
                forcer.after.append(draw.choice(sorted(engine.groups)))
            if draw.random() < 0.02 and engine.groups:
                aborted.add(name := draw.choice(sorted(engine.groups)))
                engine.abort(name)
            if engine.has_work:
                engine.step()
            check_invariants(engine)
        assert not engine.has_work, seed
        for name, outputs in log.outputs.items():
            if name not in aborted and log.records[name].finish_reason != "kv_capacity":
                assert outputs == expected[name], (seed, name)
        for what in ("num_preemptions", "swapped_in_blocks", "cow_copies", "prefix_cache_hits", "recomputed_tokens"):
            totals[what] += log.total(what)
        totals["stops"] += sum(reason == "stop" for outputs in log.outputs.values() for _, reason in outputs)
    assert min(totals.values()) > 20, totals


# ------------------------------------------------------------------ the same plans


@pytest.mark.parametrize("batching", policy_names("batching"))
def test_plans_are_the_same_for_runners_that_are_late_prompt_and_simulated(batching: str) -> None:
    preempted = 0
    for seed in range(2):
        logs = []
        for runner in (LateRunner(PagedFakeRunner(VOCAB)), PagedFakeRunner(VOCAB), SimulatedRunner(VOCAB)):
            seams, limits, requests = scene(seed)
            seams |= {"batching": batching, "layout": "paged", "compression": "full"}
            engine, log = make_engine(18, 3, policies(**seams), runner=runner, depth=1, **limits)
            serve(engine, requests, check=False)
            logs.append(log)
        preempted += logs[0].total("num_preemptions")
        for other in logs[1:]:
            assert [plan.decisions() for plan in other.plans] == [plan.decisions() for plan in logs[0].plans]
            assert [plan.token_ids for plan in other.plans] == [plan.token_ids for plan in logs[0].plans]
            assert [outcome.tokens for outcome in other.outcomes] == [outcome.tokens for outcome in logs[0].outcomes]
            assert other.outputs == logs[0].outputs
    assert preempted > 0


@pytest.mark.parametrize("concurrency", [None, 8], ids=["open loop", "closed loop"])
def test_a_real_run_replayed_decides_the_same(tmp_path: Path, concurrency: int | None) -> None:
    config = [*REAL, "depth=1", f"workload.concurrency={concurrency or 'null'}"]
    real, again = Log(), Log()
    first = kvlab.run(kvlab.compose(*config), folder=tmp_path / "real", listeners=[real], progress=False)
    check_everything_happened(real)
    second = kvlab.run(kvlab.compose(*config, "runner=recorded", f"run={tmp_path / 'real'}"), folder=tmp_path / "again",
                       listeners=[again], progress=False)  # fmt: skip
    assert [plan.decisions() for plan in real.plans] == [plan.decisions() for plan in again.plans]
    assert [plan.now_s for plan in real.plans] == [plan.now_s for plan in again.plans]
    assert list(read_plans(tmp_path / "real")) == list(read_plans(tmp_path / "again"))
    pd.testing.assert_frame_equal(first.requests(), second.requests())
    pd.testing.assert_frame_equal(first.blocks(), second.blocks())
    with pytest.raises(UserError, match=r"depth = 0 \(recorded: 1\)"):
        kvlab.run(kvlab.compose(*config, "depth=0", "runner=recorded", f"run={tmp_path / 'real'}"), folder=tmp_path / "other",
                  progress=False)  # fmt: skip


def test_the_simulator_decides_as_the_real_run_does(tmp_path: Path) -> None:
    logs = {"torch": Log(), "simulated": Log()}
    for runner, log in logs.items():
        kvlab.run(kvlab.compose(*SIMULATED, "depth=1", "prefix_cache=none", "preemption/mode=swap", "num_cpu_blocks=100",
                                f"runner={runner}"), folder=tmp_path / runner, listeners=[log], progress=False)  # fmt: skip
    real, simulated = logs.values()
    assert real.total("swapped_in_blocks") > 0
    assert any(ids == (LATE,) for plan in real.plans for ids in plan.token_ids)
    assert [plan.decisions() for plan in real.plans] == [plan.decisions() for plan in simulated.plans]


# ------------------------------------------------------------------ a real model


def test_a_real_model_says_the_same_at_both_depths() -> None:
    """Attention over real tensors, in float64: greedy, sampled, penalties, logprobs, samples, beams, a stop string, the end of text."""
    prompts = [list(range(5, 25)), list(range(5, 15)), [7, 8, 9], [30, 31, 32, 33, 34]]
    more: list[dict[str, Any]] = [{}, {"temperature": 1.0, "top_p": 0.9, "logprobs": 2}, {"n": 2, "temperature": 1.3},
                                  {"presence_penalty": 1.0, "temperature": 0.7}, {"beam_width": 2},
                                  {"stop": ("e", "t"), "temperature": 1.5}]  # fmt: skip
    requests = [request(f"r{i}", prompts[i % 4], 10, ignore_eos=i % 2 == 0, **params) for i, params in enumerate(more)]
    logs = []
    for depth in (0, 1):
        loaded = tiny(torch.float64)
        runner: Any = TorchRunner(loaded) if depth == 0 else LateRunner(TorchRunner(loaded))
        engine, log = tiny_engine(26, 3, policies(mode="swap", admission="none"), runner=runner, depth=depth, num_cpu_blocks=20)
        serve(engine, requests)
        assert log.total("num_preemptions") > 0
        logs.append(log)
    assert logs[0].outputs == logs[1].outputs
    assert EOS in loaded.eos_token_ids


# a prompt's tokens and outputs of an old request and of one with n samples, blocks, n, steps between the two
GIVES_WAY = [(4, 47, 15, 34, 100, 3, 26), (21, 22, 15, 27, 64, 2, 9), (27, 7, 7, 2, 100, 3, 3), (24, 12, 11, 2, 100, 2, 6)]


@pytest.mark.parametrize("scene", GIVES_WAY)
def test_a_region_that_a_dropped_copy_still_parks_is_waited_for(scene: tuple[int, ...]) -> None:
    """Samples give way to an older request before their copies are made: one step in which nothing can be done, and no stall."""
    prompt, output, prompt_2, output_2, num_blocks, n, steps_between = scene
    outputs = []
    for depth in (0, 1):
        engine, log = make_engine(num_blocks, 1, policies(layout=ContiguousPow2(), prefix_cache="none"), depth=depth)
        engine.add_request(request("a", prompt_of(prompt), output))
        for _ in range(steps_between):
            engine.step()
        engine.add_request(request("b", prompt_of(prompt_2, 1), output_2, n=n, temperature=1.0, seed=3))
        while engine.has_work:
            engine.step()
            check_invariants(engine)
        assert engine.kv.pool.num_free == num_blocks
        assert depth == 0 or log.records["b"].num_preemptions
        outputs.append({name: record.outputs for name, record in log.records.items()})
    assert outputs[0] == outputs[1]


class Hears(Vtc):
    """Counts what it is told."""

    num_outputs = 0

    def computed(self, group: Any, num_computed: int, num_output: int, now: Any) -> None:
        self.num_outputs += num_output
        super().computed(group, num_computed, num_output, now)


def test_policies_hear_of_every_token() -> None:
    """Requests join the columns in the middle of a flight; fair shares are counted all the same."""
    told = {}
    for depth in (0, 1):
        policy = Hears()
        engine, _ = make_engine(2000, 16, policies(scheduling=policy, prefix_cache="none"), runner=SimulatedRunner(97), depth=depth,
                                max_num_seqs=64)  # fmt: skip
        for i in range(60):
            engine.add_request(replace(request(f"r{i}", prompt_of(20, i), 40), tenant="ab"[i % 2]))
            engine.step()
        while engine.has_work:
            engine.step()
        told[depth] = policy.num_outputs
    assert told == {0: 60 * 40, 1: 60 * 40}


def test_sampled_lanes_in_the_simulator() -> None:
    """More sequences than `FEWEST`, each with noise of its own, looked up for some steps at once."""
    engine, log = make_engine(200, 4, policies(), runner=SimulatedRunner(97))
    for i in range(12):
        engine.add_request(request(f"r{i}", prompt_of(5, i), 20, temperature=1.0, seed=i))
    while engine.has_work:
        engine.step()
    assert {len(record.outputs[0][0]) for record in log.records.values()} == {20}
    few, log_of_few = make_engine(200, 4, policies(), runner=SimulatedRunner(97), max_num_seqs=4)
    for i in range(12):
        few.add_request(request(f"r{i}", prompt_of(5, i), 20, temperature=1.0, seed=i))
    while few.has_work:
        few.step()
    assert {n: r.outputs for n, r in log.records.items()} == {n: r.outputs for n, r in log_of_few.records.items()}
