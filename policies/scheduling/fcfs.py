"""First come, first served."""

from __future__ import annotations

from kvlab.policies.base import SchedulingPolicy
from kvlab.types import GroupView, Now


class Fcfs(SchedulingPolicy):
    """The request that arrived first goes first.

    Source: Orca (Yu et al., OSDI 2022), https://www.usenix.org/conference/osdi22/presentation/yu; the default of vLLM.
    Parameters: none.
    Deviations: none.
    """

    def key(self, group: GroupView, now: Now) -> tuple[float, ...]:
        """Arrival time (s)."""
        return (group.arrival_s,)
