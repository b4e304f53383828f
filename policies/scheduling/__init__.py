"""Who goes first: the order of the waiting queue."""

from kvlab.policies.scheduling.fcfs import Fcfs
from kvlab.policies.scheduling.priority import Priority
from kvlab.policies.scheduling.sjf import Sjf

__all__ = ["Fcfs", "Priority", "Sjf"]
