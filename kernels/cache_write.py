"""Torch reference: writing new keys and values into their slots, as the cache stores them.

Shapes: T tokens, N blocks, B block size, K KV heads, D head size.
"""

from __future__ import annotations

import torch

from kvlab.kernels.batch_index import batch_index
from kvlab.kernels.interface import AttentionMetadata, LayerCache
from kvlab.kernels.quantize import FP8, as_movable, quantize_fp8, quantize_int8


def write_kv(k_TKD: torch.Tensor, v_TKD: torch.Tensor, cache: LayerCache, meta: AttentionMetadata) -> None:
    """Write each token's key and value at `meta.slot_mapping_T`, rounded to the cache's dtype, or quantised where that is int8 (its
    scales are written beside it) or fp8 (by the layer's scale). Tokens with slot -1 are skipped."""
    index = batch_index(meta)
    for new_TKD, cache_NBKD, scale in ((k_TKD, cache.k_NBKD, cache.k_scale), (v_TKD, cache.v_NBKD, cache.v_scale)):
        rows = new_TKD if index.written_rows is None else new_TKD.index_select(0, index.written_rows)
        if cache_NBKD.dtype == torch.int8 and scale is not None:
            rows, scale_TK = quantize_int8(rows)
            scale.flatten(0, 1).index_copy_(0, index.written_slots, scale_TK)
        elif cache_NBKD.dtype == FP8:
            rows = quantize_fp8(rows, scale)
        slots_PKD = as_movable(cache_NBKD).flatten(0, 1)
        slots_PKD.index_copy_(0, index.written_slots, as_movable(rows.to(cache_NBKD.dtype)))
