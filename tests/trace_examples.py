"""A small run, made by hand: three steps and four requests whose every figure can be worked out on paper."""

from __future__ import annotations

from typing import Any

from kvlab.types import BlockEvent, Candidate, Outcome, Plan, RequestRecord, ScheduledSeq, StepStats, TokenLogprobs


def stats(step: int, now_s: float, end_s: float, **more: Any) -> StepStats:
    """Stats of a step; what is not given is 0 or empty, and a pool of 10 blocks is free."""
    zeros: dict[str, Any] = dict.fromkeys(StepStats._fields, 0)
    zeros.update(
        step=step, now_s=now_s, end_s=end_s, admission_blocked_by="", kv_blocks_total=10, kv_blocks_free=10, schedule_ms=0.25,
        execute_ms=(end_s - now_s) * 1e3, commit_ms=0.125,
    )  # fmt: skip
    zeros.update(more)
    return StepStats(**zeros)


STATS = (
    stats(0, 1.0, 1.5, num_running_reqs=2, num_waiting_reqs=1, num_prompt_tokens_computed=40, num_ctx_tokens=40,
          num_output_tokens=2, kv_blocks_used=4, kv_blocks_free=6, prefix_cache_queries=50, prefix_cache_hits=10,
          internal_fragmentation_tokens=8),
    stats(1, 1.5, 2.0, num_running_reqs=2, num_generation_tokens=2, num_output_tokens=2, kv_blocks_used=8, kv_blocks_evictable=1,
          kv_blocks_free=1, num_preemptions=1, swapped_out_blocks=2, internal_fragmentation_tokens=4,
          admission_blocked_by="watermark"),
    stats(2, 2.0, 3.0, num_running_reqs=1, num_generation_tokens=1, num_output_tokens=1, kv_blocks_used=2, kv_blocks_evictable=5,
          kv_blocks_free=3, preempted_queries=20, preempted_hits=5, recomputed_tokens=15, num_evicted_blocks=3),
)  # fmt: skip


def request(request_id: str, arrival_s: float, times: tuple[float, ...], reason: str = "length", **more: Any) -> RequestRecord:
    """A request of 20 prompt tokens with one sequence whose tokens came at `times`."""
    fields: dict[str, Any] = {
        "request_id": request_id, "arrival_s": arrival_s, "first_scheduled_s": arrival_s + 0.25,
        "finish_s": times[-1] if times else arrival_s, "num_prompt_tokens": 20,
        "num_output_tokens": len(times), "num_cached_tokens": 0,
        "num_computed_tokens": 20, "num_wasted_tokens": 0, "num_shareable_tokens_lost": 0, "num_preemptions": 0, "num_swaps": 0,
        "finish_reason": reason,
        "token_times_s": times, "spans": (), "outputs": ((tuple(range(len(times))), reason),), "tenant": "",
        "session_id": None, "turn": 0, "priority": 0,
    }  # fmt: skip
    return RequestRecord(**{**fields, **more})


REQUESTS = (
    request("a", 1.0, (1.5, 2.0, 3.0), texts=("Hi",), spans=(("queue", 1.0, 1.25), ("prefill", 1.25, 1.5), ("decode", 1.5, 3.0))),
    request("b", 1.0, (1.5,), "stop", session_id="s", turn=2, outputs=(((7,), "stop"), ((8,), "stop")), num_output_tokens=2),
    request("c", 1.25, (2.0,), "abort"),
    request("d", 1.5, (), "refused", first_scheduled_s=None, detail="needs 12 blocks, the pool has 10"),
)

BLOCKS = (BlockEvent(0, "allocate", "gpu", 3, 1, "", "a"), BlockEvent(2, "evict", "gpu", 3, 0, "ab12", ""))


def plan(step: int) -> Plan:
    """A plan with a sequence for each token of OUTCOMES[step]."""
    scheduled = tuple(ScheduledSeq(7 + i, 16 * i, 1 + i) for i in range(len(OUTCOMES[step].tokens)))
    return Plan(step, STATS[step].now_s, scheduled, tables={7: (3, 4)}, fresh_tables={8: ()})


LOGPROBS = {7: (TokenLogprobs(-0.1, (5, 9), (-0.1, -2.0 / 3.0)), TokenLogprobs(float("-inf")))}
OUTCOMES = (
    Outcome(0, ((5,), ()), {7: (9, 11)}, {}, LOGPROBS, 0.1 + 0.2),
    Outcome(1, ((), ()), {}, {8: (Candidate(3, -1e-300), Candidate(4, -1.1))}, {}, 1e-17),
    Outcome(2, ((1, 2, 3),)),
)
