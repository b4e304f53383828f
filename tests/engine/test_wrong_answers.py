"""Policies that answer with what can't be meant, or write to what they are given: an error that names them, never another result."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from engine_support import Log, make_engine, policies, prompt_of, request, run_to_end, serve

from kvlab.engine.read_only import ReadOnly
from kvlab.policies.admission.watermark import Watermark
from kvlab.policies.base import KeyEviction
from kvlab.policies.batching.chunked import Chunked
from kvlab.policies.preemption.lifo import Lifo
from kvlab.policies.preemption.mode import Recompute
from kvlab.policies.scheduling.fcfs import Fcfs
from kvlab.types import ChangedView, IllegalDecision


def answering(base: Any, *arguments: Any, **methods: Any) -> Any:
    """A policy of the given class whose methods answer with these values, whatever they are asked; functions are asked in their place."""
    body = {name: (lambda self, *args, value=value: value(*args) if callable(value) else value) for name, value in methods.items()}
    return type("Odd", (base,), body)(*arguments)


CROWD = [request(f"r{i}", prompt_of(9, i), 12, arrival_s=0.0, priority=-i) for i in range(5)]
"""Five requests in ten blocks of 4: some wait, some give way."""

ODD = {
    "no phases": ({"batching": answering(Chunked, phases=None)}, "batching policy Odd .* phases None. Allowed: orders of running"),
    "phases of numbers": ({"batching": answering(Chunked, phases=((1,),))}, r"batching policy Odd .* phases \(\(1,\),\)"),
    "one flat order": ({"batching": answering(Chunked, phases=("running", 3))}, "batching policy Odd .* phases"),
    "no budget": ({"batching": answering(Chunked, token_budget=None)}, "batching policy Odd .* a token budget of None. Allowed: an int"),
    "negative budget": ({"batching": answering(Chunked, token_budget=-1)}, "batching policy Odd .* a token budget of -1"),
    "fractional budget": ({"batching": answering(Chunked, token_budget=8.5)}, r"batching policy Odd .* a token budget of 8\.5"),
    "half a token": ({"batching": answering(Chunked, chunk=0.5)}, r"batching policy Odd .* compute 0\.5 of 9 tokens"),
    "order of running is a number": ({"batching": answering(Chunked, running_order=3)}, "batching policy Odd .* an order of 0 groups"),
    "no headroom": ({"admission": answering(Watermark, headroom_blocks=None)}, "admission policy Odd .* a headroom of None blocks"),
    "negative headroom": ({"admission": answering(Watermark, headroom_blocks=-5)},
                          "admission policy Odd .* a headroom of -5 blocks. Allowed: an integer from 0 to the 10 there are"),
    "fractional headroom": ({"admission": answering(Watermark, headroom_blocks=2.5)}, r"admission policy Odd .* a headroom of 2\.5 blocks"),
    "headroom above the pool": ({"admission": answering(Watermark, headroom_blocks=11)}, "admission policy Odd .* a headroom of 11 blocks"),
    "headroom is a word": ({"admission": answering(Watermark, headroom_blocks="a")}, "admission policy Odd .* a headroom of 'a' blocks"),
    "admits with True": ({"admission": answering(Watermark, admits=True)}, "admission policy Odd .* True. Allowed: '' to admit"),
    "victim is nobody": ({"preemption": answering(Lifo, Recompute(), victim=None)}, "preemption policy Odd .* victim None"),
    "victim is a name": ({"preemption": answering(Lifo, Recompute(), victim="r0")}, "preemption policy Odd .* victim 'r0'"),
    "no mode": ({"mode": answering(Recompute, mode=None)}, "preemption mode policy Odd .* mode None"),
    "key is a number": ({"scheduling": answering(Fcfs, key=3)}, "scheduling policy Odd .* key 3 for request 'r0'"),
    "key is not a number": ({"scheduling": answering(Fcfs, key=(float("nan"),))}, r"scheduling policy Odd .* key \(nan,\)"),
    "keys without order": ({"scheduling": answering(Fcfs, key=lambda g, now: (g.request_id,) if g.group_id % 2 else (g.group_id,))},
                           r"scheduling policy Odd .* keys \('r1',\), \(0,\) .*Allowed: tuples of numbers"),
    "moving keys without order": (
        {"scheduling": answering(type("Moving", (Fcfs,), {"is_static": False}), key=lambda g, now: ("a",) if now.step and g.group_id == 4
                                 else (g.group_id,))}, r"scheduling policy Odd .* keys .*Allowed: tuples of numbers"),
    "order is a number": ({"scheduling": answering(Fcfs, order=7)}, "scheduling policy Odd .* an order of 0 groups"),
}  # fmt: skip


@pytest.mark.parametrize("name", ODD)
def test_an_answer_that_cannot_be_meant_is_an_error_that_names_the_policy(name: str) -> None:
    seams, words = ODD[name]
    engine, _ = make_engine(10, 4, policies(**seams), max_num_batched_tokens=16)
    with pytest.raises(IllegalDecision, match=words):
        serve(engine, CROWD, check=False)


class NoNumber(KeyEviction):
    """Sorts by a number that is none from the second block of a prompt on."""

    def key(self, block: Any) -> tuple[float, ...]:
        return (float("nan") if block.depth else 0.0, block.used_tick)


def test_a_key_of_eviction_that_is_no_number_is_not_sorted() -> None:
    engine, _ = make_engine(10, 4, policies(eviction=NoNumber()))
    with pytest.raises(IllegalDecision, match=r"eviction policy NoNumber .* the key of block \d+ is \(nan, \d+\)\. Allowed: .* no NaN"):
        serve(engine, CROWD, check=False)


# ------------------------------------------------------------------------------------------------ views are to look at


def crowd(**seams: Any) -> Log:
    engine, log = make_engine(10, 4, policies(**seams), max_num_batched_tokens=16)
    serve(engine, CROWD)
    assert log.total("num_preemptions") > 0
    return log


class Sorts(Watermark):
    """Looks at the running groups in an order of its own, in place."""

    def admits(self, entry: Any, pool: Any, now: Any) -> str:
        entry.running.sort(key=lambda group: group.priority)
        return super().admits(entry, pool, now)


class SortsCopy(Watermark):
    """The same with a list of its own."""

    def admits(self, entry: Any, pool: Any, now: Any) -> str:
        assert [group.request_id for group in sorted(entry.running, key=lambda group: group.priority)]
        return super().admits(entry, pool, now)


class Clears(Chunked):
    """Empties the queue that it is shown."""

    def token_budget(self, queues: Any, max_num_batched_tokens: int) -> int:
        queues.running.clear()
        return max_num_batched_tokens


class Appends(Chunked):
    """Adds to the queue that it is shown."""

    def phases(self, queues: Any, now: Any) -> Any:
        queues.swapped.append("nobody")
        return super().phases(queues, now)


@pytest.mark.parametrize("seams", [{"admission": Sorts(0.0)}, {"batching": Clears()}, {"batching": Appends()}])
def test_the_queues_have_no_way_to_be_changed(seams: dict[str, Any]) -> None:
    with pytest.raises(AttributeError, match="'ReadOnly' object has no attribute '(sort|clear|append)'"):
        crowd(**seams)


def test_looking_at_them_in_another_order_changes_nothing() -> None:
    plain, sorting = crowd(admission=Watermark(0.0)), crowd(admission=SortsCopy(0.0))
    assert [plan.decisions() for plan in sorting.plans] == [plan.decisions() for plan in plain.plans]


def test_a_list_to_look_at() -> None:
    items = [3, 1, 2]
    view = ReadOnly(items)
    assert (len(view), view[0], view[-1], view[1:], list(view), 2 in view, view.index(2)) == (3, 3, 2, (1, 2), [3, 1, 2], True, 2)
    items.append(4)
    assert list(reversed(view)) == [4, 2, 1, 3]
    assert repr(view) == "(3, 1, 2, 4)"


@pytest.mark.parametrize(
    ("name", "value", "was"),
    [("arrival_s", 5.0, "0.0"), ("priority", 9, "0"), ("tenant", "me", "''"), ("max_tokens", 1, "12"), ("num_prompt_tokens", 3, "9"),
     ("oracle_output_len", 7, "12")],
)  # fmt: skip
def test_a_request_that_a_policy_changed_is_an_error_when_it_ends(name: str, value: object, was: str) -> None:
    """Its figures would be wrong: a time to first token from another arrival, say."""

    class Writes(Fcfs):
        def key(self, group: Any, now: Any) -> tuple[float, ...]:
            key = super().key(group, now)
            setattr(group, name, value)
            return key

    engine, _ = make_engine(40, 4, policies(scheduling=Writes()))
    engine.add_request(request("r0", prompt_of(9), 12))
    with pytest.raises(ChangedView, match=f"{name} of request 'r0' was changed from {was} to .*check_policy"):
        run_to_end(engine, 60, check=False)


def test_the_facts_of_every_kind_of_request_hold() -> None:
    """n samples, beams, an oracle, an abort: nobody changed them."""
    engine, log = make_engine(60, 4, policies())
    known = request("known", prompt_of(5, 4), 6)
    known.oracle_output_len = 30
    for each in (request("n", prompt_of(5, 1), 4, n=3, temperature=1.0), request("beams", prompt_of(5, 2), 4, beam_width=2),
                 known, request("gone", prompt_of(5, 3), 40)):  # fmt: skip
        engine.add_request(each)
    engine.step()
    engine.abort("gone")
    run_to_end(engine, 60)
    assert {name: record.finish_reason for name, record in log.records.items()} == {
        "n": "length", "beams": "length", "known": "length", "gone": "abort"}  # fmt: skip


def test_what_a_replay_says_when_the_recording_is_over() -> None:
    from kvlab.engine.runners.recorded import RecordedRunner
    from kvlab.types import UserError

    runner = RecordedRunner([], "runs/a")
    with pytest.raises(UserError, match="runs/a has 0 steps and this replay needs more: the recorded run was cut short, or"):
        runner.submit(SimpleNamespace(step=0, scheduled=()))  # type: ignore[arg-type]
