"""Belady's MIN."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from kvlab.policies.base import KeyEviction
from kvlab.types import BlockView, Now, UserError


class Belady(KeyEviction):
    """The block whose next use lies farthest in the future goes: no policy that must take in every block has more hits.

    Source: Belady, "A study of replacement algorithms for a virtual-storage computer" (IBM Systems Journal 5(2), 1966),
        https://doi.org/10.1147/sj.52.0078
    Parameters: none.
    Deviations: works where the future is known, in replay. With semantics access it is the bound on object hits (offline MIN, without
        bypass); with semantics engine, where blocks are pinned and only an unbroken prefix is a hit, it is no bound, just well informed.
        Among blocks never used again the one used longest ago goes.
    """

    sees_future = True

    def reset(self) -> None:
        """As new: without a future."""
        super().reset()
        self._contents: list[bytes] = []  # all accesses, by position
        self._next: list[int] = []  # by position: the next one of the same content
        self._first: list[int] = []  # by request: its first position; at last the number of accesses
        self._upcoming: dict[bytes, int] = {}  # content -> its first position not yet passed
        self._never = 0  # behind the last position
        self._request = 0
        self._end = 0  # of the request, by position
        self._block_id: dict[bytes, int] = {}  # of contents in the cache

    def foresee(self, accesses: Iterable[Sequence[bytes]]) -> None:
        """Note the next position of each access."""
        for request in accesses:
            self._first.append(len(self._contents))
            self._contents += request
        never = self._never = len(self._contents)
        self._first.append(never)
        self._next = [never] * never
        for position in range(never - 1, -1, -1):
            content = self._contents[position]
            self._next[position] = self._upcoming.get(content, never)
            self._upcoming[content] = position
        self._end = self._start_of(1)

    def bind(self, num_blocks: int) -> None:
        """UserError without a future."""
        if not self._first:
            raise UserError(
                "eviction belady must know all accesses in advance, which an engine does not: use it in kvlab.replay, where the workload's"
                " future is given, or choose another eviction policy."
            )

    def key(self, block: BlockView) -> tuple[float, ...]:
        """(next position, farthest first, tick of its last use)."""
        return (-self._upcoming.get(block.content, self._never), block.used_tick)

    def insert(self, block: BlockView, now: Now) -> None:
        """An access."""
        self._block_id[block.content] = block.block_id
        self._pass(block, now)

    def hit(self, block: BlockView, now: Now) -> None:
        """An access."""
        super().hit(block, now)
        self._pass(block, now)

    def _pass(self, block: BlockView, now: Now) -> None:
        """The access that was foreseen in this request is over."""
        if now.step != self._request:
            self._begin(now)
        position = self._upcoming.get(block.content, self._never)
        if position < self._end:
            self._upcoming[block.content] = self._next[position]

    def _start_of(self, request: int) -> int:
        return self._first[min(request, len(self._first) - 1)]

    def _begin(self, now: Now) -> None:
        """A new request: what was foreseen for those before it and did not happen is over as well."""
        start = self._start_of(now.step)
        upcoming = self._upcoming
        for content in self._contents[self._start_of(self._request) : start]:
            position = upcoming[content]
            if position >= start:
                continue
            while position < start:
                position = self._next[position]
            upcoming[content] = position
            block_id = self._block_id.get(content, -1)
            if block_id in self._live:
                self._rank(block_id, (-position, self._live[block_id][1]))
        self._request = now.step
        self._end = self._start_of(now.step + 1)

    def victim(self, now: Now) -> int:
        """The candidate with the farthest next use."""
        if now.step != self._request:
            self._begin(now)
        return super().victim(now)

    def evict(self, block: BlockView, now: Now) -> None:
        """Gone."""
        super().evict(block, now)
        del self._block_id[block.content]
