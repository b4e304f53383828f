"""Semantics `engine`: an eviction policy under the engine's own cache manager, without scheduler, runner and clock.

Requests are served one after the other, each to its end, in order of arrival: what an engine with max_num_seqs=1 and first come first
served does, whose hits and evictions these are, request by request. Look-up comes first; hits and new blocks are held until the
request ends; only full blocks are published and found, at most `num_tokens - 1` of a prompt; output blocks take room and are
published as well; blocks are let go tail first. A request's `cache` and `cache_until` keep its blocks from being published as there.

A policy that asks what waiting requests will hit (`queue_depth`) is told of those that come next, as if all had arrived.

Deviation: `now` of a policy is (number of the request, its arrival), the engine's is (step, clock); policies that look at it differ.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, fields
from fractions import Fraction
from itertools import islice
from pathlib import Path
from typing import NamedTuple

import numpy as np

from kvlab.cache.manager import KVCacheManager
from kvlab.cache.pool import CachedBlock
from kvlab.engine.runners.fake_tokens import FakeModel, hash_tokens
from kvlab.engine.sequence import Sequence as Seq
from kvlab.engine.sequence import SequenceGroup
from kvlab.policies.base import EvictionPolicy
from kvlab.policies.compression import Full
from kvlab.policies.layout import Paged
from kvlab.policies.prefix_cache import Hash
from kvlab.replay.result import ReplayResult
from kvlab.replay.trace import NOTHING_SHARED, ReadOptions, format_of
from kvlab.types import Now, Request, UserError, wrong_caching
from kvlab.workload.azure import AzureWorkload
from kvlab.workload.base import Workload, WorkloadContext
from kvlab.workload.burstgpt import BurstGPTWorkload
from kvlab.workload.mooncake import TRACE_BLOCK_TOKENS, MooncakeWorkload
from kvlab.workload.qwen_bailian import TRACE_BLOCK_TOKENS as QWEN_BLOCK_TOKENS
from kvlab.workload.qwen_bailian import QwenBailianWorkload

VOCAB_SIZE = 32_000
_NO_LIMIT = 2**31 - 1


class Served(NamedTuple):
    """A request (of one sequence) and the tokens it was answered with, at least one."""

    request: Request
    output_token_ids: Sequence[int]


@dataclass(frozen=True)
class EngineOptions:
    """block_size: tokens per block. max_num_batched_tokens: tokens a step computes (chunks of a prompt). block_tokens: tokens that a
    hash id of a file becomes (16 with blocks of 16: an id is a block).
    """

    block_size: int = 16
    max_num_batched_tokens: int = 2048
    block_tokens: int = 16

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise UserError(f"{field.name} = {value!r} is not allowed: a positive integer (tokens).")


def served_trace(path: str | Path, options: EngineOptions, limit: int | None, reading: ReadOptions | None = None) -> Iterator[Served]:
    """Requests of a file, in order of arrival; see `open_served`."""
    return open_served(Path(path), options, limit, reading or ReadOptions())[0]


def open_served(path: Path, options: EngineOptions, limit: int | None, reading: ReadOptions) -> tuple[Iterator[Served], list[str]]:
    """Requests of a file in order of arrival, and notes on it (complete when all requests were taken).

    A ShareGPT file's requests are answered as in the file, others by the fake model of the simulated runner. Prompts and outputs of
    traces with hash ids shrink as blocks do (see MooncakeWorkload); those without content share nothing.

    Raises:
        UserError: malformed rows, an option without effect, or a format that has no lengths.
    """
    kind = format_of(path)
    reading.refuse_unused(path, kind, but=("block_size",))  # the engine's, which every format has
    if kind == "accesses":
        raise UserError(f"Semantics engine needs lengths and tokens, and {path} has single accesses: take semantics access.")
    if kind == "sharegpt":
        from kvlab.replay.conversations import served_sharegpt  # here: it may need a model's tokenizer

        requests, notes = served_sharegpt(path, limit, reading)
        return (Served(request, answer) for request, answer in requests), notes
    workload = _workload(kind, path, options, limit, reading)
    context = WorkloadContext(tokenizer=None, vocab_size=VOCAB_SIZE, max_model_len=_NO_LIMIT, seed=0)
    arrivals_s = workload.build(context)

    def served() -> Iterator[Served]:
        for index, arrival_s in enumerate(arrivals_s):
            request = workload.make(index)
            request.arrival_s = arrival_s
            yield Served(request, fake_output(request))

    nothing_shared = [f"{path.name}: {NOTHING_SHARED}."] if kind in ("azure", "burstgpt") else []
    return served(), [*workload.notes, *nothing_shared]


def _workload(kind: str, path: Path, options: EngineOptions, limit: int | None, reading: ReadOptions) -> Workload:
    if kind == "azure":
        return AzureWorkload(path, limit=limit)
    if kind == "burstgpt":
        return BurstGPTWorkload(path, limit=limit)
    if kind == "qwen_bailian":
        return QwenBailianWorkload(path, block_tokens=options.block_tokens, limit=limit)
    trace_tokens = reading.trace_block_tokens or TRACE_BLOCK_TOKENS
    return MooncakeWorkload(path, block_tokens=options.block_tokens, trace_block_tokens=trace_tokens, limit=limit)


def real_block_tokens(path: Path | None, options: EngineOptions, reading: ReadOptions) -> Fraction:
    """Tokens of the traced service that one block of the pool stands for: where ids shrink, a block stands for more than it holds."""
    kind = "" if path is None else format_of(path)
    if kind == "qwen_bailian":
        return Fraction(options.block_size * QWEN_BLOCK_TOKENS, options.block_tokens)
    if kind == "mooncake":
        return Fraction(options.block_size * (reading.trace_block_tokens or TRACE_BLOCK_TOKENS), options.block_tokens)
    return Fraction(options.block_size)


def fake_output(request: Request) -> list[int]:
    """The `max_tokens` tokens that the simulated runner answers a greedy request with that ignores EOS."""
    model, sampling = FakeModel(VOCAB_SIZE), request.sampling
    num_prompt = len(request.prompt_token_ids)
    prefix_hash = hash_tokens(request.prompt_token_ids, 0)
    output: list[int] = []
    for position in range(num_prompt, num_prompt + sampling.max_tokens):
        output.append(model.next_token(prefix_hash, position, num_prompt, sampling, seed=0, stream=0))
        prefix_hash = (prefix_hash + hash_tokens(output[-1:], position)) % 2**64
    return output


def replay_engine(served: Iterable[Served], policy: EvictionPolicy, name: str, capacity: int, options: EngineOptions,
                  trace: str) -> ReplayResult:  # fmt: skip
    """Serve every request through one pool of `capacity` blocks; `name` and `trace` are for the result.

    A prompt that can never fit is passed over, one that outgrows the pool ends there, as in the engine.

    Raises:
        UserError: no requests, a request without output tokens or of several sequences. IllegalDecision: the policy's fault.
    """
    block_size = options.block_size
    if policy.sees_future:
        served = list(served)
        policy.foresee(_keys(each, block_size) for each in served)
    evicted: list[bytes] = []

    def note(kind: str, tier: str, block: CachedBlock) -> None:
        if kind == "evict" and block.content is not None:
            evicted.append(block.content)

    kv = KVCacheManager(capacity, 0, block_size, policy, Hash(), Paged(), Full(), _NO_LIMIT, track_shareable=False, on_event=note)
    queue = _Queue(served, kv, policy)
    num_blocks, hits, num_tokens = [], [], []
    for number, (request, output) in enumerate(queue):
        if not output or not request.prompt_token_ids or request.sampling.num_sequences > 1:
            raise UserError(f"Request {request.request_id!r} can't be replayed: one sequence, with a prompt and at least one output token.")
        if words := wrong_caching(request.cache, request.cache_until):
            raise UserError(f"Request {request.request_id!r}: {words}.")
        kv.set_now(Now(number, request.arrival_s))
        hits.append(_serve(kv, queue, number, request, output, options.max_num_batched_tokens))
        num_tokens.append(len(request.prompt_token_ids))
        num_blocks.append(num_tokens[-1] // block_size)
    if not hits:
        raise UserError(f"{trace} holds no requests.")
    hit_array = np.array(hits, dtype=np.int32)
    return ReplayResult(trace, name, "engine", capacity, np.array(num_blocks, dtype=np.int32), hit_array, hit_array,
                        hit_array.astype(np.int64) * block_size, np.array(num_tokens, dtype=np.int64), tuple(evicted))  # fmt: skip


class _Queue:
    """The requests in order, and for a policy that asks what those next in it will hit."""

    def __init__(self, served: Iterable[Served], kv: KVCacheManager, policy: EvictionPolicy) -> None:
        self._served = iter(served)
        self._kv = kv
        self._policy = policy
        self._ahead = deque[Served]()
        self._prefixes = deque[list[bytes]]()  # of those ahead that fit into the pool; an engine takes no others

    def __iter__(self) -> Iterator[Served]:
        while True:
            self._look_ahead()
            if not self._ahead:
                return
            yield self._ahead.popleft()

    def _look_ahead(self) -> None:
        kv, depth = self._kv, self._policy.queue_depth
        while len(self._prefixes) <= depth and (one := next(self._served, None)) is not None:
            self._ahead.append(one)
            prompt = one.request.prompt_token_ids
            if kv.num_blocks_for(len(prompt)) <= kv.pool.num_blocks:
                self._prefixes.append(_keys_of(one.request.cache_salt, prompt, kv.block_size) if depth else [])

    def tell(self) -> None:
        """The policy hears of those next in the queue, if it asks."""
        if self._policy.queue_depth:
            self._policy.waiting(list(islice(self._prefixes, self._policy.queue_depth)), self._kv.pool.now)

    def enters(self) -> None:
        """The first has left the queue."""
        self._prefixes.popleft()


def _keys(served: Served, block_size: int) -> list[bytes]:
    """Contents of the blocks that a request looks for or may publish, head to tail; nobody reads the KV of its last token."""
    request, tokens = served.request, [*served.request.prompt_token_ids, *served.output_token_ids]
    num = max(len(request.prompt_token_ids), min(request.num_cacheable_tokens + 1, len(tokens)))
    return _keys_of(request.cache_salt, tokens[:num], block_size)


def _keys_of(cache_salt: str, tokens: Sequence[int], block_size: int) -> list[bytes]:
    """Contents of the blocks of these tokens, without the last token."""
    prefix_cache = Hash()
    key, keys = prefix_cache.root(cache_salt), list[bytes]()
    for end in range(block_size, len(tokens), block_size):
        key = prefix_cache.key(key, tokens[end - block_size : end])
        keys.append(key)
    return keys


def _serve(kv: KVCacheManager, queue: _Queue, number: int, request: Request, output: Sequence[int],
           max_num_batched_tokens: int) -> int:  # fmt: skip
    """Run one request to its end; returns the blocks of its prompt that were found."""
    size, prompt = kv.block_size, request.prompt_token_ids
    if kv.num_blocks_for(len(prompt)) > kv.pool.num_blocks:
        return 0  # the engine refuses it
    queue.tell()
    queue.enters()
    group = SequenceGroup(number, request, 0, (), len(output))
    seq = Seq(number, group, 0, list(prompt))
    group.seqs.append(seq)
    hits = kv.find_prefix(seq, len(prompt) - 1)
    target = min(len(hits) * size + max_num_batched_tokens, len(prompt))
    while not kv.enter(group, hits, target):
        if not kv.pool.give_up_pins():
            return 0
    seq.tokens += output
    end = len(seq.tokens) - 1  # nobody reads the KV of the last token
    while True:
        seq.num_computed = target
        kv.publish(seq)
        if target >= end:
            break
        # A chunk of the prompt, or as many decode steps as fill a block: between two boundaries nothing happens to the pool.
        target = min(target + max_num_batched_tokens, len(prompt)) if target < len(prompt) else min((target // size + 1) * size, end)
        queue.tell()
        if not _grow(kv, seq, target):
            break  # alone in the pool and no room: the engine ends it
    kv.release(seq)
    return len(hits)


def _grow(kv: KVCacheManager, seq: Seq, num_tokens: int) -> bool:
    """Make room for a request that is alone, if need be with the blocks that the eviction policy has pinned."""
    while not kv.grow([(seq, num_tokens)]):
        if not kv.pool.give_up_pins():
            return False
    return True
