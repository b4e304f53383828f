"""When the last request has gone, no block is held: every layout, both depths, every way to end. (After each test this is checked of all
engines that it stepped, see `drain_support`; here are the scenes in which something was held.)"""

from __future__ import annotations

from typing import Any

import pytest
from drain_support import Drains
from engine_support import make_engine, policies, policy_names, prompt_of, reference_outputs, request, serve

from kvlab.engine import Engine
from kvlab.llm import LLM
from kvlab.testing.invariants import check_drained
from kvlab.testing.late import LateRunner
from kvlab.testing.paged_fake import PagedFakeRunner
from kvlab.types import SamplingParams

LAYOUTS = policy_names("layout")
VOCAB = 97


def made(layout: str, depth: int, eos: tuple[int, ...] = ()) -> Engine:
    runner = LateRunner(PagedFakeRunner(VOCAB)) if depth else PagedFakeRunner(VOCAB)
    return make_engine(40, 4, policies(layout=layout, prefix_cache="hash" if layout == "paged" else "none"), runner=runner, eos=eos,
                       depth=depth, max_model_len=32)[0]  # fmt: skip


@pytest.mark.parametrize("depth", [0, 1])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_group_that_ends_with_its_first_token(layout: str, depth: int) -> None:
    """Its samples are to be copied from its first sequence in the next step, and there is no next step."""
    plain = reference_outputs([request("a", prompt_of(6), 4)])["a"][0][0]
    for eos, max_tokens, reason in (((), 1, "length"), (plain[:1], 4, "stop")):
        engine = made(layout, depth, eos)
        serve(engine, [request("a", prompt_of(6), max_tokens, n=3, ignore_eos=False)])
        assert engine.kv.pool.num_held == 0
        assert engine.kv.pool.num_free + engine.kv.pool.num_evictable == 40
        serve(engine, [request(name, prompt_of(6), max_tokens, n=3, ignore_eos=False) for name in "bc"])
        assert engine.kv.pool.num_held == 0
        assert reason in {"length", "stop"}


@pytest.mark.parametrize("depth", [0, 1])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("num_steps", [1, 2, 3])
def test_a_group_that_is_aborted_while_its_samples_are_to_be_copied(layout: str, depth: int, num_steps: int) -> None:
    engine = made(layout, depth)
    engine.add_request(request("a", prompt_of(6), 8, n=3, temperature=1.0))
    for _ in range(num_steps):
        engine.step()
    engine.abort("a")
    while engine.has_work:
        engine.step()
    check_drained(engine)


def test_as_it_was_reported() -> None:
    for layout in LAYOUTS:
        llm = LLM("tiny", device="cpu", depth=1, layout=layout, prefix_cache="none", max_model_len=64, num_blocks=16)
        llm.generate([[1, 2, 3]], SamplingParams(n=2, max_tokens=1, ignore_eos=True))
        assert llm.engine.kv.pool.num_free + llm.engine.kv.pool.num_evictable == 16
        check_drained(llm.engine)


@pytest.mark.parametrize("depth", [0, 1])
@pytest.mark.parametrize("layout", [layout for layout in LAYOUTS if layout != "contiguous_oracle"])  # which knows no output that stops
@pytest.mark.parametrize("sampling", [{}, {"n": 2, "max_tokens": 1}, {"n": 2, "temperature": 1.0}], ids=str)
def test_llm_leaves_nothing_in_flight(layout: str, depth: int, sampling: dict[str, Any]) -> None:
    """A stop is seen a step late; what was computed meanwhile is taken in before the call returns, and after a stream that was left."""
    llm = LLM("tiny", device="cpu", depth=depth, layout=layout, prefix_cache="none", max_model_len=64, num_blocks=64)
    plain = llm.generate([5, 6, 7], SamplingParams(max_tokens=4, ignore_eos=True))[0]
    check_drained(llm.engine)
    llm.generate([5, 6, 7], SamplingParams(stop_token_ids=plain.token_ids[2:3], **{"max_tokens": 9, **sampling}))
    assert not llm.engine.has_work
    check_drained(llm.engine)
    stream = llm.stream([[5, 6, 7], [8, 9]], SamplingParams(**{"max_tokens": 9, **sampling}))
    next(stream)
    stream.close()
    assert not llm.engine.has_work
    check_drained(llm.engine)


def test_the_check_after_every_test_finds_what_is_held() -> None:
    engine = made("paged", 0)
    serve(engine, [request("a", prompt_of(6), 2)])
    drains = Drains()
    drains._check(engine)
    drains.finish()
    (block_id,) = engine.kv.pool.allocate(1) or ()
    drains._check(engine)
    with pytest.raises(AssertionError, match=rf"layout Paged, depth 0: tier gpu: block {block_id} counts 1 holders, 0 hold it"):
        drains.finish()
    engine.kv.pool.release((block_id,))
