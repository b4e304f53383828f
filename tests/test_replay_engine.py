"""kvlab.replay with semantics engine: by hand, and against the engine itself, request by request and eviction by eviction."""

from __future__ import annotations

from dataclasses import replace
from hashlib import sha256
from random import Random
from typing import Any

import pytest
from engine_support import policy_names

from kvlab.engine.config import EngineConfig, PolicySet
from kvlab.engine.engine import Engine
from kvlab.engine.runners.simulated import SimulatedRunner
from kvlab.policies.prefix_cache import Hash
from kvlab.policies.registry import by_name
from kvlab.replay import AccessTrace, EngineOptions, Served, replay
from kvlab.replay.engine import VOCAB_SIZE, fake_output, served_trace
from kvlab.types import BlockEvent, Outcome, Plan, Request, RequestRecord, RequestTooLong, SamplingParams, StepStats, UserError
from kvlab.workload.traces import find_trace


class Heard:
    """A listener that keeps ended requests and evicted contents."""

    wants_block_events = True

    def __init__(self) -> None:
        self.records: dict[str, RequestRecord] = {}
        self.evicted: list[bytes] = []

    def on_step(self, plan: Plan, outcome: Outcome, stats: StepStats) -> None:
        pass

    def on_request(self, record: RequestRecord) -> None:
        self.records[record.request_id] = record

    def on_block(self, event: BlockEvent) -> None:
        if event.kind == "evict":
            self.evicted.append(bytes.fromhex(event.content))


def run_engine(served: list[Served], policy: str, num_blocks: int, options: EngineOptions) -> tuple[list[int], tuple[bytes, ...], Heard]:
    """Cached prompt tokens by request, evicted contents in order, and all that was heard."""
    heard = Heard()
    config = EngineConfig(num_blocks, options.block_size, max_num_seqs=1, max_num_batched_tokens=options.max_num_batched_tokens,
                          max_model_len=2**31 - 1)  # fmt: skip
    engine = Engine(config, PolicySet(eviction=by_name("eviction", policy)), SimulatedRunner(VOCAB_SIZE), listeners=[heard])
    for request, _ in served:
        try:
            engine.add_request(request)
        except RequestTooLong as error:
            engine.refuse(request, error, 0.0)
    while engine.has_work:
        engine.step()
    return [heard.records[request.request_id].num_cached_tokens for request, _ in served], tuple(heard.evicted), heard


@pytest.mark.traces
@pytest.mark.parametrize(
    ("policy", "num_blocks", "options"),
    [
        ("lru", 6000, EngineOptions()),
        ("fifo", 6000, EngineOptions()),
        ("lfu", 6000, EngineOptions()),
        ("random", 6000, EngineOptions()),
        ("lru", 150, EngineOptions(max_num_batched_tokens=100)),  # small steps, and 12 prompts can never fit
        ("lfu", 2000, EngineOptions(block_size=3, block_tokens=7, max_num_batched_tokens=64)),  # ids end inside of blocks
    ],
)
def test_equal_to_the_engine_on_500_requests_of_a_real_trace(policy: str, num_blocks: int, options: EngineOptions) -> None:
    try:
        path = find_trace("mooncake_conversation")
    except UserError:
        pytest.skip("the trace mooncake_conversation is not there: set KVLAB_TRACES to the folder that holds it")
    served = list(served_trace(path, options, limit=500))
    result = replay(path, policy, num_blocks, "engine", limit=500, options=options)
    cached_tokens, evicted, heard = run_engine(served, policy, num_blocks, options)
    assert [hits * options.block_size for hits in result.prefix_hits_per_request.tolist()] == cached_tokens
    assert result.evicted == evicted
    assert result.requests == 500
    assert sum(cached_tokens) > 0  # both mechanisms were at work
    assert len(evicted) > 1000
    outputs = {record.request_id: record.outputs[0][0] for record in heard.records.values() if record.outputs and record.outputs[0][0]}
    assert all(outputs[s.request.request_id] == tuple(s.output_token_ids) for s in served if s.request.request_id in outputs)


def request(name: str, tokens: list[int], num_output: int = 1) -> Request:
    return Request(name, tokens, SamplingParams(max_tokens=num_output, ignore_eos=True))


def keys(tokens: list[int], block_size: int) -> list[bytes]:
    """Contents of the full blocks of a sequence."""
    key, found = Hash().root(""), []
    for first in range(0, len(tokens) - block_size + 1, block_size):
        key = sha256(key + b"".join(token.to_bytes(4, "little") for token in tokens[first : first + block_size])).digest()
        found.append(key)
    return found


def test_by_hand() -> None:
    """B=2, 4 blocks. a = 1 2 | 3 4 | 5 and outputs 6, 7: computed are 1..6, so three blocks are published.

    a again: at most 4 of its 5 tokens may hit: 2 blocks; then 5 alone is computed, in a fresh block (the free one), with 8: its
    third block 5 8 is other content than 5 6. Let go tail first, LRU stands at: 56, 58, 34, 12 (oldest first; the old tail was not
    used again). b = 9 9 needs 1 block and takes 56; its output 9 is never computed.
    """
    a1 = Served(request("a1", [1, 2, 3, 4, 5], 2), [6, 7])
    a2 = Served(request("a2", [1, 2, 3, 4, 5], 2), [8, 7])
    b = Served(request("b", [9, 9], 1), [9])
    result = replay([a1, a2, b], "lru", 4, "engine", options=EngineOptions(block_size=2))
    assert result.num_blocks_per_request.tolist() == [2, 2, 1]
    assert result.prefix_hits_per_request.tolist() == [0, 2, 0]
    assert result.evicted == (keys([1, 2, 3, 4, 5, 6], 2)[2],)
    assert result.token_hit_rate == 4 / 12
    assert result.semantics == "engine"


@pytest.mark.parametrize(
    ("prompt_len", "hits"),
    [(16, 0), (17, 1), (31, 1), (32, 1), (33, 2), (48, 2)],
)
def test_a_prompt_that_is_cached_as_a_whole_leaves_one_token_to_compute(prompt_len: int, hits: int) -> None:
    """Public case 1: B=16, the same prompt again."""
    prompt = list(range(prompt_len))
    served = [Served(request(name, prompt), [7]) for name in ("first", "again")]
    assert replay(served, "lru", 10, "engine").prefix_hits_per_request.tolist() == [0, hits]


def kept_out(seed: int) -> list[Served]:
    """Requests of a few families with answers of their own, some kept out of the cache as a whole or from a position on."""
    draw = Random(seed)
    served = []
    for i in range(60):
        first = 50 * draw.randrange(3)
        prompt = [*range(first, first + draw.randint(5, 40)), *[900 + draw.randrange(3)] * draw.randint(1, 9)]
        one = request(f"r{i}", prompt, draw.randint(1, 20))
        one.cache = draw.random() < 0.7
        one.cache_until = draw.choice([None, None, draw.randrange(60)]) if one.cache else None
        served.append(Served(one, fake_output(one)))
    return served


@pytest.mark.parametrize("policy", policy_names("eviction"))
def test_equal_to_the_engine_where_requests_are_kept_out_of_the_cache(policy: str) -> None:
    """Under every eviction policy: request by request, eviction by eviction."""
    served, options = kept_out(3), EngineOptions(block_size=4, max_num_batched_tokens=16)
    result = replay(served, policy, 26, "engine", options=options)
    cached_tokens, evicted, _ = run_engine(served, policy, 26, options)
    assert [hits * 4 for hits in result.prefix_hits_per_request.tolist()] == cached_tokens
    assert result.evicted == evicted
    free = [Served(request(s.request.request_id, s.request.prompt_token_ids, len(s.output_token_ids)), s.output_token_ids) for s in served]
    assert replay(free, policy, 26, "engine", options=options).prefix_hits != result.prefix_hits
    assert result.prefix_hits > 0
    assert len(evicted) > 20


def test_kept_out_by_hand_and_belady_knows_it() -> None:
    """B=2, 4 blocks. a = 1 2 | 3 4 | 5, twice kept out, then until position 2, then not, then again: 0, 0, 0, 1, 2 blocks are found."""
    def served(*fields: dict[str, Any]) -> list[Served]:
        return [Served(replace(request(f"r{i}", [1, 2, 3, 4, 5]), **more), [9]) for i, more in enumerate(fields)]

    each = served({"cache": False}, {"cache": False}, {"cache_until": 3}, {}, {"cache": False})
    for policy in ("lru", "belady"):
        assert replay(each, policy, 4, "engine", options=EngineOptions(block_size=2)).prefix_hits_per_request.tolist() == [0, 0, 0, 1, 2]
    with pytest.raises(UserError, match=r"Request 'r0': cache_until = -2 is not allowed: a position in tokens"):
        replay(served({"cache_until": -2}), "lru", 4, "engine")


def test_belady_knows_what_is_neither_looked_for_nor_published() -> None:
    """B=1, 3 blocks. x leaves 1 and 1 2, y leaves 5, and w takes the room of one. z computes 1 and 1 2 again, but is kept out and too short
    to look for them: nobody needs these two any more, while v looks for 5."""
    x, y, w, z, v = (Served(request(name, prompt, len(output)), output) for name, prompt, output in (
        ("x", [1], [2, 3]), ("y", [5], [3]), ("w", [9], [3]), ("z", [1], [2, 3]), ("v", [5, 8], [3])))  # fmt: skip
    z.request.cache = False
    result = replay([x, y, w, z, v], "belady", 3, "engine", options=EngineOptions(block_size=1))
    assert result.prefix_hits_per_request.tolist() == [0, 0, 0, 0, 1]


def test_a_prompt_that_can_never_fit_is_passed_over_and_one_that_outgrows_the_pool_ends() -> None:
    """B=1, 4 blocks: 5 tokens are refused; 3 tokens and 9 outputs fill the pool, end there, and are hit afterwards."""
    served = [
        Served(request("long", [1, 2, 3, 4, 5]), [6]),
        Served(request("grows", [1, 2, 3], 9), [4, 5, 6, 7, 8, 9, 10, 11, 12]),
        Served(request("again", [1, 2, 3, 4]), [5]),
    ]
    options = EngineOptions(block_size=1)
    result = replay(served, "lru", 4, "engine", options=options)
    assert result.prefix_hits_per_request.tolist() == [0, 0, 3]
    # "again" hits 1, 2, 3 and computes its last token anew, in the place of the only block that nobody holds: that of 4.
    assert result.evicted == (keys([1, 2, 3, 4], 1)[3],)


def small_requests() -> tuple[list[Served], EngineOptions]:
    """60 requests with shared prefixes for pools of 1 to 9 blocks of 3 tokens: some prompts are too long, some answers outgrow the pool."""
    served = []
    for number in range(60):
        shared = [number % 3] * (number % 11)
        prompt = [*shared, 5 + number % 7, *range(number % 5)]
        one = request(f"r{number}", prompt, 1 + number % 9)
        served.append(Served(one, fake_output(one)))
    return served, EngineOptions(block_size=3, max_num_batched_tokens=5)


@pytest.mark.parametrize("policy", policy_names("eviction"))
def test_small_pools_equal_the_engine(policy: str) -> None:
    """Every policy that an engine takes. All requests wait from the start, so both tell a policy the same of the queue."""
    served, options = small_requests()
    for num_blocks in range(1, 10):
        result = replay(served, policy, num_blocks, "engine", options=options)
        cached_tokens, evicted, _ = run_engine(served, policy, num_blocks, options)
        assert (result.prefix_hits_per_request * 3).tolist() == cached_tokens, num_blocks
        assert result.evicted == evicted, num_blocks


def test_the_queue_and_pins_are_at_work_in_that_comparison() -> None:
    """Else it would prove nothing about them: what they evict differs from LRU."""
    served, options = small_requests()
    evicted = {
        policy: [replay(served, policy, num_blocks, "engine", options=options).evicted for num_blocks in range(4, 10)]
        for policy in ("lru", "queue_informed", "pinned")
    }
    assert evicted["queue_informed"] != evicted["lru"] != evicted["pinned"] != evicted["queue_informed"]


@pytest.mark.parametrize(
    ("trace", "arguments", "message"),
    [
        ([[1, 2]], {}, "Semantics engine takes a trace's path, or requests as kvlab.replay.Served"),
        (AccessTrace("t", [[1]], [0.0]), {}, "Semantics engine needs lengths and tokens"),
        ([], {}, "holds no requests"),
        ([Served(request("r", [1]), [])], {}, "Request 'r' can't be replayed"),
        ([Served(Request("n", [1], SamplingParams(n=2)), [1])], {}, "Request 'n' can't be replayed"),
        ([Served(request("r", [1]), [2])], {"capacity": 0.5}, "semantics engine takes blocks"),
    ],
)
def test_what_cannot_be_replayed(trace: Any, arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        replay(trace, **{"eviction": "lru", "capacity": 4, "semantics": "engine", **arguments})
