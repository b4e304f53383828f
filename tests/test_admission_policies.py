"""The admission policies that look ahead or learn: their sums, step by step, and what they are for."""

from __future__ import annotations

from collections.abc import Iterator
from random import Random
from types import SimpleNamespace
from typing import Any

import pytest

from kvlab.engine.config import EngineConfig, PolicySet
from kvlab.engine.engine import Engine
from kvlab.engine.runners.simulated import SimulatedRunner
from kvlab.policies.admission import Adaptive, ExpectedOutput, PastFuture, Unlimited
from kvlab.policies.admission.past_future import expected_peak
from kvlab.policies.registry import by_name
from kvlab.types import Now, Request, SamplingParams, UserError

POOL = SimpleNamespace(num_blocks=1000, block_size=16)


def group(number: int = 0, **fields: Any) -> Any:
    """A group; what a test doesn't name is 0 or 1."""
    defaults: dict[str, Any] = {"group_id": number, "num_sequences": 1, "num_prompt_tokens": 16, "max_tokens": 100, "num_output_tokens": 0,
                                "num_tokens": 16, "num_blocks": 1, "admitted_step": 0}  # fmt: skip
    return SimpleNamespace(**{**defaults, **fields})


def entry(newcomer: Any, num_available: int, running: tuple[Any, ...] = ()) -> Any:
    """It asks, in a pool of blocks of 16, with nothing cached."""
    return SimpleNamespace(group=newcomer, kind="new", first_chunk_tokens=newcomer.num_tokens, num_available_blocks=num_available,
                           running=running, blocks_for=lambda num_tokens: -(-num_tokens // 16))  # fmt: skip


def at(step: int) -> Now:
    return Now(step, float(step))


# ------------------------------------------------------------------------------------------------------- expected output


@pytest.mark.parametrize(("conservativeness", "first", "last"), [(1.0, 0.7, 0.098), (0.5, 0.35, 0.049), (2.0, 1.0, 0.14)])
def test_the_ratio_falls_to_its_minimum_in_600_steps(conservativeness: float, first: float, last: float) -> None:
    policy = ExpectedOutput(schedule_conservativeness=conservativeness)
    decoding = group(num_output_tokens=5)
    assert policy.ratio == pytest.approx(first)
    for step in range(300):
        policy.computed(decoding, 1, 1, at(step))
    assert policy.ratio == pytest.approx((first + last) / 2)
    for step in range(300, 700):
        policy.computed(decoding, 1, 1, at(step))
    assert policy.ratio == pytest.approx(last)


def test_the_ratio_falls_once_a_step_and_only_where_somebody_decodes() -> None:
    policy = ExpectedOutput(decay_steps=10)  # 0.0602 a step
    policy.computed(group(0), 16, 0, at(0))  # a chunk
    policy.computed(group(1, num_output_tokens=1), 16, 1, at(1))  # a prompt and its first token
    assert policy.ratio == pytest.approx(0.7)
    for number in range(3):
        policy.computed(group(number, num_output_tokens=2), 1, 1, at(2))
    assert policy.ratio == pytest.approx(0.6398)


def test_after_a_preemption_the_ratio_is_what_the_others_have_reached() -> None:
    """Two go on, with 10 of 40 and 30 of 160 tokens: (10 + 20 + 30 + 20) / 200 = 0.4. With one more gone, (10 + 20) / 40 = 0.75."""
    policy = ExpectedOutput()
    running = [group(0, num_output_tokens=10, max_tokens=40), group(1, num_output_tokens=30, max_tokens=160), group(2, max_tokens=50)]
    for each in running:
        policy.arrived(each, SimpleNamespace(), at(0))
        policy.entered(each, "new", at(0))
    policy.preempted(running[2], "recompute", at(5))
    assert policy.ratio == pytest.approx(0.4)
    policy.computed(running[0], 1, 1, at(5))  # the same step: it does not fall in it
    assert policy.ratio == pytest.approx(0.4)
    policy.preempted(running[1], "swap", at(6))
    assert policy.ratio == pytest.approx(0.75)
    running[0].num_output_tokens = 35
    policy.entered(running[1], "resumed", at(7))
    policy.preempted(running[1], "recompute", at(8))
    assert policy.ratio == 1.0  # (35 + 20) / 40, at most 1
    for each in running:
        policy.ended(each, at(9))
    assert policy.ratio == pytest.approx(0.7)  # nobody is left: anew


def test_what_is_reserved_for_a_request_is_clipped() -> None:
    """100 prompt tokens and max_tokens 9,000: 4,196 tokens are 263 blocks. A running one with 9,000 to come counts 0.7 * 4,096 tokens:
    2,867.2, so 263 * 16 + 2,867.2 = 7,075.2 tokens, 442.2 blocks."""
    newcomer = group(1, num_prompt_tokens=100, num_tokens=100, max_tokens=9000, num_blocks=0)
    running = group(0, max_tokens=9000)
    answers = [ExpectedOutput().admits(entry(newcomer, n), POOL, at(3)) for n in (262, 263)]
    assert answers == ["expected_output", ""]
    answers = [ExpectedOutput().admits(entry(newcomer, n, (running,)), POOL, at(3)) for n in (6, 442, 443)]
    assert answers == ["blocks", "expected_output", ""]


def test_who_entered_in_the_same_step_and_prompts_in_chunks_count_in_full() -> None:
    """A newcomer of 16 + 16 tokens: 32. Running: a prompt that holds one of its 3 blocks, so 32 tokens are to come, and 100 * 0.7 = 70 of
    output, or all 100 in the step of its entry: 134 tokens (8.4 blocks), or 164 (10.25)."""
    newcomer = group(1, max_tokens=16)
    running = group(0, num_prompt_tokens=48, num_tokens=48, num_blocks=1, admitted_step=4)
    later = [ExpectedOutput().admits(entry(newcomer, n, (running,)), POOL, at(5)) for n in (8, 9)]
    same = [ExpectedOutput().admits(entry(newcomer, n, (running,)), POOL, at(4)) for n in (10, 11)]
    assert (later, same) == (["expected_output", ""], ["expected_output", ""])


# -------------------------------------------------------------------------------------------------------------- adaptive


def test_the_reserve_follows_the_preemptions() -> None:
    """Intervals of 10 steps, target 0.2, from 0.02 by a factor of 2 up and 0.01 down. Entered / preempted in them: 2 / 1 raises to 0.04;
    10 / 2 is the target, kept; 0 / 1 raises to 0.08; 3 / 0 and none at all lower to 0.07, 0.06; then at most 0.1, at least 0.05."""
    policy = Adaptive(initial=0.02, minimum=0.02, maximum=0.1, target=0.2, interval=10)

    def interval(number: int, num_entered: int, num_preempted: int) -> float:
        step = 10 * number
        for _ in range(num_entered):
            policy.entered(group(), "new", at(step))
        for _ in range(num_preempted):
            policy.preempted(group(admitted_step=step), "recompute", at(step + 9))
        policy.admits(entry(group(), 1000), POOL, at(step + 10))
        return round(policy.fraction, 3)

    events = [(2, 1), (10, 2), (0, 1), (3, 0), (0, 0), (1, 1), (1, 1), (0, 0)]
    assert [interval(n, *counts) for n, counts in enumerate(events)] == [0.04, 0.04, 0.08, 0.07, 0.06, 0.1, 0.1, 0.09]
    assert policy.headroom_blocks(POOL) == 90
    policy.admits(entry(group(), 1000), POOL, at(1000))
    assert policy.fraction == 0.02  # ninety quiet intervals later, at its minimum


def test_a_victim_that_a_lower_reserve_let_in_does_not_count() -> None:
    """Raised at step 10; those that entered before and give way after it say nothing about the new reserve."""
    policy = Adaptive(initial=0.0, interval=10, target=0.05)
    policy.preempted(group(admitted_step=0), "recompute", at(5))
    policy.preempted(group(admitted_step=0), "recompute", at(15))
    policy.admits(entry(group(), 1000), POOL, at(20))
    assert policy.fraction == 0.0  # 0.01 from step 10 on, and 0.01 less from step 20 on
    policy.preempted(group(admitted_step=20), "recompute", at(25))
    policy.admits(entry(group(), 1000), POOL, at(30))
    assert policy.fraction == pytest.approx(0.01)


# ----------------------------------------------------------------------------------------------------------- past future


def test_the_expected_peak() -> None:
    """(remaining, held): a (5, 10), b (3, 4), c (1, 7). When c ends: 21 + 3; when b ends: 14 + 2 * 3; when a ends: 10 + 5."""
    assert expected_peak([(3, 4, 1), (5, 10, 1), (1, 7, 1)]) == 24
    assert expected_peak([(3, 4, 1), (50, 10, 1), (1, 7, 1)]) == 60  # a alone, at its end
    assert expected_peak([(5, 10, 4)]) == 30  # four sequences grow
    assert expected_peak([(0, 10, 1), (0, 5, 1)]) == 15


def test_the_expected_peak_is_what_a_simulation_sees() -> None:
    """Random groups, grown token by token."""
    draw = Random(5)
    for _ in range(200):
        groups = [(draw.randint(0, 12), draw.randint(1, 30), draw.choice((1, 1, 3))) for _ in range(draw.randint(1, 8))]
        seen = [sum(held + t * n for remaining, held, n in groups if remaining >= t) for t in range(13)]
        assert expected_peak(groups) == max(seen)


def _remember(policy: PastFuture, lengths: list[int]) -> None:
    for number, length in enumerate(lengths, start=100):
        policy.arrived(group(number), SimpleNamespace(), at(0))
        policy.computed(group(number), 1, length, at(0))
        policy.ended(group(number), at(0))


def test_predictions_are_draws_from_longer_ones_that_ended() -> None:
    """Remembered 3, 10, 10, 20. Who has 10 can only become 20; who has 20 or more is expected to reach its limit; the limit bounds all."""
    policy = PastFuture(window=4)
    _remember(policy, [999, 3, 10, 10, 20])  # the first has left the window
    quantiles = (0.0, 0.24, 0.25, 0.74, 0.75, 0.99)
    assert [policy._remaining(group(), q) for q in quantiles] == [3, 3, 10, 10, 20, 20]
    assert [policy._remaining(group(num_output_tokens=10), q) for q in quantiles] == [10] * 6
    assert policy._remaining(group(num_output_tokens=20), 0.0) == 80
    assert policy._remaining(group(max_tokens=8), 0.99) == 8
    assert PastFuture()._remaining(group(num_output_tokens=1), 0.5) == 99


def test_four_samples_are_remembered_by_their_mean() -> None:
    policy = PastFuture()
    four = group(1, num_sequences=4)
    policy.arrived(four, SimpleNamespace(), at(0))
    for step in range(3):
        policy.computed(four, 4, 4, at(step))
    policy.computed(four, 2, 2, at(3))
    policy.ended(four, at(3))
    _remember(policy, [0])  # an abort before the first token says nothing
    assert policy._sorted == [4]  # 14 tokens of 4 sequences: 3.5, rounded to even


def test_asking_twice_changes_nothing_and_seeds_differ() -> None:
    policy, other = PastFuture(reserved=0.0), PastFuture(reserved=0.0, seed=1)
    for each in (policy, other):
        _remember(each, list(range(1, 100)))
    running = tuple(group(number) for number in range(10))
    pool = SimpleNamespace(num_blocks=42, block_size=16)  # about the median peak of these eleven

    def answers(asked: PastFuture) -> list[str]:
        return [asked.admits(entry(group(50, num_blocks=0), 1000, running), pool, at(step)) for step in range(60)]

    first = answers(policy)
    assert first == answers(policy)
    assert set(first) == {"", "past_future"}
    assert answers(other) != first


# -------------------------------------------------------------------------------------------------------- in the engine


def _serve(admission: Any, num_blocks: int = 160) -> Iterator[int]:
    """80 requests of 32 tokens in and 40 to 120 out, thirty alive at a time, B = 8; preemptions of each step."""
    draw = Random(1)
    waiting = [Request(f"{n}", [n] * 32, SamplingParams(max_tokens=draw.randint(40, 120), ignore_eos=True)) for n in range(80)]
    config = EngineConfig(num_blocks, 8, max_model_len=400)
    engine = Engine(config, PolicySet(admission=admission, prefix_cache=by_name("prefix_cache", "none")), SimulatedRunner(500))
    while waiting or engine.has_work:
        while waiting and len(engine.groups) < 30:
            engine.add_request(waiting.pop(0))
        yield len(engine.step().plan.preempted)


def test_they_prevent_preemptions_that_others_let_happen() -> None:
    """On one load. reserve_all prevents all of them, at the price of more steps than any of the others."""
    counts, steps = {}, {}
    for name, policy in {
        "none": Unlimited(), "adaptive": Adaptive(initial=0.0, interval=20), "expected_output": ExpectedOutput(),
        "past_future": PastFuture(), "reserve_all": by_name("admission", "reserve_all"),
    }.items():  # fmt: skip
        preemptions = list(_serve(policy))
        counts[name], steps[name] = sum(preemptions), len(preemptions)
    assert counts["none"] >= 60
    assert max(counts["adaptive"], counts["expected_output"], counts["past_future"]) < 0.7 * counts["none"]
    assert counts["reserve_all"] == 0
    assert steps["reserve_all"] == max(steps.values())


@pytest.mark.parametrize(
    ("policy", "parameters", "named"),
    [
        (ExpectedOutput, {"initial_ratio": -0.1}, "initial_ratio"), (ExpectedOutput, {"min_ratio_factor": 1.1}, "min_ratio_factor"),
        (ExpectedOutput, {"decay_steps": 0}, "decay_steps"), (ExpectedOutput, {"clip_max_new_tokens": 0}, "clip_max_new_tokens"),
        (ExpectedOutput, {"retract_decode_steps": True}, "retract_decode_steps"), (Adaptive, {"maximum": 1.0}, "maximum"),
        (Adaptive, {"minimum": 0.6}, "minimum"), (Adaptive, {"initial": 0.6}, "initial"), (Adaptive, {"factor": 1.0}, "factor"),
        (Adaptive, {"step": 0.0}, "step"), (Adaptive, {"interval": 0}, "interval"), (Adaptive, {"target": -1}, "target"),
        (Adaptive, {"full_sequence": 1}, "full_sequence"), (PastFuture, {"window": 0}, "window"),
        (PastFuture, {"reserved": 1.0}, "reserved"),
        (PastFuture, {"num_draws": 0}, "num_draws"), (PastFuture, {"seed": 0.5}, "seed"),
        (Unlimited, {"full_sequence": "no"}, "full_sequence"),
    ],
)  # fmt: skip
def test_a_parameter_out_of_range_is_named(policy: Any, parameters: dict[str, Any], named: str) -> None:
    with pytest.raises(UserError, match=named):
        policy(**parameters)
