"""How a victim gives way."""

from kvlab.policies.preemption.mode.cheaper_of_both import CheaperOfBoth
from kvlab.policies.preemption.mode.recompute import Recompute
from kvlab.policies.preemption.mode.swap import Swap

__all__ = ["CheaperOfBoth", "Recompute", "Swap"]
