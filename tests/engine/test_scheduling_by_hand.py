"""Parts of scheduling and committing by hand: the plan in the making, the queue, who gives way, what a step counts."""

from __future__ import annotations

from collections.abc import Sequence as Seqs
from typing import Any

import pytest
from engine_support import Forcer, make_engine, policies, prompt_of, request, run_to_end

from kvlab.cache.table import BlockTable
from kvlab.engine.commit import Committer, StepCounts
from kvlab.engine.entry import Entry
from kvlab.engine.giving_way import GivingWay
from kvlab.engine.plan_builder import PlanBuilder
from kvlab.engine.prefixes import Prefixes
from kvlab.engine.queue import WaitingQueue
from kvlab.engine.runners.base import Ready
from kvlab.engine.runners.simulated import SimulatedRunner
from kvlab.engine.sequence import Sequence, SequenceGroup
from kvlab.policies.base import PreemptionPolicy, SchedulingPolicy
from kvlab.policies.eviction import Lru
from kvlab.policies.preemption.mode import Recompute
from kvlab.policies.scheduling import Fcfs
from kvlab.types import BlockTransfer, BlockView, GroupView, Now, Outcome, Plan, Request, SamplingParams, TokenLogprobs

NOW = Now(3, 0.0)


def group_of(group_id: int, tokens: Seqs[Seqs[int]], num_prompt: int, n: int = 1) -> SequenceGroup:
    """A request whose sequences have these tokens, of which the first `num_prompt` are the prompt."""
    sampling = SamplingParams(max_tokens=20, n=n, temperature=1.0, stop_token_ids=(99,))
    group = SequenceGroup(group_id, Request(f"r{group_id}", list(tokens[0][:num_prompt]), sampling), 0, (), 20)
    group.seqs += [Sequence(10 * group_id + i, group, i, list(each)) for i, each in enumerate(tokens)]
    return group


# ------------------------------------------------------------------ the plan in the making


def test_the_budget_of_who_is_taken_out_comes_back() -> None:
    build = PlanBuilder(NOW, 10, [], [])
    first, second = group_of(0, [[1, 2, 3, 4]], 4), group_of(1, [[1, 2, 3]], 3)
    build.add(first, [(first.seqs[0], 4, 1)])
    build.add(second, [(second.seqs[0], 3, 1)])
    assert build.budget == 3
    build.take_out(first)
    assert (build.budget, list(build.work)) == (7, [second])
    build.take_out(first)
    assert build.budget == 7


def test_a_return_from_swap_is_undone_with_its_transfers() -> None:
    """Blocks 4 and 5 came back for group 0, block 6 for group 1: group 0 gives way in the same step."""
    build = PlanBuilder(NOW, 10, [], [])
    back = group_of(0, [[1, 2, 3, 4]], 4)
    back.seqs[0].table = BlockTable([4, 5], 2)
    build.swap_in = [BlockTransfer("cpu", i, "gpu", block_id, 2) for i, block_id in enumerate((4, 6, 5))]
    build.stay_out(back)
    assert [transfer.destination for transfer in build.swap_in] == [6]


def test_a_runner_is_not_told_to_forget_what_it_was_not_told_of() -> None:
    """Sequence 10 was to be started by this plan, 20 is known to the runner, 30 has no table."""
    started, known, without = (group_of(i, [[1, 2]], 2).seqs[0] for i in (1, 2, 3))
    started.table, known.table = BlockTable([0], 2), BlockTable([1], 2)
    build = PlanBuilder(NOW, 10, [], [started])
    for seq in (started, known, without):
        build.forget(seq)
    assert (build.released, build.starts) == ([20], {})


def test_a_fork_that_ends_with_its_first_token_is_never_started() -> None:
    """n = 2, one token each: both sequences end in the commit that made the second. The runner knows the first alone."""
    engine, log = make_engine(20, 4, policies(prefix_cache="none"), runner=SimulatedRunner(97))
    engine.add_request(request("a", prompt_of(6), 1, n=2, temperature=1.0))
    engine.step()
    engine.add_request(request("b", prompt_of(5), 2))
    engine.step()
    assert [start.seq_id for start in log.plans[1].starts] == [2]
    assert log.plans[1].released == (0,)


# ------------------------------------------------------------------ the queue


def test_whoever_gave_way_last_goes_first() -> None:
    a, b, c = (group_of(i, [[1, 2]], 2) for i in range(3))
    queue = WaitingQueue(Fcfs(), Prefixes(make_engine(4, 4)[0].kv))
    queue.add(c, NOW)
    queue.add_preempted(a, NOW)
    queue.add_preempted(b, NOW)
    assert [group.request_id for group in queue] == ["r1", "r0", "r2"]


def test_keys_that_change_are_taken_anew_in_each_step() -> None:
    class Turns(SchedulingPolicy):
        is_static = False

        def key(self, group: GroupView, now: Now) -> tuple[float, ...]:
            return (group.group_id * (-1) ** now.step,)

    queue = WaitingQueue(Turns(), Prefixes(make_engine(4, 4)[0].kv))
    groups = [group_of(i, [[1, 2]], 2) for i in range(3)]
    for group in groups:
        queue.add(group, Now(0, 0.0))
    assert [queue.head(Now(step, 0.0)) for step in (0, 1, 2, 3)] == [groups[0], groups[2], groups[0], groups[2]]


# ------------------------------------------------------------------ who gives way


class Hears(Lru):
    def __init__(self) -> None:
        super().__init__()
        self.heard: list[tuple[int, bool]] = []

    def release(self, block: BlockView, now: Now, preempted: bool) -> None:
        super().release(block, now, preempted)
        self.heard.append((block.block_id, preempted))


@pytest.mark.parametrize(("num_cpu_blocks", "mode"), [(0, "recompute"), (8, "swap")])
def test_a_plan_says_what_a_victim_had_and_how_it_gave_way(num_cpu_blocks: int, mode: str) -> None:
    """A prompt of 6 and two tokens computed: 8 tokens in two blocks of 4. Swap is wanted; without swap space it is recomputed. Its
    published blocks are released as a preemption's."""
    hears = Hears()
    engine, log = make_engine(20, 4, policies(mode="swap", eviction=hears), num_cpu_blocks=num_cpu_blocks)
    engine.add_request(request("a", prompt_of(6), 9))
    for _ in range(3):
        engine.step()
    Forcer(engine).before.append("a")
    engine.step()
    (preempted,) = log.plans[3].preempted
    assert (preempted.request_id, preempted.mode, preempted.wanted_mode) == ("a", mode, "swap")
    assert (preempted.num_computed_tokens, preempted.num_blocks) == (8, 2)
    assert hears.heard == [(1, True), (0, True)]


def test_each_sequence_of_a_group_that_comes_back_joins_the_earlier_one_most_like_it() -> None:
    """The third shares 4 tokens with the first and 6 with the second; the fourth is the first's beginning, and needs a token of its own."""
    group = group_of(0, [[1, 2, 3, 4, 5, 6, 7, 8], [1, 2, 3, 4, 9, 9, 9], [1, 2, 3, 4, 9, 9, 8], [1, 2, 3, 4, 5, 6]], 3, n=4)
    GivingWay._plan_reattachment(group)
    first, second, _, _ = group.seqs
    assert [(seq.attach_to, seq.attach_at) for seq in group.seqs] == [(None, 0), (first, 4), (second, 6), (first, 5)]


def test_blocks_of_a_group_that_enters_are_shared_up_to_where_it_branches() -> None:
    """Three samples of a prompt of 6, B = 4: for 7 tokens each, two blocks and twice one more (the second block is copied); for 9, three
    and twice two; for 6 the prompt's two."""
    kv = make_engine(20, 4)[0].kv
    entry = Entry(group_of(0, [[1, 2, 3, 4, 5, 6]], 6, n=3), "new", [], 6, [], kv)
    assert [entry.blocks_for(num_tokens) for num_tokens in (6, 7, 9)] == [2, 4, 7]


class Watches(PreemptionPolicy):
    """The first candidate goes; who the candidates were is kept."""

    def __init__(self, protect_oldest: bool) -> None:
        super().__init__(Recompute(), protect_oldest)
        self.seen: list[list[str]] = []

    def victim(self, candidates: Seqs[GroupView], now: Now) -> GroupView:
        self.seen.append([group.request_id for group in candidates])
        return candidates[0]


@pytest.mark.parametrize(("protect_oldest", "first"), [(True, ["b", "c"]), (False, ["a", "b", "c"])])
def test_the_oldest_is_no_candidate_where_it_is_protected(protect_oldest: bool, first: list[str]) -> None:
    """Three prompts of 4 fill three blocks of 4; each needs another for its second token."""
    watches = Watches(protect_oldest)
    engine, _ = make_engine(3, 4, policies(preemption=watches, prefix_cache="none"))
    for i, name in enumerate("abc"):
        engine.add_request(request(name, prompt_of(4, i), 3))
    engine.step()
    engine.step()
    assert watches.seen[0] == first


def test_whoever_comes_back_keeps_its_age() -> None:
    engine, _ = make_engine(20, 4, policies(prefix_cache="none"))
    for i, name in enumerate("ab"):
        engine.add_request(request(name, prompt_of(4, i), 9))
    engine.step()
    assert [engine.groups[name].admission_order for name in "ab"] == [0, 1]
    forcer = Forcer(engine)
    forcer.before.append("a")
    for _ in range(3):
        engine.step()
    assert [group.request_id for group in engine.scheduler.running] == ["b", "a"]
    assert [engine.groups[name].admission_order for name in "ab"] == [0, 1]


@pytest.mark.parametrize("reads", [False, True])
def test_swap_space_that_is_read_in_a_step_is_not_written_in_it(reads: bool) -> None:
    """Blocks go out before others come back: a victim of a step in which somebody comes back from swap is computed again."""
    engine, _ = make_engine(20, 4, policies(mode="swap", prefix_cache="none"), num_cpu_blocks=8)
    engine.add_request(request("a", prompt_of(6), 9))
    engine.step()
    build = PlanBuilder(Now(1, 0.0), 100, [], [])
    if reads:
        build.swap_in = [BlockTransfer("cpu", 7, "gpu", 19, 4)]
    engine.scheduler.giving_way.preempt(engine.groups["a"], build)
    (preempted,) = build.preempted
    assert (preempted.mode, preempted.wanted_mode, len(build.swap_out)) == (("recompute", "swap", 0) if reads else ("swap", "swap", 2))


def test_who_has_entered_in_a_step_is_not_displaced_in_it() -> None:
    class Asks(SchedulingPolicy):
        preempted_first = False

        def __init__(self) -> None:
            self.seen: list[list[str]] = []

        def key(self, group: GroupView, now: Now) -> tuple[float, ...]:
            return (group.group_id,)

        def displaces(self, head: GroupView, running: Seqs[GroupView], now: Now) -> GroupView | None:
            self.seen.append([group.request_id for group in running])
            return None

    asks = Asks()
    engine, _ = make_engine(20, 4, policies(scheduling=asks, prefix_cache="none"), max_num_seqs=2)
    engine.add_request(request("a", prompt_of(4, 0), 9))
    engine.step()
    for i, name in enumerate("bc", start=1):
        engine.add_request(request(name, prompt_of(4, i), 9))
    engine.step()  # b enters, c finds no place: a may be displaced, b not
    engine.step()
    assert asks.seen == [["a"], ["a", "b"]]


# ------------------------------------------------------------------ what a step counts


@pytest.mark.parametrize(
    ("highest", "first", "end", "prompt_computed", "generation", "recomputed"),
    [(0, 0, 6, 6, 0, 0), (0, 4, 8, 2, 2, 0), (5, 3, 8, 3, 2, 2), (9, 7, 9, 0, 2, 2), (6, 6, 7, 0, 1, 0)],
)
def test_tokens_of_a_step(highest: int, first: int, end: int, prompt_computed: int, generation: int, recomputed: int) -> None:
    """A prompt of 6; tokens `first` to `end` are computed in this step, `highest` had been before."""
    seq = group_of(0, [list(range(1, 10))], 6).seqs[0]
    seq.num_highest = highest
    counts = StepCounts()
    Committer._count(seq, first, end, counts)
    assert (counts.prompt_computed, counts.generation, counts.recomputed) == (prompt_computed, generation, recomputed)
    assert (seq.group.num_computed_total, seq.group.num_recomputed, seq.num_highest) == (end - first, recomputed, max(highest, end))


def test_tokens_accepted_behind_one_that_ends_the_sequence_are_dropped() -> None:
    engine, _ = make_engine(20, 4, policies(prefix_cache="none"), runner=SimulatedRunner(97))
    engine.add_request(request("a", prompt_of(6), 9, stop_token_ids=(50,)))
    engine.step()
    seq, counts = engine.groups["a"].seqs[0], StepCounts()
    before = seq.output_token_ids
    engine.committer._accept(seq, (7, 50, 8), Outcome(1, ((7, 50, 8),)), 2.0, counts)
    assert (seq.output_token_ids, seq.finish_reason, counts.output) == ((*before, 7, 50), "stop", 2)


def test_logprobs_of_samples_go_to_the_sequence_of_each() -> None:
    class Says(SimulatedRunner):
        def submit(self, plan: Plan) -> Ready:
            outcome = super().submit(plan).result()
            return Ready(outcome._replace(logprobs={0: (TokenLogprobs(-1.0), TokenLogprobs(-2.0), TokenLogprobs(-3.0))}))

    engine, _ = make_engine(20, 4, policies(prefix_cache="none"), runner=Says(97))
    engine.add_request(request("a", prompt_of(6), 4, n=3, temperature=1.0))
    engine.step()
    assert [[each.logprob for each in seq.logprobs] for seq in engine.groups["a"].seqs] == [[-1.0], [-2.0], [-3.0]]


def test_a_fork_whose_parent_ends_at_once_has_computed_the_prompt_before() -> None:
    """n = 2 over a prompt of 6. The first sample is a stop token; the second, alone now, gives way before it has computed anything of its
    own: the six tokens that it took over are computed again."""
    sampling: dict[str, Any] = {"n": 2, "temperature": 1.0, "seed": 5}
    engine, log = make_engine(20, 4, policies(prefix_cache="none"), runner=SimulatedRunner(97))
    engine.add_request(request("a", prompt_of(6), 3, **sampling))
    run_to_end(engine, 9)
    (first, *_), (second, *_) = (ids for ids, _ in log.outputs["a"])
    assert first != second
    engine, log = make_engine(20, 4, policies(prefix_cache="none"), runner=SimulatedRunner(97))
    engine.add_request(request("a", prompt_of(6), 3, stop_token_ids=(first,), **sampling))
    engine.step()
    Forcer(engine).before.append("a")
    run_to_end(engine, 9)
    record = log.records["a"]
    assert (record.num_preemptions, record.num_wasted_tokens, log.total("recomputed_tokens")) == (1, 6, 6)


def test_a_sequence_that_ends_as_it_comes_back_lets_the_others_branch_off_first() -> None:
    """n = 2, two of three tokens are there when both give way. The first computes everything again in one step and samples its last
    token: it ends in the commit in which the second takes over the prompt from it."""
    engine, log = make_engine(20, 4, policies(prefix_cache="none"), runner=SimulatedRunner(97))
    sampling: dict[str, Any] = {"n": 2, "temperature": 1.0, "seed": 5}
    engine.add_request(request("undisturbed", prompt_of(6), 3, **sampling))
    run_to_end(engine, 9)
    engine.add_request(request("a", prompt_of(6), 3, **sampling))
    engine.step()
    engine.step()
    Forcer(engine).before.append("a")
    run_to_end(engine, 9)
    assert log.records["a"].num_preemptions == 1
    assert log.outputs["a"] == log.outputs["undisturbed"]
    assert [len(ids) for ids, _ in log.outputs["a"]] == [3, 3]
