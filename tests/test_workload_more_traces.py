"""Qwen-Bailian, BurstGPT and ShareGPT as workloads: token ids, sessions, lengths and arrivals on small files written here."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from workload_helpers import all_due, context, record, serve

from kvlab.types import UserError
from kvlab.workload import BurstGPTWorkload, QwenBailianWorkload, ShareGPTWorkload, WorkloadContext
from kvlab.workload.burstgpt import read_burstgpt

# ------------------------------------------------------------------------ Qwen-Bailian

QWEN: list[dict[str, Any]] = [
    {"chat_id": 4, "parent_chat_id": -1, "timestamp": 1.5, "input_length": 40, "output_length": 8, "turn": 1, "hash_ids": [7, 8, 9]},
    {"chat_id": 9, "parent_chat_id": -1, "timestamp": 1.5, "input_length": 32, "output_length": 4, "turn": 1, "hash_ids": [8, 7]},
    {"chat_id": 6, "parent_chat_id": 4, "timestamp": 4.0, "input_length": 64, "output_length": 1, "turn": 2, "hash_ids": [7, 8, 5, 6]},
    {"chat_id": 2, "parent_chat_id": 6, "timestamp": 5.0, "input_length": 64, "output_length": 0, "turn": 3, "hash_ids": [7, 8, 5, 6]},
]


@pytest.fixture
def qwen(tmp_path: Path) -> Path:
    path = tmp_path / "q.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in QWEN), encoding="utf-8")
    return path


def test_qwen_ids_become_tokens_and_chats_sessions(qwen: Path) -> None:
    workload = QwenBailianWorkload(qwen)
    a, b, c, d = all_due(workload)
    assert [len(r.prompt_token_ids) for r in (a, b, c, d)] == [40, 32, 64, 64]
    assert a.prompt_token_ids[:16] == b.prompt_token_ids[16:]
    assert a.prompt_token_ids[:32] == c.prompt_token_ids[:32]
    assert a.prompt_token_ids[32:] != c.prompt_token_ids[32:40]  # a's last block is partial: tokens of its own
    assert c.prompt_token_ids == d.prompt_token_ids
    assert [(r.session_id, r.turn, r.arrival_s) for r in (a, b, c, d)] == [
        ("chat-4", 0, 0.0), ("chat-9", 0, 0.0), ("chat-4", 1, 2.5), ("chat-4", 2, 3.5),
    ]  # fmt: skip
    assert workload.notes == ["q.jsonl: 1 rows have no output tokens; each was given 1."]


def test_qwen_blocks_shrink(qwen: Path) -> None:
    """40 = 2 blocks and 8: 8 + 8 * 4 // 16 = 10 tokens. Outputs 8 -> 2, 4 -> 1, 1 -> 1."""
    requests = all_due(QwenBailianWorkload(qwen, block_tokens=4, limit=3))
    assert [len(r.prompt_token_ids) for r in requests] == [10, 8, 16]
    assert [r.sampling.max_tokens for r in requests] == [2, 1, 1]
    assert requests[0].prompt_token_ids[:8] == requests[2].prompt_token_ids[:8]
    with pytest.raises(UserError, match=r"1 of 4 prompts leave no room|prompts leave no room .* workload\.block_tokens"):
        all_due(QwenBailianWorkload(qwen), context(max_model_len=50))


# ---------------------------------------------------------------------------- BurstGPT

BURST = """Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type
5,ChatGPT,472,18,490,Conversation log
45.5,GPT-4,1087,230,1317,API log
45.5,ChatGPT,9,0,9,API log
118,"ChatGPT",417,276,693,Conversation log
"""


@pytest.fixture
def burst(tmp_path: Path) -> Path:
    path = tmp_path / "b.csv"
    path.write_text(BURST, encoding="utf-8")
    return path


def test_burstgpt_rows_become_requests_of_random_tokens(burst: Path) -> None:
    workload = BurstGPTWorkload(burst)
    requests = all_due(workload)
    assert [(r.request_id, len(r.prompt_token_ids), r.sampling.max_tokens, r.arrival_s) for r in requests] == [
        ("burstgpt-2", 472, 18, 0.0), ("burstgpt-3", 1087, 230, 40.5), ("burstgpt-5", 417, 276, 113.0),
    ]  # fmt: skip
    assert workload.notes == ["b.csv: 1 rows without response tokens (requests that failed) were left out."]
    assert len({tuple(r.prompt_token_ids[:4]) for r in requests}) == 3
    assert [r.request_id for r in all_due(BurstGPTWorkload(burst, model="ChatGPT"))] == ["burstgpt-2", "burstgpt-5"]
    assert [r.request_id for r in all_due(BurstGPTWorkload(burst, log_type="API log"))] == ["burstgpt-3"]
    assert [len(r.prompt_token_ids) for r in all_due(BurstGPTWorkload(burst, length_scale=0.5, limit=1))] == [236]
    assert len(read_burstgpt(burst, limit=2)) == 2


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a,b\n", r"the first line must be a header with Timestamp, Model, Request tokens"),
        (BURST + "1,GPT-4,5\n", r"line 6: 3 columns where the header has 6"),
        (BURST + "soon,GPT-4,5,5,10,API log\n", r"line 6: Timestamp = 'soon' is not a number of seconds"),
        (BURST + "nan,GPT-4,5,5,10,API log\n", r"line 6: Timestamp = 'nan' is not a number of seconds"),
        (BURST + "1,GPT-4,x,5,10,API log\n", r"line 6: Request tokens = 'x' is not a whole number"),
        (BURST + "1,GPT-4,5,-5,10,API log\n", r"line 6: Response tokens = -5 is negative"),
        (BURST.splitlines()[0] + "\n", r"holds no requests"),
    ],
)
def test_a_malformed_burstgpt_row_is_named(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "b.csv"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(UserError, match=message):
        BurstGPTWorkload(path).start(context())


def test_a_model_that_is_not_there_is_named(burst: Path) -> None:
    with pytest.raises(UserError, match=r"has no rows with Model 'GPT-5'; it has ChatGPT, GPT-4"):
        BurstGPTWorkload(burst, model="GPT-5").start(context())


# ---------------------------------------------------------------------------- ShareGPT


def talk(*texts: str) -> dict[str, Any]:
    return {"conversations": [{"from": ("human", "gpt")[place % 2], "value": text} for place, text in enumerate(texts)]}


@pytest.fixture
def shares(tmp_path: Path) -> Path:
    path = tmp_path / "s.json"
    path.write_text(json.dumps([talk("hi", "yo!", "k", "bye"), talk("x" * 400, "no"), talk("a", "four")]), encoding="utf-8")
    return path


def test_turns_of_a_conversation_follow_one_another(shares: Path) -> None:
    """Bytes in ChatML's shape (52 and 117 bytes, see test_replay_formats); a turn comes a second after the answer to the last."""
    workload = ShareGPTWorkload(shares, think_s=1.0)
    handed, records, _ = serve(workload, context(), lambda request: 0.5)
    assert [(when, request.request_id, len(request.prompt_token_ids), request.sampling.max_tokens) for when, request in handed] == [
        (0.0, "sharegpt-1-turn-0", 52, 3), (0.0, "sharegpt-2-turn-0", 450, 2), (0.0, "sharegpt-3-turn-0", 51, 4),
        (1.5, "sharegpt-1-turn-1", 117, 3),
    ]  # fmt: skip
    first, second = handed[0][1], handed[3][1]
    assert second.prompt_token_ids[:52] == first.prompt_token_ids
    assert bytes(second.prompt_token_ids[52:55]) == b"yo!"
    assert (second.session_id, second.turn, second.prompt) == (first.session_id, 1, "k")
    assert (len(records), workload.num_requests) == (4, 4)
    assert workload.notes == ["This run has no tokenizer: the prompts are the UTF-8 bytes of their texts."]


def test_what_is_too_long_is_left_out_and_counted(shares: Path) -> None:
    workload = ShareGPTWorkload(shares, max_input=100, max_output=2)
    handed, _, _ = serve(workload, context(), lambda request: 0.5)
    assert [(request.request_id, request.sampling.max_tokens) for _, request in handed] == [
        ("sharegpt-1-turn-0", 2), ("sharegpt-3-turn-0", 2),
    ]  # fmt: skip
    assert workload.num_requests == 2
    assert workload.notes[1:] == [
        "s.json: 1 conversations begin with more than 100 tokens and were left out.",
        "1 of 2 conversations ended early: a turn was not answered, or the next prompt was longer than 100 tokens.",
    ]
    with pytest.raises(UserError, match=r"no conversation is left: 3 have a first prompt of more than 20 tokens"):
        all_due(ShareGPTWorkload(shares), context(max_model_len=21))


def test_skip_limit_turns_and_aborted_conversations(shares: Path) -> None:
    assert [r.request_id for r in all_due(ShareGPTWorkload(shares, skip=1, limit=1))] == ["sharegpt-2-turn-0"]
    workload = ShareGPTWorkload(shares, turns=1)
    assert [workload.has_next(request) for request in all_due(workload)] == [False, False, False]
    workload = ShareGPTWorkload(shares)
    first = all_due(workload)[0]
    assert workload.has_next(first)
    workload.on_finish(record(first, 2.0, reason="abort"))
    assert workload.num_requests == 3
    assert workload.next_arrival_s() is None


def test_messages_go_through_the_models_template(shares: Path) -> None:
    class Template:
        vocab_size = 500
        bos_token_id = 1

        def encode(self, text: str) -> list[int]:
            return [1, *[len(word) for word in text.split()]]

        def decode(self, token_ids: Any) -> str:
            return ""

        def apply_chat(self, messages: Any) -> list[int]:
            return [400 + len(messages)]

    requests = all_due(ShareGPTWorkload(shares), WorkloadContext(Template(), 500, 1000, 0))
    assert [(r.prompt_token_ids, r.sampling.max_tokens) for r in requests] == [([401], 1), ([401], 1), ([401], 1)]
