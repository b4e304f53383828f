"""What a plan asks of a machine, in counts: what cost models are functions of, and what the steps table keeps for fitting one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from kvlab.types import Plan, ScheduledSeq
from kvlab.types.columns import Decodes


class StepWork(NamedTuple):
    """The work of one step.

    Attributes:
        num_tokens: tokens computed. num_seqs: sequences they belong to. num_decode_seqs: those of a single new token.
        num_sampled_seqs: sequences whose last position goes through the output head.
        num_kv_tokens_read: K and V entries that attention reads: every sequence's context, its new tokens included and those that a
            compression policy has given up, or that lie between the sinks and the windows of all its new tokens, not.
        num_attention_pairs: query-key pairs: a new token sees the context up to and including itself, of a window only that and
            the sinks.
        num_moved_blocks: blocks swapped in or out. num_copied_blocks: blocks copied within the pool.
    """

    num_tokens: int
    num_seqs: int
    num_decode_seqs: int
    num_sampled_seqs: int
    num_kv_tokens_read: int
    num_attention_pairs: int
    num_moved_blocks: int
    num_copied_blocks: int


_last: tuple[Plan, StepWork] | None = None  # a cost model and the recorder's row ask for the same plan, one after the other


def step_work(plan: Plan) -> StepWork:
    """Count a plan's work. A plan never changes, so the last answer is kept."""
    global _last
    if _last is None or _last[0] is not plan:
        _last = plan, _count(plan)
    return _last[1]


def _count(plan: Plan) -> StepWork:
    """In the hot path, about 10 us at 128 decoding sequences: whole columns are summed at once."""
    scheduled = plan.scheduled
    num_moved, num_copied = len(plan.swap_in) + len(plan.swap_out), len(plan.copies)
    if isinstance(scheduled, Decodes):
        num, keys = len(scheduled.seq_ids), scheduled.num_keys
        if not scheduled.rest:
            return StepWork(num, num, num, num, keys, keys, num_moved, num_copied)
        rest = _count(plan._replace(scheduled=scheduled.rest))
        return StepWork(rest.num_tokens + num, rest.num_seqs + num, rest.num_decode_seqs + num, rest.num_sampled_seqs + num,
                        rest.num_kv_tokens_read + keys, rest.num_attention_pairs + keys, num_moved, num_copied)  # fmt: skip
    if not scheduled:
        return StepWork(0, 0, 0, 0, 0, 0, num_moved, num_copied)
    _, first, new, samples, dropped = list(zip(*scheduled, strict=True))[:5]
    num_tokens, num_seqs = sum(new), len(new)
    if plan.attention_window is not None:
        num_keys, num_pairs = _within(plan.attention_window, plan.num_sink_tokens, scheduled)
        return StepWork(num_tokens, num_seqs, new.count(1), num_seqs - samples.count(0), num_keys, num_pairs, num_moved, num_copied)
    num_keys = num_pairs = sum(first) + num_tokens - sum(dropped)
    num_decodes = num_seqs
    if num_tokens != num_seqs:
        num_decodes = new.count(1)
        for s in scheduled:
            n = s.num_new_tokens
            if n > 1:  # n queries over `end` keys, less what the causal mask hides; one query's worth is counted already
                end = s.first_position + n - s.num_dropped_tokens
                num_pairs += (n - 1) * end - n * (n - 1) // 2
    return StepWork(num_tokens, num_seqs, num_decodes, num_seqs - samples.count(0), num_keys, num_pairs, num_moved, num_copied)


def _within(window: int, num_sinks: int, scheduled: Sequence[ScheduledSeq]) -> tuple[int, int]:
    """(entries read, query-key pairs) where each token sees the `window` latest positions and the first `num_sinks`."""
    num_keys = num_pairs = 0
    for s in scheduled:
        end = s.first_position + s.num_new_tokens
        start = max(s.num_dropped_tokens, s.first_position + 1 - window, 0)
        num_keys += end - start + min(num_sinks, start)
        growing = max(0, min(end, window) - s.first_position)  # of the new tokens those that see all before them
        num_pairs += growing * s.first_position + growing * (growing + 1) // 2 + (s.num_new_tokens - growing) * window
        if num_sinks:  # of these, tokens whose window begins behind them see each one besides
            num_pairs += _sum_clamped(end - window, num_sinks) - _sum_clamped(s.first_position - window, num_sinks)
    return num_keys, num_pairs


def _sum_clamped(last: int, most: int) -> int:
    """Sum of min(x, most) over x = 1 .. last; 0 where last is below 1."""
    rising = max(0, min(last, most))
    return rising * (rising + 1) // 2 + max(0, last - most) * most
