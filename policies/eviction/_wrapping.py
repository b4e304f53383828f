"""What policies share that leave the choice to another one, an inner policy, and only narrow it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from kvlab.policies.base import EvictionPolicy, KeyEviction, require
from kvlab.policies.eviction.lru import Lru
from kvlab.types import BlockView, Now


class _Lru(KeyEviction):
    """LRU as a sort: what Lru does, whose list relies on hearing of a release when it happens."""

    def key(self, block: BlockView) -> tuple[float, ...]:
        """Tick of its last use."""
        return (block.used_tick,)


class Wrapping(EvictionPolicy):
    """Hands every event on to the inner policy (None: LRU). What the inner one is not to choose is kept from it: its `release` is handed
    on later, so that to the inner policy the block is held, and passed over, for so long."""

    def __init__(self, inner: EvictionPolicy | None = None) -> None:
        require(inner is None or isinstance(inner, EvictionPolicy), self, "inner", inner, "an eviction policy, or None for LRU")
        self.inner = inner
        self._inner = _Lru() if inner is None or type(inner) is Lru else inner
        self.sees_future = self._inner.sees_future
        self.queue_depth = self._inner.queue_depth

    def reset(self) -> None:
        """As new, the inner policy too."""
        reset = getattr(self._inner, "reset", None)
        if reset is not None:
            reset()

    @property
    def num_pinned(self) -> int:
        """Those of the inner policy."""
        return self._inner.num_pinned

    def is_pinned(self, block_id: int) -> bool:
        """By the inner policy."""
        return self._inner.is_pinned(block_id)

    def give_up_pins(self, now: Now) -> bool:
        """Those of the inner policy."""
        return self._inner.give_up_pins(now)

    def bind(self, num_blocks: int) -> None:
        """Handed on."""
        self._inner.bind(num_blocks)

    def foresee(self, accesses: Iterable[Sequence[bytes]]) -> None:
        """Handed on."""
        self._inner.foresee(accesses)

    def waiting(self, prefixes: Sequence[Sequence[bytes]], now: Now) -> None:
        """Handed on as far as the inner policy asks."""
        if self._inner.queue_depth:
            self._inner.waiting(prefixes[: self._inner.queue_depth], now)

    def miss(self, content: bytes, now: Now) -> None:
        """Handed on."""
        self._inner.miss(content, now)

    def insert(self, block: BlockView, now: Now) -> None:
        """Handed on."""
        self._inner.insert(block, now)

    def hit(self, block: BlockView, now: Now) -> None:
        """Handed on."""
        self._inner.hit(block, now)

    def release(self, block: BlockView, now: Now, preempted: bool) -> None:
        """Handed on."""
        self._inner.release(block, now, preempted)

    def withhold(self, block: BlockView, now: Now) -> None:
        """Handed on."""
        self._inner.withhold(block, now)

    def evict(self, block: BlockView, now: Now) -> None:
        """Handed on."""
        self._inner.evict(block, now)
