"""Random paged pools for the checks: blocks in random order, unused slots poisoned with NaN.

Shapes: S sequences, K KV heads, D head size, N blocks, B block size, M blocks of the longest sequence.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(slots=True)
class Pool:
    """K and V [N, B, K, D], block tables int64 [S, M] (0 beyond a sequence's blocks), lengths int64 [S] in slots."""

    k_NBKD: torch.Tensor
    v_NBKD: torch.Tensor
    tables_SM: torch.Tensor
    lengths_S: torch.Tensor
    lengths: list[int]

    @property
    def block_size(self) -> int:
        """B."""
        return self.k_NBKD.shape[1]


def make_pool(lengths: list[int], block_size: int, num_kv_heads: int, head_dim: int, dtype: torch.dtype, device: torch.device,
              seed: int, poison: bool = False) -> Pool:  # fmt: skip
    """A pool that holds sequences of these lengths (slots), each block in a random place, and a few blocks that nobody owns.

    Args:
        poison: NaN in every slot that no sequence owns, also behind the last token of a sequence's last block.
    """
    generator = torch.Generator(device).manual_seed(seed)
    blocks = [-(-length // block_size) for length in lengths]
    num_blocks = sum(blocks) + 3
    shape = (num_blocks, block_size, num_kv_heads, head_dim)
    k, v = (torch.empty(shape, dtype=dtype, device=device).normal_(generator=generator) for _ in range(2))
    order = torch.randperm(num_blocks, generator=torch.Generator().manual_seed(seed))
    tables = torch.zeros(len(lengths), max(blocks), dtype=torch.int64)
    owned = torch.zeros(num_blocks, block_size, dtype=torch.bool)
    at = 0
    for seq, (length, count) in enumerate(zip(lengths, blocks, strict=True)):
        mine = order[at : at + count]
        tables[seq, :count] = mine
        owned[mine] = (torch.arange(count * block_size) < length).view(count, block_size)
        at += count
    if poison:
        stale = ~owned.to(device)
        k[stale], v[stale] = float("nan"), float("nan")
    return Pool(k, v, tables.to(device), torch.tensor(lengths, device=device), lengths)


def contiguous(pool: Pool, seq: int) -> tuple[torch.Tensor, torch.Tensor]:
    """K and V of one sequence in order, [length, K, D] each."""
    slots = torch.arange(pool.lengths[seq], device=pool.tables_SM.device)
    blocks = pool.tables_SM[seq, slots // pool.block_size]
    return pool.k_NBKD[blocks, slots % pool.block_size], pool.v_NBKD[blocks, slots % pool.block_size]
