"""The reference backend: plain torch operations, for a CPU and for any other device torch knows. Correct first, and fast on a CPU."""

from __future__ import annotations

from collections import Counter

import torch

from kvlab.kernels.activation import silu_and_mul
from kvlab.kernels.attention import paged_attention
from kvlab.kernels.block_copy import copy_blocks, gather_blocks, scatter_blocks
from kvlab.kernels.cache_write import write_kv
from kvlab.kernels.interface import AttentionMetadata, LayerCache
from kvlab.kernels.norm import add_rms_norm, rms_norm
from kvlab.kernels.rotary import rotary


class TorchBackend:
    """`Backend` on torch operations. Results depend on the batch alone: not on block size, nor on where blocks lie.

    Each method is the function of its name in kvlab.kernels.
    """

    name = "torch"

    def __init__(self) -> None:
        self.paths: Counter[str] = Counter()

    def check(self, head_dim: int, num_heads: int, num_kv_heads: int, block_size: int, dtype: torch.dtype, kv_dtype: torch.dtype,
              window: int | None, device: torch.device) -> None:  # fmt: skip
        """It serves everything."""

    def rms_norm(self, x_TE: torch.Tensor, weight_E: torch.Tensor, eps: float) -> torch.Tensor:
        """See `kvlab.kernels.norm`."""
        return rms_norm(x_TE, weight_E, eps)

    def add_rms_norm(self, x_TE: torch.Tensor, residual_TE: torch.Tensor, weight_E: torch.Tensor,
                     eps: float) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
        """See `kvlab.kernels.norm`."""
        return add_rms_norm(x_TE, residual_TE, weight_E, eps)

    def rotary(self, heads_THD: torch.Tensor, cos_T1D: torch.Tensor, sin_T1D: torch.Tensor) -> torch.Tensor:
        """See `kvlab.kernels.rotary`."""
        return rotary(heads_THD, cos_T1D, sin_T1D)

    def silu_and_mul(self, gate_up_T2F: torch.Tensor) -> torch.Tensor:
        """See `kvlab.kernels.activation`."""
        return silu_and_mul(gate_up_T2F)

    def write_kv(self, k_TKD: torch.Tensor, v_TKD: torch.Tensor, cache: LayerCache, meta: AttentionMetadata) -> None:
        """See `kvlab.kernels.cache_write`."""
        write_kv(k_TKD, v_TKD, cache, meta)

    def attention(self, q_THD: torch.Tensor, cache: LayerCache, meta: AttentionMetadata, scale: float) -> torch.Tensor:
        """See `kvlab.kernels.attention`."""
        return paged_attention(q_THD, cache, meta, scale)

    def copy_blocks(self, cache_LXN: torch.Tensor, pairs: list[tuple[int, int]]) -> None:
        """See `kvlab.kernels.block_copy`."""
        copy_blocks(cache_LXN, pairs)

    def gather_blocks(self, cache_LXN: torch.Tensor, block_ids: list[int]) -> torch.Tensor:
        """See `kvlab.kernels.block_copy`."""
        return gather_blocks(cache_LXN, block_ids)

    def scatter_blocks(self, cache_LXN: torch.Tensor, block_ids: list[int], blocks_LXn: torch.Tensor) -> None:
        """See `kvlab.kernels.block_copy`."""
        scatter_blocks(cache_LXN, block_ids, blocks_LXn)
