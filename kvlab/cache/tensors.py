"""The tensors that hold K and V: one for the device's tier, one for swapped blocks. Who owns which block is the pools' business.

Shapes: L layers, N blocks, B block size, K KV heads, D head size. X is 2: keys, then values.
"""

from __future__ import annotations

import os
from collections.abc import Sequence

import torch

from kvlab.kernels.interface import Backend, LayerCache
from kvlab.types import UserError

Pair = tuple[int, int]


def _machine_memory() -> float:
    """Bytes of main memory; infinite where the system does not say."""
    if not hasattr(os, "sysconf"):
        return float("inf")
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


class KVTensors:
    """K and V of every block of a run, [L, 2, N, B, K, D] for the gpu tier (on `device`, which may be a CPU) and for the cpu tier.

    Args:
        dtype: storage dtype; values are rounded to it when written.
        num_cpu_blocks: blocks of swap space; 0 for none. Pinned memory when `device` is CUDA.

    Raises:
        UserError: a size below 1, or not enough memory for the tensors (the message says how much was asked for).
    """

    def __init__(self, num_layers: int, num_blocks: int, block_size: int, num_kv_heads: int, head_dim: int,
                 dtype: torch.dtype, device: torch.device | str = "cpu", num_cpu_blocks: int = 0) -> None:  # fmt: skip
        sizes = {"num_layers": num_layers, "num_blocks": num_blocks, "block_size": block_size, "num_kv_heads": num_kv_heads,
                 "head_dim": head_dim}  # fmt: skip
        for name, value in sizes.items():
            if value < 1:
                raise UserError(f"{name} = {value} is not allowed for a KV cache: a whole number of at least 1.")
        if num_cpu_blocks < 0:
            raise UserError(f"num_cpu_blocks = {num_cpu_blocks} is not allowed: 0 (no swap space) or more.")
        self.num_layers, self.num_blocks, self.num_cpu_blocks = num_layers, num_blocks, num_cpu_blocks
        self.block_size, self.num_kv_heads, self.head_dim = block_size, num_kv_heads, head_dim
        self.dtype, self.device = dtype, torch.device(device)
        self.gpu = self._allocate("num_blocks", num_blocks, self.device, pinned=False)
        self.cpu = self._allocate("num_cpu_blocks", num_cpu_blocks, torch.device("cpu"), pinned=self.device.type == "cuda")
        # Views are made once: indexing a six-dimensional tensor in every layer of every step would cost more than it looks.
        self._layers = [LayerCache(self.gpu[layer, 0], self.gpu[layer, 1]) for layer in range(num_layers)]

    def _allocate(self, name: str, num_blocks: int, device: torch.device, pinned: bool) -> torch.Tensor:
        shape = (self.num_layers, 2, num_blocks, self.block_size, self.num_kv_heads, self.head_dim)
        try:
            if device.type == "cpu" and num_blocks * self.block_bytes > (memory := _machine_memory()):
                raise MemoryError(f"this machine has {memory / 2**30:.1f} GiB")  # Linux would promise it, and kill the process later
            # Zeros, not empty: the pages are touched now, so that the first steps of a run don't pay for them.
            return torch.zeros(shape, dtype=self.dtype, device=device, pin_memory=pinned and num_blocks > 0)
        except (RuntimeError, MemoryError) as error:
            num_bytes = num_blocks * self.block_bytes
            raise UserError(
                f"Not enough memory on {device} for {num_blocks} KV blocks ({num_bytes / 2**30:.2f} GiB, {self.block_bytes} bytes"
                f" each): use a smaller {name} or a smaller kv_dtype. ({str(error).splitlines()[0]})"
            ) from error

    def layer(self, index: int) -> LayerCache:
        """K and V of one layer in the gpu tier: views."""
        return self._layers[index]

    @staticmethod
    def bytes_per_block(num_layers: int, block_size: int, num_kv_heads: int, head_dim: int, dtype: torch.dtype) -> int:
        """Bytes of one block: K and V of `block_size` tokens in all layers."""
        return 2 * num_layers * block_size * num_kv_heads * head_dim * dtype.itemsize

    @property
    def block_bytes(self) -> int:
        """Bytes of one block of these tensors."""
        return self.bytes_per_block(self.num_layers, self.block_size, self.num_kv_heads, self.head_dim, self.dtype)

    @property
    def nbytes(self) -> int:
        """Bytes of the gpu tier's tensor (`kv_bytes_allocated`)."""
        return self.gpu.nbytes

    @property
    def cpu_nbytes(self) -> int:
        """Bytes of the swap space."""
        return self.cpu.nbytes

    def copy(self, pairs: Sequence[Pair], backend: Backend) -> None:
        """Copy blocks (source, destination) within the gpu tier; all sources are read before any destination is written."""
        if pairs:
            backend.copy_blocks(self.gpu, list(pairs))

    def swap_out(self, pairs: Sequence[Pair], backend: Backend) -> None:
        """Move blocks (gpu source, cpu destination). The gpu blocks may be reused once this returns."""
        if pairs:
            blocks = backend.gather_blocks(self.gpu, [source for source, _ in pairs])
            destination = torch.tensor([destination for _, destination in pairs])
            self.cpu.index_copy_(2, destination, blocks.to("cpu"))

    def swap_in(self, pairs: Sequence[Pair], backend: Backend) -> None:
        """Move blocks (cpu source, gpu destination)."""
        if pairs:
            source = torch.tensor([source for source, _ in pairs])
            blocks = self.cpu.index_select(2, source).to(self.device)
            backend.scatter_blocks(self.gpu, [destination for _, destination in pairs], blocks)
