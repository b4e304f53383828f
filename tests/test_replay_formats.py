"""Trace formats of kvlab.replay: small files written here, hits worked out by hand, repairs that are counted, rows that are refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import kvlab
from kvlab.replay import AccessTrace, EngineOptions, ReadOptions, as_trace, replay
from kvlab.replay.engine import open_served
from kvlab.replay.trace import BlockRows, format_of
from kvlab.types import UserError
from kvlab.workload.qwen_bailian import chain_ids


def lines(path: Path, rows: list[Any]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def qwen(chat: int, parent: int, at_s: float, num_input: int, ids: list[int], **more: Any) -> dict[str, Any]:
    return {"chat_id": chat, "parent_chat_id": parent, "timestamp": at_s, "input_length": num_input, "output_length": 5,
            "type": "text", "turn": 1, "hash_ids": ids, **more}  # fmt: skip


def talk(*texts: str) -> dict[str, Any]:
    """A conversation in which human and assistant take turns."""
    speakers = ("human", "gpt")
    return {"id": "x", "conversations": [{"from": speakers[place % 2], "value": text} for place, text in enumerate(texts)]}


# ------------------------------------------------------------------------ Qwen-Bailian


def test_qwen_ids_stand_for_their_own_block_and_are_chained(tmp_path: Path) -> None:
    """B=16. a = [7, 8, 9 partial]: 40 tokens are two full blocks. b = [8, 7]: the same contents elsewhere, no hit. c = a's two blocks
    and one more: two hits, 32 of 48 tokens.
    """
    path = lines(tmp_path / "q.jsonl", [qwen(1, -1, 0.0, 40, [7, 8, 9]), qwen(2, -1, 1.5, 32, [8, 7]), qwen(3, 1, 2.0, 48, [7, 8, 10])])
    trace = as_trace(path)
    assert [list(blocks) for blocks in trace.blocks] == [[0, 1], [2, 3], [0, 1, 4]]
    assert (trace.block_tokens, trace.times_s, trace.input_lengths, trace.notes) == (16, [0.0, 1.5, 2.0], [40, 32, 48], ())
    result = replay(path, "lru", 10)
    assert result.prefix_hits_per_request.tolist() == [0, 0, 2]
    assert result.token_hit_rate == 32 / 120


def test_chaining_equals_naming_prefixes() -> None:
    """Two blocks get one number exactly when they and all before them in their rows are equal."""
    draw = np.random.default_rng(0)
    rows = [draw.integers(0, 3, size=draw.integers(0, 9)).tolist() for _ in range(300)]
    starts = np.concatenate([[0], np.cumsum([len(row) for row in rows])]).astype(np.int64)
    names: dict[tuple[int, ...], int] = {}
    expected = [names.setdefault(tuple(row[: end + 1]), len(names)) for row in rows for end in range(len(row))]
    assert chain_ids(np.array([block for row in rows for block in row], dtype=np.int64), starts).tolist() == expected
    assert chain_ids(np.zeros(0, dtype=np.int64), np.zeros(3, dtype=np.int64)).tolist() == []


def test_qwen_repairs_are_counted(tmp_path: Path) -> None:
    rows = [
        qwen(1, -1, 5.0, 32, [1, 2, 3]),  # one id more than 32 tokens need
        qwen(2, 99, 4.0, 40, [1, 2]),  # an earlier time, an unknown parent, and no id for the partial block
        qwen(3, 1, 6.0, 0, []),  # no input
    ]
    trace = as_trace(lines(tmp_path / "q.jsonl", rows))
    assert [list(blocks) for blocks in trace.blocks] == [[0, 1], [0, 1]]
    assert trace.times_s == [4.0, 5.0]
    assert trace.notes == (
        "q.jsonl: 1 of 3 rows have one hash id more than their length needs; it was left out.",
        "q.jsonl: 1 of 3 rows name a parent that no earlier row has; each begins a session.",
        "q.jsonl: 1 of 3 rows have no input tokens and were left out.",
        "q.jsonl: 1 rows arrive before the row above them; the trace was sorted by arrival.",
    )


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({**qwen(2, -1, 0, 33, [1, 2]), "hash_ids": [1]}, r"line 2: 1 hash_ids for 33 input tokens; there must be one per 16 tokens"),
        (qwen(2, -1, 0, 1024, [1, 2]), r"line 2: 2 hash_ids for 1024 .* They fit blocks of 512 tokens: one trace can't mix block sizes"),
        (qwen(2, -1, 0, 16, [1, 2, 3]), r"line 2: 3 hash_ids for 16 input tokens"),
        (qwen(2, -1, 0, -4, []), r"line 2: input length -4 is negative"),
        (qwen(2, -1, 0, 4, [], output_length=-1), r"line 2: output length -1 is negative"),
        (qwen(2, "a", 0, 4, []), r"line 2: parent_chat_id = 'a' is not allowed"),
        (qwen(2, -1, 0, 4, [], turn="x"), r"line 2: turn = 'x' is not allowed"),
        (qwen(2, -1, float("nan"), 4, []), r"line 2: timestamp = nan is not allowed: seconds"),
        ({"chat_id": 5}, r"line 2: the field 'parent_chat_id' is missing. A Qwen-Bailian trace has"),
    ],
)
def test_a_malformed_qwen_row_is_named(tmp_path: Path, row: Any, message: str) -> None:
    with pytest.raises(UserError, match=message):
        replay(lines(tmp_path / "q.jsonl", [qwen(1, -1, 0, 16, [1]), row]), "lru", 3)


# -------------------------------------------------------------------- lengths without content

BURST = "Timestamp,Session ID,Elapsed time,Model,Request tokens,Response tokens,Total tokens,Log Type\n"


def test_traces_without_content_say_that_nothing_can_hit(tmp_path: Path) -> None:
    """33, 16 tokens in blocks of 16: 3 and 1 blocks, all new. Capacity 2: two of the four are evicted."""
    azure = tmp_path / "a.csv"
    azure.write_text(
        "TIMESTAMP,ContextTokens,GeneratedTokens\n2024-05-10 00:00:00.009930+00:00,33,4\n2024-05-10 00:00:01+00:00,16,4\n",
        encoding="utf-8",
    )
    burst = tmp_path / "b.csv"
    burst.write_text(
        BURST + "45.0,s1,2,ChatGPT,33,18,51,Conversation log\n46.0,,1,GPT-4,7,0,7,API log\n118.0,,1,GPT-4,16,9,25,API log\n",
        encoding="utf-8",
    )
    for path in (azure, burst):
        result = replay(path, "lru", 2)
        assert result.num_blocks_per_request.tolist() == [3, 1]
        assert (result.object_hits, result.evicted) == (0, (b"0", b"1"))
        assert result.notes[-1].startswith(f"{path.name}: the trace has no content: each request's blocks are its own, so that nothing")
    assert replay(burst, "lru", 2).notes[0] == "b.csv: 1 rows without response tokens (requests that failed) were left out."
    assert replay(azure, "lru", 2, reading=ReadOptions(block_size=11)).num_blocks_per_request.tolist() == [3, 2]
    served = replay(azure, "lru", 100, "engine")
    assert served.prefix_hits_per_request.tolist() == [0, 0]
    assert "nothing can hit" in served.notes[-1]


def test_rows_are_sorted_by_arrival_and_rows_of_one_time_keep_their_order(tmp_path: Path) -> None:
    rows = [(3000, [1]), (1000, [2]), (3000, [3]), (0, [4])]
    path = lines(tmp_path / "m.jsonl", [{"timestamp": time, "hash_ids": ids} for time, ids in rows])
    trace = as_trace(path)
    assert [list(blocks) for blocks in trace.blocks] == [[4], [2], [1], [3]]
    assert trace.notes == ("m.jsonl: 2 rows arrive before the row above them; the trace was sorted by arrival.",)


def test_ids_that_are_not_chained_are_told(tmp_path: Path) -> None:
    """2 follows 1 and begins a request; 3 follows 2 and 1; 1 always begins."""
    path = lines(tmp_path / "m.jsonl", [{"hash_ids": [1, 2, 3]}, {"hash_ids": []}, {"hash_ids": [2, 3]}, {"hash_ids": [1, 3]}])
    assert as_trace(path).notes == (
        "m.jsonl: 2 ids follow different ids in different rows. Ids of this format stand for all before them too: if these don't, hits"
        " are counted that attention can't use.",
    )
    assert as_trace(lines(path, [{"hash_ids": [1, 2, 3]}, {"hash_ids": [1, 2]}, {"hash_ids": [1, 4]}])).notes == ()


def test_reading_stops_behind_the_requests_wanted(tmp_path: Path) -> None:
    """Rows without input don't count; what comes after is not looked at."""
    rows = [{"hash_ids": [1], "input_length": 5}, {"hash_ids": [], "input_length": 0}, {"hash_ids": [2], "input_length": 5}]
    path = lines(tmp_path / "m.jsonl", [*rows, {"hash_ids": "broken"}])
    assert [list(blocks) for blocks in as_trace(path, 2).blocks] == [[1], [2]]
    with pytest.raises(UserError, match="line 4: hash_ids must be a list"):
        as_trace(path, 3)
    burst = tmp_path / "b.csv"
    burst.write_text(BURST + "1,,1,GPT-4,5,5,10,API log\n2,,1,GPT-4,5,0,5,API log\n3,,1,GPT-4,6,5,11,API log\nbroken\n", encoding="utf-8")
    assert as_trace(burst, 2).input_lengths == [5, 6]
    assert replay(burst, "lru", 9, "engine", limit=2).requests == 2


def test_blocks_of_another_size(tmp_path: Path) -> None:
    path = lines(tmp_path / "m.jsonl", [{"hash_ids": [1, 2], "input_length": 32}, {"hash_ids": [1, 3], "input_length": 20}])
    result = replay(path, "lru", 4, reading=ReadOptions(trace_block_tokens=16))
    assert result.token_hit_rate == 16 / 52


# ------------------------------------------------------------------------------ ShareGPT


def test_a_conversations_next_turn_hits_what_the_turn_before_asked(tmp_path: Path) -> None:
    """Bytes in ChatML's shape: 13 for "<|im_start|>u" ... The first prompt is `<|im_start|>user\\nhi<|im_end|>\\n<|im_start|>assistant\\n`:
    17 + 2 + 11 + 22 = 52 bytes, 3 full blocks of 16; all of them begin the second prompt, of 52 + 3 + 11 + 17 + 1 + 11 + 22 = 117: 7.
    """
    path = tmp_path / "s.json"
    path.write_text(json.dumps([talk("hi", "yo!", "k", "bye"), talk("hi", "other")]), encoding="utf-8")
    result = replay(path, "lru", 100)
    assert result.tokens_per_request is not None
    assert result.tokens_per_request.tolist() == [52, 117, 52]
    assert result.num_blocks_per_request.tolist() == [3, 7, 3]
    assert result.prefix_hits_per_request.tolist() == [0, 3, 3]
    assert result.notes == (
        "s.json: has no times; conversations follow one another, which favours recency; interleave=n lets n of them take turns."
        " Prompts are UTF-8 bytes.",
    )
    assert replay(path, "lru", 100, limit=2).requests == 2
    assert replay(path, "lru", 100, reading=ReadOptions(block_size=50)).num_blocks_per_request.tolist() == [1, 2, 1]


def test_conversations_take_turns(tmp_path: Path) -> None:
    """Three conversations of 2, 1 and 1 turns, two at a time: a1 b1 a2 c1."""
    path = lines(tmp_path / "s.jsonl", [talk("a", "1", "a", "2"), talk("bb", "1"), talk("ccc", "1")])
    trace = as_trace(path, reading=ReadOptions(interleave=2))
    assert trace.input_lengths == [51, 52, 114, 53]
    assert trace.notes[0].startswith("s.jsonl: has no times; 2 conversations take turns.")


def test_a_tokenizer_may_be_given(tmp_path: Path) -> None:
    class Words:
        vocab_size = 1000
        bos_token_id = None

        def encode(self, text: str) -> list[int]:
            return [len(word) for word in text.split()]

        def apply_chat(self, messages: list[dict[str, str]]) -> list[int]:
            return [token for message in messages for token in [0, *self.encode(message["content"])]]

    path = lines(tmp_path / "s.jsonl", [talk("one two three", "four five", "six", "seven")])
    trace = as_trace(path, reading=ReadOptions(block_size=2, tokenizer=Words()))
    assert (trace.input_lengths, trace.output_lengths) == ([4, 9], [2, 1])
    assert [list(blocks) for blocks in trace.blocks][1][:2] == list(trace.blocks[0])
    assert as_trace(path, reading=ReadOptions(tokenizer="tiny")).block_tokens == 16
    with pytest.raises(UserError, match="tokenizer = 5 is not allowed: bytes, smollm2"):
        as_trace(path, reading=ReadOptions(tokenizer=5))


def test_a_block_is_named_by_all_that_is_before_it(tmp_path: Path) -> None:
    """A template that keeps the last message only, a word is its length: prompts 1 2 3 4, then 5 1 3 4; another conversation asks 1 2 8 8.
    The 3 4 behind 5 1 is not the one behind 1 2; the 1 2 of both conversations is one block."""

    class Forgets:
        vocab_size = 1000
        bos_token_id = None

        def encode(self, text: str) -> list[int]:
            return [len(word) for word in text.split()]

        def apply_chat(self, messages: list[dict[str, str]]) -> list[int]:
            return self.encode(messages[-1]["content"])

    path = lines(tmp_path / "s.jsonl", [talk("a bb ccc dddd", "x", "eeeee a ccc dddd", "x"), talk("a bb cccccccc dddddddd", "x")])
    first, second, other = as_trace(path, reading=ReadOptions(block_size=2, tokenizer=Forgets())).blocks
    assert [len(first), len(second), len({*first, *second})] == [2, 2, 4]
    assert (other[0] == first[0], other[1] in {*first, *second}) == (True, False)


def test_the_engine_is_answered_as_in_the_file(tmp_path: Path) -> None:
    """B=16, bytes: "hi" asks 52, the answer of 40 letters makes 92: all of the 5 blocks computed before the last token (91 of them)
    are found by the second prompt, of 52 + 40 + 11 + 17 + 1 + 11 + 22 = 154.
    """
    path = tmp_path / "s.json"
    path.write_text(json.dumps([talk("hi", "x" * 40, "k", "bye")]), encoding="utf-8")
    result = replay(path, "lru", 100, "engine")
    assert result.prefix_hits_per_request.tolist() == [0, 5]
    assert result.tokens_per_request is not None
    assert result.tokens_per_request.tolist() == [52, 154]


def test_odd_conversations_are_mended_and_counted(tmp_path: Path) -> None:
    odd = {"conversations": [{"from": "gpt", "value": "as I said"}, {"from": "human", "value": "a"}, {"from": "human", "value": "b"},
                             {"from": "gpt", "value": " "}, {"from": "chatgpt", "value": "c"}]}  # fmt: skip
    path = tmp_path / "s.json"
    path.write_text(json.dumps([odd, {"id": "n", "conversations": []}, talk("a\n\nb", "c")], indent=1), encoding="utf-8")
    trace = as_trace(path)
    assert list(trace.blocks[0]) == list(trace.blocks[1])
    assert trace.notes[1:] == (
        "s.json: 1 answers that nobody asked for were left out.",
        "s.json: 1 conversations without an answer were left out.",
        "s.json: 1 empty messages were left out.",
        "s.json: 1 messages were joined to the one before, of the same role.",
    )


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[]", r"holds no conversations"),
        ('[{"conversations": [{"from": "human", "value": "a"}', r"conversation 1: broken JSON"),
        ('[{"conversations": []}, {"conversations": nope}, {"conversations": []}]', r"conversation 2: broken JSON"),
        ("[5]", r"conversation 1: an object with a list \"conversations\" is expected"),
        ('[{"conversations": [{"from": "tool", "value": "a"}]}]', r"conversation 1: message 0 is from 'tool'; known are system, human"),
        ('[{"conversations": [{"from": "human"}]}]', r"conversation 1: message 0 must be like"),
        ('{"conversations": []}\n{"conversations"\n', r"line 2: broken JSON"),
        ('[{"conversations": []}]', r"holds no requests"),
    ],
)
def test_a_malformed_conversation_is_named(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "s.json"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(UserError, match=message):
        replay(path, "lru", 3)


def test_a_long_file_is_read_an_item_at_a_time(tmp_path: Path) -> None:
    """Items across the reader's buffers of 1 MiB, one of them longer than two."""
    texts = ["é" * size for size in (300_000, 900_000, 5, 1_600_000, 700_000, 1)]
    path = tmp_path / "s.json"
    path.write_text(json.dumps([talk(text, "ok") for text in texts], ensure_ascii=False), encoding="utf-8")
    assert as_trace(path, reading=ReadOptions(block_size=4096)).input_lengths == [50 + 2 * len(text) for text in texts]


# --------------------------------------------------------------------------- told apart


def test_formats_are_told_apart(tmp_path: Path) -> None:
    for text, kind in [
        ('[{"id": 1}]', "sharegpt"), ('\n {"conversations": []}', "sharegpt"), ('{"hash_ids": []}', "mooncake"),
        ('{"chat_id": 3}', "qwen_bailian"), (BURST, "burstgpt"), ("TIMESTAMP,ContextTokens,GeneratedTokens", "azure"), ("17", "accesses"),
    ]:  # fmt: skip
        path = tmp_path / "file"
        path.write_text(text, encoding="utf-8")
        assert format_of(path) == kind


@pytest.mark.parametrize(
    ("reading", "message"),
    [
        ({"block_size": 8}, "block_size has no effect on m.jsonl, a trace of the format mooncake"),
        ({"tokenizer": "bytes"}, "tokenizer has no effect"),
        ({"interleave": 2}, "interleave has no effect"),
    ],
)
def test_an_option_without_effect_is_refused(tmp_path: Path, reading: dict[str, Any], message: str) -> None:
    path = lines(tmp_path / "m.jsonl", [{"hash_ids": [1]}])
    with pytest.raises(UserError, match=message):
        replay(path, "lru", 3, reading=ReadOptions(**reading))
    for value in (0, -1, 1.5, True):
        with pytest.raises(UserError, match="is not allowed: a whole number of at least 1"):
            ReadOptions(block_size=value)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (([[1], [2]], [1.0, 0.5]), "request 1 arrives at 0.5 s, before request 0 at 1.0 s. Sort the requests"),
        (([[1], [2]], [0.0, float("nan")]), "request 1 arrives at nan s"),
        (([[1], [2]], [0.0]), "1 times_s for 2 requests"),
        (([[1], [2]], [0.0, 0.0], [5]), "1 input_lengths for 2 requests"),
        (([[1], [2]], [0.0, 0.0], [5, 0]), "request 1 has 1 block ids for 0 input tokens"),
        (([[1], [2]], [0.0, 0.0], [5, 1030]), "request 1 has 1 block ids for 1030 input tokens in blocks of 512"),
        (([[1]], [0.0], None, None, 0), "block_tokens = 0 is not allowed"),
        (([], []), "holds no requests"),
    ],
)
def test_an_access_trace_that_does_not_go_together_is_refused(arguments: tuple[Any, ...], message: str) -> None:
    with pytest.raises(UserError, match=message):
        AccessTrace("mine", *arguments)


def test_engine_semantics_of_qwen_ids(tmp_path: Path) -> None:
    """Blocks of 16 as they are. The same content after another beginning is no hit; the tail of 8 tokens is the row's own."""
    path = lines(tmp_path / "q.jsonl", [qwen(1, -1, 0.0, 40, [7, 8, 9]), qwen(2, -1, 1.0, 32, [8, 7]), qwen(3, 1, 2.0, 40, [7, 8, 9])])
    result = replay(path, "lru", 50, "engine", options=EngineOptions(block_size=16, block_tokens=16))
    assert result.prefix_hits_per_request.tolist() == [0, 0, 2]
    first, _, third = (each.request for each in open_served(path, EngineOptions(), None, ReadOptions())[0])
    assert first.prompt_token_ids[:32] == third.prompt_token_ids[:32]
    assert first.prompt_token_ids[32:] != third.prompt_token_ids[32:]
    assert (third.session_id, third.turn) == ("chat-1", 0)


def test_a_trace_in_arrays_is_cut_by_requests() -> None:
    rows = BlockRows(np.array([0, 2, 3, 5]), np.array([1, 2, 3, 1, 4]))
    cut = as_trace(AccessTrace("t", rows, [0.0, 1.0, 2.0], [9, 8, 7], [1, 2, 3]), limit=2)
    assert [list(blocks) for blocks in cut.blocks] == [[1, 2], [3]]
    assert (cut.num_accesses, cut.num_unique_blocks, list(cut.times_s)) == (3, 3, [0.0, 1.0])
    assert (cut.input_lengths, cut.output_lengths) == ([9, 8], [1, 2])


def test_a_hundred_thousand_requests_are_arrays(tmp_path: Path) -> None:
    """100,000 requests of 8 blocks are read into two arrays; their ids are no Python objects until they are asked for."""
    with (tmp_path / "big.jsonl").open("w", encoding="utf-8") as file:
        for number in range(100_000):
            ids = [number % 1000, *range(8 * number, 8 * number + 7)]
            file.write(f'{{"timestamp": {number}, "input_length": 4000, "output_length": 1, "hash_ids": {ids}}}\n')
    trace = kvlab.replay.as_trace(tmp_path / "big.jsonl")
    blocks: Any = trace.blocks
    assert (len(blocks), trace.num_accesses, blocks.ids.dtype, blocks.ids.nbytes) == (100_000, 800_000, np.int64, 6_400_000)
