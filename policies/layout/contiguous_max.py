"""One consecutive region a sequence, of the longest length there may be."""

from __future__ import annotations

from kvlab.policies.base import FreeView, LayoutPolicy


class ContiguousMax(LayoutPolicy):
    """A sequence owns one region of consecutive blocks, from entry to end, for as many tokens as the model can take.

    Source: what engines did before paging; "Orca (Max)" in Kwon et al., SOSP 2023, section 6.1, https://arxiv.org/abs/2309.06180,
        and the static cache of `transformers`, https://huggingface.co/docs/transformers/kv_cache
    Parameters: none. The region holds max_model_len tokens.
    Deviations: the region is cut into blocks that no one shares, so the same kernels read it. The lowest gap that is large enough
        is taken (first fit), which with regions of one size never leaves holes too small for one.
    """

    shares_blocks = False

    def reserve_blocks(self, num_blocks: int, prompt_tokens: int, max_tokens: int, max_model_len: int, block_size: int) -> int:
        """ceil(max_model_len / block_size)."""
        return max(num_blocks, -(-max_model_len // block_size))

    def place(self, num_blocks: int, free: FreeView) -> list[int] | None:
        """The lowest run of `num_blocks` free ids."""
        if num_blocks == 0:
            return []
        first = free.first_run(num_blocks)
        return None if first is None else list(range(first, first + num_blocks))
