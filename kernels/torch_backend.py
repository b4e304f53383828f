"""The reference backend: plain torch operations, for a CPU and for any other device torch knows. Correct first, and fast on a CPU."""

from __future__ import annotations

import torch

from kvlab.kernels.attention import paged_attention
from kvlab.kernels.block_copy import copy_blocks, gather_blocks, scatter_blocks
from kvlab.kernels.cache_write import write_kv
from kvlab.kernels.interface import AttentionMetadata


class TorchBackend:
    """`Backend` on torch operations. Results depend on the batch alone: not on block size, nor on where blocks lie."""

    name = "torch"

    def write_kv(self, k_TKD: torch.Tensor, v_TKD: torch.Tensor, k_cache_NBKD: torch.Tensor, v_cache_NBKD: torch.Tensor,
                 meta: AttentionMetadata) -> None:  # fmt: skip
        """See `kvlab.kernels.cache_write`."""
        write_kv(k_TKD, v_TKD, k_cache_NBKD, v_cache_NBKD, meta)

    def attention(self, q_THD: torch.Tensor, k_cache_NBKD: torch.Tensor, v_cache_NBKD: torch.Tensor, meta: AttentionMetadata,
                  scale: float) -> torch.Tensor:  # fmt: skip
        """See `kvlab.kernels.attention`."""
        return paged_attention(q_THD, k_cache_NBKD, v_cache_NBKD, meta, scale)

    def copy_blocks(self, cache_LXNBKD: torch.Tensor, pairs: list[tuple[int, int]]) -> None:
        """See `kvlab.kernels.block_copy`."""
        copy_blocks(cache_LXNBKD, pairs)

    def gather_blocks(self, cache_LXNBKD: torch.Tensor, block_ids: list[int]) -> torch.Tensor:
        """See `kvlab.kernels.block_copy`."""
        return gather_blocks(cache_LXNBKD, block_ids)

    def scatter_blocks(self, cache_LXNBKD: torch.Tensor, block_ids: list[int], blocks_LXnBKD: torch.Tensor) -> None:
        """See `kvlab.kernels.block_copy`."""
        scatter_blocks(cache_LXNBKD, block_ids, blocks_LXnBKD)
