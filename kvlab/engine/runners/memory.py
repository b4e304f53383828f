"""How much memory the KV pool may take, and whether it fits, before it is allocated.

On CUDA as vLLM does: a forward pass over as many tokens as a step may hold is run once; what the device holds at its peak (weights,
activations, whatever else is on it) is taken from the share of the device's memory that the engine may use, the rest is the pool's. On a
CPU activations are small beside a machine's memory: a share of what is available is the pool's.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch

from kvlab.types import UserError


@dataclass(frozen=True, slots=True)
class Limits:
    """What a pool's size is measured for.

    Attributes:
        gpu_memory_utilization: share of a CUDA device's memory that all of the engine may use. memory_fraction: share of a CPU's available
            memory that the pool may use.
        max_num_batched_tokens, max_num_seqs, max_model_len: of a step.
    """

    gpu_memory_utilization: float
    memory_fraction: float
    max_num_batched_tokens: int
    max_num_seqs: int
    max_model_len: int


@runtime_checkable
class MeasuresMemory(Protocol):
    """A runner with memory to measure."""

    def kv_budget(self, limits: Limits) -> int:
        """Bytes that the gpu tier's KV tensors may take on each device; may be 0 or less where there is no room."""


class DeviceStatistics(Protocol):
    """What is asked of torch.cuda."""

    def empty_cache(self) -> None:
        """Give back what is only cached."""

    def reset_peak_memory_stats(self, device: torch.device) -> None:
        """The peak is what is allocated now."""

    def synchronize(self, device: torch.device) -> None:
        """Wait."""

    def max_memory_allocated(self, device: torch.device) -> int:
        """Bytes of tensors at the peak."""

    def memory_reserved(self, device: torch.device) -> int:
        """Bytes that the allocator holds, cached ones included."""

    def mem_get_info(self, device: torch.device) -> tuple[int, int]:
        """(free, total) bytes of the device."""


def cuda_budget(profile: Callable[[], None], device: torch.device, utilization: float, cuda: DeviceStatistics) -> int:
    """Bytes left for the pool: `utilization` of the device less what it holds at the peak of `profile`.

    What others hold (memory in use that this process's allocator has not reserved) counts as held too.
    """
    cuda.synchronize(device)
    cuda.empty_cache()
    cuda.reset_peak_memory_stats(device)
    profile()
    cuda.synchronize(device)
    peak = cuda.max_memory_allocated(device)
    free, total = cuda.mem_get_info(device)
    others = total - free - cuda.memory_reserved(device)
    cuda.empty_cache()
    return int(utilization * total) - peak - max(0, others)


def available_memory() -> int:
    """Bytes of main memory that a process could have now (all of it where psutil is missing)."""
    try:
        import psutil
    except ImportError:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return int(psutil.virtual_memory().available)


def free_memory(device: torch.device) -> int:
    """Bytes that can be allocated on a device now."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    return available_memory()


def check_fits(name: str, num_blocks: int, block_bytes: int, free_bytes: int, where: str) -> None:
    """Refuse a pool that memory can't hold.

    Raises:
        UserError: `num_blocks` blocks need more than `free_bytes`; the message says how many fit.
    """
    if num_blocks * block_bytes <= free_bytes:
        return
    raise UserError(f"{name} = {num_blocks} needs {num_blocks * block_bytes / 2**30:.2f} GiB on {where}, and {free_bytes / 2**30:.2f} GiB "
                    f"are free: at most {free_bytes // block_bytes} blocks of {block_bytes:,} bytes fit. Lower {name}, or take a kv_dtype "
                    "of fewer bytes.")  # fmt: skip
