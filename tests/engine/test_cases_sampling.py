"""Sampling and stopping through the engine: random streams that nothing shifts, stop strings however tokens cut them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from engine_support import Forcer, Log, make_engine, policies, prompt_of, reference_outputs, request, run_to_end, serve

from kvlab.engine.runners.fake_tokens import FakeModel
from kvlab.model.tokenizer import ByteTokenizer
from kvlab.testing.paged_fake import PagedFakeRunner
from kvlab.types import RequestRecord, SamplingParams

# ------------------------------------------------------------------------------ random streams


def test_four_samples_of_one_seed_are_four_streams_and_come_again() -> None:
    """n = 4 with one seed: different from the first token on, the same in another run, other with another seed."""
    runs = []
    for seed in (11, 11, 12):
        engine, log = make_engine(40, 4, vocab_size=10_000)
        serve(engine, [request("a", prompt_of(6), 6, n=4, temperature=1.0, seed=seed)])
        runs.append(log.records["a"].outputs)
    assert len({tokens for tokens, _ in runs[0]}) == 4
    assert len({tokens[0] for tokens, _ in runs[0]}) == 4
    assert runs[0] == runs[1]
    assert not {tokens for tokens, _ in runs[0]} & {tokens for tokens, _ in runs[2]}


def test_a_seed_is_its_own_requests_affair() -> None:
    """Another request's seed, or another request at all, changes nothing; a request without seed draws from the engine's."""
    alone = reference_outputs([request("a", prompt_of(6), 6, n=2, temperature=1.0, seed=7)])["a"]
    for other in (None, 7, 8):
        engine, log = make_engine(40, 4)
        serve(
            engine,
            [request("b", prompt_of(9, 2), 6, temperature=1.0, seed=other), request("a", prompt_of(6), 6, n=2, temperature=1.0, seed=7)],
        )
        assert log.records["a"].outputs == alone
    by_engine_seed = []
    for seed in (0, 0, 1):
        engine, log = make_engine(40, 4, seed=seed)
        serve(engine, [request("a", prompt_of(6), 6, temperature=1.0), request("b", prompt_of(6), 6, temperature=1.0)])
        by_engine_seed.append(log.outputs)
    assert by_engine_seed[0] == by_engine_seed[1] != by_engine_seed[2]
    assert by_engine_seed[0]["a"] != by_engine_seed[0]["b"]


@pytest.mark.parametrize("mode", ["recompute", "swap"])
def test_a_preemption_neither_resets_nor_shifts_a_random_stream(mode: str) -> None:
    """Preempted in every step that decodes: the draws are those of an undisturbed run."""
    asked = request("a", prompt_of(6), 8, n=4, temperature=1.0, seed=3)
    engine, log = make_engine(60, 4, policies(mode=mode), num_cpu_blocks=60)
    forcer = Forcer(engine)
    engine.add_request(asked)
    for _ in range(12):
        if engine.has_work:
            engine.step()
            forcer.before.append("a")
    run_to_end(engine, 60)
    assert forcer.num_forced >= 7
    assert log.records["a"].outputs == reference_outputs([asked])["a"]


@pytest.mark.parametrize("mode", ["recompute", "swap"])
def test_each_sequence_keeps_its_stream(mode: str) -> None:
    """A runner is told streams 0 to 3, at the fork and again after a preemption."""
    engine, log = make_engine(60, 4, policies(mode=mode), num_cpu_blocks=60)
    forcer = Forcer(engine)
    engine.add_request(request("a", prompt_of(6), 8, n=4, temperature=1.0))
    for _ in range(3):
        engine.step()
    forcer.before.append("a")
    run_to_end(engine, 60)
    streams: dict[int, list[int]] = {}
    for plan in log.plans:
        for start in plan.starts:
            streams.setdefault(start.seq_id, []).append(start.stream)
    assert streams == {0: [0, 0], 1: [1, 1], 2: [2, 2], 3: [3, 3]}


@pytest.mark.parametrize(("min_tokens", "num_tokens", "reason"), [(0, 2, "stop"), (1, 2, "stop"), (2, 5, "length"), (5, 5, "length")])
def test_an_end_id_below_min_tokens_does_not_end(min_tokens: int, num_tokens: int, reason: str) -> None:
    """Samplers mask them; should one come all the same (id 1, the second token), the engine goes on."""
    record, _ = _say([b"a", b"b", b"c", b"d", b"e"], stop_token_ids=(1,), min_tokens=min_tokens)
    assert record.outputs == ((tuple(range(num_tokens)), reason),)


# -------------------------------------------------------------------------------- stop strings


class Pieces(ByteTokenizer):
    """A tokenizer whose tokens are the given pieces of bytes."""

    def __init__(self, pieces: Sequence[bytes]) -> None:
        super().__init__(len(pieces) + 1)
        self.pieces = list(pieces)

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        return b"".join(self.pieces[i] for i in ids if i < len(self.pieces)).decode(errors="replace")


class Script(FakeModel):
    """Says tokens 0, 1, 2, ... whatever the prompt."""

    def next_token(self, prefix_hash: int, position: int, num_prompt: int, sampling: SamplingParams, seed: int, stream: int) -> int:
        return position - num_prompt


def _say(pieces: Sequence[bytes], preempt: bool = False, **sampling: Any) -> tuple[RequestRecord, Log]:
    """The record of a request whose output is the pieces, one a token."""
    runner = PagedFakeRunner(len(pieces) + 1)
    engine, log = make_engine(40, 4, runner=runner, tokenizer=Pieces(pieces))
    runner._model = Script(len(pieces) + 1)
    forcer = Forcer(engine)
    engine.add_request(request("a", prompt_of(3, 0, len(pieces) + 1), len(pieces), **sampling))
    while engine.has_work:
        engine.step()
        if preempt:
            forcer.before.append("a")
    return log.records["a"], log


E_ACUTE = "\u00e9".encode()
THREE_BYTES = "\u4f60".encode()
CASES = {
    "spanning two tokens": ([b"hel", b"lo wo", b"rld"], "o w", 2, "hell", "hello w"),
    "spanning three tokens": ([b"ab", b"c", b"de", b"f"], "bcd", 3, "a", "abcd"),
    "inside one token": ([b"x", b"abSTOPcd", b"y"], "STOP", 2, "xab", "xabSTOP"),
    "equal to the whole output": ([b"STOP", b"more"], "STOP", 1, "", "STOP"),
    "with a character cut across two tokens": ([b"a", E_ACUTE[:1], E_ACUTE[1:] + b"!", b"z"], "\u00e9!", 3, "a", "a\u00e9!"),
    "being a character cut across three tokens": (
        [b"a", THREE_BYTES[:1], THREE_BYTES[1:2], THREE_BYTES[2:], b"z"],
        "\u4f60",
        4,
        "a",
        "a\u4f60",
    ),
    "after a false start": ([b"aa", b"ab", b"c"], "aab", 2, "a", "aaab"),
    "at the last token allowed": ([b"ab", b"cd"], "cd", 2, "ab", "abcd"),
}


@pytest.mark.parametrize("preempt", [False, True])
@pytest.mark.parametrize("include", [False, True])
@pytest.mark.parametrize("case", CASES, ids=[name.replace(" ", "-") for name in CASES])
def test_a_stop_string_however_it_is_cut(case: str, include: bool, preempt: bool) -> None:
    """The text ends before (or after) the stop string; the ids are those of all tokens that were needed; a preemption changes nothing."""
    pieces, stop, num_tokens, without, with_stop = CASES[case]
    record, log = _say(pieces, preempt, stop=(stop,), include_stop_str=include)
    assert record.outputs == ((tuple(range(num_tokens)), "stop"),)
    assert record.texts == (with_stop if include else without,)
    assert (log.total("num_preemptions") > 0) == (preempt and num_tokens > 1)


def test_no_stop_string_no_stop() -> None:
    """The whole output is the text; a cut character at its end is a replacement character."""
    record, _ = _say([b"ab", b"c", E_ACUTE[:1]], stop=("abd", "\u00e9"))
    assert record.outputs == (((0, 1, 2), "length"),)
    assert record.texts == ("abc\ufffd",)


def test_the_stop_string_that_is_complete_first_counts() -> None:
    """Two stop strings in one text."""
    record, _ = _say([b"one ", b"two ", b"three"], stop=("thr", "wo"))
    assert record.texts == ("one t",)
    assert record.outputs == (((0, 1), "stop"),)


@pytest.mark.parametrize(
    ("min_tokens", "text", "num_tokens"), [(0, "", 1), (1, "STOPa", 3), (2, "STOPa", 3), (3, "STOPaSTOPb", 5), (4, "STOPaSTOPb", 5)]
)
def test_a_stop_string_below_min_tokens_does_not_count(min_tokens: int, text: str, num_tokens: int) -> None:
    """STOP comes with tokens 1, 3 and 5 of 6: only one that is complete after the first `min_tokens` ends the text."""
    record, _ = _say([b"STOP", b"a", b"STOP", b"b", b"STOP", b"c"], stop=("STOP",), min_tokens=min_tokens)
    assert record.outputs == ((tuple(range(num_tokens)), "stop"),)
    assert record.texts == (text,)


@pytest.mark.parametrize("batching", ["chunked", "static"])
def test_one_stream_that_stops_lets_the_others_go_on(batching: str) -> None:
    """n = 3: each ends by EOS, a stop id or its length on its own; blocks of ended ones are free at once."""
    asked = request("a", prompt_of(6), 40, n=3, temperature=1.0, ignore_eos=False, stop_token_ids=(5,))
    wanted = reference_outputs([asked], eos=(3,), vocab_size=40)["a"]
    engine, log = make_engine(60, 4, policies(batching=batching), eos=(3,), vocab_size=40)
    serve(engine, [asked])
    assert log.records["a"].outputs == wanted
    lengths = [len(tokens) for tokens, _ in wanted]
    assert len(set(lengths)) == 3
    assert all(tokens[-1] in (3, 5) for tokens, reason in wanted if reason == "stop")
    assert not any({3, 5} & set(tokens[:-1]) for tokens, _ in wanted)
    seqs = [stats.num_running_seqs for stats in log.stats]
    assert seqs[0] == 3
    assert sorted(set(seqs), reverse=True) == [3, 2, 1, 0]
