"""Torch reference: causal attention of new tokens over their sequences' slots, read from the paged cache.

Shapes: T tokens, S sequences of a group, Q queries of each, L slots read, H query heads, K KV heads, R = H / K, D head size,
N blocks, B block size, X = S * K, Y rows of D numbers.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from kvlab.kernels.batch_index import BatchIndex, Group, batch_index
from kvlab.kernels.interface import AttentionMetadata, LayerCache
from kvlab.kernels.quantize import as_movable, dequantize


def paged_attention(q_THD: torch.Tensor, cache: LayerCache, meta: AttentionMetadata, scale: float) -> torch.Tensor:
    """Softmax(q k^T * scale) v of each new token over the slots it sees; computed in q's dtype. Returns [T, H, D].

    K and V come from the cache for all tokens, those just written too: what storage rounds off does not depend on how a prompt
    was cut into chunks. Only slots that belong to a sequence are read.
    """
    index = batch_index(meta)
    decode = _decode if q_THD.device.type == "cpu" else _decode_fused
    if len(index.groups) == 1 and index.groups[0].num_queries == 1 and isinstance(index.groups[0].rows, slice):  # all, in order
        return decode(q_THD, cache, index, index.groups[0], scale)
    out_THD = q_THD.new_empty(q_THD.shape)
    for group in index.groups:
        attend = decode if group.num_queries == 1 else _prefill
        out_THD[group.rows] = attend(q_THD[group.rows], cache, index, group, scale)
    return out_THD


def _decode(q_SHD: torch.Tensor, cache: LayerCache, index: BatchIndex, group: Group, scale: float) -> torch.Tensor:
    """One query a sequence, by batched products: a third of the time of torch's fused attention on a CPU. Half types in float32.

    The R query heads of a KV head stand as R query rows, so K and V are never repeated. float32 values are summed where they lie in the
    pool (an embedding bag a head: its rows are slots, its weights the softmax), other types are gathered as keys are.
    """
    num_kv_heads, head_dim = cache.k_NBKD.shape[2:]
    dtype = torch.promote_types(q_SHD.dtype, torch.float32)
    q_XRD = torch.mul(q_SHD.to(dtype), scale).view(group.num_seqs * num_kv_heads, -1, head_dim)
    room_2YD = index.scratch(cache.k_NBKD)
    k_XLD = _gather_heads(cache.k_NBKD, cache.k_scale, group, room_2YD[0], dtype)
    scores_XRL = torch.bmm(q_XRD, k_XLD.transpose(1, 2))
    if (bias := group.bias(dtype)) is not None:
        scores_XRL.view(group.num_seqs, -1, group.length).add_(bias[:, 0])
    weights_XRL = torch.softmax(scores_XRL, dim=-1)
    if cache.v_NBKD.dtype == dtype == torch.float32:
        rows, offsets = group.head_bags(num_kv_heads, q_XRD.shape[1])
        v_YD = cache.v_NBKD.view(-1, head_dim)
        out = torch.embedding_bag(v_YD, rows, offsets, per_sample_weights=weights_XRL.view(-1))[0]
    else:
        out = torch.bmm(weights_XRL, _gather_heads(cache.v_NBKD, cache.v_scale, group, room_2YD[1], dtype))
    return out.view(q_SHD.shape).to(q_SHD.dtype)


def _gather_heads(cache_NBKD: torch.Tensor, scale: torch.Tensor | None, group: Group, room_YD: torch.Tensor,
                  dtype: torch.dtype) -> torch.Tensor:  # fmt: skip
    """The group's slots as `dtype`, by sequence and KV head, [S * K, L, D]; valid until the same room is used again."""
    num_kv_heads, head_dim = cache_NBKD.shape[2:]
    rows = group.head_rows(num_kv_heads)
    return _rows(cache_NBKD.view(-1, head_dim), scale, rows, room_YD, dtype).view(-1, group.length, head_dim)


def _gather(cache_NBKD: torch.Tensor, scale: torch.Tensor | None, group: Group, room_YD: torch.Tensor,
            dtype: torch.dtype) -> torch.Tensor:  # fmt: skip
    """The group's slots as `dtype`, [S, L, K, D]; valid until the same room is used again."""
    slots_PKD = cache_NBKD.flatten(0, 1)
    return _rows(slots_PKD, scale, group.slots, room_YD.view(-1, *slots_PKD.shape[1:]), dtype).unflatten(0, (group.num_seqs, group.length))


def _rows(stored: torch.Tensor, scale: torch.Tensor | None, rows: torch.Tensor, room: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Rows of what is stored as `dtype`."""
    taken = torch.index_select(as_movable(stored), 0, rows, out=as_movable(room)[: len(rows)])
    if scale is not None and scale.dim() > 1:  # one a slot and head
        scale = scale.view(stored.shape[:-1]).index_select(0, rows)
    return dequantize(taken.view(stored.dtype), scale, dtype)


def _decode_fused(q_SHD: torch.Tensor, cache: LayerCache, index: BatchIndex, group: Group, scale: float) -> torch.Tensor:
    """As `_decode`, by torch's fused attention."""
    k_SLKD, v_SLKD = _keys_and_values(q_SHD, cache, index, group)
    q_SKRD = q_SHD.unflatten(1, (k_SLKD.shape[2], -1))
    out = F.scaled_dot_product_attention(
        q_SKRD, k_SLKD.transpose(1, 2), v_SLKD.transpose(1, 2), attn_mask=group.bias(q_SHD.dtype), scale=scale
    )
    return out.flatten(1, 2)


def _prefill(q_QHD: torch.Tensor, cache: LayerCache, index: BatchIndex, group: Group, scale: float) -> torch.Tensor:
    """A chunk of one sequence."""
    k_SLKD, v_SLKD = _keys_and_values(q_QHD, cache, index, group)
    out = F.scaled_dot_product_attention(
        q_QHD.transpose(0, 1)[None], k_SLKD.transpose(1, 2), v_SLKD.transpose(1, 2), attn_mask=group.bias(q_QHD.dtype),
        is_causal=group.is_causal, scale=scale, enable_gqa=q_QHD.shape[1] != k_SLKD.shape[2],
    )  # fmt: skip
    return out[0].transpose(0, 1)


def _keys_and_values(q: torch.Tensor, cache: LayerCache, index: BatchIndex, group: Group) -> tuple[torch.Tensor, torch.Tensor]:
    """The group's K and V as q's dtype, [S, L, K, D] each."""
    room_2YD = index.scratch(cache.k_NBKD)
    return (_gather(cache.k_NBKD, cache.k_scale, group, room_2YD[0], q.dtype),
            _gather(cache.v_NBKD, cache.v_scale, group, room_2YD[1], q.dtype))  # fmt: skip
