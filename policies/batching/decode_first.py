"""Decodes first, then whole prompts in what is left of the step."""

from __future__ import annotations

from collections.abc import Sequence

from kvlab.policies.base import RUNNING, SWAPPED, WAITING, BatchingPolicy, is_decoding
from kvlab.types import GroupView, Now, QueuesView


class DecodeFirst(BatchingPolicy):
    """Every step serves all decodes, and whole prompts as far as they fit into the tokens left: no prompt is cut, none delays a token
    by a step of its own.

    Source: in-flight batching of TensorRT-LLM without chunked context,
        https://nvidia.github.io/TensorRT-LLM/advanced/gpt-attention.html; iteration-level scheduling of Orca (Yu et al., OSDI 2022),
        https://www.usenix.org/conference/osdi22/presentation/yu
    Parameters: none. The budget is the engine's max_num_batched_tokens.
    Deviations: a prompt longer than max_num_batched_tokens is computed in pieces (they refuse it), the last of which waits for a step
        with room for the whole of it; until then nobody new is taken.
    """

    def phases(self, queues: QueuesView, now: Now) -> Sequence[Sequence[str]]:
        """One mixed step; nobody new while a prompt is half computed, or decodes could keep the rest of it out for ever."""
        if all(is_decoding(group) for group in queues.running):
            return ((RUNNING, SWAPPED, WAITING),)
        return ((RUNNING, SWAPPED),)

    def running_order(self, running: Sequence[GroupView], now: Now) -> Sequence[GroupView]:
        """Decodes, then prompts, each in order of entry."""
        return sorted(running, key=lambda group: not is_decoding(group))

    def chunk(self, num_uncomputed: int, budget: int, max_num_batched_tokens: int) -> int:
        """All, or for what no step could hold: as much as fits now."""
        if num_uncomputed <= budget:
            return num_uncomputed
        return budget if num_uncomputed > max_num_batched_tokens else 0
