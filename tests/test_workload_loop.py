"""Open loop, closed loop, aborts, and requests given by hand."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from workload_helpers import all_due, context, record, serve

from kvlab.types import Request, SamplingParams, UserError
from kvlab.workload import FixedWorkload, Workload, WorkloadContext


def fixed(*arrivals_s: float, concurrency: int | None = None, abort: dict[str, float] | None = None) -> FixedWorkload:
    requests = [Request(f"r{i}", [i + 1, 2], SamplingParams(max_tokens=3), arrival_s=t) for i, t in enumerate(arrivals_s)]
    return FixedWorkload(requests, concurrency=concurrency, abort=abort)


def test_open_loop_hands_out_by_arrival_time_and_only_what_is_due() -> None:
    workload = fixed(2.0, 0.5, 2.0, 9.0)
    workload.start(context())
    assert workload.num_requests == 4
    assert workload.next_arrival_s() == 0.5
    assert workload.due(0.4) == []
    assert [r.request_id for r in workload.due(2.0)] == ["r1", "r0", "r2"]
    assert not workload.exhausted
    assert workload.next_arrival_s() == 9.0
    assert [r.request_id for r in workload.due(100.0)] == ["r3"]
    assert workload.exhausted
    assert workload.next_arrival_s() is None


def test_requests_are_made_only_when_they_become_due() -> None:
    made: list[int] = []

    class Lazy(Workload):
        def build(self, ctx: WorkloadContext) -> Sequence[float]:
            return [0.0, 1.0, 2.0]

        def make(self, index: int) -> Request:
            made.append(index)
            return Request(str(index), [1], SamplingParams())

    workload = Lazy()
    workload.start(context())
    assert made == []
    assert [r.arrival_s for r in workload.due(1.0)] == [0.0, 1.0]
    assert made == [0, 1]


def test_closed_loop_begins_one_when_one_ends_at_that_moment() -> None:
    workload = fixed(0.0, 0.0, 0.0, 5.0, concurrency=2)
    workload.start(context())
    first = workload.due(0.0)
    assert [r.request_id for r in first] == ["r0", "r1"]
    assert workload.next_arrival_s() is None
    assert workload.due(100.0) == []
    workload.on_finish(record(first[1], finish_s=3.25))
    assert workload.next_arrival_s() == 3.25
    second = workload.due(4.0)
    assert [(r.request_id, r.arrival_s) for r in second] == [("r2", 3.25)]
    workload.on_finish(record(second[0], finish_s=4.0))
    assert [(r.request_id, r.arrival_s) for r in workload.due(4.0)] == [("r3", 4.0)]
    assert workload.exhausted
    assert workload.notes == ["Closed loop (concurrency=2): the arrival times given were not used."]


@pytest.mark.parametrize("concurrency", [1, 3, 7])
def test_closed_loop_is_full_and_never_over_its_concurrency(concurrency: int) -> None:
    workload = fixed(*[0.0] * 20, concurrency=concurrency)
    handed, records, most = serve(workload, context(), lambda request: 1.0 + request.prompt_token_ids[0] % 3)
    assert most == concurrency
    assert [r.request_id for _, r in handed] == [f"r{i}" for i in range(20)]
    assert len(records) == 20
    finishes = [r.finish_s for r in records]
    for _, request in handed[concurrency:]:
        assert request.arrival_s in finishes
    waits = [now - request.arrival_s for now, request in handed]
    assert waits == [0.0] * 20


def test_a_refused_request_frees_its_slot() -> None:
    workload = fixed(0.0, 0.0, concurrency=1)
    workload.start(context())
    (first,) = workload.due(0.0)
    workload.on_finish(record(first, finish_s=0.0, output=(), reason="refused")._replace(outputs=()))
    assert [r.request_id for r in workload.due(0.0)] == ["r1"]


def test_records_of_other_requests_and_second_reports_are_ignored() -> None:
    workload = fixed(0.0, 0.0, 0.0, concurrency=1)
    workload.start(context())
    (first,) = workload.due(0.0)
    stranger = Request("stranger", [1], SamplingParams())
    workload.on_finish(record(stranger, 1.0))
    assert workload.due(1.0) == []
    workload.on_finish(record(first, 2.0))
    workload.on_finish(record(first, 2.0))
    assert [r.request_id for r in workload.due(9.0)] == ["r1"]


def test_starting_again_gives_a_fresh_identical_run_even_if_requests_were_changed() -> None:
    workload = fixed(0.0, 1.0)
    first = all_due(workload)
    before = [list(r.prompt_token_ids) for r in first]
    first[0].prompt_token_ids.append(99)
    again = all_due(workload)
    assert [r.prompt_token_ids for r in again] == before == [[1, 2], [2, 2]]


def test_aborts_are_a_share_of_the_requests_after_their_arrival() -> None:
    requests = all_due(fixed(*[float(i) for i in range(1000)], abort={"fraction": 0.25, "after_s": 1.5}))
    leaving = [r for r in requests if r.abort_at_s is not None]
    assert 200 <= len(leaving) <= 300
    assert all(r.abort_at_s == r.arrival_s + 1.5 for r in leaving)
    again = all_due(fixed(*[0.0] * 1000, concurrency=1000, abort={"fraction": 0.25, "after_s": 1.5}))
    assert [r.request_id for r in again if r.abort_at_s is not None] == [r.request_id for r in leaving]
    other = all_due(fixed(*[0.0] * 1000, abort={"fraction": 0.25, "after_s": 1.5}), context(seed=1))
    assert [r.request_id for r in other if r.abort_at_s is not None] != [r.request_id for r in leaving]


@pytest.mark.parametrize(
    ("abort", "message"),
    [
        ({"fraction": 1.5, "after_s": 1.0}, "fraction = 1.5"),
        ({"fraction": 0.5, "after_s": -1.0}, "after_s = -1.0"),
        ({"fraction": 0.5}, "needs both"),
        ({"fraktion": 0.5, "after_s": 1.0}, "Did you mean 'fraction'"),
        ({"fraction": "half", "after_s": 1.0}, "fraction = 'half'"),
    ],
)
def test_a_wrong_abort_is_named(abort: dict[str, float], message: str) -> None:
    with pytest.raises(UserError, match=message):
        fixed(0.0, abort=abort)


@pytest.mark.parametrize("concurrency", [0, -1, 2.0, True, "4"])
def test_a_wrong_concurrency_is_named(concurrency: int) -> None:
    with pytest.raises(UserError, match=r"workload\.concurrency"):
        fixed(0.0, concurrency=concurrency)


def test_fixed_requests_need_unique_ids_and_prompts() -> None:
    twin = Request("a", [1], SamplingParams())
    with pytest.raises(UserError, match="Requests 0 and 1 are both called 'a'"):
        FixedWorkload([twin, twin])
    with pytest.raises(UserError, match="'b' has an empty prompt"):
        FixedWorkload([Request("b", [], SamplingParams())])


def test_arrivals_must_be_finite_and_not_negative() -> None:
    with pytest.raises(UserError, match="at least 0 seconds"):
        fixed(0.0, -1.0).start(context())


def test_no_requests_is_an_exhausted_workload() -> None:
    workload = FixedWorkload([])
    workload.start(context())
    assert workload.exhausted
    assert workload.due(1.0) == []
    assert workload.next_arrival_s() is None


def test_using_a_workload_before_start_says_so() -> None:
    with pytest.raises(RuntimeError, match="start"):
        fixed(0.0).due(0.0)
