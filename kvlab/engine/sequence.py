"""Sequences and sequence groups: a request inside the engine. Plain state; the scheduler moves it."""

from __future__ import annotations

from array import array
from collections.abc import Iterator
from collections.abc import Sequence as Seqs
from typing import TYPE_CHECKING

from kvlab.cache.pool import CachedBlock
from kvlab.cache.table import BlockTable
from kvlab.engine.beam import BeamState
from kvlab.engine.stopping import StopChecker, end_token_ids
from kvlab.types import LATE, ChangedView, Request, TokenLogprobs

if TYPE_CHECKING:
    from kvlab.engine.steady import Lanes

WAITING, RUNNING, SWAPPED, FINISHED = "waiting", "running", "swapped", "finished"


class Sequence:
    """One stream of tokens of a group.

    `num_computed` counts tokens whose KV is in the pool; `num_highest` the most it ever was (below it, computing is recomputing).
    `attach_to` / `attach_at`: after a recompute-preemption of a group, a sequence waits until `attach_to` has computed their
    common prefix of `attach_at` tokens, and then shares its blocks.
    `flight`: the step in flight that computes it (see `kvlab.engine.flight`), -1 for none; its tokens count as computed.
    """

    __slots__ = ("attach_at", "attach_to", "finish_reason", "flight", "group", "keys", "logprobs", "num_computed", "num_highest",
                 "num_prompt", "packed", "score", "seq_id", "stop_checker", "stream", "table", "token_times", "tokens")  # fmt: skip

    def __init__(self, seq_id: int, group: SequenceGroup, stream: int, tokens: list[int]) -> None:
        self.seq_id = seq_id
        self.group = group
        self.stream = stream
        self.tokens = tokens
        self.num_prompt = len(group.request.prompt_token_ids)
        self.num_computed = 0
        self.num_highest = 0
        self.table: BlockTable | None = None
        self.keys: list[bytes] = []
        self.packed = array("I")
        self.attach_to: Sequence | None = None
        self.attach_at = 0
        self.flight = -1
        self.finish_reason = ""
        self.stop_checker: StopChecker | None = None
        self.logprobs: list[TokenLogprobs] = []
        self.token_times: list[float] = []
        self.score: float | None = None

    @property
    def num_output(self) -> int:
        """Output tokens so far."""
        return len(self.tokens) - self.num_prompt

    @property
    def output_token_ids(self) -> tuple[int, ...]:
        """Output so far, as far as it is known (at depth 1 a token in flight counts in `num_output` and stands as `LATE` in `tokens`)."""
        ids = self.tokens[self.num_prompt :]
        while ids and ids[-1] == LATE:
            ids.pop()
        return tuple(ids)

    @property
    def text_token_ids(self) -> tuple[int, ...]:
        """Known output whose text is the sequence's: without the id that ended it, unless `include_stop_str`."""
        ids = self.output_token_ids
        is_ended = self.finish_reason == "stop" and not self.group.sampling.include_stop_str
        return ids[:-1] if is_ended and ids and ids[-1] in self.group.end_ids else ids


class SequenceGroup:
    """A request: one prompt and its sequences. Satisfies `GroupView`; scheduling, preemption and swap act on it as a whole."""

    def __init__(self, group_id: int, request: Request, seed: int, eos_token_ids: tuple[int, ...], max_output: int) -> None:
        self.group_id = group_id
        self.request = request
        self.request_id = request.request_id
        self.arrival_s = request.arrival_s
        self.priority = request.priority
        self.tenant = request.tenant
        self.sampling = sampling = request.sampling
        known = request.known_output_len
        self.oracle_output_len = None if known is None else min(known, max_output)
        self.seed = seed
        self.max_output = max_output
        self.max_tokens = max_output
        self.end_ids = frozenset(end_token_ids(request.sampling, eos_token_ids))
        self.num_prompt_tokens = len(request.prompt_token_ids)
        self.num_cacheable_tokens = request.num_cacheable_tokens
        self._seqs: list[Sequence] = []
        self.lanes: Lanes | None = None
        """Where its sequence is kept in columns (see `kvlab.engine.steady`)."""
        self.pool_blocks: Seqs[CachedBlock] = ()  # the pool's records, to count what is shared and published; the engine sets it
        self.ended_seqs: list[Sequence] = []
        self.beam: BeamState | None = None
        self.is_forked = request.sampling.num_sequences == 1
        self.is_plain = self.is_forked and not sampling.beam_width and not sampling.stop and sampling.logprobs is None
        self.status = WAITING
        self.admitted_step = -1
        self.admission_order = -1
        self.num_preemptions = 0
        self.num_swaps = 0
        self.was_swapped_out = False
        self.num_cached_tokens = 0
        self.num_computed_total = 0
        self.num_recomputed = 0
        self.num_shareable_lost = 0
        self.first_scheduled_s: float | None = None
        self.finish_reason = ""
        self.detail = ""
        self.spans: list[tuple[str, float, float]] = []
        self.phase = "queue"
        self.phase_since = request.arrival_s

    def check_facts(self) -> None:
        """ChangedView unless what policies may see and nobody changes is still as the request has it."""
        request, known = self.request, self.request.known_output_len
        facts = {
            "arrival_s": request.arrival_s, "priority": request.priority, "tenant": request.tenant, "request_id": request.request_id,
            "max_tokens": self.max_output, "num_prompt_tokens": len(request.prompt_token_ids),
            "num_cacheable_tokens": request.num_cacheable_tokens,
            "oracle_output_len": None if known is None else min(known, self.max_output),
        }  # fmt: skip
        for name, fact in facts.items():
            if getattr(self, name) != fact:
                raise ChangedView(name, f"request {request.request_id!r}", fact, getattr(self, name))

    def enter_phase(self, phase: str, at_s: float) -> None:
        """Close the span of the present phase (queue, prefill, decode, preempted, swapped) and begin another."""
        if phase != self.phase:
            if at_s > self.phase_since:
                self.spans.append((self.phase, self.phase_since, at_s))
            self.phase, self.phase_since = phase, max(at_s, self.phase_since)

    @property
    def seqs(self) -> list[Sequence]:
        """Live sequences, up to date. (Nobody keeps one and reads it after another step: ask anew.)"""
        if self.lanes is not None:
            self.lanes.settle()
        return self._seqs

    @seqs.setter
    def seqs(self, seqs: list[Sequence]) -> None:
        self._seqs = seqs

    @property
    def num_sequences(self) -> int:
        """Live sequences; before the first token, those it will have."""
        return len(self._seqs) if self.is_forked else self.sampling.num_sequences

    @property
    def num_output_tokens(self) -> int:
        """Longest output so far."""
        return max((len(s.tokens) for s in self.seqs), default=self.num_prompt_tokens) - self.num_prompt_tokens

    @property
    def num_all_output_tokens(self) -> int:
        """Output tokens so far, over live and ended sequences."""
        return sum(len(s.tokens) - s.num_prompt for s in (*self.seqs, *self.ended_seqs))

    @property
    def num_tokens(self) -> int:
        """Prompt and longest output."""
        return max((len(s.tokens) for s in self.seqs), default=self.num_prompt_tokens)

    @property
    def num_computed_tokens(self) -> int:
        """Tokens whose KV is in the pool, over all sequences."""
        return sum(s.num_computed for s in self.seqs)

    @property
    def num_uncomputed_tokens(self) -> int:
        """Known tokens still to compute, over all sequences."""
        return sum(len(s.tokens) - s.num_computed for s in self.seqs)

    @property
    def num_unshared_blocks(self) -> int:
        """Distinct blocks that no other group holds."""
        return sum(block.ref_count == held for block, held in self._held_blocks())

    @property
    def num_published_tokens(self) -> int:
        """Tokens in its blocks that the prefix cache can find again."""
        return sum(block.num_tokens for block, _ in self._held_blocks() if block.content)

    @property
    def num_unpublished_tokens(self) -> int:
        """Distinct computed tokens in its blocks that the prefix cache can't find again: lost when it gives way by recompute."""
        filled: dict[int, int] = {}
        for seq in self.seqs if self.status != SWAPPED else ():
            if seq.table is None:
                continue
            slots = seq.num_computed - seq.table.num_dropped_blocks * self.pool_blocks[0].num_tokens
            for block_id in seq.table.block_ids:
                block = self.pool_blocks[block_id]
                if slots > 0 and not block.content:
                    filled[block_id] = max(filled.get(block_id, 0), min(block.num_tokens, slots))
                slots -= block.num_tokens
        return sum(filled.values())

    def _held_blocks(self) -> Iterator[tuple[CachedBlock, int]]:
        """(block, how many of its tables hold it), in table order."""
        held: dict[int, int] = {}
        if self.status != SWAPPED:
            for seq in self.seqs:
                for block_id in seq.table.block_ids if seq.table is not None else ():
                    held[block_id] = held.get(block_id, 0) + 1
        return ((self.pool_blocks[block_id], num) for block_id, num in held.items())

    @property
    def num_blocks(self) -> int:
        """Distinct blocks held in the gpu tier."""
        if len(self._seqs) == 1:
            table = self._seqs[0].table
            return 0 if table is None or self.status == SWAPPED else len(table.block_ids)
        if self.status == SWAPPED:
            return 0
        return len({b for s in self.seqs if s.table is not None for b in s.table.block_ids})
