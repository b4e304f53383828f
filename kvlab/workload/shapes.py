"""What a workload's first requests look like, before the run: for policies that choose a size by them."""

from __future__ import annotations

import copy
from bisect import bisect_left, insort
from collections.abc import Sequence

from kvlab.types import RequestShape
from kvlab.workload.base import Workload, WorkloadContext

MOST = 256
"""Requests looked at: making a request's token ids takes time, and lengths of more would say little else."""


def first_shapes(workload: Workload, ctx: WorkloadContext, shares: bool = True, most: int = MOST) -> list[RequestShape]:
    """Shapes of the first conversations' first requests, from a copy: `workload` itself stays as it is.

    Args:
        shares: whether prompts can share blocks at all (a prefix cache); if not, no token counts as shared. most: requests looked at.
    """
    twin = copy.deepcopy(workload)
    twin.start(ctx)
    number = min(most, twin.loop.num_conversations)
    shapes: list[RequestShape] = []
    seen: list[tuple[str, list[int]]] = []  # sorted: whoever shares most with a prompt stands next to its place
    for index in range(number):
        request = twin.make(index)
        prompt = request.prompt_token_ids
        entry = request.cache_salt, prompt
        place = bisect_left(seen, entry)
        near = [other for salt, other in seen[max(0, place - 1) : place + 1] if salt == request.cache_salt]
        shared = max((_common(prompt, other) for other in near), default=0) if shares else 0
        insort(seen, (request.cache_salt, prompt[: request.num_cacheable_tokens]))  # what it leaves for others
        num_output = request.sampling.max_tokens if request.oracle_output_len is None else request.oracle_output_len
        shapes.append(RequestShape(len(prompt), num_output, min(shared, len(prompt) - 1), request.sampling.num_sequences))
    return shapes


def _common(a: Sequence[int], b: Sequence[int]) -> int:
    """Length of the common beginning."""
    for i, (x, y) in enumerate(zip(a, b, strict=False)):
        if x != y:
            return i
    return min(len(a), len(b))
