"""kvlab.LLM: prompts in every form, streaming, parallel samples, chat, wrong input, nothing left behind."""

from __future__ import annotations

import itertools
import os
import signal
from array import array
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import kvlab
from kvlab.generation import Chunk
from kvlab.interrupts import interrupts_held
from kvlab.llm import LLM
from kvlab.model import load_model, tiny
from kvlab.policies.eviction.fifo import Fifo
from kvlab.types import MissingOracle, Outcome, Plan, RequestRecord, RequestTooLong, SamplingParams, StepStats, UserError

FIVE = SamplingParams(max_tokens=5)


@pytest.fixture(scope="module")
def llm() -> LLM:
    return LLM("tiny", device="cpu", kv_cache_tokens=2048)


def is_idle(llm: LLM) -> bool:
    pool = llm.engine.kv.pool
    return not llm.engine.has_work and pool.num_used == 0 and pool.num_free + pool.num_evictable == pool.num_blocks


def test_every_form_of_prompt_gives_the_same_tokens(llm: LLM) -> None:
    assert llm.tokenizer is not None
    ids = llm.tokenizer.encode("Hello")
    from_text = llm.generate("Hello", FIVE)
    assert len(from_text) == 1
    expected = from_text[0].token_ids
    assert len(expected) == 5
    assert from_text[0].finish_reason == "length"
    assert from_text[0].prompt == "Hello"
    assert from_text[0].prompt_token_ids == tuple(ids)
    assert [o.token_ids for o in llm.generate(["Hello", "Hello"], FIVE)] == [expected, expected]
    assert [o.token_ids for o in llm.generate(ids, FIVE)] == [expected]
    assert [o.token_ids for o in llm.generate([ids, tuple(ids)], FIVE)] == [expected, expected]
    assert is_idle(llm)


def test_tokens_are_those_of_the_model_run_by_hand(llm: LLM) -> None:
    """Greedy tokens against a forward pass over the whole prefix for each token, in float64."""
    exact = LLM(load_model(tiny(), "float64", "cpu"), kv_cache_tokens=512)
    tokens = exact.generate("Hello", FIVE)[0]
    again = LLM(load_model(tiny(), "float64", "cpu"), kv_cache_tokens=512, prefix_cache="none", block_size=1)
    prefix = list(tokens.prompt_token_ids)
    for token in tokens.token_ids:
        assert again.generate(prefix, SamplingParams(max_tokens=1))[0].token_ids == (token,)
        prefix.append(token)


def test_sampling_for_all_or_for_each(llm: LLM) -> None:
    outputs = llm.generate(["a", "b"], [SamplingParams(max_tokens=2), SamplingParams(max_tokens=3)])
    assert [len(o.token_ids) for o in outputs] == [2, 3]
    assert len(llm.generate("a")[0].token_ids) == 16
    with pytest.raises(UserError, match="3 sampling parameters for 2 prompts"):
        llm.generate(["a", "b"], [FIVE] * 3)


def test_streamed_chunks_add_up_to_the_result(llm: LLM) -> None:
    sampling = SamplingParams(max_tokens=12, n=2, temperature=1.0, seed=7)
    chunks: list[Chunk] = []
    outputs = llm.generate(["first", "second one"], sampling, on_chunk=chunks.append)
    for number, output in enumerate(outputs):
        for completion in output.outputs:
            mine = [c for c in chunks if (c.prompt_index, c.index) == (number, completion.index)]
            assert len(mine) == 12
            assert sum((c.token_ids for c in mine), ()) == completion.token_ids
            assert "".join(c.text for c in mine) == completion.text
            assert [c.finish_reason for c in mine] == [""] * 11 + [completion.finish_reason]
    assert outputs[0].outputs[0].token_ids != outputs[0].outputs[1].token_ids
    streamed = list(llm.stream(["first", "second one"], sampling))
    assert [(c.prompt_index, c.index, c.token_ids) for c in streamed] == [(c.prompt_index, c.index, c.token_ids) for c in chunks]


def test_streaming_holds_back_a_stop_string(llm: LLM) -> None:
    plain = llm.generate("Hello", SamplingParams(max_tokens=24, temperature=1.0, seed=3))[0]
    stop = plain.text[3:6]
    assert len(stop) == 3
    chunks: list[Chunk] = []
    stopped = llm.generate("Hello", SamplingParams(max_tokens=24, temperature=1.0, seed=3, stop=(stop,)), on_chunk=chunks.append)[0]
    assert stopped.text == plain.text[: plain.text.index(stop)]
    assert stopped.finish_reason == "stop"
    assert "".join(c.text for c in chunks) == stopped.text


def test_leaving_a_stream_early_aborts_what_runs(llm: LLM) -> None:
    stream = llm.stream(["one", "two"], SamplingParams(max_tokens=50))
    assert next(stream).token_ids
    assert llm.engine.has_work
    stream.close()
    assert is_idle(llm)


def test_streams_side_by_side_and_calls_within_them(llm: LLM) -> None:
    """Whoever steps the engine, each gets its own tokens."""
    sampling = SamplingParams(max_tokens=6, ignore_eos=True)
    wanted = [output.token_ids for output in llm.generate([[5, 6, 7], [8, 9]], sampling)]

    def tokens(chunks: Iterable[Chunk]) -> tuple[int, ...]:
        return sum((chunk.token_ids for chunk in chunks), ())

    pairs = list(itertools.zip_longest(llm.stream([5, 6, 7], sampling), llm.stream([8, 9], sampling)))
    assert [tokens(filter(None, side)) for side in zip(*pairs, strict=True)] == wanted
    first, second = llm.stream([5, 6, 7], sampling), llm.stream([8, 9], sampling)
    begun = next(second).token_ids
    assert tokens(first) == wanted[0]
    assert begun + tokens(second) == wanted[1]
    outer = []
    for chunk in llm.stream([5, 6, 7], sampling):
        outer.append(chunk)
        assert llm.generate([8, 9], sampling)[0].token_ids == wanted[1]
    assert tokens(outer) == wanted[0]
    inner: list[tuple[int, ...]] = []
    llm.generate([5, 6, 7], sampling, on_chunk=lambda _: inner.append(llm.generate([8, 9], sampling)[0].token_ids))
    assert set(inner) == {wanted[1]}
    assert is_idle(llm)


def test_a_stream_that_never_begins_is_nowhere(llm: LLM) -> None:
    stream = llm.stream("one")
    assert not llm.engine.groups
    with pytest.raises(UserError, match="empty"):
        llm.stream([[1], []])
    del stream
    assert is_idle(llm)


def test_of_prompts_of_which_one_is_refused_none_is_started() -> None:
    llm = LLM("tiny", device="cpu", kv_cache_tokens=256, scheduling="sjf_oracle")
    known, unknown = SamplingParams(max_tokens=40, ignore_eos=True), SamplingParams(max_tokens=4)
    with pytest.raises(MissingOracle):
        llm.generate([[1, 2], [3, 4]], [known, unknown])
    assert not llm.engine.groups
    assert is_idle(llm)


def test_ctrl_c_within_a_step_waits_for_its_end(monkeypatch: pytest.MonkeyPatch) -> None:
    class Presses:
        """Ctrl-C in the middle of a step: some of its ends have been taken in, others have not."""

        at = 3
        wants_block_events = False

        def on_step(self, plan: Plan, outcome: Outcome, stats: StepStats) -> None:
            pass

        def on_request(self, record: RequestRecord) -> None:
            self.at -= 1
            if not self.at:
                os.kill(os.getpid(), signal.SIGINT)

    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a test's process may ignore it
    try:
        llm = LLM("tiny", device="cpu", kv_cache_tokens=512, listeners=[Presses()])
        commit = llm.engine.committer.commit
        prompts = [[i, i + 1] for i in range(1, 7)]
        wanted = llm.generate(prompts[:1], FIVE)[0].token_ids

        def pressed(*args: Any) -> Any:
            os.kill(os.getpid(), signal.SIGINT)
            return commit(*args)

        with pytest.raises(KeyboardInterrupt):  # a listener hears of the end of the third request
            llm.generate(prompts, FIVE)
        assert is_idle(llm)
        monkeypatch.setattr(llm.engine.committer, "commit", pressed)
        with pytest.raises(KeyboardInterrupt):
            llm.generate(prompts, FIVE)
        assert is_idle(llm)
        monkeypatch.setattr(llm.engine.committer, "commit", commit)
        assert llm.generate(prompts, FIVE)[0].token_ids == wanted
    finally:
        signal.signal(signal.SIGINT, before)


def test_held_interrupts() -> None:
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        reached = []

        @interrupts_held()
        def presses() -> None:
            os.kill(os.getpid(), signal.SIGINT)
            reached.append("first")
            os.kill(os.getpid(), signal.SIGINT)
            reached.append("second")

        with pytest.raises(KeyboardInterrupt):
            presses()
        assert reached == ["first"]
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    finally:
        signal.signal(signal.SIGINT, before)


def test_beams_and_logprobs(llm: LLM) -> None:
    output = llm.generate("Hello", SamplingParams(max_tokens=4, beam_width=3, n=2))[0]
    assert [c.index for c in output.outputs] == [0, 1]
    assert output.outputs[0].token_ids != output.outputs[1].token_ids
    chunks = list(llm.stream("Hello", SamplingParams(max_tokens=4, beam_width=3, n=2)))
    assert [c.token_ids for c in chunks] == [c.token_ids for c in output.outputs]
    logprobs = llm.generate("Hello", SamplingParams(max_tokens=3, logprobs=2))[0].outputs[0].logprobs
    assert [len(entry.top_ids) for entry in logprobs] == [2, 2, 2]
    assert [entry.logprob for entry in logprobs] == [entry.top_logprobs[0] for entry in logprobs]
    assert llm.generate("Hello", FIVE)[0].outputs[0].logprobs == ()


def test_chat_answers_one_conversation_or_several(llm: LLM) -> None:
    hello = [{"role": "user", "content": "hello"}]
    one = llm.chat(hello, FIVE)  # type: ignore[arg-type]
    two = llm.chat([hello, hello], FIVE)  # type: ignore[arg-type]
    assert [o.token_ids for o in two] == [one[0].token_ids] * 2
    with pytest.raises(UserError, match="role and content"):
        llm.chat([{"role": "user"}], FIVE)  # type: ignore[list-item]


def test_a_later_call_finds_earlier_prefixes(llm: LLM) -> None:
    prompt = list(range(40))
    llm.generate(prompt, FIVE)
    assert llm.generate([*prompt, 50, 51], FIVE)[0].record.num_cached_tokens == 32


def test_prompts_kept_out_of_the_cache_as_a_whole_or_from_a_position_on() -> None:
    """Blocks of 16; 40 tokens and 5 of output: 44 computed, two full blocks. Of the same prompt 32 tokens are found, if they are there."""
    llm = LLM("tiny", device="cpu", kv_cache_tokens=2048)

    def cached(**params: Any) -> list[int]:
        outputs = llm.generate([list(range(first, first + 40)) for first in (0, 100, 200)], FIVE, **params)
        return [output.record.num_cached_tokens for output in outputs]

    assert cached(cache=False) == [0, 0, 0]
    assert cached(cache_until=31) == [0, 0, 0]
    assert cached(cache_until=np.array([15, 31, 0])) == [16, 16, 16]
    assert cached(cache=[False, True, False]) == [16, 16, 16]
    assert cached(cache_until=[None, 10, None]) == [16, 32, 16]
    assert cached(cache=False) == [32, 32, 32]  # what others have cached is found all the same
    assert llm.engine.kv.pool.num_evictable == 6
    list(llm.stream(list(range(250, 290)), FIVE, cache=False))
    assert llm.generate(list(range(250, 290)), FIVE, cache_until=16)[0].record.num_cached_tokens == 0
    assert llm.generate(list(range(250, 290)), FIVE, cache=False)[0].record.num_cached_tokens == 16
    talk = [{"role": "user", "content": "Tell me a long story, and then another one."}]
    for params, found in (({"cache": False}, 0), ({"cache_until": 16}, 0), ({}, 16), ({}, 48)):
        assert llm.chat(talk, FIVE, **params)[0].record.num_cached_tokens == found  # type: ignore[arg-type]


def test_wrong_ways_to_keep_a_prompt_out_start_nothing(llm: LLM) -> None:
    for params, say in (
        ({"cache": "no"}, "cache = 'no' is not allowed: true or false"),
        ({"cache": [True, 0]}, "cache = 0 is not allowed: true or false"),
        ({"cache_until": -1}, "cache_until = -1 is not allowed: a position in tokens"),
        ({"cache_until": [1, 2.0]}, r"cache_until = 2\.0 is not allowed: a position in tokens"),
        ({"cache_until": True}, "cache_until = True is not allowed: a position in tokens"),
        ({"cache_until": [1, 2, 3]}, "3 values of cache_until for 2 prompts: give one for all, or one for each"),
        ({"cache": False, "cache_until": 3}, "two answers to one question"),
    ):
        with pytest.raises(UserError, match=say):
            llm.generate([[1, 2], [3]], FIVE, **params)  # type: ignore[arg-type]
        assert is_idle(llm)


def test_wrong_prompts_start_nothing(llm: LLM) -> None:
    for prompts, error, say in (
        ([], UserError, "no prompt"),
        ([[1, 2], []], UserError, "empty prompt"),
        ([[1, 2], [5000]], UserError, "5000"),
        ([[1] * 5000], RequestTooLong, "5000 tokens"),
        ([1, "a"], UserError, "Prompt 0 is int"),
        ([None], UserError, "The prompt holds NoneType"),
        (b"ab", UserError, r"The prompt is bytes \(decode it"),
        ([b"ab", "a"], UserError, r"Prompt 0 is bytes \(decode it"),
        ([1, 2.0], UserError, r"The prompt holds float 2\.0"),
        ([[1, 2.0]], UserError, r"Prompt 0 holds float 2\.0"),
        ([True, 1], UserError, "The prompt holds bool True"),
        (np.array([1.0, 2.0]), UserError, r"The prompt holds float 1\.0"),
        (torch.tensor([[1.5]]), UserError, r"Prompt 0 holds float 1\.5"),
        (np.array([True]), UserError, "The prompt holds bool True"),
        (np.array([], dtype=np.int64), UserError, "no prompt"),
        (np.zeros((2, 0), dtype=np.int64), UserError, "empty prompt"),
        (np.zeros((1, 1, 1), dtype=np.int64), UserError, "Prompt 0 holds list"),
        (np.array(5), UserError, "The prompt is ndarray"),
        ({1, 2}, UserError, "The prompt is set"),
        (iter(()), UserError, "no prompt"),
        (5, UserError, "The prompt is int"),
        ({"prompt": "a"}, UserError, "The prompt is dict"),
    ):
        with pytest.raises(error, match=say):
            llm.generate(prompts, FIVE)  # type: ignore[arg-type]
        assert is_idle(llm)
    for sampling in ({"max_tokens": 3}, [None], 5, "greedy"):
        with pytest.raises(UserError, match="a kvlab.SamplingParams is needed"):
            llm.generate([1, 2], sampling)  # type: ignore[arg-type]
    assert is_idle(llm)


def test_a_sequence_of_whole_numbers_is_token_ids_whatever_holds_it(llm: LLM) -> None:
    once = llm.generate([3, 4, 5], FIVE)[0].token_ids
    whole: list[Any] = [
        (3, 4, 5), np.array([3, 4, 5]), np.array([3, 4, 5], dtype=np.uint8), torch.tensor([3, 4, 5]), [np.int64(3), 4, np.uint16(5)],
        [torch.tensor(3), 4, 5], range(3, 6), iter([3, 4, 5]), array("I", [3, 4, 5]), np.array([3, 4, 5], dtype=object),
    ]  # fmt: skip
    for ids in whole:
        assert [output.token_ids for output in llm.generate(ids, FIVE)] == [once], type(ids)
    two = [once, llm.generate([6, 7, 8], FIVE)[0].token_ids]
    for rows in (np.array([[3, 4, 5], [6, 7, 8]]), torch.tensor([[3, 4, 5], [6, 7, 8]]), ([3, 4, 5], np.array([6, 7, 8])),
                 (row for row in ([3, 4, 5], iter((6, 7, 8))))):  # fmt: skip
        assert [output.token_ids for output in llm.generate(rows, FIVE)] == two
    texts = [llm.generate(text, FIVE)[0].token_ids for text in ("a", "b")]
    for mixed in (["a", "b", [3, 4, 5]], np.array(["a", "b"]), (text for text in "ab")):
        assert [output.token_ids for output in llm.generate(mixed, FIVE)][:2] == texts


def test_an_error_in_a_callback_leaves_a_usable_engine(llm: LLM) -> None:
    def fail(chunk: Chunk) -> None:
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        llm.generate(["a", "b"], FIVE, on_chunk=fail)
    assert is_idle(llm)
    assert len(llm.generate("a", FIVE)[0].token_ids) == 5


def test_policies_by_name_object_and_class() -> None:
    model = load_model(tiny(), "float32", "cpu")
    for eviction in ("fifo", Fifo, Fifo()):
        assert isinstance(LLM(model, kv_cache_tokens=256, eviction=eviction).policies.eviction, Fifo)
    for wrong, say in (
        ({"evction": "lru"}, "no seam"),
        ({"eviction": "lrru"}, "Did you mean 'lru'"),
        ({"block_size": 0}, "positive integer"),
        ({"watermark": 1.0}, r"\[0, 1\)"),
        ({"layout": "contiguous_max"}, "prefix_cache"),
    ):
        with pytest.raises(UserError, match=say):
            LLM(model, kv_cache_tokens=256, **wrong)  # type: ignore[arg-type]


def test_models_by_name_folder_and_id(tmp_path: Path) -> None:
    for wrong in (None, 5, True, b"tiny", ["tiny"], {}, 1.5):
        with pytest.raises(UserError, match="model = .* is not allowed: a model's name, a folder"):
            kvlab.LLM(wrong)  # type: ignore[arg-type]
    for name, say in (
        ("", "model is empty"),
        ("smolm2", "Did you mean 'smollm2'"),
        ("dummy_llama9", "dummy_llama3_8b"),
        (tmp_path / "none", "none"),
        (str(tmp_path), "config.json"),
    ):
        with pytest.raises(UserError, match=say):
            kvlab.LLM(name)


def test_a_limit_that_the_batching_policy_does_not_take_is_told_of(caplog: pytest.LogCaptureFixture) -> None:
    model = load_model(tiny(), "float32", "cpu")
    LLM(model, kv_cache_tokens=256, batching="static")
    LLM(model, kv_cache_tokens=256, max_num_batched_tokens=7)
    assert caplog.messages == []
    LLM(model, kv_cache_tokens=256, batching="static", max_num_batched_tokens=7)
    (message,) = caplog.messages
    assert message.startswith("max_num_batched_tokens = 7 does not limit a step with batching Static: prompts are computed whole")
