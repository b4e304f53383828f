"""Workloads: prompts from files, synthetic streams and production traces, in open or closed loop."""

from kvlab.workload.azure import AzureWorkload
from kvlab.workload.base import Tokenizer, Workload, WorkloadContext
from kvlab.workload.burstgpt import BurstGPTWorkload
from kvlab.workload.fixed import FixedWorkload
from kvlab.workload.mooncake import MooncakeWorkload
from kvlab.workload.multi_turn import MultiTurnWorkload
from kvlab.workload.prompts import PromptWorkload
from kvlab.workload.qwen_bailian import QwenBailianWorkload
from kvlab.workload.sharegpt import ShareGPTWorkload
from kvlab.workload.synthetic import SyntheticWorkload
from kvlab.workload.traces import find_trace

__all__ = [
    "AzureWorkload", "BurstGPTWorkload", "FixedWorkload", "MooncakeWorkload", "MultiTurnWorkload", "PromptWorkload", "QwenBailianWorkload",
    "ShareGPTWorkload", "SyntheticWorkload", "Tokenizer", "Workload", "WorkloadContext", "find_trace",
]  # fmt: skip
