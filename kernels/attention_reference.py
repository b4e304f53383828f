"""Plain torch versions of the Triton attention kernels: slow, in float64, sequence by sequence and KV head by KV head, obviously right.

The softmax is written as it is defined, over the visible slots only. What isn't visible is never touched.

Shapes: T tokens, S sequences, H query heads, K KV heads, R = H / K, D head size, B block size, N blocks, M blocks of a table row,
Q queries and L slots of one sequence.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class Masks:
    """What a query sees and how its logits are made; see `kvlab.kernels.decode_attention.decode_attention`."""

    scale: float
    window: int | None = None
    num_sink_tokens: int = 0
    sink_logits_H: torch.Tensor | None = None
    soft_cap: float | None = None


def decode_attention_reference(
    q_SHD: torch.Tensor, k_cache_NBKD: torch.Tensor, v_cache_NBKD: torch.Tensor, block_tables_SM: torch.Tensor, lengths: torch.Tensor,
    masks: Masks, *, k_scale: torch.Tensor | None = None, v_scale: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """(out [S, H, D], mass [S, K, M]), float64, of `decode_attention` with the same arguments."""
    num_seqs, num_heads, head_dim = q_SHD.shape
    block_size, num_kv_heads = k_cache_NBKD.shape[1:3]
    num_blocks = block_tables_SM.shape[1]
    out = torch.zeros(num_seqs, num_heads, head_dim, dtype=torch.float64)
    mass = torch.zeros(num_seqs, num_kv_heads, num_blocks, dtype=torch.float64)
    lengths_SK = lengths[:, None].expand(-1, num_kv_heads) if lengths.dim() == 1 else lengths
    for s in range(num_seqs):
        for k in range(num_kv_heads):
            length = int(lengths_SK[s, k])
            keys_LD = stored(k_cache_NBKD, block_tables_SM[s], length, k, k_scale)
            values_LD = stored(v_cache_NBKD, block_tables_SM[s], length, k, v_scale)
            for h in heads_of(k, num_heads, num_kv_heads):
                result, weights_L = attend(q_SHD[s, h], keys_LD, values_LD, length - 1, h, masks)
                out[s, h] = result
                for slot in range(length):
                    mass[s, k, slot // block_size] += weights_L[slot]
    return out, mass


def prefill_attention_reference(
    q_THD: torch.Tensor, k_cache_NBKD: torch.Tensor, v_cache_NBKD: torch.Tensor, block_tables_SM: torch.Tensor,
    query_starts_S1: torch.Tensor, context_lens_S: torch.Tensor, masks: Masks, *, k_scale: torch.Tensor | None = None,
    v_scale: torch.Tensor | None = None,
) -> torch.Tensor:  # fmt: skip
    """out [T, H, D], float64, of `prefill_attention` with the same arguments."""
    num_heads, num_kv_heads = q_THD.shape[1], k_cache_NBKD.shape[2]
    out = torch.zeros(q_THD.shape, dtype=torch.float64)
    for s, length in enumerate(context_lens_S.tolist()):
        first, last = query_starts_S1[s : s + 2].tolist()
        for k in range(num_kv_heads):
            keys_LD = stored(k_cache_NBKD, block_tables_SM[s], length, k, k_scale)
            values_LD = stored(v_cache_NBKD, block_tables_SM[s], length, k, v_scale)
            for t in range(first, last):
                slot = length - (last - t)  # the last query sees all slots
                for h in heads_of(k, num_heads, num_kv_heads):
                    out[t, h], _ = attend(q_THD[t, h], keys_LD, values_LD, slot, h, masks)
    return out


def heads_of(kv_head: int, num_heads: int, num_kv_heads: int) -> range:
    """Query heads that share a KV head."""
    group = num_heads // num_kv_heads
    return range(kv_head * group, (kv_head + 1) * group)


def stored(
    cache_NBKD: torch.Tensor, table_M: torch.Tensor, length: int, kv_head: int, scale: torch.Tensor | None = None
) -> torch.Tensor:
    """One sequence and KV head's keys or values as numbers, float64 [L, D]. uint8 are the bits of float8_e4m3fn."""
    block_size = cache_NBKD.shape[1]
    cache = cache_NBKD.view(torch.float8_e4m3fn) if cache_NBKD.dtype == torch.uint8 else cache_NBKD
    rows = [torch.empty(0, cache_NBKD.shape[3], dtype=torch.float64)]
    for slot in range(length):
        block, within = int(table_M[slot // block_size]), slot % block_size
        factor = 1.0 if scale is None else float(scale) if scale.numel() == 1 else float(scale[block, within, kv_head])
        rows.append(cache[block, within, kv_head].to(torch.float64)[None] * factor)
    return torch.cat(rows)


def attend(
    q_D: torch.Tensor, keys_LD: torch.Tensor, values_LD: torch.Tensor, slot: int, head: int, masks: Masks
) -> tuple[torch.Tensor, torch.Tensor]:
    """One query at `slot`, one head: (result [D], weights [L] of the slots, 0 where not visible), float64."""
    seen = [
        p for p in range(slot + 1) if masks.window is None or p > slot - masks.window or p < masks.num_sink_tokens
    ]  # fmt: skip
    weights_L = torch.zeros(keys_LD.shape[0], dtype=torch.float64)
    if not seen:
        return torch.zeros(q_D.shape[0], dtype=torch.float64), weights_L
    logits = keys_LD[seen] @ q_D.to(torch.float64) * masks.scale
    if masks.soft_cap is not None:
        logits = masks.soft_cap * torch.tanh(logits / masks.soft_cap)
    extra = torch.empty(0, dtype=torch.float64) if masks.sink_logits_H is None else masks.sink_logits_H[head : head + 1].to(torch.float64)
    weights = torch.softmax(torch.cat([logits, extra]), dim=0)[: len(seen)]
    weights_L[seen] = weights
    return weights @ values_LD[seen], weights_L
