"""What the workload tests share: a context, records of finished requests, and a driver that serves without an engine."""

from __future__ import annotations

import heapq
from collections.abc import Callable

from kvlab.types import Request, RequestRecord
from kvlab.workload import Workload, WorkloadContext


def context(vocab_size: int = 50_000, max_model_len: int = 100_000, seed: int = 0, special_ids: tuple[int, ...] = ()) -> WorkloadContext:
    return WorkloadContext(None, vocab_size, max_model_len, seed, special_ids)


def record(request: Request, finish_s: float, output: tuple[int, ...] = (7,), reason: str = "length") -> RequestRecord:
    return RequestRecord(
        request_id=request.request_id, arrival_s=request.arrival_s, first_scheduled_s=request.arrival_s, finish_s=finish_s,
        num_prompt_tokens=len(request.prompt_token_ids), num_output_tokens=len(output), num_cached_tokens=0,
        num_computed_tokens=0, num_wasted_tokens=0, num_shareable_tokens_lost=0,
        num_preemptions=0, num_swaps=0, finish_reason=reason, token_times_s=(),
        spans=(), outputs=((output, reason),), tenant=request.tenant, session_id=request.session_id, turn=request.turn,
        priority=request.priority,
    )  # fmt: skip


def all_due(workload: Workload, ctx: WorkloadContext | None = None) -> list[Request]:
    """Start a workload and take everything that becomes due without an answer."""
    workload.start(ctx or context())
    return workload.due(float("inf"))


def serve(
    workload: Workload, ctx: WorkloadContext, service_s: Callable[[Request], float]
) -> tuple[list[tuple[float, Request]], list[RequestRecord], int]:
    """Serve every request in parallel for service_s(request) seconds, answering 1, 2, 3 ... max_tokens.

    Returns what was handed out and when, the records by time of finish, and the most requests that were in flight at once.
    """
    workload.start(ctx)
    now_s, handed, records, most = 0.0, [], [], 0
    running: list[tuple[float, int, Request]] = []
    while True:
        for request in workload.due(now_s):
            handed.append((now_s, request))
            heapq.heappush(running, (now_s + service_s(request), len(handed), request))
        most = max(most, len(running))
        times = [t for t in (workload.next_arrival_s(), running[0][0] if running else None) if t is not None]
        if not times:
            break
        now_s = max(now_s, min(times))
        while running and running[0][0] <= now_s:
            _, _, request = heapq.heappop(running)
            records.append(record(request, now_s, tuple(range(1, request.sampling.max_tokens + 1))))
            workload.on_finish(records[-1])
    assert workload.exhausted
    return handed, records, most
