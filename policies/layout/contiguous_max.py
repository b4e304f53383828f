"""One consecutive region a sequence, of the longest length there may be."""

from __future__ import annotations

from kvlab.policies.base import FreeView, LayoutPolicy, RegionNeed
from kvlab.policies.layout._runs import first_fit, longest_run


class ContiguousMax(LayoutPolicy):
    """A sequence owns one region of consecutive blocks, from entry to end, for as many tokens as the model can take.

    Source: what engines did before paging; "Orca (Max)" in Kwon et al., SOSP 2023, section 6.1, https://arxiv.org/abs/2309.06180,
        and the static cache of `transformers`, https://huggingface.co/docs/transformers/kv_cache
    Parameters: none. The region holds max_model_len tokens.
    Deviations: the region is cut into blocks that no one shares, so the same kernels read it. The lowest gap that is large enough
        is taken (first fit; the paper assumes a buddy allocator), which with regions of one size never leaves holes too small for one.
    """

    shares_blocks = False
    is_contiguous = True

    def reserve_blocks(self, need: RegionNeed) -> int:
        """ceil(max_model_len / block_size)."""
        return max(need.num_blocks, -(-need.max_model_len // need.block_size))

    def place(self, num_blocks: int, free: FreeView) -> list[int] | None:
        """The lowest run of `num_blocks` free ids."""
        return first_fit(num_blocks, free)

    def largest_region(self, free: FreeView) -> int:
        """The longest run."""
        return longest_run(free)
