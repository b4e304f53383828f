"""Pinning: shared prefixes stay."""

from __future__ import annotations

from kvlab.policies.base import EvictionPolicy, is_number, require
from kvlab.policies.eviction._heap import KeyHeap
from kvlab.policies.eviction._wrapping import Wrapping
from kvlab.types import BlockView, Now


class Pinned(Wrapping):
    """The first tokens of prompts that others have hit are pinned (system prompts, few-shot examples, documents asked about again and
    again); the inner policy chooses among the rest.

    Source: TensorRT-LLM's retention priorities for KV blocks (https://nvidia.github.io/TensorRT-LLM/advanced/kv-cache-reuse.html) and
        SGLang's locked nodes; here the prefix is found by its hits instead of being named.
    Parameters: inner: the policy for the rest (None: lru), without pins of its own. mode: "hard": a pinned block is never evicted, and
        to the engine it is in use; "soft": it goes after all others. depth_tokens: a block is pinned if it begins within so many tokens
        of its prompt, and min_hits: has been hit so often since it came in. max_fraction: share of the pool that may be pinned, in
        (0, 1); where more deserve it, those with most hits, then the shallowest, are pinned.
    Deviations: pins of mode hard are given up all at once when otherwise a request would end for want of blocks: nothing else runs, and
        it fits only in their place. They are pinned again when they are hit and let go again. Blocks that a table holds don't count into
        max_fraction. A soft-pinned block goes when no other is left: fewest hits, then deepest, first.
    """

    def __init__(self, inner: EvictionPolicy | None = None, mode: str = "hard", depth_tokens: int = 512, min_hits: int = 1,
                 max_fraction: float = 0.25) -> None:  # fmt: skip
        super().__init__(inner)
        require(mode in ("hard", "soft"), self, "mode", mode, '"hard" (never evicted) or "soft" (evicted last)')
        require(type(depth_tokens) is int and depth_tokens >= 1, self, "depth_tokens", depth_tokens, "an integer of at least 1 (tokens)")
        require(type(min_hits) is int and min_hits >= 0, self, "min_hits", min_hits, "an integer of at least 0")
        is_share = is_number(max_fraction) and 0 < max_fraction < 1
        require(is_share, self, "max_fraction", max_fraction, "a number in (0, 1)")
        around = self._inner
        while isinstance(around, Wrapping):
            require(not isinstance(around, Pinned), self, "inner", type(self._inner).__name__, "a policy without pins of its own")
            around = around._inner
        self.mode = mode
        self.depth_tokens = depth_tokens
        self.min_hits = min_hits
        self.max_fraction = max_fraction
        self._make_empty()

    def reset(self) -> None:
        """As new."""
        super().reset()
        self._make_empty()

    def _make_empty(self) -> None:
        self._capacity = 0
        self._pins: dict[int, BlockView] = {}
        self._weakest = KeyHeap()  # the pins, who deserves it least first
        self._offered: set[int] = set()

    def bind(self, num_blocks: int) -> None:
        """How many may be pinned."""
        super().bind(num_blocks)
        self._capacity = int(self.max_fraction * num_blocks)

    @property
    def num_pinned(self) -> int:
        """Blocks that are pinned hard."""
        return len(self._pins) if self.mode == "hard" else 0

    def is_pinned(self, block_id: int) -> bool:
        """Pinned hard."""
        return self.mode == "hard" and block_id in self._pins

    def give_up_pins(self, now: Now) -> bool:
        """Hand them to the inner policy, who deserves it least first."""
        had_some = self.num_pinned > 0
        while self._pins and self.mode == "hard":
            self._offer(self._unpin(self._weakest.first()), now)
        return had_some

    def release(self, block: BlockView, now: Now, preempted: bool) -> None:
        """Pinned if it deserves it more than the weakest that is; else the inner policy's."""
        if block.depth * block.num_tokens >= self.depth_tokens or block.num_hits < self.min_hits or not self._capacity:
            self._offer(block, now, preempted)
            return
        merit = (block.num_hits, -block.depth, block.used_tick)
        if len(self._pins) >= self._capacity:
            least, weakest = self._weakest.first_entry()
            if merit < least:
                self._offer(block, now, preempted)
                return
            self._offer(self._unpin(weakest), now)
        self._pins[block.block_id] = block
        self._weakest.push(block.block_id, merit)

    def _unpin(self, block_id: int) -> BlockView:
        self._weakest.drop(block_id)
        return self._pins.pop(block_id)

    def _offer(self, block: BlockView, now: Now, preempted: bool = False) -> None:
        self._offered.add(block.block_id)
        self._inner.release(block, now, preempted)

    def hit(self, block: BlockView, now: Now) -> None:
        """Held."""
        super().hit(block, now)
        self._drop(block)

    def withhold(self, block: BlockView, now: Now) -> None:
        """No candidate."""
        if block.block_id in self._offered:
            self._inner.withhold(block, now)
        self._drop(block)

    def evict(self, block: BlockView, now: Now) -> None:
        """Gone (a pinned one: by a reset, or soft and the last of all)."""
        self._drop(block)
        super().evict(block, now)

    def _drop(self, block: BlockView) -> None:
        self._offered.discard(block.block_id)
        if block.block_id in self._pins:
            self._unpin(block.block_id)

    def victim(self, now: Now) -> int:
        """The inner policy's choice, or when it has none the soft pin that deserves it least."""
        if self._offered:
            return self._inner.victim(now)
        return self._weakest.first()
