"""Least recently used."""

from __future__ import annotations

from kvlab.policies.base import KeyEviction
from kvlab.types import BlockView


class Lru(KeyEviction):
    """The block that was used longest ago goes; being inserted, hit or let go is a use.

    Source: the classic; vLLM's and SGLang's default. A prompt's blocks are let go tail first, so its tail goes first
        (https://docs.vllm.ai/en/latest/design/prefix_caching.html).
    Parameters: none.
    Deviations: none.
    """

    def key(self, block: BlockView) -> tuple[float, ...]:
        """Tick of its last use."""
        return (block.used_tick,)
