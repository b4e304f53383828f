"""Requests that someone already has: tests, and `LLM.generate`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from kvlab.types import Request, UserError
from kvlab.workload.base import Workload, WorkloadContext


class FixedWorkload(Workload):
    """The given requests, at their own arrival times. The caller's objects are copied, never changed."""

    def __init__(self, requests: Iterable[Request], *, concurrency: int | None = None, abort: Mapping[str, Any] | None = None) -> None:
        """requests: with unique ids and at least one prompt token each; UserError otherwise."""
        super().__init__(concurrency=concurrency, abort=abort)
        self.requests = list(requests)
        seen: dict[str, int] = {}
        for number, request in enumerate(self.requests):
            if request.request_id in seen:
                other = seen[request.request_id]
                raise UserError(f"Requests {other} and {number} are both called {request.request_id!r}: ids must be unique.")
            if not request.prompt_token_ids:
                raise UserError(f"Request {request.request_id!r} has an empty prompt: at least one token is needed.")
            seen[request.request_id] = number

    def build(self, ctx: WorkloadContext) -> Sequence[float]:
        """Their arrival times."""
        return [request.arrival_s for request in self.requests]

    def make(self, index: int) -> Request:
        """A copy of request `index`."""
        request = self.requests[index]
        return replace(request, prompt_token_ids=list(request.prompt_token_ids))
