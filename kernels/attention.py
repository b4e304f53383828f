"""Torch reference: causal attention of new tokens over their sequences' slots, read from the paged cache.

Shapes: T tokens, S sequences of a group, Q queries of each, L slots read, H query heads, K KV heads, R = H / K, D head size,
N blocks, B block size.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from kvlab.kernels.batch_index import Group, batch_index
from kvlab.kernels.interface import AttentionMetadata, LayerCache
from kvlab.kernels.quantize import as_movable, dequantize


def paged_attention(q_THD: torch.Tensor, cache: LayerCache, meta: AttentionMetadata, scale: float) -> torch.Tensor:
    """Softmax(q k^T * scale) v of each new token over the slots it sees; computed in q's dtype. Returns [T, H, D].

    K and V come from the cache for all tokens, those just written too: what storage rounds off does not depend on how a prompt
    was cut into chunks. Only slots that belong to a sequence are read.
    """
    out_THD = torch.empty_like(q_THD)
    k_slots, v_slots = cache.k_NBKD.flatten(0, 1), cache.v_NBKD.flatten(0, 1)
    index = batch_index(meta)
    for group in index.groups:
        room_2PKD = index.scratch(k_slots)
        k_SLKD = _gather(k_slots, cache.k_scale, group, room_2PKD[0], q_THD.dtype)
        v_SLKD = _gather(v_slots, cache.v_scale, group, room_2PKD[1], q_THD.dtype)
        attend = _decode if group.num_queries == 1 else _prefill
        out_THD[group.rows] = attend(q_THD[group.rows], k_SLKD, v_SLKD, group, scale)
    return out_THD


def _gather(slots_PKD: torch.Tensor, scale: torch.Tensor | None, group: Group, room_PKD: torch.Tensor,
            dtype: torch.dtype) -> torch.Tensor:  # fmt: skip
    """The group's slots as `dtype`, [S, L, K, D]; they stay valid until the next group is gathered into the same room."""
    stored = torch.index_select(as_movable(slots_PKD), 0, group.slots, out=as_movable(room_PKD)[: len(group.slots)])
    if scale is not None and scale.dim() > 1:  # one a slot
        scale = scale.flatten(0, 1).index_select(0, group.slots)
    rows = dequantize(stored.view(slots_PKD.dtype), scale, dtype)
    return rows.view(group.num_seqs, group.length, *rows.shape[1:])


def _decode(q_SHD: torch.Tensor, k_SLKD: torch.Tensor, v_SLKD: torch.Tensor, group: Group, scale: float) -> torch.Tensor:
    """One query a sequence: the R query heads of a KV head stand as R query rows, so K and V are never repeated."""
    num_kv_heads = k_SLKD.shape[2]
    q_SKRD = q_SHD.unflatten(1, (num_kv_heads, -1))
    out = F.scaled_dot_product_attention(
        q_SKRD, k_SLKD.transpose(1, 2), v_SLKD.transpose(1, 2), attn_mask=group.bias(q_SHD.dtype), scale=scale
    )
    return out.flatten(1, 2)


def _prefill(q_QHD: torch.Tensor, k_SLKD: torch.Tensor, v_SLKD: torch.Tensor, group: Group, scale: float) -> torch.Tensor:
    """A chunk of one sequence."""
    out = F.scaled_dot_product_attention(
        q_QHD.transpose(0, 1)[None], k_SLKD.transpose(1, 2), v_SLKD.transpose(1, 2), attn_mask=group.bias(q_QHD.dtype),
        is_causal=group.is_causal, scale=scale, enable_gqa=q_QHD.shape[1] != k_SLKD.shape[2],
    )  # fmt: skip
    return out[0].transpose(0, 1)
