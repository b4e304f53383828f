"""Torch reference: copying whole blocks in all layers, for copy-on-write, swap and forks.

Shapes: L layers, X keys and values (2), N blocks, n blocks moved; what a block holds ([B, K, D] numbers, or [B, K] scales) follows.
"""

from __future__ import annotations

import torch

from kvlab.kernels.quantize import as_movable
from kvlab.kernels.transfer import on_device


def _index(block_ids: list[int], device: torch.device) -> torch.Tensor:
    return on_device(block_ids, torch.int64, device)


def gather_blocks(cache_LXN: torch.Tensor, block_ids: list[int]) -> torch.Tensor:
    """A copy of the named blocks, [L, 2, n, ...]."""
    return as_movable(cache_LXN).index_select(2, _index(block_ids, cache_LXN.device)).view(cache_LXN.dtype)


def scatter_blocks(cache_LXN: torch.Tensor, block_ids: list[int], blocks_LXn: torch.Tensor) -> None:
    """Write blocks [L, 2, n, ...] into the named ones. `block_ids` must be distinct."""
    as_movable(cache_LXN).index_copy_(2, _index(block_ids, cache_LXN.device), as_movable(blocks_LXn))


def copy_blocks(cache_LXN: torch.Tensor, pairs: list[tuple[int, int]]) -> None:
    """Copy (source, destination) blocks. All sources are read before any destination is written, so a destination may be
    another pair's source; destinations must be distinct."""
    if pairs:
        blocks = gather_blocks(cache_LXN, [source for source, _ in pairs])
        scatter_blocks(cache_LXN, [destination for _, destination in pairs], blocks)
