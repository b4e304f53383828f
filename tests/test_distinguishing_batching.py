"""Each batching policy makes steps that no other policy makes: one scene, worked out by hand.

`a` (6 prompt tokens, 7 outputs) comes before step 0; `b` (20 prompt tokens, 3 outputs) and `c` (5, 2) come before step 1. A step may
compute 8 tokens. "a1 b7" is a step that computes a token of a and seven of b, in this order. A request samples in the step that computes
the last of its tokens.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from engine_support import Forcer, make_engine, policies, policy_names, prompt_of, reference_outputs, request

from kvlab.policies.batching import Chunked, DecodeFirst, Sarathi, SplitPrefillFirst, WaitingServed
from kvlab.policies.registry import by_name
from kvlab.types import Now, UserError

PARAMETERS: dict[str, dict[str, Any]] = {
    "sarathi": {"chunk_size": 6},
    "waiting_served": {"waiting_served_ratio": 3.0, "max_waiting_tokens": 3},
}

STEPS = {
    # 8 tokens a step, in order of entry; c begins in what b's last piece leaves.
    "chunked": ["a6", "a1 b7", "a1 b7", "a1 b6 c1", "a1 b1 c4", "a1 b1 c1", "a1"],
    # b is longer than any step and computed in pieces; c, which is not, begins only when all of it fits beside the decodes.
    "decode_first": ["a6", "a1 b7", "a1 b7", "a1 b6", "a1 b1 c5", "a1 b1 c1", "a1"],
    # As chunked, with 6 tokens a step.
    "sarathi": ["a6", "a1 b5", "a1 b5", "a1 b5", "a1 b5", "a1 b1 c4", "a1 b1 c1", "c1"],
    # A prompt that was cut goes before a's decodes, which get nothing in step 2.
    "split_prefill_first": ["a6", "a1 b7", "b8", "b5 a1 c2", "c3 a1 b1", "a1 b1 c1", "a1", "a1"],
    # New prompts alone; b's further pieces run with the others.
    "prefill_first": ["a6", "b8", "c5", "a1 b7", "a1 b5 c1", "a1 b1", "a1 b1", "a1", "a1"],
    # Two wait and one runs, 3 are needed: they wait until a third token after a's prompt. After b's first piece a decode follows; one
    # waits and two run: c waits until the third step after it. Then a decode again.
    "waiting_served": ["a6", "a1", "a1", "b8", "a1 b7", "a1 b5", "c5", "a1 b1 c1", "a1 b1"],
    # The next batch when the first has ended, prompts whole.
    "static": ["a6", "a1", "a1", "a1", "a1", "a1", "a1", "b20 c5", "b1 c1", "b1"],
    # Prompts whole, beside the decodes.
    "walkthrough": ["a6", "a1 b20 c5", "a1 b1 c1", "a1 b1", "a1", "a1", "a1"],
}


def steps(batching: str) -> list[str]:
    """What each step of the scene computes under a policy."""
    engine, log = make_engine(60, 4, policies(batching=by_name("batching", batching, **PARAMETERS.get(batching, {}))),
                              max_num_batched_tokens=8)  # fmt: skip
    a, b, c = request("a", prompt_of(6, 1), 7), request("b", prompt_of(20, 2), 3), request("c", prompt_of(5, 3), 2)
    engine.add_request(a)
    engine.step()
    names = {engine.groups["a"].seqs[0].seq_id: "a"}
    for each in (b, c):
        engine.add_request(each)
        names[engine.groups[each.request_id].seqs[0].seq_id] = each.request_id
    while engine.has_work:
        engine.step()
    assert log.outputs == reference_outputs([a, b, c])
    return [" ".join(f"{names[s.seq_id]}{s.num_new_tokens}" for s in plan.scheduled) for plan in log.plans]


@pytest.mark.parametrize("batching", policy_names("batching"))
def test_each_policy_makes_its_own_steps_and_no_other_policys(batching: str) -> None:
    got = steps(batching)
    assert got == STEPS[batching], "a new policy needs its row in STEPS"
    assert [name for name, row in STEPS.items() if row == got] == [batching]


def test_the_table_is_whole() -> None:
    assert sorted(STEPS) == policy_names("batching")


# ------------------------------------------------------------------------------------------------------ details

NOW = Now(0, 0.0)


def group(num_uncomputed: int, num_output: int = 0, num_sequences: int = 1) -> Any:
    return SimpleNamespace(num_uncomputed_tokens=num_uncomputed, num_output_tokens=num_output, num_sequences=num_sequences)


def queues(waiting: int, running: list[Any] | int, swapped: int = 0) -> Any:
    running = [group(1, 1)] * running if isinstance(running, int) else running
    return SimpleNamespace(waiting=[group(9)] * waiting, running=running, swapped=[group(1, 1)] * swapped, num_waiting=waiting)


def test_who_decodes_goes_first_or_last() -> None:
    """A prompt, a decode, four samples 4 tokens before their prompt's end, the four decoding, one computed again after 3 outputs."""
    running = [group(9), group(1, 5), group(4, 0, 4), group(4, 2, 4), group(7, 3)]
    places = {id(each): place for place, each in enumerate(running)}
    orders = [[places[id(each)] for each in policy.running_order(running, NOW)]
              for policy in (Chunked(), DecodeFirst(), Sarathi(), SplitPrefillFirst())]  # fmt: skip
    assert orders == [[0, 1, 2, 3, 4], [1, 3, 0, 2, 4], [1, 3, 0, 2, 4], [0, 2, 4, 1, 3]]


def test_sarathis_budget_never_keeps_a_decode_out() -> None:
    """Chunks of 4: with 3 sequences running 4 tokens, with 9 running and 2 swapped 11, never more than the engine's limit."""
    budgets = [Sarathi(4).token_budget(q, 10) for q in (queues(5, 3), queues(5, 9), queues(5, 7, swapped=2), queues(5, 9, swapped=2))]
    assert budgets == [4, 9, 9, 10]


def test_decode_first_takes_nobody_new_while_a_prompt_is_half_computed() -> None:
    assert DecodeFirst().phases(queues(2, [group(1, 1), group(5)]), NOW) == (("running", "swapped"),)
    assert DecodeFirst().phases(queues(2, 2), NOW) == (("running", "swapped", "waiting"),)


@pytest.mark.parametrize(
    ("waiting", "running", "takes"), [(0, 3, True), (1, 4, True), (1, 7, False), (2, 7, True), (2, 10, False), (3, 10, True)]
)
def test_waiting_served_ratio(waiting: int, running: int, takes: bool) -> None:
    """0.3 of those that run, rounded down: 0 of 3, 1 of 4, 2 of 7, 3 of 10."""
    policy = WaitingServed(waiting_served_ratio=0.3, max_waiting_tokens=20)
    policy.phases(queues(running, 0), Now(4, 0.0))
    policy.entered(group(9), "new", Now(4, 0.0))
    phases = policy.phases(queues(waiting, running), Now(5, 0.0))
    assert phases == ((("waiting",), ("running",)) if takes else (("running",),))


def test_waiting_served_takes_any_number_after_max_waiting_tokens_and_lets_one_decode_follow() -> None:
    """Prompts at step 4 (nothing ran): 1 waits, 10 run, so not before step 8. Those pause the others: step 9 decodes whatever waits."""
    policy = WaitingServed(waiting_served_ratio=0.3, max_waiting_tokens=4)
    policy.phases(queues(10, 0), Now(4, 0.0))
    policy.entered(group(9), "new", Now(4, 0.0))
    takes = [len(policy.phases(queues(1, 10), Now(step, 0.0))) == 2 for step in (5, 6, 7, 8)]
    assert takes == [False, False, False, True]
    policy.entered(group(9), "new", Now(8, 0.0))
    takes = [len(policy.phases(queues(9, 11), Now(step, 0.0))) == 2 for step in (9, 10)]
    assert takes == [False, True]
    assert policy.phases(queues(9, 11, swapped=1), Now(11, 0.0)) == (("running", "swapped"),)


@pytest.mark.parametrize(
    ("name", "parameters", "message"),
    [
        ("sarathi", {"chunk_size": 0}, "Sarathi.chunk_size = 0 is not allowed: tokens a step, a positive integer"),
        ("sarathi", {"chunk_size": 1.5}, "chunk_size = 1.5"),
        ("waiting_served", {"waiting_served_ratio": -0.1}, "waiting_served_ratio = -0.1 is not allowed: a number, at least 0"),
        ("waiting_served", {"max_waiting_tokens": True}, "max_waiting_tokens = True"),
    ],
)
def test_a_parameter_out_of_range(name: str, parameters: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        by_name("batching", name, **parameters)


# ----------------------------------------------------------------------------------- no stall, whatever the budget


@pytest.mark.parametrize("mode", ["recompute", "swap"])
@pytest.mark.parametrize("batching", ["decode_first", "sarathi", "split_prefill_first", "waiting_served"])
def test_beams_and_samples_get_on_though_chunks_are_smaller_than_they_are_many(batching: str, mode: str) -> None:
    """Chunks of 1 token (sarathi), at most 4 tokens a step: three beams sample together or not at all. Each gives way once."""
    parameters = {"sarathi": {"chunk_size": 1}}.get(batching, {})
    chosen = policies(batching=by_name("batching", batching, **parameters), mode=mode, admission="none")
    engine, log = make_engine(60, 2, chosen, max_num_batched_tokens=4, num_cpu_blocks=60)
    forcer = Forcer(engine)
    requests = [request("beams", prompt_of(5, 1), 6, n=2, beam_width=3), request("samples", prompt_of(7, 2), 6, n=4, temperature=1.0),
                request("long", prompt_of(13, 3), 8), request("more", prompt_of(6, 4), 6, n=2, beam_width=2)]  # fmt: skip
    for each in requests:
        engine.add_request(each)
    for _ in range(400):
        forcer.after += [g.request_id for g in engine.scheduler.running if not g.num_preemptions and g.num_output_tokens >= 2]
        if engine.has_work:
            engine.step()
    assert not engine.has_work
    assert [log.records[each.request_id].num_preemptions for each in requests] == [1, 1, 1, 1]
    assert log.outputs == reference_outputs(requests)
