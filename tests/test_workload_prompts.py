"""Prompts from files and the bundled chats: content, parameters, repetition, and errors that name file and line."""

from __future__ import annotations

import gzip
import json
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from workload_helpers import all_due, context

from kvlab.types import Request, SamplingParams, UserError
from kvlab.workload import FixedWorkload, PromptWorkload, WorkloadContext
from kvlab.workload.prompts import CHAT_PROMPTS
from kvlab.workload.shapes import first_shapes


class Words:
    """A tokenizer of whitespace words: ids by length, 100 before a chat, 101 after a user's message."""

    vocab_size = 1000

    def encode(self, text: str, /) -> list[int]:
        return [len(word) for word in text.split()]

    def decode(self, token_ids: Sequence[int], /) -> str:
        return " ".join(str(i) for i in token_ids)

    def apply_chat(self, messages: Sequence[Mapping[str, str]], /) -> list[int]:
        if messages[-1]["role"] != "user":
            raise ValueError("the last message must be the user's")
        return [100] + [i for m in messages for i in [*self.encode(m["content"]), 101]]


def words_context(vocab_size: int = 1000, max_model_len: int = 1000) -> WorkloadContext:
    return WorkloadContext(Words(), vocab_size, max_model_len, 0)


def jsonl(folder: Path, *rows: Any) -> Path:
    path = folder / "prompts.jsonl"
    path.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows), encoding="utf-8")
    return path


def test_text_messages_and_ids_become_requests(tmp_path: Path) -> None:
    path = jsonl(
        tmp_path,
        {"prompt": "a bb ccc"},
        {"messages": [{"role": "system", "content": "be kind"}, {"role": "user", "content": "hello you"}]},
        {"prompt_token_ids": [5, 6, 7]},
    )
    requests = all_due(PromptWorkload(path), words_context())
    assert [r.prompt_token_ids for r in requests] == [[1, 2, 3], [100, 2, 4, 101, 5, 3, 101], [5, 6, 7]]
    assert [r.prompt for r in requests] == ["a bb ccc", "hello you", None]
    assert [r.request_id for r in requests] == ["prompt-0", "prompt-1", "prompt-2"]
    as_chat = all_due(PromptWorkload(path, as_chat=True), words_context())
    assert [r.prompt_token_ids for r in as_chat] == [[100, 1, 2, 3, 101], [100, 2, 4, 101, 5, 3, 101], [5, 6, 7]]


def test_a_line_may_set_its_fields_and_sampling_parameters_over_the_defaults(tmp_path: Path) -> None:
    path = jsonl(
        tmp_path,
        {"prompt": "x", "max_tokens": 9, "temperature": 1, "stop": ["END"], "priority": 2, "tenant": "t", "cache_salt": "s",
         "oracle_output_len": 4, "abort_at_s": 8.5, "request_id": "mine", "session_id": "c", "arrival_s": 1.5, "n": 2},
        {"prompt": "y", "arrival_s": 0},
    )  # fmt: skip
    second, first = all_due(PromptWorkload(path, sampling={"max_tokens": 3, "top_k": 5}), words_context())
    assert (first.request_id, first.arrival_s, first.priority, first.tenant, first.cache_salt) == ("mine", 1.5, 2, "t", "s")
    assert (first.oracle_output_len, first.abort_at_s, first.session_id) == (4, 8.5, "c")
    assert (first.sampling.max_tokens, first.sampling.temperature, first.sampling.stop, first.sampling.n) == (9, 1.0, ("END",), 2)
    assert (first.sampling.top_k, second.sampling.top_k, second.sampling.max_tokens) == (5, 5, 3)
    assert (second.request_id, second.arrival_s) == ("prompt-1", 0.0)


def test_a_text_file_is_a_prompt_a_line_also_gzipped(tmp_path: Path) -> None:
    plain, packed = tmp_path / "p.txt", tmp_path / "p.txt.gz"
    plain.write_text("one two\n\n  \n{not json}\r\nthree\n", encoding="utf-8")
    packed.write_bytes(gzip.compress(plain.read_bytes()))
    for path in (plain, packed):
        assert [r.prompt for r in all_due(PromptWorkload(path), words_context())] == ["one two", "{not json}", "three"]


def test_limit_and_repeat(tmp_path: Path) -> None:
    path = jsonl(tmp_path, {"prompt": "a"}, {"prompt": "bb", "request_id": "b"}, "{broken")
    workload = PromptWorkload(path, limit=2, repeat=2)
    requests = all_due(workload, words_context())
    assert workload.num_requests == 4
    assert [r.request_id for r in requests] == ["prompt-0-0", "b-0", "prompt-0-1", "b-1"]
    assert [r.prompt_token_ids for r in requests] == [[1], [2], [1], [2]]


def test_a_line_may_keep_its_prompt_out_of_the_cache(tmp_path: Path) -> None:
    fields: list[dict[str, Any]] = [{}, {"cache": False}, {"cache_until": 7}, {"cache": True}]
    path = jsonl(tmp_path, *({"prompt": "a", **more} for more in fields))
    requests = all_due(PromptWorkload(path, repeat=2), words_context())
    assert [(r.cache, r.cache_until) for r in requests] == [(True, None), (False, None), (True, 7), (True, None)] * 2
    assert [min(r.num_cacheable_tokens, 99) for r in requests[:4]] == [99, 0, 7, 99]


def test_what_later_prompts_share_with_one_that_is_kept_out() -> None:
    """Of what a workload's first requests look like (for a block size that is chosen by them)."""
    def of(*fields: dict[str, Any]) -> list[int]:
        requests = [Request(f"r{i}", list(range(20)), SamplingParams(), **more) for i, more in enumerate(fields)]
        return [shape.num_shared_tokens for shape in first_shapes(FixedWorkload(requests), words_context())]

    assert of({}, {}, {}) == [0, 19, 19]
    assert of({"cache": False}, {}, {"cache": False}) == [0, 0, 19]
    assert of({"cache_until": 7}, {"cache_until": 3}, {}) == [0, 7, 7]


def test_repeated_arrival_times_follow_one_another(tmp_path: Path) -> None:
    path = jsonl(tmp_path, {"prompt": "a", "arrival_s": 0.5, "abort_at_s": 1.0}, {"prompt": "b", "arrival_s": 2.0})
    requests = all_due(PromptWorkload(path, repeat=2), words_context())
    assert [(r.request_id, r.arrival_s, r.abort_at_s) for r in requests] == [
        ("prompt-0-0", 0.5, 1.0), ("prompt-1-0", 2.0, None), ("prompt-0-1", 2.5, 3.0), ("prompt-1-1", 4.0, None),
    ]  # fmt: skip


def test_drawn_arrivals(tmp_path: Path) -> None:
    path = jsonl(tmp_path, {"prompt": "a"}, {"prompt": "b"})
    requests = all_due(PromptWorkload(path, arrivals={"kind": "fixed", "rate": 2}, repeat=2), words_context())
    assert [r.arrival_s for r in requests] == [0.0, 0.5, 1.0, 1.5]


def test_without_a_tokenizer_text_is_its_bytes_and_the_notes_say_so(tmp_path: Path) -> None:
    path = jsonl(tmp_path, {"prompt": "hé"}, {"messages": [{"role": "user", "content": "x"}]})
    workload = PromptWorkload(path)
    first, second = all_due(workload, context(vocab_size=256))
    assert first.prompt_token_ids == [104, 195, 169]
    assert bytes(second.prompt_token_ids) == b"<|im_start|>user\nx<|im_end|>\n<|im_start|>assistant\n"
    assert workload.notes == ["This run has no tokenizer: the prompts are the UTF-8 bytes of their texts."]


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ('{"prompt": "a"', r"prompts\.jsonl, line 3: broken JSON"),
        ("[1, 2]", r"line 3: a JSON object is expected, for example .* not list"),
        ({"promt": "a"}, r"line 3: exactly one of prompt, messages, prompt_token_ids is needed; there is none"),
        ({"prompt": "a", "prompt_token_ids": [1]}, r"line 3: exactly one of .* there is prompt and prompt_token_ids"),
        ({"prompt": ""}, r"line 3: prompt must be a text of at least one character"),
        ({"prompt": 5}, r"line 3: prompt must be a text"),
        ({"prompt": "   "}, r"line 3: the prompt has no tokens"),
        ({"prompt": "a", "max_token": 5}, r"line 3: Unknown field 'max_token'\. Did you mean 'max_tokens'"),
        ({"prompt": "a", "max_tokens": 0}, r"line 3: max_tokens = 0 is not allowed: at least 1"),
        ({"prompt": "a", "max_tokens": "5"}, r"line 3: max_tokens = '5' is not allowed: a whole number"),
        ({"prompt": "a", "stop": [1]}, r"line 3: stop = \[1\] is not allowed: a string or strings"),
        ({"prompt": "a", "ignore_eos": 1}, r"line 3: ignore_eos = 1 is not allowed: true or false"),
        ({"prompt": "a", "priority": 1.5}, r"line 3: priority = 1\.5 is not allowed: a whole number"),
        ({"prompt": "a", "arrival_s": -1}, r"line 3: arrival_s = -1 is not allowed: seconds >= 0"),
        ({"prompt": "a", "arrival_s": 1}, r"line 1: no arrival_s, though other lines have one"),
        ({"prompt": "a", "tenant": 7}, r"line 3: tenant = 7"),
        ({"prompt": "a", "cache": 0}, r"line 3: cache = 0 is not allowed: true or false\."),
        ({"prompt": "a", "cache": "false"}, r"line 3: cache = 'false' is not allowed: true or false\."),
        ({"prompt": "a", "cache": None}, r"line 3: cache = None is not allowed: true or false\."),
        ({"prompt": "a", "cache_until": -1}, r"line 3: cache_until = -1 is not allowed: a position in tokens, 0 \(nothing may be cached\)"),
        ({"prompt": "a", "cache_until": True}, r"line 3: cache_until = True is not allowed: a position in tokens"),
        ({"prompt": "a", "cache_until": 4.0}, r"line 3: cache_until = 4\.0 is not allowed: a position in tokens"),
        ({"prompt": "a", "cache_until": "4"}, r"line 3: cache_until = '4' is not allowed: a position in tokens"),
        ({"prompt": "a", "cache": False, "cache_until": 4}, r"line 3: cache = false and cache_until = 4 are two answers"),
        ({"prompt": "a", "oracle_output_len": 0}, r"line 3: oracle_output_len = 0 is not allowed: tokens, at least 1"),
        ({"prompt_token_ids": []}, r"line 3: prompt_token_ids must be a list of at least one"),
        ({"prompt_token_ids": [1, -2]}, r"line 3: prompt_token_ids must be"),
        ({"prompt_token_ids": [1, True]}, r"line 3: prompt_token_ids must be"),
        ({"prompt_token_ids": [1, 1000]}, r"line 3: token id 1000 is outside the model's vocabulary of 1000"),
        ({"messages": "a"}, r"line 3: messages must be a list like"),
        ({"messages": []}, r"line 3: the conversation is empty"),
        ({"messages": [{"role": "user"}]}, r"line 3: message 0 is .*a dict with role and content is needed"),
        ({"messages": [{"role": "user", "content": None}]}, r"line 3: message 0: content = None is not allowed"),
        ({"messages": [{"role": "assistant", "content": "a"}]}, r"line 3: the model's chat template refuses .* \(the last"),
        ({"prompt": "a", "request_id": "one"}, r"line 3: request_id 'one' is also that of .*line 1"),
        ({"prompt": "w " * 2000}, r"1 of 3 prompts leave no room .* \(the longest has 2000 tokens\).* line 3\."),
    ],
)
def test_a_wrong_line_is_named(tmp_path: Path, row: Any, message: str) -> None:
    path = jsonl(tmp_path, {"prompt": "fine", "request_id": "one"}, "", row, {"prompt": "fine too"})
    with pytest.raises(UserError, match=message):
        PromptWorkload(path).start(words_context())


def test_a_wrong_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"There is no file of prompts '.*nowhere\.jsonl'"):
        PromptWorkload(tmp_path / "nowhere.jsonl").start(words_context())
    empty = tmp_path / "empty.jsonl"
    empty.write_text("\n\n", encoding="utf-8")
    with pytest.raises(UserError, match=r"empty\.jsonl holds no prompts"):
        PromptWorkload(empty).start(words_context())
    array = tmp_path / "list.json"
    array.write_text("[]", encoding="utf-8")
    with pytest.raises(UserError, match=r"list\.json: one JSON object a line is read"):
        PromptWorkload(array).start(words_context())
    latin = tmp_path / "latin.txt"
    latin.write_bytes(b"fine\n\xe9\xe8\n")
    with pytest.raises(UserError, match=r"latin\.txt: not UTF-8"):
        PromptWorkload(latin).start(words_context())
    broken = tmp_path / "broken.jsonl.gz"
    broken.write_bytes(gzip.compress(b'{"prompt": "a"}\n' * 1000)[:-20])
    with pytest.raises(UserError, match=r"broken\.jsonl\.gz: damaged gzip data"):
        PromptWorkload(broken).start(words_context())


def test_the_bundled_chats_are_many_and_varied() -> None:
    workload = PromptWorkload()
    requests = all_due(workload, words_context())
    assert workload.num_requests == len(requests) == 74
    chats = [json.loads(line)["messages"] for line in CHAT_PROMPTS.read_text(encoding="utf-8").splitlines()]
    assert len({json.dumps(chat) for chat in chats}) == 74
    systems = Counter(chat[0]["content"] for chat in chats if chat[0]["role"] == "system")
    assert sorted(systems.values()) == [4, 6, 6, 6, 7, 8]
    assert sum(not json.dumps(chat, ensure_ascii=False).isascii() for chat in chats) >= 12
    assert sum(len(chat) > 3 for chat in chats) == 3  # conversations of several turns
    lengths = sorted(len(chat[-1]["content"]) for chat in chats)
    assert lengths[0] <= 5
    assert lengths[-1] >= 800
    assert all(chat[-1]["role"] == "user" for chat in chats)
