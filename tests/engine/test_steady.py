"""Groups that only decode are kept in columns (`kvlab.engine.steady`): whatever happens, an engine with them and one without decide the
same, step by step, and say the same of it. An engine has none below `FEWEST` groups, so that number chooses the way."""

from __future__ import annotations

from contextlib import suppress
from random import Random
from typing import Any

import numpy as np
import pytest
from engine_support import Forcer, Log, make_engine, policies, policy_names, prompt_of, request, run_to_end

from kvlab.engine import Engine, steady
from kvlab.engine.runners.late_tokens import LastTokens
from kvlab.engine.runners.simulated import SimulatedRunner
from kvlab.policies.batching import Chunked
from kvlab.policies.prefix_cache import Radix
from kvlab.testing.invariants import check_drained, check_invariants
from kvlab.testing.late import LateRunner
from kvlab.testing.paged_fake import PagedFakeRunner
from kvlab.types import LATE, GroupView, Now, Outcome, Plan, ScheduledSeq, UserError
from kvlab.types.columns import Decodes, OneEach

NEVER = 10**9
EOS = (3,)
VOCAB = 23
KINDS: list[dict[str, Any]] = [{}] * 6 + [
    {"temperature": 1.0}, {"ignore_eos": False}, {"ignore_eos": False, "temperature": 1.0}, {"stop_token_ids": (5, 7)},
    {"n": 2, "temperature": 1.0}, {"beam_width": 2}, {"min_tokens": 3, "ignore_eos": False}, {"logprobs": None, "seed": 4},
]  # fmt: skip


class Silent(Log):
    """Does not ask for block events: blocks may then be taken several at once."""

    wants_block_events = False


class Counted:
    """How often lanes were used."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.steps = self.lanes = self.mixed = 0
        plan = steady.Lanes.plan

        def counted(lanes: steady.Lanes, rest: Any, rest_ids: Any) -> Any:
            self.steps, self.lanes, self.mixed = self.steps + 1, self.lanes + len(lanes), self.mixed + bool(rest)
            return plan(lanes, rest, rest_ids)

        monkeypatch.setattr(steady.Lanes, "plan", counted)


def scene(seed: int, fewest: int, monkeypatch: pytest.MonkeyPatch, listens: bool, depth: int, **fixed: Any) -> Log:
    """Requests of all kinds that come in the middle, some aborted, in a pool too small for all of them. At depth 1 the paged runner is
    late, and looks at what is in flight."""
    monkeypatch.setattr(steady, "FEWEST", fewest)
    draw = Random(seed)
    size = fixed.pop("block_size", draw.choice([1, 3, 16, 17]))
    drawn = ("scheduling", "batching", "admission", "preemption", "eviction")
    seams: dict[str, Any] = {seam: draw.choice(policy_names(seam)) for seam in drawn}
    seams["prefix_cache"] = draw.choice(["none", "none", "hash", Radix(), Radix(partial_block_copy=True)])
    seams |= {"mode": draw.choice(policy_names("preemption/mode"))} | fixed
    paged = LateRunner(PagedFakeRunner(VOCAB)) if depth else PagedFakeRunner(VOCAB)
    engine, log = make_engine(
        draw.randint(30, 60) * 16 // size, size, policies(**seams), eos=EOS, vocab_size=VOCAB, log=None if listens else Silent(),
        depth=depth, runner=paged if draw.random() < 0.5 else SimulatedRunner(VOCAB),
        num_cpu_blocks=draw.choice([0, 200]), block_bytes=300_000,
        max_num_batched_tokens=draw.choice([24, 64, 2048]), max_num_seqs=draw.choice([10, 24]),
    )  # fmt: skip
    for i in range(30):
        submit(engine, draw, i)
        for _ in range(draw.choice([0, 0, 1, 3, 9])):
            engine.step()
            check_invariants(engine)
        if draw.random() < 0.1:
            engine.abort(f"r{draw.randint(0, i)}")
            check_invariants(engine)
    run_to_end(engine, 5_000)
    check_drained(engine)
    return log


def submit(engine: Engine, draw: Random, number: int) -> None:
    kind, max_tokens = draw.choice(KINDS), draw.randint(3, 60)
    prompt = prompt_of(20, number % 2, VOCAB)[: draw.choice([0, 0, 17, 20])] + prompt_of(draw.randint(1, 30), number, VOCAB)
    with suppress(UserError):
        engine.add_request(request(f"r{number}", prompt, max_tokens, priority=draw.randint(0, 2), **kind))


def same(one: Log, other: Log) -> None:
    """Plans, outcomes, counts, block events and records, step by step."""
    assert len(one.plans) == len(other.plans)
    for plan, plan_, outcome, outcome_, stats, stats_ in zip(
            one.plans, other.plans, one.outcomes, other.outcomes, one.stats, other.stats, strict=True):  # fmt: skip
        assert plan.decisions() == plan_.decisions()
        assert plan == plan_
        assert outcome == outcome_
        assert stats._replace(schedule_ms=0, execute_ms=0, commit_ms=0) == stats_._replace(schedule_ms=0, execute_ms=0, commit_ms=0)
    assert one.events == other.events
    assert one.records == other.records


def compare(seeds: range, monkeypatch: pytest.MonkeyPatch, depth: int = 0, **fixed: Any) -> Counted:
    counted = Counted(monkeypatch)
    for seed in seeds:
        for listens in (True, False):
            with_lanes = scene(seed, 1 + seed % 4, monkeypatch, listens, depth, **fixed)
            num_steps = counted.steps
            without = scene(seed, NEVER, monkeypatch, listens, depth, **fixed)
            assert counted.steps == num_steps
            same(with_lanes, without)
    return counted


@pytest.mark.slow
@pytest.mark.parametrize("depth", [0, 1])
@pytest.mark.parametrize("block_size", [1, 16, 17])
def test_random_scenes_decide_the_same(block_size: int, depth: int, monkeypatch: pytest.MonkeyPatch) -> None:
    num = 8 if depth else 12
    counted = compare(range(100 * block_size, 100 * block_size + num), monkeypatch, depth, block_size=block_size)
    assert counted.lanes > 3 * counted.steps > 0
    assert counted.mixed > 0


@pytest.mark.slow
@pytest.mark.parametrize("batching", policy_names("batching"))
def test_every_batching_policy_decides_the_same(batching: str, monkeypatch: pytest.MonkeyPatch) -> None:
    counted = compare(range(5), monkeypatch, batching=batching)
    assert counted.lanes > counted.steps > 0


@pytest.mark.slow
@pytest.mark.parametrize("seed", [5109, 5124, 5160, 5245, 5253])
def test_who_comes_behind_a_lane_that_gives_way_is_scheduled_all_the_same(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A victim among the lanes, chosen for a group behind them: those still to come in that step must not be lost."""
    assert compare(range(seed, seed + 1), monkeypatch).lanes > 0


@pytest.mark.full
@pytest.mark.parametrize("depth", [0, 1])
def test_many_random_scenes_decide_the_same(depth: int, monkeypatch: pytest.MonkeyPatch) -> None:
    assert compare(range(5_000, 5_300), monkeypatch, depth).steps > 0


def crowd(num: int, monkeypatch: pytest.MonkeyPatch, fewest: int = 1, depth: int = 0, **seams: Any) -> tuple[Engine, Log]:
    monkeypatch.setattr(steady, "FEWEST", fewest)
    engine, log = make_engine(200, 4, policies(**{"prefix_cache": "none"} | seams), runner=SimulatedRunner(97), depth=depth)
    for i in range(num):
        engine.add_request(request(f"r{i}", prompt_of(3 + i, i), 20))
    return engine, log


def test_lanes_are_what_only_decodes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Three prompts of 3, 4 and 5 tokens in one step; from the second on they are lanes, blocks of 4 are taken at 4, 8 ..."""
    engine, log = crowd(3, monkeypatch)
    engine.step()
    assert len(engine.scheduler.lanes) == 0
    engine.step()
    assert len(engine.scheduler.lanes) == 3
    plan = log.plans[1]
    assert isinstance(plan.scheduled, Decodes)
    assert plan.scheduled == tuple(plan.scheduled) == ((0, 3, 1, 1, 0, 0), (1, 4, 1, 1, 0, 0), (2, 5, 1, 1, 0, 0))
    assert plan.tables == {1: (4,)}  # 0; 1; 2 and 3 hold the prompts
    assert log.plans[0].tables == {}
    assert (log.stats[1].num_ctx_tokens, log.stats[1].internal_fragmentation_tokens) == (4 + 5 + 6, 0 + 3 + 2)
    engine.add_request(request("late", prompt_of(5, 9), 20))
    engine.step()
    assert len(engine.scheduler.lanes) == 3
    assert [s.num_new_tokens for s in log.plans[2].scheduled] == [1, 1, 1, 5]
    engine.step()
    assert len(engine.scheduler.lanes) == 4


def test_a_sequence_is_up_to_date_when_somebody_looks(monkeypatch: pytest.MonkeyPatch) -> None:
    engine, log = crowd(3, monkeypatch)
    for num in range(1, 12):
        engine.step()
        if num not in (5, 11):
            continue
        for i in range(3):
            group = engine.groups[f"r{i}"]
            assert (group.num_output_tokens, group.num_computed_tokens, group.num_uncomputed_tokens) == (num, 2 + i + num, 1)
            assert group.seqs[0].output_token_ids == tuple(outcome.tokens[i][0] for outcome in log.outcomes)
            assert group.seqs[0].token_times == [stats.end_s for stats in log.stats]
    engine.step()
    assert [(len(seq.tokens), seq.num_computed) for seq in engine.sequences.values()] == [(3 + i + 12, 2 + i + 12) for i in range(3)]


def test_an_abort_takes_one_lane_out(monkeypatch: pytest.MonkeyPatch) -> None:
    engine, log = crowd(3, monkeypatch)
    for _ in range(4):
        engine.step()
    record = engine.abort("r1")
    assert record is not None
    assert record.num_output_tokens == 4
    assert record.num_computed_tokens == 4 + 3
    engine.step()
    assert [s.seq_id for s in log.plans[-1].scheduled] == [0, 2]
    assert len(engine.scheduler.lanes) == 2
    run_to_end(engine, 50)
    assert [log.records[f"r{i}"].num_output_tokens for i in range(3)] == [20, 4, 20]


def test_lanes_at_depth_1(monkeypatch: pytest.MonkeyPatch) -> None:
    """Prompts of 3, 4 and 5 tokens, 20 to come of each. Step 1 decodes what step 0 began with; from step 2, planned while 1 is in
    flight, they are lanes. A look shows one token in flight, and changes nothing. Step 19 has the last token: nobody is a lane then."""
    engine, log = crowd(3, monkeypatch, depth=1)
    engine.step()
    assert len(engine.scheduler.lanes) == 0
    engine.step()
    assert len(engine.scheduler.lanes) == 3
    engine.step()
    group = engine.groups["r1"]
    assert (len(group.seqs[0].tokens), group.seqs[0].tokens[-1], group.seqs[0].num_computed) == (4 + 3 + 1, LATE, 4 + 3)
    while len(log.plans) < 18:
        engine.step()
    assert len(engine.scheduler.lanes) == 3
    plan = log.plans[-1]
    assert isinstance(plan.scheduled, Decodes)
    assert plan.scheduled == tuple(plan.scheduled) == ((0, 19, 1, 1, 0, 0), (1, 20, 1, 1, 0, 0), (2, 21, 1, 1, 0, 0))
    assert plan.token_ids == ((LATE,),) * 3
    assert log.stats[-1].num_ctx_tokens == (3 + 18) + (4 + 18) + (5 + 18)  # the step in flight included
    engine.step()
    assert len(engine.scheduler.lanes) == 0
    run_to_end(engine, 3)
    assert [log.records[f"r{i}"].num_output_tokens for i in range(3)] == [20, 20, 20]
    assert [len(plan.scheduled) for plan in log.plans[1:]] == [3] * 19 + [0]


def test_a_lane_that_stops_leaves_the_others_alone_at_depth_1(monkeypatch: pytest.MonkeyPatch) -> None:
    """An end of text is seen one step late: its extra token is dropped, the others' are taken."""
    outputs = []
    for fewest in (1, NEVER):
        counted = Counted(monkeypatch)
        engine, log = crowd(3, monkeypatch, fewest, depth=1)
        engine.abort("r1")
        engine.add_request(request("stops", prompt_of(4, 1), 20, stop_token_ids=tuple(range(0, 97, 12))))
        run_to_end(engine, 40)
        assert (counted.steps > 10) == (fewest == 1)
        assert log.records["stops"].finish_reason == "stop"
        assert 2 < log.records["stops"].num_output_tokens < 19
        assert [log.records[name].num_output_tokens for name in ("r0", "r2")] == [20, 20]
        outputs.append({name: record.outputs for name, record in log.records.items()})
    assert outputs[0] == outputs[1]


def five(fewest: int, depth: int, monkeypatch: pytest.MonkeyPatch) -> Log:
    """Five that decode together, of which one ends early by length, one by a token that the others have too, and one gives way."""
    monkeypatch.setattr(steady, "FEWEST", fewest)
    monkeypatch.setattr(steady, "NUM_ROWS", 4)  # sequences are written every four steps
    engine, log = make_engine(60, 4, policies(prefix_cache="hash"), runner=SimulatedRunner(7), vocab_size=7, depth=depth)
    for i, max_tokens in enumerate((20, 9, 20, 14, 20)):
        engine.add_request(request(f"r{i}", prompt_of(3 + i, i, 7), max_tokens, stop_token_ids=(6,) if i == 2 else ()))
    forcer = Forcer(engine)
    for step in range(60):
        if step == 5:
            forcer.before.append("r3")
        if engine.has_work:
            engine.step()  # and nobody looks at a sequence, which would write it
    assert (engine.has_work, forcer.num_forced) == (False, 1)
    check_drained(engine)
    return log


@pytest.mark.parametrize("depth", [0, 1])
def test_a_few_that_decode_say_the_same_in_columns_and_without(depth: int, monkeypatch: pytest.MonkeyPatch) -> None:
    counted = Counted(monkeypatch)
    log = five(1, depth, monkeypatch)
    assert counted.lanes > 40
    assert 1 < log.records["r2"].num_output_tokens < 20
    assert [log.records[name].num_output_tokens for name in ("r0", "r1", "r3", "r4")] == [20, 9, 14, 20]
    assert any(6 in ids for name in ("r0", "r1", "r3", "r4") for ids, _ in log.records[name].outputs)  # which ends r2 alone
    same(log, five(NEVER, depth, monkeypatch))


def test_lanes_publish_a_block_in_the_step_that_fills_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Prompts of 3, 4 and 5 tokens, blocks of 4; in step 0 the prompts are computed, then a token a step."""
    engine, log = crowd(3, monkeypatch, prefix_cache="hash")
    for _ in range(6):
        engine.step()
    published = [(event.step, event.request_id) for event in log.events if event.kind == "publish"]
    assert published == [(0, "r1"), (0, "r2"), (1, "r0"), (3, "r2"), (4, "r1"), (5, "r0")]


def test_tokens_of_lanes_that_have_changed_are_looked_up_by_sequence() -> None:
    """Depth 1: sequences 1 and 2 sampled 10 and 20 as lanes, 3 sampled 30 on its own. The next plan has 2 and 3 as lanes."""
    column = Decodes((1, 2), np.array([4, 4]), 0, 10, (ScheduledSeq(3, 6, 1),))
    last = LastTokens()
    last.note(Plan(0, 0.0, column), Outcome(0, OneEach(np.array([10, 20]), ((30,),))))
    late = OneEach(np.array([LATE, LATE]), ())
    assert last.fill(Plan(1, 0.0, Decodes((2, 3), np.array([5, 7]), 0, 14, ()), late)).token_ids == ((20,), (30,))


def test_few_groups_have_no_lanes(monkeypatch: pytest.MonkeyPatch) -> None:
    engine, log = crowd(3, monkeypatch, fewest=4)
    run_to_end(engine, 50)
    assert not any(isinstance(plan.scheduled, Decodes) for plan in log.plans)


class FirstOnly(Chunked):
    """A decode gets its token only as the first of a step: a `chunk` of its own."""

    def chunk(self, num_uncomputed: int, budget: int, max_num_batched_tokens: int) -> int:
        return min(num_uncomputed, budget) if num_uncomputed > 1 or budget == max_num_batched_tokens else 0


def test_a_policy_with_a_chunk_of_its_own_is_asked_each_time(monkeypatch: pytest.MonkeyPatch) -> None:
    engine, log = crowd(3, monkeypatch, batching=FirstOnly())
    for _ in range(3):
        engine.step()
    assert [[s.seq_id for s in plan.scheduled] for plan in log.plans] == [[0, 1, 2], [0], [0]]


class Reversed(Chunked):
    """Serves the latest first: `chunk` is inherited, the order is its own."""

    def running_order(self, running: Any, now: Now) -> list[GroupView]:
        return list(reversed(running))


def test_an_order_of_ones_own_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    engine, log = crowd(3, monkeypatch, batching=Reversed())
    for _ in range(3):
        engine.step()
    assert [[s.seq_id for s in plan.scheduled] for plan in log.plans] == [[0, 1, 2], [2, 1, 0], [2, 1, 0]]
