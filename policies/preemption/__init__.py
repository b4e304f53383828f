"""Who gives way when a running sequence can't grow; `mode` holds how."""

from kvlab.policies.preemption.least_computed import LeastComputed
from kvlab.policies.preemption.lifo import Lifo
from kvlab.policies.preemption.priority import Priority

__all__ = ["LeastComputed", "Lifo", "Priority"]
