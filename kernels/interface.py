"""The backend interface between a model and the paged KV cache: write, attend, copy, gather, scatter.

Shapes: T tokens in the batch, S sequences, H query heads, K KV heads, D head size, N blocks, B block size.
A slot is block_id * B + offset. A sequence's slots are counted from its first kept token: slot index = position - dropped tokens.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch


@dataclass(slots=True)
class AttentionMetadata:
    """Where a ragged batch's tokens lie. Sequences with one new token (decodes) come first, then those with more (prefill chunks).

    Attributes:
        slot_mapping_T: int64, pool slot of each new token; -1 is not written.
        block_tables_SM: int64 [S, max blocks in the batch], rows padded with 0; logical block 0 is the first kept block.
        context_lens_S: int64, kept slots of each sequence after this step's tokens are written (new ones included).
        context_lens, query_lens: the same and the new tokens per sequence, as Python ints (no device synchronisation).
        num_decodes: sequences at the front with exactly one new token; they are the first `num_decodes` tokens.
        block_size: B.
        window: a query at slot q sees slots (q - window, q]; None: all up to q.
    """

    slot_mapping_T: torch.Tensor
    block_tables_SM: torch.Tensor
    context_lens_S: torch.Tensor
    context_lens: list[int]
    query_lens: list[int]
    num_decodes: int
    block_size: int
    window: int | None = None
    derived: object = None
    """A backend's own: indices made from the above once a step, the same for every layer. Leave it None."""


class Backend(Protocol):
    """What a model needs from the cache's kernels. Caches are [N, B, K, D] per layer, of the storage dtype."""

    name: str

    def write_kv(self, k_TKD: torch.Tensor, v_TKD: torch.Tensor, k_cache_NBKD: torch.Tensor, v_cache_NBKD: torch.Tensor,
                 meta: AttentionMetadata) -> None:  # fmt: skip
        """Write new keys and values into their slots (rounded to the storage dtype); slot -1 is skipped."""

    def attention(self, q_THD: torch.Tensor, k_cache_NBKD: torch.Tensor, v_cache_NBKD: torch.Tensor, meta: AttentionMetadata,
                  scale: float) -> torch.Tensor:  # fmt: skip
        """Causal attention of each new token over its sequence's slots, read from the cache. Returns [T, H, D]."""

    def copy_blocks(self, cache_LXNBKD: torch.Tensor, pairs: list[tuple[int, int]]) -> None:
        """Copy whole blocks (source, destination) in all layers and K and V; sources are read before any destination is written."""

    def gather_blocks(self, cache_LXNBKD: torch.Tensor, block_ids: list[int]) -> torch.Tensor:
        """Blocks as one tensor [L, 2, n, B, K, D] (for swap-out)."""

    def scatter_blocks(self, cache_LXNBKD: torch.Tensor, block_ids: list[int], blocks_LXnBKD: torch.Tensor) -> None:
        """Inverse of gather_blocks (for swap-in)."""
