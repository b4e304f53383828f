"""Triton kernel of prefill attention: chunks of new tokens over their sequences' paged K and V. `kvlab.kernels.prefill_attention` launches
it.

A program's rows are the R query heads of a KV head times as many tokens as fill them: row r is head r % R of token r // R. So each K and V
tile is read once for all heads of a group, short chunks still fill the matrix instructions, and the causal edge covers few tokens.

Shapes: T tokens, S sequences, H query heads, K KV heads, R = H / K, D head size, B block size, N blocks.
"""

from __future__ import annotations

import triton.language as tl

from kvlab.kernels.paging import logits_log2, slot_offsets, window_gap
from kvlab.kernels.triton_common import Arg, cast, dot, jit, jit_for_any, load_kv


@jit
def find_sequence(starts_ptr: Arg, num_seqs: Arg, query_tile: Arg, TOKENS: tl.constexpr) -> Arg:
    """The sequence of a query tile. Tiles of sequence s begin at starts[s] // TOKENS + s: there is room for each sequence's last,
    partly filled tile, and the host needs no lengths to size the grid."""
    low, high = 0, num_seqs
    while high - low > 1:
        middle = (low + high) // 2
        if tl.load(starts_ptr + middle).to(tl.int32) // TOKENS + middle <= query_tile:
            low = middle
        else:
            high = middle
    return low


@jit
def attend_tiles(
    peak: Arg, total: Arg, acc: Arg, q: Arg, k_ptr: Arg, v_ptr: Arg, k_scale_ptr: Arg, v_scale_ptr: Arg, table_ptr: Arg, begin: Arg,
    end: Arg, sinks_end: Arg, gap: Arg, length: Arg, first_slot: Arg, query_slot: Arg, scale: Arg, soft_cap: Arg, window: Arg,
    num_sinks: Arg, block_size: Arg, stride_block: Arg, stride_slot: Arg, scale_stride_block: Arg, scale_stride_slot: Arg,
    D: tl.constexpr, PADDED_D: tl.constexpr, TILE: tl.constexpr, BLOCK_SIZE: tl.constexpr, SCALES: tl.constexpr, WINDOW: tl.constexpr,
    SOFT_CAP: tl.constexpr, MASKED: tl.constexpr,
) -> Arg:  # fmt: skip
    """Online softmax over the tiles in [begin, end) for rows from slot `first_slot` on. MASKED False: every slot exists and every row sees
    it. Only slots that some row may see are read."""
    d = tl.arange(0, PADDED_D)
    dtype: tl.constexpr = q.dtype
    for j in range(begin, end, TILE):
        start = j
        if WINDOW:
            start = j + tl.where(j >= sinks_end, gap, 0)
        slots = start + tl.arange(0, TILE)
        offsets = slot_offsets(table_ptr, start, length, block_size, stride_block, stride_slot, TILE, BLOCK_SIZE, MASKED)
        exists = slots < length
        if WINDOW:
            exists &= (slots > first_slot - window) | (slots < num_sinks)
        if MASKED:
            mask = exists[:, None] & (d < D)[None, :]
        elif D < PADDED_D:
            mask = (d < D)[None, :]
        else:
            mask = None
        k = load_kv(k_ptr + offsets[:, None] + d[None, :], mask, dtype)
        logits = dot(q, tl.trans(k), tl.zeros([q.shape[0], TILE], tl.float32))
        if SCALES == 2:
            at = slot_offsets(table_ptr, start, length, block_size, scale_stride_block, scale_stride_slot, TILE, BLOCK_SIZE, MASKED)
            logits *= tl.load(k_scale_ptr + at, mask=exists, other=0.0).to(tl.float32)[None, :]
        logits = logits_log2(logits, scale, soft_cap, SOFT_CAP)
        if MASKED:
            seen = slots[None, :] <= query_slot[:, None]
            if WINDOW:
                seen &= (slots[None, :] > query_slot[:, None] - window) | (slots < num_sinks)[None, :]
            logits = tl.where(seen, logits, float("-inf"))
        new_peak = tl.maximum(peak, tl.max(logits, 1))
        base = tl.where(new_peak == float("-inf"), 0.0, new_peak)
        weights = tl.exp2(logits - base[:, None])
        decay = tl.exp2(peak - base)
        total = total * decay + tl.sum(weights, 1)
        v = load_kv(v_ptr + offsets[:, None] + d[None, :], mask, dtype)
        if SCALES == 2:
            weights *= tl.load(v_scale_ptr + at, mask=exists, other=0.0).to(tl.float32)[None, :]
        acc = dot(cast(weights, dtype), v, acc * decay[:, None])
        peak = new_peak
    return peak, total, acc


@jit_for_any("num_seqs", "table_ptr", "table_stride", "starts_ptr", "length_ptr")
def prefill_kernel(
    q_ptr: Arg, k_ptr: Arg, v_ptr: Arg, table_ptr: Arg, starts_ptr: Arg, length_ptr: Arg, k_scale_ptr: Arg, v_scale_ptr: Arg, sink_ptr: Arg,
    out_ptr: Arg, scale: Arg, soft_cap: Arg, window: Arg, num_sinks: Arg, block_size: Arg, num_seqs: Arg, heads_per_group: Arg,
    q_stride_t: Arg, q_stride_h: Arg, stride_block: Arg, stride_slot: Arg, stride_head: Arg, table_stride: Arg, scale_stride_block: Arg,
    scale_stride_slot: Arg, scale_stride_head: Arg, out_stride_t: Arg, out_stride_h: Arg,
    D: tl.constexpr, PADDED_D: tl.constexpr, ROWS: tl.constexpr, TOKENS: tl.constexpr, HEADS: tl.constexpr, TILE: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, SCALES: tl.constexpr, WINDOW: tl.constexpr, SOFT_CAP: tl.constexpr, SINK_LOGITS: tl.constexpr,
) -> None:  # fmt: skip
    """TOKENS queries of HEADS heads of one KV head. Grid: (query tiles, K * head chunks); late tiles, the longest, go first."""
    num_chunks = (heads_per_group + HEADS - 1) // HEADS
    kv_head = tl.program_id(1) // num_chunks
    query_tile = tl.num_programs(0) - 1 - tl.program_id(0)
    seq = find_sequence(starts_ptr, num_seqs, query_tile, TOKENS)
    query_begin = tl.load(starts_ptr + seq).to(tl.int32)
    num_queries = tl.load(starts_ptr + seq + 1).to(tl.int32) - query_begin
    first = (query_tile - query_begin // TOKENS - seq) * TOKENS
    if first < num_queries:
        row = tl.arange(0, ROWS)
        query = first + row // HEADS
        head_of_group = (tl.program_id(1) % num_chunks) * HEADS + row % HEADS
        is_row = (row < TOKENS * HEADS) & (query < num_queries) & (head_of_group < heads_per_group)
        head = kv_head * heads_per_group + head_of_group
        token = (query_begin + query).to(tl.int64)
        length = tl.load(length_ptr + seq).to(tl.int32)
        query_slot = length - num_queries + query
        d = tl.arange(0, PADDED_D)
        row_mask = is_row[:, None] & (d < D)[None, :]
        q = tl.load(q_ptr + token[:, None] * q_stride_t + head[:, None] * q_stride_h + d[None, :], mask=row_mask, other=0.0)
        table_ptr += seq.to(tl.int64) * table_stride
        k_ptr += kv_head.to(tl.int64) * stride_head
        v_ptr += kv_head.to(tl.int64) * stride_head
        if SCALES == 1:
            scale *= tl.load(k_scale_ptr)
        if SCALES == 2:
            k_scale_ptr += kv_head.to(tl.int64) * scale_stride_head
            v_scale_ptr += kv_head.to(tl.int64) * scale_stride_head
        peak = tl.full([ROWS], float("-inf"), tl.float32)
        total = tl.zeros([ROWS], tl.float32)
        acc = tl.zeros([ROWS, PADDED_D], tl.float32)
        # Slots below first_slot are seen by all rows; the last row that is there sees those below end_slot.
        first_slot = length - num_queries + first
        end_slot = tl.minimum(first_slot + TOKENS, length)
        sinks_end, gap, full = 0, 0, 0
        if WINDOW:
            sinks_end, gap = window_gap(first_slot - window + 1, num_sinks, TILE)
        else:
            full = (first_slot + 1) // TILE * TILE
            peak, total, acc = attend_tiles(
                peak, total, acc, q, k_ptr, v_ptr, k_scale_ptr, v_scale_ptr, table_ptr, 0, full, sinks_end, gap, length, first_slot,
                query_slot, scale, soft_cap, window, num_sinks, block_size, stride_block, stride_slot, scale_stride_block,
                scale_stride_slot, D, PADDED_D, TILE, BLOCK_SIZE, SCALES, WINDOW, SOFT_CAP, False,
            )  # fmt: skip
        peak, total, acc = attend_tiles(
            peak, total, acc, q, k_ptr, v_ptr, k_scale_ptr, v_scale_ptr, table_ptr, full, end_slot - gap, sinks_end, gap, length,
            first_slot, query_slot, scale, soft_cap, window, num_sinks, block_size, stride_block, stride_slot, scale_stride_block,
            scale_stride_slot, D, PADDED_D, TILE, BLOCK_SIZE, SCALES, WINDOW, SOFT_CAP, True,
        )  # fmt: skip
        if SCALES == 1:
            acc *= tl.load(v_scale_ptr)
        if SINK_LOGITS:
            sink = tl.load(sink_ptr + head, mask=is_row, other=0.0).to(tl.float32) * 1.4426950408889634
            new_peak = tl.maximum(peak, sink)
            decay = tl.exp2(peak - new_peak)
            total = total * decay + tl.exp2(sink - new_peak)
            acc *= decay[:, None]
        acc /= tl.where(total == 0, 1.0, total)[:, None]
        out = out_ptr + token[:, None] * out_stride_t + head[:, None] * out_stride_h + d[None, :]
        tl.store(out, cast(acc, out_ptr.dtype.element_ty), mask=row_mask)
