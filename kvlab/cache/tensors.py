"""The tensors that hold K and V: one for the device's tier, one for swapped blocks. Who owns which block is the pools' business.

Shapes: L layers, N blocks, B block size, K KV heads, D head size. X is 2: keys, then values. int8 has scales beside it,
[L, X, N, B, K] of float16, which move wherever their blocks move.
"""

from __future__ import annotations

import os
from collections.abc import Sequence

import torch

from kvlab.kernels.block_copy import gather_blocks, scatter_blocks
from kvlab.kernels.interface import Backend, LayerCache
from kvlab.kernels.quantize import FP8
from kvlab.types import UserError, unknown_name

Pair = tuple[int, int]
Scales = float | Sequence[float]
"""One for all layers, or one each."""

STORAGE_DTYPES = {"float64": torch.float64, "float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16,
                  "float8_e4m3fn": FP8, "int8": torch.int8}  # fmt: skip
"""What K and V can be stored as, by the names that policies use."""


def storage_dtype(name: str) -> torch.dtype:
    """A storage dtype by name. UserError: an unknown one."""
    if name not in STORAGE_DTYPES:
        raise unknown_name("kv_dtype", name, STORAGE_DTYPES)
    return STORAGE_DTYPES[name]


def bytes_per_slot(num_kv_heads: int, head_dim: int, dtype: torch.dtype) -> int:
    """Bytes of one token's K (or V) in one layer, an int8 scale a head included."""
    return num_kv_heads * (head_dim * dtype.itemsize + (torch.float16.itemsize if dtype == torch.int8 else 0))


def _machine_memory() -> float:
    """Bytes of main memory; infinite where the system does not say."""
    if not hasattr(os, "sysconf"):
        return float("inf")
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


class KVTensors:
    """K and V of every block of a run, [L, 2, N, B, K, D] for the gpu tier (on `device`, which may be a CPU) and for the cpu tier.

    Args:
        dtype: storage dtype; values are rounded or quantised to it when written (kvlab.kernels.quantize).
        num_cpu_blocks: blocks of swap space; 0 for none. Ordinary memory: blocks go to and from a device through pinned buffers of
            their own, and torch would round a pinned tier up to a power of two.
        scales: of K and V under fp8; another dtype takes 1.0 only.

    Attributes:
        gpu, cpu: the numbers. gpu_scales, cpu_scales: int8's scales, else None.

    Raises:
        UserError: a size below 1, scales that the dtype has no use for or that aren't positive, or not enough memory for the tensors (the
            message says how much was asked for).
    """

    def __init__(self, num_layers: int, num_blocks: int, block_size: int, num_kv_heads: int, head_dim: int,
                 dtype: torch.dtype, device: torch.device | str = "cpu", num_cpu_blocks: int = 0,
                 scales: tuple[Scales, Scales] = (1.0, 1.0)) -> None:  # fmt: skip
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
        layer_scales = _layer_scales(scales, num_layers, dtype, self.device)
        self.gpu, self.gpu_scales = self._allocate("num_blocks", num_blocks, self.device)
        self.cpu, self.cpu_scales = self._allocate("num_cpu_blocks", num_cpu_blocks, torch.device("cpu"))
        # Views are made once: indexing a six-dimensional tensor in every layer of every step would cost more than it looks.
        by_layer = layer_scales if self.gpu_scales is None else self.gpu_scales.unbind(1)
        self._layers = [LayerCache(self.gpu[layer, 0], self.gpu[layer, 1], by_layer[0][layer], by_layer[1][layer])
                        for layer in range(num_layers)]  # fmt: skip

    def _allocate(self, name: str, num_blocks: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Numbers and scales."""
        shape = (self.num_layers, 2, num_blocks, self.block_size, self.num_kv_heads, self.head_dim)
        try:
            if device.type == "cpu" and num_blocks * self.block_bytes > (memory := _machine_memory()):
                raise MemoryError(f"this machine has {memory / 2**30:.1f} GiB")  # Linux would promise it, and kill the process later
            # Zeros, not empty: the pages are touched now, so that the first steps of a run don't pay for them.
            scales = torch.zeros(shape[:-1], dtype=torch.float16, device=device) if self.dtype == torch.int8 else None
            return torch.zeros(shape, dtype=self.dtype, device=device), scales
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
        """Bytes of one block: K and V of `block_size` tokens in all layers, scales included."""
        return 2 * num_layers * block_size * bytes_per_slot(num_kv_heads, head_dim, dtype)

    @property
    def block_bytes(self) -> int:
        """Bytes of one block of these tensors."""
        return self.bytes_per_block(self.num_layers, self.block_size, self.num_kv_heads, self.head_dim, self.dtype)

    @property
    def nbytes(self) -> int:
        """Bytes of the gpu tier's tensors (`kv_bytes_allocated`)."""
        return self.gpu.nbytes + (0 if self.gpu_scales is None else self.gpu_scales.nbytes)

    @property
    def cpu_nbytes(self) -> int:
        """Bytes of the swap space."""
        return self.cpu.nbytes + (0 if self.cpu_scales is None else self.cpu_scales.nbytes)

    def tiers(self) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """(gpu, cpu) tensors that a block's content lies in."""
        if self.gpu_scales is None or self.cpu_scales is None:
            return [(self.gpu, self.cpu)]
        return [(self.gpu, self.cpu), (self.gpu_scales, self.cpu_scales)]

    def copy(self, pairs: Sequence[Pair], backend: Backend) -> None:
        """Copy blocks (source, destination) within the gpu tier; all sources are read before any destination is written."""
        for gpu, _ in self.tiers() if pairs else ():
            backend.copy_blocks(gpu, list(pairs))

    def swap_out(self, pairs: Sequence[Pair], backend: Backend) -> None:
        """Move blocks (gpu source, cpu destination). The gpu blocks may be reused once this returns."""
        for gpu, cpu in self.tiers() if pairs else ():
            blocks = backend.gather_blocks(gpu, [source for source, _ in pairs])
            scatter_blocks(cpu, [destination for _, destination in pairs], blocks.to("cpu"))

    def swap_in(self, pairs: Sequence[Pair], backend: Backend) -> None:
        """Move blocks (cpu source, gpu destination)."""
        for gpu, cpu in self.tiers() if pairs else ():
            blocks = gather_blocks(cpu, [source for source, _ in pairs]).to(self.device)
            backend.scatter_blocks(gpu, [destination for _, destination in pairs], blocks)


def _layer_scales(scales: tuple[Scales, Scales], num_layers: int, dtype: torch.dtype,
                  device: torch.device) -> list[list[torch.Tensor | None]]:  # fmt: skip
    """Of K and of V, a float32 [1] a layer; None everywhere if all are 1."""
    every: list[list[float]] = []
    for scale in scales:
        values = [float(value) for value in scale] if isinstance(scale, Sequence) else [float(scale)] * num_layers
        if len(values) != num_layers:
            raise UserError(f"{len(values)} scales are not allowed for K or V of {num_layers} layers: one for all, or one a layer.")
        if any(not 0 < value < float("inf") for value in values):
            raise UserError(f"Scales of K or V = {scale!r} are not allowed: positive numbers.")
        if dtype != FP8 and any(value != 1.0 for value in values):
            raise UserError(f"Scales of K or V = {scale!r} have no effect with {str(dtype).removeprefix('torch.')}: they are for fp8.")
        every.append(values)
    if all(value == 1.0 for values in every for value in values):
        return [[None] * num_layers] * 2
    return [[torch.tensor([value], dtype=torch.float32, device=device) for value in values] for values in every]
