"""Give way by moving to host memory."""

from __future__ import annotations

from kvlab.policies.base import PreemptionMode, VictimView
from kvlab.types import Now


class Swap(PreemptionMode):
    """The victim's blocks are copied to host memory and back when it returns.

    Source: vLLM (Kwon et al., SOSP 2023, section 4.5), https://arxiv.org/abs/2309.06180
    Parameters: none.
    Deviations: works for every group; vLLM v0 swapped groups of several sequences only, by default. Where swap space is short the
        engine recomputes instead, where vLLM v0 ended.
    """

    def mode(self, victim: VictimView, now: Now) -> str:
        """Always "swap"."""
        return "swap"
