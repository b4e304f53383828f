"""Triton kernels of decode attention: one query token a sequence over its paged K and V. `kvlab.kernels.decode_attention` launches them.

Split-KV ("flash decoding"): a program serves one (KV head, sequence, split), reads each of its K and V once for all query heads of that KV
head, and leaves a normalised result and the log of its weights' sum; a reduction weighs the splits. Online softmax in float32.

Shapes: S sequences, H query heads, K KV heads, R = H / K, D head size, B block size, N blocks, M blocks of a table row, P splits.
"""

from __future__ import annotations

import triton.language as tl

from kvlab.kernels.paging import logits_log2, slot_offsets, window_gap
from kvlab.kernels.triton_common import Arg, cast, dot, jit, jit_for_any, load_kv


@jit
def visible_slots(slots: Arg, length: Arg, window: Arg, num_sinks: Arg, WINDOW: tl.constexpr) -> Arg:
    """Which slots a query at slot length - 1 sees."""
    seen = slots < length
    if WINDOW:
        seen &= (slots >= length - window) | (slots < num_sinks)
    return seen


@jit_for_any("num_splits", "table_ptr", "table_stride", "length_ptr", "lse_stride_s")
def decode_kernel(
    q_ptr: Arg, k_ptr: Arg, v_ptr: Arg, table_ptr: Arg, length_ptr: Arg, k_scale_ptr: Arg, v_scale_ptr: Arg, sink_ptr: Arg,
    out_ptr: Arg, lse_ptr: Arg, logit_ptr: Arg, scale: Arg, soft_cap: Arg, window: Arg, num_sinks: Arg, block_size: Arg,
    heads_per_group: Arg, num_row_chunks: Arg, num_splits: Arg, q_stride_s: Arg, q_stride_h: Arg, stride_block: Arg, stride_slot: Arg,
    stride_head: Arg, table_stride: Arg, length_stride_s: Arg, length_stride_k: Arg, scale_stride_block: Arg, scale_stride_slot: Arg,
    scale_stride_head: Arg, out_stride_s: Arg, out_stride_p: Arg, out_stride_h: Arg, lse_stride_s: Arg, lse_stride_p: Arg,
    logit_stride_s: Arg, logit_stride_h: Arg,
    D: tl.constexpr, PADDED_D: tl.constexpr, ROWS: tl.constexpr, TILE: tl.constexpr, BLOCK_SIZE: tl.constexpr, SCALES: tl.constexpr,
    WINDOW: tl.constexpr, SOFT_CAP: tl.constexpr, SINK_LOGITS: tl.constexpr, ONE_SPLIT: tl.constexpr, KEEP_LOGITS: tl.constexpr,
    KEEP_LSE: tl.constexpr,
) -> None:  # fmt: skip
    """One split of one KV head of one sequence. Grid: (K * row chunks, S, P). SCALES: 0 none, 1 one a layer, 2 one a slot and head."""
    kv_head = tl.program_id(0) // num_row_chunks
    seq = tl.program_id(1).to(tl.int64)
    split = tl.program_id(2)
    row = (tl.program_id(0) % num_row_chunks) * ROWS + tl.arange(0, ROWS)
    head = kv_head * heads_per_group + row
    is_head = row < heads_per_group
    d = tl.arange(0, PADDED_D)
    dtype = q_ptr.dtype.element_ty
    length = tl.load(length_ptr + seq * length_stride_s + kv_head * length_stride_k).to(tl.int32)
    sinks_end, gap = 0, 0
    if WINDOW:
        sinks_end, gap = window_gap(length - window, num_sinks, TILE)
    tiles = (tl.maximum(length, 0) - gap + TILE - 1) // TILE
    tiles_per_split = (tiles + num_splits - 1) // num_splits
    begin = tl.minimum(split * tiles_per_split, tiles) * TILE
    end = tl.minimum((split + 1) * tiles_per_split, tiles) * TILE

    q = tl.load(q_ptr + seq * q_stride_s + head[:, None] * q_stride_h + d[None, :], mask=is_head[:, None] & (d < D)[None, :], other=0.0)
    table_ptr += seq * table_stride
    k_ptr += kv_head.to(tl.int64) * stride_head
    v_ptr += kv_head.to(tl.int64) * stride_head
    if SCALES == 1:
        scale *= tl.load(k_scale_ptr)
    peak = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    acc = tl.zeros([ROWS, PADDED_D], tl.float32)
    for j in range(begin, end, TILE):
        start = j
        if WINDOW:
            start = j + tl.where(j >= sinks_end, gap, 0)
        slots = start + tl.arange(0, TILE)
        seen = visible_slots(slots, length, window, num_sinks, WINDOW)
        offsets = slot_offsets(table_ptr, start, length, block_size, stride_block, stride_slot, TILE, BLOCK_SIZE, True)
        if D == PADDED_D:
            mask = seen[:, None]
        else:
            mask = seen[:, None] & (d < D)[None, :]
        k = load_kv(k_ptr + offsets[:, None] + d[None, :], mask, dtype)
        logits = dot(q, tl.trans(k), tl.zeros([ROWS, TILE], tl.float32))
        if SCALES == 2:
            at = slot_offsets(table_ptr, start, length, block_size, scale_stride_block, scale_stride_slot, TILE, BLOCK_SIZE, True)
            at += kv_head.to(tl.int64) * scale_stride_head
            logits *= tl.load(k_scale_ptr + at, mask=seen, other=0.0).to(tl.float32)[None, :]
        logits = logits_log2(logits, scale, soft_cap, SOFT_CAP)
        logits = tl.where(seen[None, :], logits, float("-inf"))
        if KEEP_LOGITS:
            kept = logit_ptr + seq * logit_stride_s + head.to(tl.int64)[:, None] * logit_stride_h + slots[None, :]
            tl.store(kept, logits, mask=is_head[:, None] & seen[None, :])
        new_peak = tl.maximum(peak, tl.max(logits, 1))
        base = tl.where(new_peak == float("-inf"), 0.0, new_peak)
        weights = tl.exp2(logits - base[:, None])
        decay = tl.exp2(peak - base)
        total = total * decay + tl.sum(weights, 1)
        v = load_kv(v_ptr + offsets[:, None] + d[None, :], mask, dtype)
        if SCALES == 2:
            weights *= tl.load(v_scale_ptr + at, mask=seen, other=0.0).to(tl.float32)[None, :]
        acc = dot(cast(weights, dtype), v, acc * decay[:, None])
        peak = new_peak

    if SCALES == 1:
        acc *= tl.load(v_scale_ptr)
    if SINK_LOGITS and ONE_SPLIT:
        sink = tl.load(sink_ptr + head, mask=is_head, other=0.0).to(tl.float32) * 1.4426950408889634
        new_peak = tl.maximum(peak, sink)
        base = tl.where(new_peak == float("-inf"), 0.0, new_peak)
        decay = tl.exp2(peak - base)
        total = total * decay + tl.exp2(sink - base)
        acc *= decay[:, None]
        peak = new_peak
    acc /= tl.where(total == 0, 1.0, total)[:, None]
    # An empty split writes no result, only that its weight is 0; the one split of an empty sequence writes zeros.
    writes = is_head
    if not ONE_SPLIT:
        writes = row < tl.where(begin < end, heads_per_group, 0)
    out = out_ptr + seq * out_stride_s + split.to(tl.int64) * out_stride_p + head[:, None] * out_stride_h + d[None, :]
    tl.store(out, cast(acc, out_ptr.dtype.element_ty), mask=writes[:, None] & (d < D)[None, :])
    if KEEP_LSE:
        lse = peak + tl.log2(tl.where(total == 0, 1.0, total))
        tl.store(lse_ptr + seq * lse_stride_s + split * lse_stride_p + head, lse, mask=is_head)


@jit_for_any("num_splits", "part_lse_stride_s")
def reduce_kernel(
    part_ptr: Arg, part_lse_ptr: Arg, sink_ptr: Arg, out_ptr: Arg, lse_ptr: Arg, num_splits: Arg, part_stride_s: Arg, part_stride_p: Arg,
    part_stride_h: Arg, part_lse_stride_s: Arg, part_lse_stride_p: Arg, out_stride_s: Arg, out_stride_h: Arg, lse_stride_s: Arg,
    D: tl.constexpr, PADDED_D: tl.constexpr, CHUNK: tl.constexpr, SINK_LOGITS: tl.constexpr, KEEP_LSE: tl.constexpr,
) -> None:  # fmt: skip
    """Weigh the splits of one query head of one sequence. Grid: (H, S)."""
    head = tl.program_id(0)
    seq = tl.program_id(1).to(tl.int64)
    d = tl.arange(0, PADDED_D)
    part_ptr += seq * part_stride_s + head * part_stride_h
    part_lse_ptr += seq * part_lse_stride_s + head
    peaks = tl.full([CHUNK], float("-inf"), tl.float32)
    for i in range(0, num_splits, CHUNK):
        split = i + tl.arange(0, CHUNK)
        peaks = tl.maximum(peaks, tl.load(part_lse_ptr + split * part_lse_stride_p, mask=split < num_splits, other=float("-inf")))
    peak = tl.max(peaks, 0)
    if SINK_LOGITS:
        sink = tl.load(sink_ptr + head).to(tl.float32) * 1.4426950408889634
        peak = tl.maximum(peak, sink)
    base = tl.where(peak == float("-inf"), 0.0, peak)
    totals = tl.zeros([CHUNK], tl.float32)
    acc = tl.zeros([PADDED_D], tl.float32)
    for i in range(0, num_splits, CHUNK):
        split = i + tl.arange(0, CHUNK)
        weight = tl.exp2(tl.load(part_lse_ptr + split * part_lse_stride_p, mask=split < num_splits, other=float("-inf")) - base)
        # A split of weight 0 wrote no result: what lies there isn't read.
        mask = (weight > 0)[:, None] & (d < D)[None, :]
        part = tl.load(part_ptr + split.to(tl.int64)[:, None] * part_stride_p + d[None, :], mask=mask, other=0.0)
        acc += tl.sum(part * weight[:, None], 0)
        totals += weight
    total = tl.sum(totals, 0)
    if SINK_LOGITS:
        total += tl.exp2(sink - base)
    total = tl.where(total == 0, 1.0, total)
    tl.store(out_ptr + seq * out_stride_s + head * out_stride_h + d, cast(acc / total, out_ptr.dtype.element_ty), mask=d < D)
    if KEEP_LSE:
        tl.store(lse_ptr + seq * lse_stride_s + head, peak + tl.log2(total))


@jit_for_any("length_ptr", "num_blocks")
def mass_kernel(
    logit_ptr: Arg, lse_ptr: Arg, length_ptr: Arg, mass_ptr: Arg, window: Arg, num_sinks: Arg, block_size: Arg, num_blocks: Arg,
    heads_per_group: Arg, logit_stride_s: Arg, logit_stride_h: Arg, lse_stride_s: Arg, length_stride_s: Arg, length_stride_k: Arg,
    mass_stride_s: Arg, mass_stride_k: Arg, BLOCKS: tl.constexpr, COLUMNS: tl.constexpr, WINDOW: tl.constexpr,
) -> None:  # fmt: skip
    """Softmax mass of BLOCKS logical blocks, from the logits kept and their log-sum. Grid: (ceil(M / BLOCKS), K, S)."""
    block = tl.program_id(0) * BLOCKS + tl.arange(0, BLOCKS)
    kv_head = tl.program_id(1)
    seq = tl.program_id(2).to(tl.int64)
    length = tl.load(length_ptr + seq * length_stride_s + kv_head * length_stride_k).to(tl.int32)
    mass = tl.zeros([BLOCKS], tl.float32)
    for column in range(0, block_size, COLUMNS):
        within = column + tl.arange(0, COLUMNS)
        slots = block[:, None] * block_size + within[None, :]
        seen = visible_slots(slots, length, window, num_sinks, WINDOW) & (within < block_size)[None, :] & (block < num_blocks)[:, None]
        for r in range(heads_per_group):
            head = kv_head * heads_per_group + r
            lse = tl.load(lse_ptr + seq * lse_stride_s + head)
            lse = tl.where(lse == float("-inf"), 0.0, lse)  # nothing visible: no weight below
            at = logit_ptr + seq * logit_stride_s + head.to(tl.int64) * logit_stride_h
            logits = tl.load(at + slots, mask=seen, other=float("-inf"))
            mass += tl.sum(tl.where(seen, tl.exp2(logits - lse), 0.0), 1)
    tl.store(mass_ptr + seq * mass_stride_s + kv_head * mass_stride_k + block, mass, mask=block < num_blocks)
