"""Keep the latest tokens."""

from __future__ import annotations

from typing import ClassVar

from kvlab.policies.base import CompressionPolicy, is_whole, require


class Window(CompressionPolicy):
    """Each token sees the `size` latest positions, itself included; blocks that have left the window are freed.

    Source: sliding-window attention, Beltagy et al., Longformer (2020), https://arxiv.org/abs/2004.05150; Mistral 7B (2023),
        https://arxiv.org/abs/2310.06825
    Parameters: size: positions a query sees, at least 1.
    Deviations: laid over models that were trained with full attention, in all layers: it changes tokens once a sequence is longer
        than the window. Whole blocks are freed, so up to one block more than the window stays.
    """

    lossless: ClassVar[bool] = False

    def __init__(self, size: int = 1024) -> None:
        is_integer = is_whole(size)
        require(is_integer and size >= 1, self, "size", size, "a positive integer (tokens)")
        self.size = size
        self.attention_window = size

    def num_droppable_tokens(self, num_computed_tokens: int) -> int:
        """The next query, at position p = num_computed_tokens, sees p - size + 1 to p: those before are read no more."""
        return max(0, num_computed_tokens - self.size + 1)
