"""What listeners are told: the counts of a step and the record of a request that has ended."""

from __future__ import annotations

from kvlab.cache.manager import KVCacheManager
from kvlab.engine.commit import StepCounts
from kvlab.engine.cost.work import step_work
from kvlab.engine.scheduler import Scheduler
from kvlab.engine.sequence import Sequence, SequenceGroup
from kvlab.model.tokenizer import Tokenizer
from kvlab.types import Plan, Request, RequestRecord, StepStats


class StatsMaker:
    """Makes a step's `StepStats` from the state after its commit. O(1), and of sequences that do more than decode."""

    def __init__(self, scheduler: Scheduler, kv: KVCacheManager) -> None:
        self._scheduler = scheduler
        self._kv = kv
        self._num_evicted = 0
        self._num_relocated = 0

    def make(self, plan: Plan, counts: StepCounts, end_s: float, schedule_s: float, execute_s: float, commit_s: float) -> StepStats:
        """Counts of this step; state of pools and queues after it."""
        scheduler, pool, cpu = self._scheduler, self._kv.pool, self._kv.cpu_pool
        num_free, num_held, num_pinned = pool.num_free, pool.num_held, pool.num_pinned
        num_seqs, num_ctx, wasted, saved, reserved = self._occupancy(num_held)
        unplaceable = num_free - self._kv.layout.largest_region(pool.free)
        evicted, self._num_evicted = pool.num_evicted - self._num_evicted, pool.num_evicted
        relocated, self._num_relocated = self._kv.num_relocated - self._num_relocated, self._kv.num_relocated
        work = step_work(plan)
        queries = hits = again_queries = again_hits = 0
        for admitted in plan.admitted:
            if admitted.kind == "new":
                queries += admitted.num_tokens
                hits += admitted.num_cached_tokens
            else:  # what swap or readmission restores is no hit of the workload
                again_queries += admitted.num_tokens
                again_hits += admitted.num_cached_tokens
        return tuple.__new__(StepStats, (  # in the hot path: half the time that StepStats(...) takes
            plan.step, plan.now_s, len(scheduler.running), len(scheduler.waiting), len(scheduler.swapped), num_seqs, num_ctx,
            counts.generation, counts.prompt_computed, counts.output, work.num_seqs, work.num_decode_seqs, work.num_kv_tokens_read,
            work.num_attention_pairs, pool.num_blocks, num_held + num_pinned, pool.num_blocks - num_free - num_held - num_pinned, num_free,
            reserved, unplaceable, cpu.num_blocks, cpu.num_used if cpu.num_blocks else 0, wasted, queries, hits, again_queries, again_hits,
            len(plan.preempted), evicted, len(plan.swap_in), len(plan.swap_out), len(plan.copies) - relocated, relocated, counts.recomputed,
            plan.blocked[0].by if plan.blocked else "", plan.watermark_blocks, saved, schedule_s * 1e3, execute_s * 1e3, commit_s * 1e3,
            end_s,
        ))  # fmt: skip

    def _occupancy(self, num_blocks_held: int) -> tuple[int, int, int, int, int]:
        """(sequences, tokens with KV in the pool, slots held but not filled, blocks saved by sharing, blocks held but empty), of running
        groups.

        Saved are references to blocks beyond the first, between sequences of a group and between requests with a common prefix.
        """
        lanes = self._scheduler.lanes
        counts_reserved, size = self._kv.regions is not None, self._kv.block_size
        num_seqs, num_ctx, num_held, reserved = len(lanes), lanes.num_ctx, lanes.num_blocks, 0
        wasted = num_held * size - num_ctx
        for group in lanes.others(self._scheduler.running):
            seqs = group.seqs
            num_seqs += len(seqs)
            if len(seqs) == 1 and group.is_forked:
                seq = seqs[0]
                num_ctx += seq.num_computed - seq.table.num_dropped_blocks * size  # type: ignore[union-attr]
                wasted += seq.table.capacity - seq.num_computed  # type: ignore[union-attr]
                num_held += len(seq.table.block_ids)  # type: ignore[union-attr]
                if counts_reserved:
                    reserved += (seq.table.capacity - seq.num_computed) // size  # type: ignore[union-attr]
            else:
                context, waste, held, empty = self._group_occupancy(group)
                num_ctx, wasted, num_held, reserved = num_ctx + context, wasted + waste, num_held + held, reserved + empty
        parked = self._kv.parking.num_landing if len(self._kv.parking) else 0  # held, but by no table
        return num_seqs, num_ctx, wasted, num_held - (num_blocks_held - parked), reserved

    def _group_occupancy(self, group: SequenceGroup) -> tuple[int, int, int, int]:
        """(tokens, unfilled slots, blocks held, blocks without a token) of a group whose sequences share blocks or have regions set
        aside: each physical block is as filled as its fullest holder has it."""
        size = self._kv.block_size
        filled: dict[int, int] = {}
        num_ctx = num_held = 0
        for seq in group.seqs:
            if seq.table is None:
                continue
            num_ctx += seq.num_computed - seq.table.num_dropped_blocks * size
            num_held += len(seq.table.block_ids)
            slots = seq.num_computed - seq.table.num_dropped_blocks * size
            for i, block_id in enumerate(seq.table.block_ids):
                filled[block_id] = max(filled.get(block_id, 0), min(size, max(0, slots - i * size)))
        spare = sum(len(region) for region in self._kv.spare_regions(group))
        empty = spare + sum(not num for num in filled.values())
        return num_ctx, (len(filled) + spare) * size - sum(filled.values()), num_held + spare, empty


def make_record(group: SequenceGroup, end_s: float, tokenizer: Tokenizer | None) -> RequestRecord:
    """A group that has ended. Its sequences are reported by stream (beams: best first)."""
    group.enter_phase("ended", end_s)
    seqs = sorted(group.ended_seqs, key=lambda s: s.stream)
    reasons = {s.finish_reason for s in seqs}
    # A beam search that was cut short may have ended hypotheses only: what ended the request is told all the same.
    reason = group.finish_reason or next(r for r in ("abort", "kv_capacity", "length", "stop") if r in reasons)
    first = seqs[0]
    request = group.request
    return RequestRecord(
        group.request_id, group.arrival_s, group.first_scheduled_s, end_s, group.num_prompt_tokens, sum(s.num_output for s in seqs),
        group.num_cached_tokens, group.num_computed_total, group.num_recomputed, group.num_shareable_lost,
        group.num_preemptions, group.num_swaps, reason, tuple(first.token_times), tuple(group.spans),
        tuple((s.output_token_ids, s.finish_reason) for s in seqs), group.tenant, request.session_id, request.turn, group.priority,
        group.detail, tuple(_text(s, tokenizer) for s in seqs), _cache_until(request),
    )  # fmt: skip


def _text(seq: Sequence, tokenizer: Tokenizer | None) -> str:
    if seq.stop_checker is not None:
        return seq.stop_checker.text
    if tokenizer is None:
        return ""
    return tokenizer.decode(seq.text_token_ids)


def refused_record(request: Request, detail: str, now_s: float) -> RequestRecord:
    """A request that never entered."""
    return RequestRecord(request.request_id, request.arrival_s, None, now_s, len(request.prompt_token_ids), 0, 0, 0, 0, 0, 0, 0, "refused",
                         (), (), (), request.tenant, request.session_id, request.turn, request.priority, detail,
                         cache_until=_cache_until(request))  # fmt: skip


def _cache_until(request: Request) -> int | None:
    return None if request.cache and request.cache_until is None else request.num_cacheable_tokens
