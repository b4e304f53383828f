"""Give way by whichever way costs less time."""

from __future__ import annotations

from kvlab.policies.base import PreemptionMode, VictimView, require
from kvlab.types import Now


class CheaperOfBoth(PreemptionMode):
    """Swap where moving the blocks out and back takes less time than computing their tokens again.

    Source: the trade-off of Kwon et al., SOSP 2023, section 7.3, https://arxiv.org/abs/2309.06180 (recompute is better with small
        blocks, swap with large ones), taken per victim.
    Parameters: swap_gb_per_s: transfer speed in 10^9 bytes per second, one way (20: PCIe 4.0 x16 from pinned memory).
        prefill_tokens_per_s: speed of computing tokens again (10,000: an 8B model on one data-centre GPU). Measure both.
    Deviations: both costs are linear; tokens that would be hit in the cache on return are not deducted, and neither is the
        overlap of a transfer with computation. Equal costs recompute. Swap space that is too small counts as infinitely slow.
    """

    def __init__(self, swap_gb_per_s: float = 20.0, prefill_tokens_per_s: float = 10_000.0) -> None:
        for name, value in (("swap_gb_per_s", swap_gb_per_s), ("prefill_tokens_per_s", prefill_tokens_per_s)):
            require(isinstance(value, (int, float)) and value > 0, self, name, value, "a number above 0")
        self.swap_gb_per_s = swap_gb_per_s
        self.prefill_tokens_per_s = prefill_tokens_per_s

    def mode(self, victim: VictimView, now: Now) -> str:
        """Compare seconds."""
        if victim.num_swap_blocks > victim.num_free_swap_blocks:
            return "recompute"
        swap_s = 2 * victim.num_swap_blocks * victim.block_bytes / (self.swap_gb_per_s * 1e9)
        return "swap" if swap_s < victim.num_computed_tokens / self.prefill_tokens_per_s else "recompute"
