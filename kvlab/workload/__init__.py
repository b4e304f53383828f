"""Workloads: prompts from files, synthetic streams and production traces, in open or closed loop."""

from kvlab.workload.base import Tokenizer, Workload, WorkloadContext
from kvlab.workload.fixed import FixedWorkload

__all__ = ["FixedWorkload", "Tokenizer", "Workload", "WorkloadContext"]
