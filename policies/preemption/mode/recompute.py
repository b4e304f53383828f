"""Give way by forgetting."""

from __future__ import annotations

from kvlab.policies.base import PreemptionMode, VictimView
from kvlab.types import Now


class Recompute(PreemptionMode):
    """The victim's blocks are let go and its tokens computed again when it comes back (cached ones are hit).

    Source: vLLM (Kwon et al., SOSP 2023, section 4.5), https://arxiv.org/abs/2309.06180; the only mode of vLLM V1.
    Parameters: none.
    Deviations: none.
    """

    def mode(self, victim: VictimView, now: Now) -> str:
        """Always "recompute"."""
        return "recompute"
