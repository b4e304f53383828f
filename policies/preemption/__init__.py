"""Who gives way when a running sequence can't grow; `mode` holds how."""

from kvlab.policies.preemption.cost_aware import CostAware
from kvlab.policies.preemption.least_computed import LeastComputed
from kvlab.policies.preemption.lifo import Lifo
from kvlab.policies.preemption.most_blocks import MostBlocks
from kvlab.policies.preemption.most_computed import MostComputed
from kvlab.policies.preemption.priority import Priority
from kvlab.policies.preemption.random import Random

__all__ = ["CostAware", "LeastComputed", "Lifo", "MostBlocks", "MostComputed", "Priority", "Random"]
