"""Give way by whichever way costs less time."""

from __future__ import annotations

from kvlab.policies.base import PreemptionMode, VictimView, is_number, require
from kvlab.types import Now


class CheaperOfBoth(PreemptionMode):
    """Swap where moving the blocks out and back takes less time than computing again what the prefix cache does not keep.

    Source: the trade-off of Kwon et al., SOSP 2023, section 7.3, https://arxiv.org/abs/2309.06180 (recompute is better with small
        blocks, swap with large ones), taken per victim.
    Parameters: swap_gb_per_s: transfer speed in 10^9 bytes per second, one way (20: PCIe 4.0 x16 from pinned memory).
        prefill_tokens_per_s: speed of computing tokens again (10,000: an 8B model on one data-centre GPU). kept_share: share of the
        victim's published tokens that will still be cached when it comes back, in [0, 1] (1: all; 0: as if there were no cache).
        Measure all three; the last is preempted_hits / preempted_queries of a run with mode=recompute, at most.
    Deviations: both costs are linear; neither the overlap of a transfer with computation nor the lower speed of small chunks counts.
        Equal costs recompute. Swap space that is too small counts as infinitely slow. A simulated run charges transfers by its own
        cost model's bandwidth (roofline: transfer_gb_per_s), whatever swap_gb_per_s says here: set both alike.
    """

    def __init__(self, swap_gb_per_s: float = 20.0, prefill_tokens_per_s: float = 10_000.0, kept_share: float = 1.0) -> None:
        for name, value in (("swap_gb_per_s", swap_gb_per_s), ("prefill_tokens_per_s", prefill_tokens_per_s)):
            require(is_number(value) and value > 0, self, name, value, "a number above 0")
        require(is_number(kept_share) and 0 <= kept_share <= 1, self, "kept_share", kept_share, "in [0, 1]")
        self.swap_gb_per_s = swap_gb_per_s
        self.prefill_tokens_per_s = prefill_tokens_per_s
        self.kept_share = kept_share

    def mode(self, victim: VictimView, now: Now) -> str:
        """Compare seconds."""
        if victim.num_swap_blocks > victim.num_free_swap_blocks:
            return "recompute"
        swap_s = 2 * victim.num_swap_blocks * victim.block_bytes / (self.swap_gb_per_s * 1e9)
        lost = victim.num_computed_tokens - self.kept_share * victim.group.num_published_tokens
        return "swap" if swap_s < lost / self.prefill_tokens_per_s else "recompute"
