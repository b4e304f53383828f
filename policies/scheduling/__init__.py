"""Who goes first: the order of the waiting queue, and who gives way to it."""

from kvlab.policies.scheduling.dfs_weight import DfsWeight
from kvlab.policies.scheduling.edf import Edf
from kvlab.policies.scheduling.fcfs import Fcfs
from kvlab.policies.scheduling.hrrn import Hrrn
from kvlab.policies.scheduling.lpm import Lpm
from kvlab.policies.scheduling.mlfq import Mlfq
from kvlab.policies.scheduling.priority import Priority
from kvlab.policies.scheduling.random import Random
from kvlab.policies.scheduling.sjf import Sjf
from kvlab.policies.scheduling.sjf_oracle import SjfOracle
from kvlab.policies.scheduling.sjf_predicted import SjfPredicted
from kvlab.policies.scheduling.srpt_oracle import SrptOracle
from kvlab.policies.scheduling.srpt_predicted import SrptPredicted
from kvlab.policies.scheduling.vtc import Vtc

__all__ = ["DfsWeight", "Edf", "Fcfs", "Hrrn", "Lpm", "Mlfq", "Priority", "Random", "Sjf", "SjfOracle", "SjfPredicted", "SrptOracle",
           "SrptPredicted", "Vtc"]  # fmt: skip
