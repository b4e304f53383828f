"""Scheduling and preemption: at every edge, without livelock, with aborts anywhere, and never idle without a reason."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from random import Random
from typing import Any

import pytest
from engine_support import (
    Forcer,
    Log,
    make_engine,
    policies,
    policy_names,
    prompt_of,
    reference_outputs,
    request,
    run_to_end,
    serve,
    step_bound,
)

from kvlab.engine import Engine, EngineConfig
from kvlab.engine.clock import VirtualClock
from kvlab.engine.driver import drive
from kvlab.engine.runners.simulated import SimulatedRunner
from kvlab.policies.admission import Watermark
from kvlab.policies.base import AdmissionPolicy, BatchingPolicy, EntryView, PreemptionPolicy
from kvlab.policies.preemption.mode import Recompute
from kvlab.testing.invariants import check_drained, check_invariants
from kvlab.testing.paged_fake import PagedFakeRunner
from kvlab.types import GroupView, IllegalDecision, Now, PoolView, QueuesView, ScheduledSeq, UserError
from kvlab.workload.base import WorkloadContext
from kvlab.workload.fixed import FixedWorkload

# ------------------------------------------------------------------------ preempt at every edge


def _edges(size: int) -> list[int]:
    return [size - 1, size, size + 1, 2 * size - 1, 2 * size, 2 * size + 1]


def _preempt_at(engine: Engine, log: Log, name: str, length: int) -> None:
    """Run until `name` holds `length` tokens, then make it give way in the next step (once), and run to the end."""
    forcer = Forcer(engine)
    group = engine.groups[name]
    while group.num_tokens < length:
        engine.step()
    assert group.num_tokens == length
    forcer.before.append(name)
    engine.step()
    assert forcer.num_forced == 1
    assert group.num_preemptions == 1
    run_to_end(engine, 200)


@pytest.mark.parametrize("mode", ["recompute", "swap"])
@pytest.mark.parametrize("prefix_cache", ["none", "hash"])
@pytest.mark.parametrize("sampling", [{}, {"n": 3, "temperature": 1.0}, {"n": 2, "beam_width": 2}], ids=["greedy", "n=3", "beams"])
@pytest.mark.parametrize("block_size", [2, 4, 16])
def test_a_preemption_at_any_edge_leaves_the_stream_as_it_is(
    mode: str, prefix_cache: str, sampling: dict[str, Any], block_size: int
) -> None:
    """Total length B-1, B, B+1, 2B-1, 2B, 2B+1 when it gives way: the same stream, no token twice, max_tokens still right."""
    for edge in _edges(block_size):
        length = max(1, edge - (2 if edge > 2 else 1))  # a prompt that reaches the edge after a decode or two
        asked = request("a", prompt_of(length), 9, **sampling)
        engine, log = make_engine(60, block_size, policies(mode=mode, prefix_cache=prefix_cache), num_cpu_blocks=60)
        engine.add_request(asked)
        if edge > length:
            _preempt_at(engine, log, "a", edge)
            assert [p.mode for plan in log.plans for p in plan.preempted] == [mode], edge
        run_to_end(engine, 60)
        outputs = log.records["a"].outputs
        assert outputs == reference_outputs([asked])["a"], edge
        assert all(len(tokens) == 9 for tokens, _ in outputs)


@pytest.mark.parametrize("mode", ["recompute", "swap"])
@pytest.mark.parametrize("block_size", [1, 4])
def test_a_preemption_between_any_two_chunks(mode: str, block_size: int) -> None:
    """A prompt of 2B + 3 computed token by token gives way after every number of computed tokens."""
    asked = request("a", prompt_of(2 * block_size + 3), 4)
    for computed in range(1, 2 * block_size + 3):
        engine, log = make_engine(60, block_size, policies(mode=mode), num_cpu_blocks=60, max_num_batched_tokens=1)
        engine.add_request(asked)
        forcer = Forcer(engine)
        for _ in range(computed):
            engine.step()
        assert engine.groups["a"].num_computed_tokens == computed
        forcer.before.append("a")
        run_to_end(engine, 100)
        assert forcer.num_forced == 1
        assert log.records["a"].outputs == reference_outputs([asked])["a"]


# --------------------------------------------------------------------------------- no livelock


@pytest.mark.parametrize("victim", policy_names("preemption"))
@pytest.mark.parametrize("mode", policy_names("preemption/mode"))
@pytest.mark.parametrize("batching", policy_names("batching"))
def test_two_that_need_over_half_each_both_get_done(victim: str, mode: str, batching: str) -> None:
    """N just above one full sequence: somebody always gets on (the oldest is protected), so both end within a bounded time."""
    pair = [request("a", prompt_of(10, 1), 18), request("b", prompt_of(10, 2), 18)]  # 28 tokens are 7 blocks of 4, of 8
    engine, log = make_engine(8, 4, policies(preemption=victim, mode=mode, batching=batching, admission="none"), num_cpu_blocks=8)
    for each in pair:
        engine.add_request(each)
    steps = run_to_end(engine, 200)
    assert log.outputs == reference_outputs(pair)
    assert log.total("num_preemptions") >= 1
    assert steps <= 18 * 2 + 10


@pytest.mark.parametrize("victim", policy_names("preemption"))
def test_two_prompts_that_fit_only_one_at_a_time(victim: str) -> None:
    """Two prompts of 120,000 tokens in chunks of 8,192: the first chunks fit together, the wholes don't."""
    log = Log()
    config = EngineConfig(num_blocks=9_000, max_num_batched_tokens=8_192, max_model_len=130_000)
    engine = Engine(config, policies(preemption=victim, admission=Watermark(0.01)), SimulatedRunner(1000), VirtualClock(), listeners=[log])
    for number in range(2):
        engine.add_request(request(f"r{number}", [(7 * i + number) % 1000 for i in range(120_000)], 8))
    steps = 0
    while engine.has_work:
        engine.step()
        steps += 1
        assert steps < 100
    check_drained(engine)
    assert [record.finish_reason for record in log.records.values()] == ["length", "length"]
    assert log.total("num_preemptions") >= 1
    assert steps <= 2 * 15 + 2 * 8 + 15  # each prompt once, its tokens, and at most one prompt in vain


@pytest.mark.parametrize(("mode", "why"), [("swap", "swapped"), ("recompute", "")])
@pytest.mark.parametrize("batching", ["chunked", "prefill_first", "walkthrough"])
def test_who_gave_way_comes_back_before_anybody_new(mode: str, why: str, batching: str) -> None:
    """new (3 blocks) gave way to old, which holds 4 of 6. A third that would fit in the 2 left, and is shorter, waits behind it."""
    requests = [request("old", prompt_of(8, 1), 8), request("new", prompt_of(8, 2), 8), request("third", prompt_of(3, 3), 1)]
    chosen = policies(mode=mode, admission="none", batching=batching, scheduling="sjf")
    engine, log = make_engine(6, 4, chosen, num_cpu_blocks=9)
    for each in requests[:2]:
        engine.add_request(each)
    while not log.plans or not log.plans[-1].preempted:
        engine.step()
    engine.add_request(requests[2])
    run_to_end(engine, 40)
    order = [a.request_id for plan in log.plans for a in plan.admitted]
    assert order == ["old", "new", "new", "third"]
    if batching == "chunked" and why:
        assert {b.by for plan in log.plans for b in plan.blocked if b.request_id == "third"} == {why}
    assert log.outputs == reference_outputs(requests)


@pytest.mark.parametrize("mode", ["recompute", "swap"])
@pytest.mark.parametrize("in_one_step", [True, False])
def test_those_who_gave_way_come_back_oldest_first(mode: str, in_one_step: bool) -> None:
    """c gives way, then b: b is before c when there is room again."""
    requests = [request("a", prompt_of(5, 1), 8), request("b", prompt_of(5, 2), 8), request("c", prompt_of(5, 3), 8)]
    engine, log = make_engine(20, 4, policies(mode=mode, admission="none"), num_cpu_blocks=20)
    forcer = Forcer(engine)
    for each in requests:
        engine.add_request(each)
    engine.step()
    forcer.after += ["c", "b"] if in_one_step else ["c"]
    engine.step()
    if not in_one_step:
        forcer.before.append("b")  # nobody enters in a step that preempted
        engine.step()
    run_to_end(engine, 40)
    assert [p.request_id for plan in log.plans for p in plan.preempted] == ["c", "b"]
    assert [a.request_id for plan in log.plans for a in plan.admitted] == ["a", "b", "c", "b", "c"]
    assert log.outputs == reference_outputs(requests)


@pytest.mark.parametrize(("batching", "most"), [("chunked", 3), ("static", 3), ("walkthrough", 3), ("prefill_first", 3)])
def test_no_more_sequences_run_than_allowed(batching: str, most: int) -> None:
    """max_num_seqs = 3 counts sequences, also those that a group will only fork: n = 2 beside n = 1, and n = 3 alone."""
    requests = [request(f"r{i}", prompt_of(5, i), 4, n=n, temperature=1.0) for i, n in enumerate([2, 2, 1, 3, 1])]
    engine, log = make_engine(60, 4, policies(batching=batching, admission="none"), max_num_seqs=most, num_cpu_blocks=30)
    serve(engine, requests)
    assert max(stats.num_running_seqs for stats in log.stats) == most
    assert log.plans[0].blocked[0][1:] == ("r1", "max_num_seqs")
    assert log.outputs == reference_outputs(requests)


# ------------------------------------------------------------------- what admission is told


class Probe(AdmissionPolicy):
    """Lets everybody in and notes what it was told."""

    def __init__(self, *lengths: int) -> None:
        self.lengths = lengths
        self.seen: list[tuple[Any, ...]] = []

    def admits(self, entry: EntryView, pool: PoolView, now: Now) -> str:
        need = tuple(entry.blocks_for(n) for n in (entry.first_chunk_tokens, *self.lengths))
        self.seen.append((entry.group.request_id, entry.kind, entry.first_chunk_tokens, need, entry.num_available_blocks))
        return ""


@pytest.mark.parametrize("mode", ["recompute", "swap"])
def test_admission_is_told_what_an_entry_takes(mode: str) -> None:
    """B = 4, N = 20. Hits are not needed anew and not available; four streams share full blocks of what they have in common."""
    probe = Probe(12, 16)
    engine, _ = make_engine(20, 4, policies(admission=probe, mode=mode), num_cpu_blocks=20)
    shared = prompt_of(8, 1)
    serve(engine, [request("first", [*shared, 1], 1)])  # nothing runs: not asked. Blocks 0 and 1 stay cached
    engine.add_request(request("runs", prompt_of(3, 2), 30))
    engine.step()  # holds one block of the 18 free
    engine.add_request(request("hits", [*shared, *prompt_of(3, 3)], 1))
    engine.step()
    engine.add_request(request("four", prompt_of(6, 4), 8, n=4, temperature=1.0))
    engine.step()
    engine.step()
    assert probe.seen == [
        ("hits", "new", 11, (1, 1, 2), 17),  # 20 - 1 of who runs - 2 hits
        ("four", "new", 6, (2, 2 + 1 + 3 * 2, 2 + 2 + 3 * 3), 18),  # own blocks from the partial one on; who runs has grown to 2
    ]
    Forcer(engine).before.append("four")
    engine.step()  # each stream has 7 computed tokens, and 8 in all
    engine.step()
    back = probe.seen[2]
    if mode == "swap":  # 1 shared and 4 own blocks come back, all 8 tokens fit in them
        assert back == ("four", "swapped_in", 8, (5, 5 + 4, 5 + 8), 18)
    else:  # the first block is still cached; the others branch off the first stream at position 6
        assert back == ("four", "resumed", 8, (1 + 3, 2 + 3 * 2, 3 + 3 * 3), 17)
    run_to_end(engine, 60)


# --------------------------------------------------------------------------------------- aborts


def _abort_setup(**seams: Any) -> tuple[Engine, Log]:
    engine, log = make_engine(12, 4, policies(**seams), max_num_batched_tokens=6, num_cpu_blocks=20)
    return engine, log


def _check_gone(engine: Engine, log: Log, name: str) -> None:
    """An abort: recorded once, nothing kept; a second one finds nobody."""
    assert engine.abort(name) is None
    check_invariants(engine)
    run_to_end(engine, 100)
    assert engine.reset_prefix_cache()
    assert (engine.kv.pool.num_free, engine.kv.cpu_pool.num_free) == (12, 20)
    assert all(b.ref_count == 0 for b in engine.kv.pool.blocks)
    assert isinstance(engine.runner, PagedFakeRunner)
    assert set(engine.runner.known_sequences) <= set(engine.scheduler.released)


@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize("num_steps", range(9))
def test_an_abort_after_any_number_of_steps(n: int, num_steps: int) -> None:
    """Waiting, between prefill chunks, decoding, after the end, twice: afterwards all blocks are free and the other is served."""
    both = [request("a", prompt_of(14, 1), 4, n=n, temperature=1.0), request("b", prompt_of(9, 2), 4)]
    engine, log = _abort_setup()
    for each in both:
        engine.add_request(each)
    for _ in range(num_steps):
        engine.step()
    whole = reference_outputs(both)
    record = engine.abort("a")
    if num_steps >= 6:  # chunks of 6, 6, 2, then 3 decodes: it ended with the sixth step
        assert record is None
        assert log.records["a"].outputs == whole["a"]
    else:
        assert record is not None
        assert record.finish_reason == "abort"
        assert record.num_output_tokens == n * max(0, num_steps - 2)
        assert all(tokens == whole["a"][i][0][: len(tokens)] for i, (tokens, _) in enumerate(record.outputs))
    _check_gone(engine, log, "a")
    assert log.records["b"].outputs == whole["b"]


@pytest.mark.parametrize("mode", ["recompute", "swap"])
@pytest.mark.parametrize("sampling", [{}, {"n": 3, "temperature": 1.0}, {"beam_width": 3}], ids=["greedy", "n=3", "beams"])
def test_an_abort_while_preempted(mode: str, sampling: dict[str, Any]) -> None:
    """Swapped out, or waiting to be computed again."""
    both = [request("old", prompt_of(5, 1), 12), request("new", prompt_of(6, 2), 9, **sampling)]
    engine, log = _abort_setup(mode=mode)
    forcer = Forcer(engine)
    for each in both:
        engine.add_request(each)
    for _ in range(4):
        engine.step()
    forcer.after.append("new")
    engine.step()
    assert [p.mode for p in log.plans[-1].preempted] == [mode]
    assert engine.groups["new"].status == ("swapped" if mode == "swap" else "waiting")
    record = engine.abort("new")
    assert record is not None
    assert record.finish_reason == "abort"
    _check_gone(engine, log, "new")
    assert log.records["old"].outputs == reference_outputs(both)["old"]


def test_an_abort_in_the_step_that_ends_the_request_comes_too_late() -> None:
    """A client leaves at the very time at which its last token is there: the request has ended by itself, once."""
    asked = request("a", prompt_of(5), 3)
    asked.abort_at_s = 0.03  # three steps of 10 ms
    engine, log = make_engine(12, 4)
    workload = FixedWorkload([asked, request("b", prompt_of(5, 2), 5)])
    workload.start(WorkloadContext(None, 1000, 8192, 0))
    drive(engine, workload)
    assert log.records["a"].finish_reason == "length"
    early, early_log = make_engine(12, 4)
    asked.abort_at_s = 0.02
    workload = FixedWorkload([asked, request("b", prompt_of(5, 2), 5)])
    workload.start(WorkloadContext(None, 1000, 8192, 0))
    drive(early, workload)
    assert early_log.records["a"].finish_reason == "abort"
    assert early_log.records["a"].outputs == ((log.records["a"].outputs[0][0][:2], "abort"),)
    assert early_log.records["b"].outputs == log.records["b"].outputs
    check_drained(early)


# --------------------------------------------------------------- a victim scheduled in this step


class Named(PreemptionPolicy):
    """Always the request of one name."""

    def __init__(self, name: str) -> None:
        super().__init__(Recompute())
        self.name = name

    def victim(self, candidates: Sequence[GroupView], now: Now) -> GroupView:
        return next(g for g in candidates if g.request_id == self.name)


def test_a_victim_scheduled_in_this_step_is_taken_out_of_it() -> None:
    """Of a, b, c, d (a budget of 6 tokens), b is scheduled and then gives way to c: its token goes to d's chunk, nobody runs twice."""
    engine, log = make_engine(10, 4, policies(preemption=Named("b"), admission="none"), max_num_batched_tokens=6)
    requests = [request("a", prompt_of(1, 1), 12), request("b", prompt_of(20, 2), 12), request("c", prompt_of(3, 3), 6),
                request("d", prompt_of(12, 4), 4)]  # fmt: skip
    for each in requests[:2]:
        engine.add_request(each)
    for _ in range(4):
        engine.step()
    for each in requests[2:]:
        engine.add_request(each)
    for _ in range(3):
        engine.step()
    assert log.plans[5].scheduled == (ScheduledSeq(0, 5, 1), ScheduledSeq(1, 21, 1), ScheduledSeq(2, 3, 1), ScheduledSeq(3, 1, 3, 0))
    assert [p.request_id for p in log.plans[6].preempted] == ["b"]
    assert log.plans[6].scheduled == (ScheduledSeq(0, 6, 1), ScheduledSeq(2, 4, 1), ScheduledSeq(3, 4, 4, 0))
    assert log.plans[6].released == (1,)
    run_to_end(engine, 100)
    assert log.outputs == reference_outputs(requests)


# --------------------------------------------------------------------------------- never idle


@pytest.mark.parametrize("batching", policy_names("batching"))
@pytest.mark.parametrize("admission", policy_names("admission"))
@pytest.mark.parametrize("layout", policy_names("layout"))
def test_something_is_scheduled_whenever_something_can_be(batching: str, admission: str, layout: str) -> None:
    """Something waits, nothing runs: something enters (or ends because it can't ever go on). No step does nothing."""
    draw = Random(f"{batching} {admission} {layout}")
    seen: Counter[str] = Counter()
    for _ in range(6):
        size = draw.choice([1, 3, 4])
        limits: dict[str, Any] = {"max_model_len": 3 * size} if layout != "paged" else {}
        seams = {"prefix_cache": "none"} if layout != "paged" else {}
        seams["mode"] = draw.choice(policy_names("preemption/mode"))
        limits |= {"num_cpu_blocks": draw.choice([0, 20]), "max_num_batched_tokens": draw.choice([3, 9])}
        chosen = policies(batching=batching, admission=admission, layout=layout, **seams)
        engine, log = make_engine(draw.randint(4, 9), size, chosen, **limits)
        longest = 3 * size - 1 if layout != "paged" else 4 * size
        requests = [request(f"r{i}", prompt_of(draw.randint(1, longest), i), draw.randint(1, 6)) for i in range(6)]
        for each in requests:
            engine.add_request(each)
        for _ in range(step_bound(requests)):
            if not engine.has_work:
                break
            idle = not engine.scheduler.running and not engine.scheduler.swapped
            result = engine.step()
            check_invariants(engine)
            assert result.plan.scheduled or result.plan.ended
            if idle:
                seen["idle"] += 1
                assert result.plan.admitted or result.plan.ended
        assert not engine.has_work
        seen["blocked"] += sum(bool(plan.blocked) for plan in log.plans)
    assert seen["idle"] >= 6
    assert seen["blocked"] >= 1


class Lazy(BatchingPolicy):
    """Serves nobody."""

    def phases(self, queues: QueuesView, now: Now) -> Sequence[Sequence[str]]:
        return ((),)

    def chunk(self, num_uncomputed: int, budget: int, max_num_batched_tokens: int) -> int:
        return num_uncomputed


def test_a_policy_that_stalls_is_named() -> None:
    """A batching policy that lets everybody wait for ever is an error, not a hang."""
    engine, _ = make_engine(9, 4, policies(batching=Lazy()))
    engine.add_request(request("a", [1], 1))
    with pytest.raises(IllegalDecision, match="Lazy"):
        engine.step()


def test_every_request_is_served_once_under_every_scheduling_policy() -> None:
    """No request is skipped or run twice, whatever the order."""
    requests = [request(f"r{i}", prompt_of(3 + 5 * i % 11, i), 3, priority=i % 3, arrival_s=0.1 * i) for i in range(8)]
    wanted = reference_outputs(requests)
    for name in policy_names("scheduling"):
        engine, log = make_engine(8, 4, policies(scheduling=name))
        serve(engine, requests)
        assert log.outputs == wanted


@pytest.mark.parametrize(("batching", "most"), [("static", 52), ("walkthrough", 52), ("chunked", 7), ("prefill_first", 7), ("sarathi", 7)])
def test_whom_max_num_batched_tokens_limits(batching: str, most: int) -> None:
    """Four prompts of 13 tokens. Static and walkthrough batching know no limit of tokens: more samples than it may decode."""
    engine, log = make_engine(40, 4, policies(batching=batching), max_num_batched_tokens=7)
    serve(engine, [request(str(i), prompt_of(13, i), 3) for i in range(4)])
    assert max(sum(s.num_new_tokens for s in plan.scheduled) for plan in log.plans) == most
    assert engine.policies.batching.has_token_limit is (most == 7)
    nine = request("nine", prompt_of(3), 2, n=9)
    if most == 7:
        with pytest.raises(UserError, match="allow 7"):
            engine.add_request(nine)
    else:
        serve(engine, [nine])
        assert log.outputs["nine"] == reference_outputs([nine])["nine"]
