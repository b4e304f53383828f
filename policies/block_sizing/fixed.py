"""A fixed block size."""

from __future__ import annotations

from collections.abc import Sequence

from kvlab.policies.base import BlockSizingPolicy, is_whole, require


class Fixed(BlockSizingPolicy):
    """Every block holds the same, given number of tokens.

    Source: PagedAttention (Kwon et al., SOSP 2023, section 7.2 compares sizes), https://arxiv.org/abs/2309.06180; vLLM's
        `--block-size`.
    Parameters: tokens: tokens per block, any positive integer (1 and other numbers than powers of two as well).
    Deviations: vLLM's kernels take multiples of 16 only.
    """

    def __init__(self, tokens: int = 16) -> None:
        is_integer = is_whole(tokens)
        require(is_integer and tokens >= 1, self, "tokens", tokens, "a positive integer (tokens per block)")
        self.tokens = tokens

    def block_size(self, prompt_lens: Sequence[int], max_model_len: int) -> int:
        """The number given."""
        return self.tokens
