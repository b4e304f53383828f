"""Conversations: prompts extend what was said, think times, slots of a closed loop, early ends."""

from __future__ import annotations

from typing import Any

import pytest
from workload_helpers import context, record, serve

from kvlab.types import UserError
from kvlab.workload import MultiTurnWorkload


def conversations(**changes: Any) -> MultiTurnWorkload:
    values: dict[str, Any] = {"num_sessions": 4, "turns": 3, "prompt_len": 10, "turn_len": 5, "output_len": 2, "think_s": 1.5}
    return MultiTurnWorkload(**{**values, **changes})


def test_the_next_prompt_is_prompt_and_output_and_new_tokens_after_the_think_time() -> None:
    workload = conversations(num_sessions=1)
    workload.start(context())
    (first,) = workload.due(0.0)
    assert (first.request_id, first.session_id, first.turn) == ("session-0-turn-0", "session-0", 0)
    assert len(first.prompt_token_ids) == 10
    assert workload.next_arrival_s() is None
    assert not workload.exhausted
    workload.on_finish(record(first, finish_s=4.0, output=(101, 102)))
    assert workload.next_arrival_s() == 5.5
    assert workload.due(5.4) == []
    (second,) = workload.due(6.0)
    assert (second.request_id, second.turn, second.arrival_s) == ("session-0-turn-1", 1, 5.5)
    assert second.prompt_token_ids[:12] == [*first.prompt_token_ids, 101, 102]
    assert len(second.prompt_token_ids) == 17
    workload.on_finish(record(second, finish_s=7.0, output=(103,), reason="stop"))
    (third,) = workload.due(8.5)
    assert third.prompt_token_ids[:18] == [*second.prompt_token_ids, 103]
    assert len(third.prompt_token_ids) == 23
    assert third.prompt_token_ids[18:] != second.prompt_token_ids[12:]
    assert workload.exhausted
    workload.on_finish(record(third, finish_s=9.0))
    assert workload.due(100.0) == []


def test_all_turns_come_in_order_and_again_on_a_second_start() -> None:
    turns = {"kind": "uniform", "min": 1, "max": 4}
    workload = conversations(num_sessions=5, turns=turns, arrivals={"kind": "poisson", "rate": 1})
    first = serve(workload, context(), lambda request: 0.7)
    assert workload.num_requests == len(first[1])
    for session in range(5):
        numbers = [r.turn for _, r in first[0] if r.session_id == f"session-{session}"]
        assert numbers == list(range(len(numbers)))
        assert len(numbers) >= 1
    assert serve(workload, context(), lambda request: 0.7) == first


def test_only_turn_timing_depends_on_the_service_never_tokens() -> None:
    slow = serve(conversations(), context(), lambda request: 9.0)[0]
    fast = serve(conversations(), context(), lambda request: 0.1 * (1 + request.turn))[0]
    assert {r.request_id: r.prompt_token_ids for _, r in slow} == {r.request_id: r.prompt_token_ids for _, r in fast}


def test_a_conversation_keeps_its_slot_while_its_user_thinks() -> None:
    workload = conversations(concurrency=2)
    handed, records, most = serve(workload, context(), lambda request: 1.0)
    assert (len(records), most) == (12, 2)
    # Each conversation lasts 3 turns of 1 s and 2 pauses of 1.5 s: two of them from 0, two from 6.
    starts = {r.session_id: r.arrival_s for _, r in handed if r.turn == 0}
    assert starts == {"session-0": 0.0, "session-1": 0.0, "session-2": 6.0, "session-3": 6.0}


@pytest.mark.parametrize(("reason", "output"), [("abort", (1,)), ("refused", ()), ("kv_capacity", (1, 2))])
def test_a_conversation_ends_with_a_turn_that_was_not_answered(reason: str, output: tuple[int, ...]) -> None:
    workload = conversations(num_sessions=1)
    workload.start(context())
    (first,) = workload.due(0.0)
    workload.on_finish(record(first, 1.0, output, reason))
    assert workload.exhausted
    assert (workload.num_requests, workload.num_early_ends) == (1, 1)
    assert workload.notes == ["1 of 1 conversations ended early: a turn was not answered, or max_model_len was reached."]


def test_a_conversation_ends_before_it_outgrows_the_model() -> None:
    # Prompts of 10, 17 and 24 tokens: with max_model_len 24 the third has no room for a token, with 25 it has.
    assert len(serve(conversations(num_sessions=1), context(max_model_len=24), lambda request: 1.0)[1]) == 2
    assert len(serve(conversations(num_sessions=1), context(max_model_len=25), lambda request: 1.0)[1]) == 3


def test_conversations_share_a_system_prompt_and_keep_priority_and_tenant() -> None:
    workload = conversations(prefix={"depth": 1, "branching": 1, "tokens_per_node": 6}, priorities={3: 1}, tenants={"lab": 1})
    handed = [r for _, r in serve(workload, context(), lambda request: 1.0)[0]]
    assert len({tuple(r.prompt_token_ids[:6]) for r in handed}) == 1
    assert len({tuple(r.prompt_token_ids[6:16]) for r in handed}) == 4
    assert {(r.priority, r.tenant) for r in handed} == {(3, "lab")}


def test_wrong_parameters_are_named() -> None:
    with pytest.raises(UserError, match=r"workload\.turns\.value = 0"):
        conversations(turns=0).start(context())
    with pytest.raises(UserError, match=r"workload\.think_s\.value = -1"):
        conversations(think_s=-1).start(context())
    with pytest.raises(UserError, match=r"4 of 4 prompts leave no room"):
        conversations(prompt_len=50).start(context(max_model_len=50))
