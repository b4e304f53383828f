"""What tensor-parallel ranks say to each other, through torch.distributed: NCCL between CUDA devices, gloo between processes on a CPU."""

from __future__ import annotations

import os
import sys
from datetime import timedelta

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import FileStore


class TorchCommunicator:
    """`Communicator` over the default process group.

    Args:
        rank, size: of this process. device: what its tensors lie on. meeting_point: a file that every rank can write, not there yet.
        timeout_s: how long a rank waits for the others, at the start and in every exchange.
    """

    def __init__(self, rank: int, size: int, device: torch.device, meeting_point: str, timeout_s: float) -> None:
        self._size = size
        if sys.platform == "linux":
            os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # one machine; its name need not be known to any resolver
        dist.init_process_group("nccl" if device.type == "cuda" else "gloo", store=FileStore(meeting_point, size), rank=rank,
                                world_size=size, timeout=timedelta(seconds=timeout_s))  # fmt: skip

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """In place."""
        dist.all_reduce(x)
        return x

    def all_gather(self, x_SV: torch.Tensor) -> torch.Tensor:
        """Columns of rank 0, 1, ..."""
        parts = [torch.empty_like(x_SV) for _ in range(self._size)]
        dist.all_gather(parts, x_SV.contiguous())
        return torch.cat(parts, dim=1)

    def least(self, number: int, device: torch.device) -> int:
        """The least number of all ranks."""
        x = torch.tensor([number], dtype=torch.int64, device=device)
        dist.all_reduce(x, op=dist.ReduceOp.MIN)
        return int(x)

    def close(self) -> None:
        """Leave the group."""
        dist.destroy_process_group()
