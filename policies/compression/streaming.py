"""Keep the first tokens and the latest."""

from __future__ import annotations

from typing import ClassVar

from kvlab.policies.base import CompressionPolicy, is_whole, require


class Streaming(CompressionPolicy):
    """Each token sees the first `sinks` positions and the `size` latest, itself included; blocks that neither needs are freed.

    Softmax weights sum to one, and models learn to put what they have no use for on the first tokens: without these a window breaks.

    Source: StreamingLLM, Xiao et al., Efficient Streaming Language Models with Attention Sinks (ICLR 2024),
        https://arxiv.org/abs/2309.17453
    Parameters: sinks: first tokens that stay, at least 1. size: latest positions that a query sees, at least 1.
    Deviations: tokens keep the positions they have in the text, so that sinks are as far away as they are; the paper counts positions
        within the cache, where they never are farther than it is long. That matters in texts longer than a model was trained for, which a
        run refuses. Prompts are computed under the same mask, all layers. Whole blocks are freed: up to a block more stays at either
        end, unseen; which tokens are seen does not depend on the block size.
    """

    lossless: ClassVar[bool] = False

    def __init__(self, sinks: int = 4, size: int = 1024) -> None:
        for name, value in (("sinks", sinks), ("size", size)):
            is_integer = is_whole(value)
            require(is_integer and value >= 1, self, name, value, "a positive integer (tokens)")
        self.sinks = sinks
        self.size = size
        self.attention_window = size
        self.num_sink_tokens = sinks

    def num_droppable_tokens(self, num_computed_tokens: int) -> int:
        """The next query, at position p = num_computed_tokens, sees p - size + 1 to p, and the sinks."""
        return max(0, num_computed_tokens - self.size + 1)
