"""Paged prefill attention: ragged batches of new tokens, causal, over K and V of this chunk and of all before it. Triton; the plain torch
version is `kvlab.kernels.attention_reference`.

Follows FlashAttention-2 (Dao 2023: K and V in tiles, online softmax, float32 sums, masks only where a tile crosses the causal edge) on the
paged cache of vLLM (Kwon et al. 2023). Deviations: query heads of a KV head are packed into the rows of a program
(`kvlab.kernels.prefill_kernel` says why), tiles of K and V count tokens, not blocks (`kvlab.kernels.paging`); int8 and fp8 are turned into
q's type without their scales, which multiply scores and weights.

Shapes: T tokens, S sequences, H query heads, K KV heads, R = H / K, D head size, B block size, N blocks, M blocks of a table row.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from kvlab.kernels.attention_args import paged_args
from kvlab.kernels.launch import Launch, LaunchConfig
from kvlab.kernels.prefill_kernel import prefill_kernel
from kvlab.kernels.triton_common import capability as capability_of
from kvlab.kernels.triton_common import next_power_of_2, require_device
from kvlab.kernels.work import Work


def prefill_attention(
    q_THD: torch.Tensor, k_cache_NBKD: torch.Tensor, v_cache_NBKD: torch.Tensor, block_tables_SM: torch.Tensor,
    query_starts_S1: torch.Tensor, context_lens_S: torch.Tensor, max_query_len: int, scale: float, *, window: int | None = None,
    num_sink_tokens: int = 0, sink_logits_H: torch.Tensor | None = None, soft_cap: float | None = None,
    k_scale: torch.Tensor | None = None, v_scale: torch.Tensor | None = None, config: LaunchConfig | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:  # fmt: skip
    """Causal softmax(q k^T * scale) v of each new token over its sequence's slots. Returns out, [T, H, D] in q's dtype.

    Args:
        query_starts_S1: int32 or int64 [S + 1]; the new tokens of sequence s are rows query_starts[s] to query_starts[s + 1] of q. Rows
            from the last entry on are not computed (nor written in `out`).
        context_lens_S: int32 or int64 [S], slots of each sequence, new tokens included: its last query sees them all, the one before one
            less. At least the new tokens.
        max_query_len: most new tokens of a sequence; sizes the tiles of short chunks.
        The others: as of `kvlab.kernels.decode_attention.decode_attention`; a query at slot p sees slots (p - window, p] and the sinks.

    Raises:
        ValueError: a shape, dtype or setting that the kernel doesn't serve, or tensors on a CPU outside Triton's interpreter.
    """
    require_device(q_THD)
    out = torch.empty_like(q_THD) if out is None else out
    prefill_launch(
        q_THD, k_cache_NBKD, v_cache_NBKD, block_tables_SM, query_starts_S1, context_lens_S, max_query_len, scale, window=window,
        num_sink_tokens=num_sink_tokens, sink_logits_H=sink_logits_H, soft_cap=soft_cap, k_scale=k_scale, v_scale=v_scale, config=config,
        out=out, capability=capability_of(q_THD.device),
    ).run()  # fmt: skip
    return out


def prefill_launch(
    q_THD: torch.Tensor, k_cache_NBKD: torch.Tensor, v_cache_NBKD: torch.Tensor, block_tables_SM: torch.Tensor,
    query_starts_S1: torch.Tensor, context_lens_S: torch.Tensor, max_query_len: int, scale: float, *, window: int | None,
    num_sink_tokens: int, sink_logits_H: torch.Tensor | None, soft_cap: float | None, k_scale: torch.Tensor | None,
    v_scale: torch.Tensor | None, config: LaunchConfig | None, out: torch.Tensor, capability: tuple[int, int],
) -> Launch:  # fmt: skip
    """What `prefill_attention` runs on a GPU of this compute capability."""
    paged = paged_args(
        q_THD, k_cache_NBKD, v_cache_NBKD, block_tables_SM, scale, capability, window=window, num_sink_tokens=num_sink_tokens,
        sink_logits_H=sink_logits_H, soft_cap=soft_cap, k_scale=k_scale, v_scale=v_scale,
    )  # fmt: skip
    num_seqs = block_tables_SM.shape[0]
    for name, tensor, count in (("query_starts_S1", query_starts_S1, num_seqs + 1), ("context_lens_S", context_lens_S, num_seqs)):
        if tensor.shape != (count,) or tensor.dtype not in (torch.int32, torch.int64) or (count > 1 and tensor.stride(0) != 1):
            raise ValueError(f"{name} must be contiguous int32 or int64 [{count}], not {tensor.dtype} {list(tensor.shape)}")
    if out.shape != q_THD.shape or out.stride(2) != 1:
        raise ValueError(f"out must be {list(q_THD.shape)} with D contiguous, not {list(out.shape)}")
    config = config or default_config(paged.head_dim, paged.heads_per_group, q_THD.dtype, k_cache_NBKD.dtype, capability, max_query_len)
    heads = min(paged.heads_per_group, config.rows)
    tokens = config.rows // heads
    chunks = -(-paged.heads_per_group // heads)
    args = {
        **paged.args, "starts_ptr": query_starts_S1, "length_ptr": context_lens_S, "out_ptr": out, "num_seqs": num_seqs,
        "q_stride_t": q_THD.stride(0), "q_stride_h": q_THD.stride(1), "out_stride_t": out.stride(0), "out_stride_h": out.stride(1),
    }  # fmt: skip
    constexprs = {**paged.constexprs, "ROWS": config.rows, "TOKENS": tokens, "HEADS": heads, "TILE": config.tile}
    # Tiles of sequence s begin at query_starts[s] // tokens + s, so this many are enough for any lengths.
    query_tiles = q_THD.shape[0] // tokens + num_seqs
    grid = (query_tiles, paged.num_kv_heads * chunks) if num_seqs else (0, 0)
    return Launch(prefill_kernel, grid, args, constexprs, config)


def default_config(
    head_dim: int, heads_per_group: int, dtype: torch.dtype, kv_dtype: torch.dtype, capability: tuple[int, int], max_query_len: int
) -> LaunchConfig:
    """What compiles without spilling (`shipped_variants` are checked for that), as large as it may be.

    16-bit types: 128 rows, on sm_90 two warp groups of 64 (what wgmma takes) with tiles of 64 slots; before it, and for heads of more than
    128, fewer slots or rows, for the registers: of int8 the fewest, whose scales take some too. Fewer rows where chunks are short.
    float32: 16 rows, since three tf32 products need each operand in two parts. The pipeline has a stage more for the table look-up before
    each load, but not where bytes are decoded by shifts.
    """
    padded = max(16, next_power_of_2(head_dim))
    if dtype.itemsize > 2:
        return LaunchConfig(tile=32 if padded <= 128 else 16, num_warps=4, num_stages=3, rows=16)
    most_rows = 128 if padded <= 128 else 64
    rows = min(most_rows, max(16, next_power_of_2(max(1, max_query_len) * heads_per_group)))
    hopper = capability >= (9, 0)
    tile = 64 if padded <= 64 or (hopper and padded <= 128) else 16 if hopper and kv_dtype == torch.int8 else 32
    num_warps = 8 if rows == 128 or (rows == 64 and padded > 128) else 4
    return LaunchConfig(tile=tile, num_warps=num_warps, num_stages=2 if kv_dtype.itemsize == 1 and not hopper else 3, rows=rows)


def prefill_attention_work(
    query_lens: Sequence[int], context_lens: Sequence[int], num_query_heads: int, num_kv_heads: int, head_dim: int,
    q_dtype: torch.dtype, kv_dtype: torch.dtype, *, window: int | None = None, num_sink_tokens: int = 0, scale_bytes: int = 0,
) -> Work:  # fmt: skip
    """Compulsory work of one call: 4 D operations per query head, query and visible slot; K and V of visible slots once a sequence,
    queries in, results out.

    Args:
        query_lens, context_lens: new tokens, and slots with them, of each sequence.
        scale_bytes: bytes of a slot and KV head's scale (int8: 2), for K and for V each.
    """
    num_bytes, num_flops = 0, 0
    for num_queries, length in zip(query_lens, context_lens, strict=True):
        first = length - num_queries
        pairs = sum(visible_count(slot + 1, window, num_sink_tokens) for slot in range(first, length))
        begin = 0 if window is None else max(0, first - window + 1)
        slots = length - max(0, begin - num_sink_tokens) if num_queries else 0
        num_flops += 4 * pairs * num_query_heads * head_dim
        num_bytes += 2 * slots * num_kv_heads * (head_dim * kv_dtype.itemsize + scale_bytes)
        num_bytes += 2 * num_queries * num_query_heads * head_dim * q_dtype.itemsize
    return Work(num_bytes, num_flops)


def visible_count(length: int, window: int | None, num_sink_tokens: int) -> int:
    """Slots that a query at slot length - 1 sees."""
    return length if window is None else min(length, window + min(num_sink_tokens, max(length - window, 0)))
