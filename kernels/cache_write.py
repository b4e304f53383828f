"""Torch reference: writing new keys and values into their slots.

Shapes: T tokens, N blocks, B block size, K KV heads, D head size.
"""

from __future__ import annotations

import torch

from kvlab.kernels.batch_index import batch_index
from kvlab.kernels.interface import AttentionMetadata, LayerCache


def write_kv(k_TKD: torch.Tensor, v_TKD: torch.Tensor, cache: LayerCache, meta: AttentionMetadata) -> None:
    """Write each token's key and value at `meta.slot_mapping_T`, rounded to the cache's dtype. Tokens with slot -1 are skipped."""
    index = batch_index(meta)
    for new_TKD, cache_NBKD in ((k_TKD, cache.k_NBKD), (v_TKD, cache.v_NBKD)):
        rows = new_TKD if index.written_rows is None else new_TKD.index_select(0, index.written_rows)
        cache_NBKD.flatten(0, 1).index_copy_(0, index.written_slots, rows.to(cache_NBKD.dtype))
