"""Traces whose requests are kept out of the cache as a whole or from a position on: read by every format, replayed in both semantics."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import pytest
from engine_support import policy_names

import kvlab
from kvlab.policies.registry import by_name
from kvlab.replay import AccessTrace, EngineOptions, ReadOptions, as_trace
from kvlab.replay.access import replay_access, replay_events
from kvlab.replay.engine import served_trace
from kvlab.types import Request, UserError
from kvlab.workload import WorkloadContext
from kvlab.workload.mooncake import MooncakeWorkload
from kvlab.workload.qwen_bailian import QwenBailianWorkload
from kvlab.workload.sharegpt import ShareGPTWorkload


def lines(path: Path, *rows: dict[str, Any]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def mooncake(folder: Path, *fields: dict[str, Any], num_input: int = 1300) -> Path:
    """Rows of three blocks of 512 tokens, the last of 276, all alike."""
    row = {"timestamp": 0, "input_length": num_input, "output_length": 600, "hash_ids": [1, 2, 3]}
    return lines(folder / "trace.jsonl", *({**row, **more} for more in fields))


def qwen(folder: Path, *fields: dict[str, Any]) -> Path:
    """Rows of two full blocks of 16 tokens and 5 more."""
    row = {"chat_id": 1, "parent_chat_id": -1, "timestamp": 0, "input_length": 37, "output_length": 8, "hash_ids": [1, 2, 3]}
    return lines(folder / "trace.jsonl", *({**row, **more} for more in fields))


def sharegpt(folder: Path, *fields: dict[str, Any]) -> Path:
    talk = [{"from": "human", "value": "a question of 30 characters ok"}, {"from": "gpt", "value": "yes"}]
    return lines(folder / "trace.jsonl", *({"id": "x", "conversations": talk, **more} for more in fields))


FIELDS: tuple[dict[str, Any], ...] = ({}, {"cache": False}, {"cache_until": 20}, {"cache": True}, {"cache_until": None})
CONTEXT = WorkloadContext(None, 1000, 2**31 - 1, 0)


def due(workload: Any) -> list[Request]:
    workload.start(CONTEXT)
    return workload.due(float("inf"))  # type: ignore[no-any-return]


# -------------------------------------------------------------------------------------------------------------- reading


@pytest.mark.parametrize("write", [mooncake, qwen, sharegpt])
def test_every_format_with_content_reads_the_fields(write: Any, tmp_path: Path) -> None:
    path = write(tmp_path, *FIELDS)
    assert list(as_trace(path).cache_until or ()) == [None, 0, 20, None, None]
    assert list(as_trace(path, limit=2).cache_until or ()) == [None, 0]
    assert as_trace(write(tmp_path, {}, {"cache": True})).cache_until is None


@pytest.mark.parametrize("write", [mooncake, qwen, sharegpt])
@pytest.mark.parametrize(
    ("wrong", "say"),
    [
        ({"cache": 0}, "cache = 0 is not allowed: true or false"),
        ({"cache": "false"}, "cache = 'false' is not allowed: true or false"),
        ({"cache": None}, "cache = None is not allowed: true or false"),
        ({"cache_until": -1}, "cache_until = -1 is not allowed: a position in tokens"),
        ({"cache_until": True}, "cache_until = True is not allowed: a position in tokens"),
        ({"cache_until": 3.0}, r"cache_until = 3\.0 is not allowed: a position in tokens"),
        ({"cache": False, "cache_until": 3}, "cache = false and cache_until = 3 are two answers to one question"),
    ],
)
def test_a_wrong_field_is_named_with_its_place(write: Any, wrong: dict[str, Any], say: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=f"(line|conversation) 2: {say}"):
        as_trace(write(tmp_path, {}, wrong))


def test_positions_shrink_as_prompts_do(tmp_path: Path) -> None:
    """512 tokens become 16, so 1300 (two blocks and 276) become 32 + 8, and 600 of output 16 + 2. 700 = 512 + 188: 16 + 5; behind the
    prompt 512 tokens are 16 again. Clipped to 20 tokens a prompt keeps its beginning, and the output follows it."""
    fields = [{"cache_until": until} for until in (0, 511, 512, 700, 1299, 1300, 1812, 10**30)]
    workload = MooncakeWorkload(mooncake(tmp_path, *fields, {}), block_tokens=16)
    untils = [request.cache_until for request in due(workload)]
    assert untils[:7] == [0, 15, 16, 21, 40, 40, 56]
    assert untils[7] is not None
    assert untils[7] > 10**9
    assert untils[8] is None
    clipped = due(MooncakeWorkload(mooncake(tmp_path, *fields), block_tokens=16, max_input=20))
    assert [request.cache_until for request in clipped][:7] == [0, 15, 16, 20, 20, 20, 36]
    small = due(QwenBailianWorkload(qwen(tmp_path, *({"cache_until": n} for n in (15, 16, 36, 37, 53))), block_tokens=4))
    assert [len(small[0].prompt_token_ids), *(request.cache_until for request in small)] == [9, 3, 4, 9, 9, 13]


def test_requests_of_workloads_carry_them(tmp_path: Path) -> None:
    for write, workload in ((mooncake, MooncakeWorkload), (qwen, QwenBailianWorkload)):
        made = due(workload(write(tmp_path, *FIELDS), block_tokens=16 if workload is QwenBailianWorkload else 512))
        assert [(request.cache, request.cache_until) for request in made] == [(True, until) for until in (None, 0, 20, None, None)]
    chats = due(ShareGPTWorkload(sharegpt(tmp_path, *FIELDS), arrivals={"kind": "all_at_once"}))
    assert [request.cache_until for request in chats] == [None, 0, 20, None, None]


# ---------------------------------------------------------------------------------------------------- semantics access


def access(blocks: list[list[int]], until: list[int | None], **more: Any) -> AccessTrace:
    return AccessTrace("hand", blocks, [0.0] * len(blocks), block_tokens=4, cache_until=until, **more)


def test_access_by_hand() -> None:
    """Blocks of 4 tokens, room for 3. The second request brings in its first block alone (until 7: one whole block) though it looks for
    three; of the third, kept out, the two that are there are hits, 1 before 7. Then 9 and 8 come in, and 1 goes."""
    trace = access([[7], [1, 2, 3], [1, 7, 2], [9, 8], [1, 2], [7]], [None, 7, 0, None, 0, None])
    result = kvlab.replay(trace, "lru", 3)
    assert result.object_hits_per_request.tolist() == [0, 0, 2, 0, 0, 1]
    assert result.prefix_hits_per_request.tolist() == [0, 0, 2, 0, 0, 1]
    assert result.evicted == (b"1",)
    assert kvlab.replay(access([[1, 2], [1, 2]], [8, None]), "lru", 3).prefix_hits == 2
    assert kvlab.replay(access([[1, 2], [1, 2]], [7, None]), "lru", 3).prefix_hits == 1


def test_a_last_partial_block_may_be_cached_where_the_whole_prompt_may() -> None:
    """6 tokens: a whole block and one of 2."""
    for until, hits in ((5, 1), (6, 2), (100, 2), (3, 0)):
        trace = access([[1, 2], [1, 2]], [until, 0], input_lengths=[6, 6], output_lengths=[1, 1])
        assert kvlab.replay(trace, "lru", 3).prefix_hits == hits


@pytest.mark.parametrize("policy", [*policy_names("eviction"), "belady"])
def test_access_under_every_eviction(policy: str) -> None:
    """What nobody may bring in is never hit, and the policy hears of nothing else: not even that it was missed."""
    draw = Random(5)
    blocks = [[10 * family + i for i in range(draw.randint(1, 8))] for family in (draw.randrange(4) for _ in range(80))]
    blocks += [[100, 101, 102, 103] for _ in range(3)]
    until = [draw.choice([None, None, 0, draw.randint(1, 30)]) for _ in range(80)] + [8, 9, 0]
    trace = access(blocks, until)
    chosen = by_name("eviction", policy)
    heard: list[str] = []
    for event in ("insert", "miss"):
        tell = getattr(chosen, event)

        def told(first: Any, now: Any, tell: Any = tell) -> None:
            heard.append((first if isinstance(first, bytes) else first.content).decode())
            tell(first, now)

        setattr(chosen, event, told)
    object_hits, prefix_hits, evicted = replay_access(trace, chosen, 12)
    assert object_hits[-3:].tolist() in ([0, 2, 2], [0, 1, 2], [0, 1, 1], [0, 0, 2], [0, 0, 1])
    assert prefix_hits.sum() > 0
    assert len(evicted) > 0
    assert not {"102", "103"}.intersection(heard)
    assert {content.decode() for content in evicted} <= set(heard)
    everybody = replay_events(replace(trace, cache_until=None), by_name("eviction", policy), 12)
    nobody = replay_events(replace(trace, cache_until=[None] * len(blocks)), by_name("eviction", policy), 12)
    for one, other in zip(everybody, nobody, strict=True):
        assert list(one) == list(other)


def test_the_curve_in_one_pass_refuses_and_says_what_to_take() -> None:
    with pytest.raises(UserError, match=r"hand keeps blocks out of the cache .* Take kvlab\.replay\.sweep over capacities"):
        kvlab.replay.lru_curve(access([[1, 2]], [0]))
    with pytest.raises(UserError, match="request 1: cache_until = -1 is not allowed: a position in tokens"):
        access([[1], [2]], [None, -1])
    with pytest.raises(UserError, match="1 cache_until for 2 requests"):
        access([[1], [2]], [None])


# ---------------------------------------------------------------------------------------------------- semantics engine


def test_engine_semantics_of_files(tmp_path: Path) -> None:
    """Blocks of 16. Mooncake: 40 tokens, two full blocks, and one more with the output. The second row finds what the first may leave."""
    options = EngineOptions()
    for until, hits in ((None, 2), (0, 0), (511, 0), (512, 1), (1023, 1), (1024, 2), (10**9, 2)):
        path = mooncake(tmp_path, {"cache_until": until}, {"cache": False})
        assert kvlab.replay(path, "lru", 100, "engine", options=options).prefix_hits_per_request.tolist() == [0, hits]
    for cache, hits in ((True, 2), (False, 0)):
        path = qwen(tmp_path, {"cache": cache}, {})
        assert kvlab.replay(path, "lru", 100, "engine", options=options).prefix_hits_per_request.tolist() == [0, hits]
        path = sharegpt(tmp_path, {"cache": cache}, {})
        found = kvlab.replay(path, "lru", 100, "engine", options=options).prefix_hits_per_request.tolist()
        full = (len(next(served_trace(path, options, 1, ReadOptions())).request.prompt_token_ids) - 1) // 16
        assert found == [0, full if cache else 0]
        assert full >= 1
