"""When each conversation begins: in an open loop at its arrival time, in a closed loop when another one ends."""

from __future__ import annotations

import heapq
from collections.abc import Sequence

import numpy as np

from kvlab.types import Request, UserError


class Loop:
    """Queue of what is to come. Conversations are numbers 0..n-1; only follow-up turns and requests in flight are objects here.

    Closed loop: `concurrency` slots, each free from a moment on; a conversation begins at the moment its slot became free.
    A follow-up turn keeps its conversation's slot, so at most `concurrency` requests are in flight.
    """

    def __init__(self, arrivals_s: Sequence[float], concurrency: int | None) -> None:
        times = np.asarray(arrivals_s, dtype=np.float64)
        if times.size and not (np.isfinite(times).all() and times.min() >= 0):
            raise UserError("Arrival times must be finite and at least 0 seconds.")
        self.num_conversations = int(times.size)
        order = np.argsort(times, kind="stable")
        self._order = order
        self._times = times[order]
        self._next = 0
        self._free_slots: list[float] | None = None if concurrency is None else [0.0] * concurrency
        self._follow_ups: list[tuple[float, int, int, Request]] = []
        self._num_pushed = 0
        self._in_flight: dict[str, tuple[int, Request | None]] = {}
        self._num_may_follow = 0

    def _next_start_s(self) -> float | None:
        """When the next conversation may begin; None: no conversation left, or no free slot."""
        if self._next >= self.num_conversations:
            return None
        if self._free_slots is None:
            return float(self._times[self._next])
        return self._free_slots[0] if self._free_slots else None

    def next_arrival_s(self) -> float | None:
        """The earlier of the next start and the next follow-up; None when neither is known."""
        start_s = self._next_start_s()
        turn_s = self._follow_ups[0][0] if self._follow_ups else None
        if start_s is None or turn_s is None:
            return turn_s if start_s is None else start_s
        return min(start_s, turn_s)

    def pop(self, now_s: float) -> tuple[float, int, Request | None] | None:
        """Take what is due first: (arrival_s, conversation, request), request None for a conversation that begins."""
        due_s = self.next_arrival_s()
        if due_s is None or due_s > now_s:
            return None
        if self._follow_ups and self._follow_ups[0][0] == due_s:
            _, _, index, request = heapq.heappop(self._follow_ups)
            return due_s, index, request
        if self._free_slots is not None:
            heapq.heappop(self._free_slots)
        self._next += 1
        return due_s, int(self._order[self._next - 1]), None

    def opened(self, index: int, request: Request, may_follow: bool) -> None:
        """A request was handed out. It is kept only where a turn may follow: whoever runs it holds its tokens already."""
        if request.request_id in self._in_flight:
            raise UserError(f"Two requests in flight are called {request.request_id!r}: request ids must be unique.")
        self._in_flight[request.request_id] = (index, request if may_follow else None)
        self._num_may_follow += may_follow

    def closed(self, request_id: str) -> tuple[int, Request | None] | None:
        """A request ended; (conversation, the request if a turn may follow), or None for a request that is not ours."""
        entry = self._in_flight.pop(request_id, None)
        if entry is not None and entry[1] is not None:
            self._num_may_follow -= 1
        return entry

    def push(self, arrival_s: float, index: int, request: Request) -> None:
        """Queue a follow-up turn."""
        heapq.heappush(self._follow_ups, (arrival_s, self._num_pushed, index, request))
        self._num_pushed += 1

    def free_slot(self, now_s: float) -> None:
        """A conversation is over."""
        if self._free_slots is not None:
            heapq.heappush(self._free_slots, now_s)

    @property
    def exhausted(self) -> bool:
        """Nothing queued, and nothing in flight that may be followed."""
        return self._next >= self.num_conversations and not self._follow_ups and not self._num_may_follow
