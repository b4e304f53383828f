"""What is meant for one user at a time: an engine and an `LLM` (threads, calls from within), a policy object (engines)."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from engine_support import Log, make_engine, prompt_of, reference_outputs, request, serve
from sweep_support import SIMULATED

import kvlab
from kvlab.engine import Engine, EngineConfig, PolicySet
from kvlab.engine.runners.simulated import SimulatedRunner
from kvlab.generation import Chunk
from kvlab.llm import LLM
from kvlab.policies.eviction import Fifo, Lru
from kvlab.policies.eviction.leaf_first import LeafFirst
from kvlab.policies.preemption import Lifo
from kvlab.policies.preemption.mode import Recompute
from kvlab.policies.prefix_cache import Hash
from kvlab.testing.invariants import check_drained
from kvlab.types import Outcome, Plan, RequestRecord, SamplingParams, StepStats, UserError

PROMPTS = [[5 + i, 6, 7 + i] for i in range(8)]
TEN = SamplingParams(max_tokens=10, ignore_eos=True)


def in_threads(number: int, work: Callable[[int], Any]) -> list[Any]:
    """`work(0)`, `work(1)` ..., begun together."""
    barrier = threading.Barrier(number)

    def begin(i: int) -> Any:
        barrier.wait()
        return work(i)

    with ThreadPoolExecutor(number) as pool:
        return list(pool.map(begin, range(number)))


# ------------------------------------------------------------------------- threads


@pytest.mark.parametrize("depth", [0, 1])
def test_threads_that_share_an_llm_get_their_own_answers(depth: int) -> None:
    llm = LLM("tiny", device="cpu", dtype="float64", kv_cache_tokens=2048, depth=depth)
    wanted = [llm.generate(prompt, TEN)[0].token_ids for prompt in PROMPTS]
    texts = [llm.generate(prompt, TEN)[0].text for prompt in PROMPTS]

    def work(i: int) -> list[tuple[tuple[int, ...], str]]:
        found = []
        for turn in range(4):
            number = (i + turn) % len(PROMPTS)
            if turn % 2:
                chunks = list(llm.stream(PROMPTS[number], TEN))
            else:
                chunks = []
                llm.generate(PROMPTS[number], TEN, on_chunk=chunks.append)
            found.append((sum((chunk.token_ids for chunk in chunks), ()), "".join(chunk.text for chunk in chunks)))
        return found

    for i, found in enumerate(in_threads(6, work)):
        numbers = [(i + turn) % len(PROMPTS) for turn in range(4)]
        assert found == [(wanted[number], texts[number]) for number in numbers]
    check_drained(llm.engine)


def test_a_stream_that_several_threads_read_gives_each_chunk_once() -> None:
    llm = LLM("tiny", device="cpu", kv_cache_tokens=2048)
    wanted = list(llm.stream(PROMPTS[0], TEN))
    stream = llm.stream(PROMPTS[0], TEN)
    found = [chunk for chunks in in_threads(3, lambda _: list(stream)) for chunk in chunks]
    assert sorted(map(repr, found)) == sorted(map(repr, wanted))


def test_a_stream_is_closed_by_another_thread() -> None:
    llm = LLM("tiny", device="cpu", kv_cache_tokens=2048)
    stream = llm.stream(PROMPTS, TEN)
    next(stream)
    in_threads(2, lambda _: stream.close())
    assert list(stream) == []
    check_drained(llm.engine)


def test_threads_that_add_to_an_engine_while_another_steps_it() -> None:
    requests = [request(f"{i}-{k}", prompt_of(4 + i, k), 5) for i in range(3) for k in range(12)]
    engine, log = make_engine(60, 4)
    is_done = threading.Event()

    def work(i: int) -> None:
        if i == 3:
            while not is_done.is_set() or engine.has_work:
                engine.step()
            return
        for each in requests[12 * i : 12 * i + 12]:
            engine.add_request(each)
        if i == 0:
            is_done.set()

    in_threads(4, work)
    while engine.has_work:
        engine.step()
    assert log.outputs == reference_outputs(requests)


# ------------------------------------------------------------------ calls from within


class Calls:
    """A listener that calls `what` once, in one of the things that it hears."""

    wants_block_events = True

    def __init__(self, when: str) -> None:
        self.when = when
        self.what: Callable[[], Any] = lambda: None
        self.errors: list[UserError] = []
        self.answers: list[Any] = []

    def _call(self, when: str) -> None:
        if when == self.when and not self.errors and not self.answers:
            try:
                self.answers.append(self.what())
            except UserError as error:
                self.errors.append(error)

    def on_step(self, plan: Plan, outcome: Outcome, stats: StepStats) -> None:
        self._call("step")

    def on_request(self, record: RequestRecord) -> None:
        self._call("request")

    def on_block(self, event: Any) -> None:
        self._call("block")


@pytest.mark.parametrize("when", ["step", "request", "block"])
@pytest.mark.parametrize("depth", [0, 1])
def test_a_step_within_a_step_is_refused(when: str, depth: int) -> None:
    calls = Calls(when)
    engine = Engine(EngineConfig(20, 4, depth=depth), PolicySet(), SimulatedRunner(97), listeners=[calls])
    calls.what = engine.step
    serve(engine, [request("a", prompt_of(9), 5)])
    (error,) = calls.errors
    assert "Engine.step was called within a step, by a listener or a policy" in str(error)


@pytest.mark.parametrize("depth", [0, 1])
def test_requests_are_added_and_aborted_by_listeners_once_a_step_is_complete(depth: int) -> None:
    log = Log()
    for when, is_allowed in (("step", True), ("request", True), ("block", False)):
        for what in ("add", "abort"):
            calls, log = Calls(when), Log()
            engine = Engine(EngineConfig(20, 4, depth=depth), PolicySet(), SimulatedRunner(97), listeners=[calls, log])
            later = request("later", prompt_of(5, 2), 3)
            calls.what = (lambda e=engine, r=later: e.add_request(r)) if what == "add" else (lambda e=engine: e.abort("b"))
            serve(engine, [request("a", prompt_of(9), 2), request("b", prompt_of(6, 1), 6)])
            assert bool(calls.errors) is not is_allowed
            if is_allowed and what == "add":
                assert log.outputs["later"] == reference_outputs([later])["later"]
            assert (log.records["b"].finish_reason == "abort") is (is_allowed and what == "abort")


@pytest.mark.parametrize("when", ["step", "request", "block"])
def test_an_llm_called_by_its_own_listener_says_so_and_goes_on(when: str) -> None:
    calls = Calls(when)
    llm = LLM("tiny", device="cpu", kv_cache_tokens=512, listeners=[calls])
    wanted = LLM("tiny", device="cpu", kv_cache_tokens=512).generate(PROMPTS[:2], TEN)
    calls.what = lambda: llm.generate([1, 2, 3], TEN)
    found = llm.generate(PROMPTS[:2], TEN)
    (error,) = calls.errors
    assert "within a step" in str(error)
    assert [one.token_ids for one in found] == [one.token_ids for one in wanted]
    check_drained(llm.engine)


def test_a_call_from_on_chunk_and_one_of_another_llm_from_a_listener_are_fine() -> None:
    other = LLM("tiny", device="cpu", kv_cache_tokens=512)
    calls = Calls("step")
    calls.what = lambda: other.generate([8, 9], TEN)
    llm = LLM("tiny", device="cpu", kv_cache_tokens=512, listeners=[calls])
    inner: list[tuple[int, ...]] = []
    llm.generate([5, 6, 7], TEN, on_chunk=lambda _: inner.append(llm.generate([8, 9], TEN)[0].token_ids))
    assert {*inner, calls.answers[0][0].token_ids} == {other.generate([8, 9], TEN)[0].token_ids}


def test_a_stream_read_from_within_its_own_step_is_refused() -> None:
    calls = Calls("step")
    llm = LLM("tiny", device="cpu", kv_cache_tokens=512, listeners=[calls])
    stream = llm.stream([5, 6, 7], TEN)
    calls.what = lambda: next(stream)
    assert sum(len(chunk.token_ids) for chunk in stream) == 10
    assert "A stream of kvlab.LLM was called within a step" in str(calls.errors[0])


@pytest.mark.parametrize("when", ["step", "block"])
def test_an_open_stream_that_is_collected_in_mid_step_is_aborted_after_it(when: str) -> None:
    """The garbage collector runs whenever it likes: here in the middle of another call's step."""
    calls = Calls(when)
    llm = LLM("tiny", device="cpu", kv_cache_tokens=512, listeners=[calls])
    wanted = LLM("tiny", device="cpu", kv_cache_tokens=512).generate([5, 6, 7], TEN)[0].token_ids
    held: list[Any] = [llm.stream([8, 9], SamplingParams(max_tokens=100, ignore_eos=True))]
    next(held[0])
    calls.answers.clear()

    def let_go() -> int:
        held.clear()
        return gc.collect()

    calls.what = let_go
    assert llm.generate([5, 6, 7], TEN)[0].token_ids == wanted
    assert not held
    assert not llm.engine.has_work
    check_drained(llm.engine)


def test_an_error_in_on_chunk_ends_the_call_at_once() -> None:
    """Even while the error, and with it the call's frame, is kept."""
    llm = LLM("tiny", device="cpu", kv_cache_tokens=512)

    def fail(chunk: Chunk) -> None:
        raise KeyError("mine")

    kept: list[BaseException] = []
    try:
        llm.generate(PROMPTS, TEN, on_chunk=fail)
    except KeyError as error:
        kept.append(error)
    assert len(kept) == 1
    check_drained(llm.engine)


# ------------------------------------------------------------------- policy objects


def engine_with(**seams: Any) -> Engine:
    return make_engine(20, 4, PolicySet(**seams))[0]


@pytest.mark.parametrize(("seam", "make"), [("eviction", Lru), ("eviction", lambda: LeafFirst(Fifo())), ("prefix_cache", Hash),
                                            ("preemption", lambda: Lifo(Recompute()))])  # fmt: skip
def test_a_policy_object_of_an_engine_with_requests_is_refused(seam: str, make: Callable[[], Any]) -> None:
    policy = make()
    first = engine_with(**{seam: policy})
    first.add_request(request("a", prompt_of(9), 3))
    says = rf"^{seam} policy {type(policy).__name__} serves another engine, which has 1 unfinished requests: an object serves one engine"
    with pytest.raises(UserError, match=says):
        engine_with(**{seam: policy})
    serve(first, [request("b", prompt_of(8), 3)])  # its decisions have not been touched
    second = engine_with(**{seam: policy})
    serve(second, [request("c", prompt_of(8), 3)])
    with pytest.raises(UserError, match=rf"This engine takes no more requests: its {seam} policy {type(policy).__name__} has been given"):
        first.add_request(request("d", prompt_of(8), 3))
    with pytest.raises(UserError, match="takes no more requests"):
        first.reset_prefix_cache()
    serve(second, [request("e", prompt_of(8), 3)])


def test_a_policy_within_a_policy_counts_too() -> None:
    inner, mode = Fifo(), Recompute()
    first = make_engine(20, 4, PolicySet(eviction=LeafFirst(inner), preemption=Lifo(mode)))[0]
    first.add_request(request("a", prompt_of(9), 3))
    with pytest.raises(UserError, match=r"^eviction policy Fifo serves another engine"):
        engine_with(eviction=LeafFirst(inner))
    with pytest.raises(UserError, match=r"^eviction policy Fifo serves another engine"):
        engine_with(eviction=inner)
    with pytest.raises(UserError, match=r"^preemption policy Recompute serves another engine"):
        engine_with(preemption=Lifo(mode))


def test_a_runner_of_an_engine_with_requests_is_refused() -> None:
    runner = SimulatedRunner(97)
    first = Engine(EngineConfig(20, 4), PolicySet(), runner)
    first.add_request(request("a", prompt_of(9), 3))
    with pytest.raises(UserError, match=r"^runner SimulatedRunner serves another engine"):
        Engine(EngineConfig(20, 4), PolicySet(), runner)


def test_a_policy_of_an_engine_that_is_gone_or_closed_is_free_again() -> None:
    policy = Fifo()
    abandoned = engine_with(eviction=policy)
    abandoned.add_request(request("a", prompt_of(9), 3))
    del abandoned  # its cycles may keep it in memory for a while
    closed = engine_with(eviction=policy)
    closed.add_request(request("a", prompt_of(9), 3))
    closed.close()
    serve(engine_with(eviction=policy), [request("b", prompt_of(8), 3)])
    with pytest.raises(UserError, match="takes no more requests: it was closed"):
        closed.add_request(request("c", [1], 1))


def test_two_llms_with_one_policy_object() -> None:
    policy = Fifo()
    first = LLM("tiny", device="cpu", kv_cache_tokens=256, eviction=policy)
    first.generate([1, 2, 3], TEN)
    stream = first.stream([4, 5], TEN)
    next(stream)
    with pytest.raises(UserError, match="eviction policy Fifo serves another engine, which has 1 unfinished"):
        LLM("tiny", device="cpu", kv_cache_tokens=256, eviction=policy)
    stream.close()
    second = LLM("tiny", device="cpu", kv_cache_tokens=256, eviction=policy)
    second.generate([1, 2, 3], TEN)
    with pytest.raises(UserError, match="This engine takes no more requests: its eviction policy Fifo has been given to another engine"):
        first.generate([1, 2, 3], TEN)


def test_the_same_object_serves_one_run_after_the_other(tmp_path: Any) -> None:
    """As in notebooks: also after a run that failed, whose error (and so its engine) is still held."""

    class Fails(Fifo):
        fails = True

        def victim(self, now: Any) -> int:
            if self.fails:
                raise KeyError("mine")
            return super().victim(now)

    policy, kept = Fails(), []
    config = kvlab.compose(*SIMULATED, "num_blocks=16", "workload.num_requests=20")
    try:
        kvlab.run(config, folder=tmp_path / "a", progress=False, eviction=policy)
    except KeyError as error:
        kept.append(error)
    assert kept
    policy.fails = False
    first = kvlab.run(config, folder=tmp_path / "b", progress=False, eviction=policy).summary
    again = kvlab.run(config, folder=tmp_path / "c", progress=False, eviction=policy).summary
    assert first["num_evicted_blocks"] == again["num_evicted_blocks"] > 0
