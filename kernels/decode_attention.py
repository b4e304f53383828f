"""Paged decode attention: one query token a sequence, K and V read once per KV head. Triton; the plain torch version is
`kvlab.kernels.attention_reference`.

Follows flash decoding (Dao et al. 2023: K and V split over programs, an online softmax in each, a reduction at the end) on the paged
cache of vLLM (Kwon et al. 2023). The R query heads of a KV head are the rows of one matrix product, padded to 16 (what a matrix
instruction takes): decoding waits for memory, not for the padding. Deviations: splits are counted in tiles of tokens, not in blocks, so
any block size works (`kvlab.kernels.paging`); int8 and fp8 are turned into q's type without their scales, which are exact there, and the
scales multiply scores and weights. What is stored wider than q's type is rounded to it.

Shapes: S sequences, H query heads, K KV heads, R = H / K, D head size, B block size, N blocks, M blocks of a table row, P splits.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from kvlab.kernels.attention_args import paged_args
from kvlab.kernels.decode_kernels import decode_kernel, mass_kernel, reduce_kernel
from kvlab.kernels.launch import Launch, LaunchConfig
from kvlab.kernels.triton_common import capability as capability_of
from kvlab.kernels.triton_common import next_power_of_2, num_sms, require_device
from kvlab.kernels.work import Work

MAX_ROWS = 64
"""Query heads of one KV head in one program; more are served by several, which read K and V again."""
MAX_SPLITS = 128
MAX_SEQS = 65535
"""What the second and third axis of a CUDA grid take."""
SPLIT_TOKENS = 2048
"""Longest split: a split's result costs (D + 1) * 4 * R bytes written and read, under 1 % of its K and V from here on."""


def decode_attention(
    q_SHD: torch.Tensor, k_cache_NBKD: torch.Tensor, v_cache_NBKD: torch.Tensor, block_tables_SM: torch.Tensor, lengths: torch.Tensor,
    scale: float, *, window: int | None = None, num_sink_tokens: int = 0, sink_logits_H: torch.Tensor | None = None,
    soft_cap: float | None = None, k_scale: torch.Tensor | None = None, v_scale: torch.Tensor | None = None,
    mass_out: torch.Tensor | None = None, num_splits: int | None = None, config: LaunchConfig | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:  # fmt: skip
    """Softmax(q k^T * scale) v of each sequence's last token over its slots. Returns out, [S, H, D] in q's dtype.

    Args:
        q_SHD: float32, float16 or bfloat16; D contiguous. Computed in this type, sums in float32.
        k_cache_NBKD, v_cache_NBKD: float32, float16, bfloat16, float8_e4m3fn (or its bytes as uint8) or int8; one shape and strides, D
            contiguous, otherwise any view. Slots that no sequence sees may hold anything, NaN too.
        block_tables_SM: int32 or int64; entries past a sequence's last block are not read.
        lengths: int32 or int64, [S] or [S, K] (a compressed cache keeps different numbers of slots per KV head). 0 gives zeros.
        scale: factor of the logits, usually D ** -0.5.
        window: the query, at slot length - 1, sees the last `window` slots; None: all.
        num_sink_tokens: first slots that stay visible under a window (StreamingLLM, Xiao et al. 2023).
        sink_logits_H: a logit per query head that takes part in the softmax's denominator and has no value (gpt-oss).
        soft_cap: logits become soft_cap * tanh(logit / soft_cap) (Gemma 2).
        k_scale, v_scale: what stored numbers are multiplied by: None (1), one element (a layer's), or [N, B, K] float16 or float32.
        mass_out: float32 [S, K, M], filled with the softmax mass that each logical block received, summed over the R query heads of a
            KV head; 0 where nothing is visible. The logits are kept in memory for it, 4 * H bytes a slot.
        num_splits: programs over one sequence and KV head; None: `choose_num_splits`.
        config: None: `default_config`.
        out: where to write; None: a new tensor.

    Raises:
        ValueError: a shape, dtype or setting that the kernels don't serve, or tensors on a CPU outside Triton's interpreter.
    """
    require_device(q_SHD)
    out = torch.empty_like(q_SHD) if out is None else out
    launches = decode_launches(
        q_SHD, k_cache_NBKD, v_cache_NBKD, block_tables_SM, lengths, scale, window=window, num_sink_tokens=num_sink_tokens,
        sink_logits_H=sink_logits_H, soft_cap=soft_cap, k_scale=k_scale, v_scale=v_scale, mass_out=mass_out, num_splits=num_splits,
        config=config, out=out, capability=capability_of(q_SHD.device), sms=num_sms(q_SHD.device),
    )  # fmt: skip
    for launch in launches:
        launch.run()
    return out


def decode_launches(
    q_SHD: torch.Tensor, k_cache_NBKD: torch.Tensor, v_cache_NBKD: torch.Tensor, block_tables_SM: torch.Tensor, lengths: torch.Tensor,
    scale: float, *, window: int | None, num_sink_tokens: int, sink_logits_H: torch.Tensor | None, soft_cap: float | None,
    k_scale: torch.Tensor | None, v_scale: torch.Tensor | None, mass_out: torch.Tensor | None, num_splits: int | None,
    config: LaunchConfig | None, out: torch.Tensor, capability: tuple[int, int], sms: int,
) -> list[Launch]:  # fmt: skip
    """What `decode_attention` runs on a GPU of this compute capability and number of SMs, in order. Allocates scratch, runs nothing."""
    paged = paged_args(
        q_SHD, k_cache_NBKD, v_cache_NBKD, block_tables_SM, scale, capability, window=window, num_sink_tokens=num_sink_tokens,
        sink_logits_H=sink_logits_H, soft_cap=soft_cap, k_scale=k_scale, v_scale=v_scale,
    )  # fmt: skip
    num_seqs, num_heads, head_dim = q_SHD.shape
    max_len = block_tables_SM.shape[1] * paged.block_size
    _check_outputs(q_SHD, out, mass_out, lengths, block_tables_SM, paged.num_kv_heads)
    config = config or default_config(head_dim, paged.heads_per_group, q_SHD.dtype, capability)
    chunks = -(-paged.heads_per_group // config.rows)
    if num_splits is None:
        num_splits = choose_num_splits(num_seqs * paged.num_kv_heads * chunks, max_len, config.tile, sms)
    elif num_splits < 1:
        raise ValueError(f"num_splits must be positive, not {num_splits}")
    length_strides = (lengths.stride(0), lengths.stride(1)) if lengths.dim() == 2 else (lengths.stride(0), 0)

    def scratch(*shape: int) -> torch.Tensor:
        return torch.empty(shape, dtype=torch.float32, device=q_SHD.device)

    lse_SH = scratch(num_seqs, num_heads) if mass_out is not None else None
    logits_SHX = scratch(num_seqs, num_heads, max_len) if mass_out is not None else None
    one_split = num_splits == 1
    part_SPHD = out[:, None] if one_split else scratch(num_seqs, num_splits, num_heads, head_dim)
    part_lse_SPH = (None if lse_SH is None else lse_SH[:, None]) if one_split else scratch(num_seqs, num_splits, num_heads)
    args: dict[str, Any] = {
        **paged.args, "length_ptr": lengths, "length_stride_s": length_strides[0], "length_stride_k": length_strides[1],
        "out_ptr": part_SPHD, "lse_ptr": part_lse_SPH, "logit_ptr": logits_SHX, "num_row_chunks": chunks, "num_splits": num_splits,
        "q_stride_s": q_SHD.stride(0), "q_stride_h": q_SHD.stride(1), "out_stride_s": part_SPHD.stride(0),
        "out_stride_p": part_SPHD.stride(1), "out_stride_h": part_SPHD.stride(2), **_strides("lse", part_lse_SPH, "sp"),
        **_strides("logit", logits_SHX, "sh"),
    }  # fmt: skip
    constexprs = {
        **paged.constexprs, "ROWS": config.rows, "TILE": config.tile, "ONE_SPLIT": one_split, "KEEP_LOGITS": mass_out is not None,
        "KEEP_LSE": part_lse_SPH is not None,
    }  # fmt: skip
    launches = [Launch(decode_kernel, (paged.num_kv_heads * chunks, num_seqs, num_splits), args, constexprs, config)]
    if not one_split and part_lse_SPH is not None:
        launches.append(_reduction(part_SPHD, part_lse_SPH, sink_logits_H, out, lse_SH, paged.padded_dim))
    if mass_out is not None and logits_SHX is not None and lse_SH is not None:
        shared = {name: args[name] for name in ("window", "num_sinks", "block_size", "heads_per_group", "length_ptr", "length_stride_s",
                                                "length_stride_k")}  # fmt: skip
        launches.append(_mass(logits_SHX, lse_SH, mass_out, shared))
    return launches


def _reduction(
    part_SPHD: torch.Tensor, part_lse_SPH: torch.Tensor, sink_logits_H: torch.Tensor | None, out: torch.Tensor,
    lse_SH: torch.Tensor | None, padded_dim: int,
) -> Launch:  # fmt: skip
    num_seqs, num_splits, num_heads, head_dim = part_SPHD.shape
    args = {
        "part_ptr": part_SPHD, "part_lse_ptr": part_lse_SPH, "sink_ptr": sink_logits_H, "out_ptr": out, "lse_ptr": lse_SH,
        "num_splits": num_splits, "part_stride_s": part_SPHD.stride(0), "part_stride_p": part_SPHD.stride(1),
        "part_stride_h": part_SPHD.stride(2), "part_lse_stride_s": part_lse_SPH.stride(0), "part_lse_stride_p": part_lse_SPH.stride(1),
        "out_stride_s": out.stride(0), "out_stride_h": out.stride(1), **_strides("lse", lse_SH, "s"),
    }  # fmt: skip
    constexprs = {
        "D": head_dim, "PADDED_D": padded_dim, "CHUNK": 8, "SINK_LOGITS": sink_logits_H is not None, "KEEP_LSE": lse_SH is not None,
    }  # fmt: skip
    return Launch(reduce_kernel, (num_heads, num_seqs), args, constexprs, LaunchConfig(tile=16, num_warps=2, num_stages=2))


def _mass(logits_SHX: torch.Tensor, lse_SH: torch.Tensor, mass_out: torch.Tensor, shared: dict[str, Any]) -> Launch:
    num_seqs, num_kv_heads, num_blocks = mass_out.shape
    columns = min(next_power_of_2(shared["block_size"]), 1024)
    blocks = 1024 // columns
    args = {
        **shared, "logit_ptr": logits_SHX, "lse_ptr": lse_SH, "mass_ptr": mass_out, "num_blocks": num_blocks,
        **_strides("logit", logits_SHX, "sh"), **_strides("lse", lse_SH, "s"), **_strides("mass", mass_out, "sk"),
    }  # fmt: skip
    constexprs = {"BLOCKS": blocks, "COLUMNS": columns, "WINDOW": shared["window"] is not None}
    return Launch(mass_kernel, (-(-num_blocks // blocks), num_kv_heads, num_seqs), args, constexprs, LaunchConfig(16, 4, 2))


def _strides(name: str, tensor: torch.Tensor | None, axes: str) -> dict[str, int | None]:
    return {f"{name}_stride_{axis}": None if tensor is None else tensor.stride(i) for i, axis in enumerate(axes)}


def _check_outputs(
    q_SHD: torch.Tensor, out: torch.Tensor, mass_out: torch.Tensor | None, lengths: torch.Tensor, tables: torch.Tensor, num_kv_heads: int
) -> None:
    num_seqs = q_SHD.shape[0]
    if num_seqs > MAX_SEQS:
        raise ValueError(f"a launch has room for {MAX_SEQS:,} sequences, not {num_seqs:,}: pass them in parts")
    if lengths.shape not in ((num_seqs,), (num_seqs, num_kv_heads)) or lengths.dtype not in (torch.int32, torch.int64):
        raise ValueError(
            f"lengths must be int32 or int64, [{num_seqs}] or [{num_seqs}, {num_kv_heads}], not {lengths.dtype} {list(lengths.shape)}"
        )
    if tables.shape[0] != num_seqs:
        raise ValueError(f"{num_seqs} queries and {tables.shape[0]} rows of block tables")
    if out.shape != q_SHD.shape or out.stride(2) != 1:
        raise ValueError(f"out must be {list(q_SHD.shape)} with D contiguous, not {list(out.shape)}")
    if mass_out is not None and (
        mass_out.shape != (num_seqs, num_kv_heads, tables.shape[1]) or mass_out.dtype != torch.float32 or mass_out.stride(2) != 1
    ):
        raise ValueError(
            f"mass_out must be float32 {[num_seqs, num_kv_heads, tables.shape[1]]} with contiguous rows, "
            f"not {mass_out.dtype} {list(mass_out.shape)}"
        )


def default_config(head_dim: int, heads_per_group: int, dtype: torch.dtype, capability: tuple[int, int]) -> LaunchConfig:
    """Tiles of about 16 KiB of K in the type computed in. Five stages are two tiles of K and two of V on their way, as each load waits
    for a table look-up; three programs fit an SM of sm_90, two one of sm_80. float32: 16 rows, for the registers."""
    padded = max(16, next_power_of_2(head_dim))
    rows = 16 if dtype.itemsize > 2 else min(MAX_ROWS, max(16, next_power_of_2(heads_per_group)))
    tile = min(128, max(16, 16384 // (padded * dtype.itemsize)))
    return LaunchConfig(tile=tile, num_warps=4, num_stages=5, rows=rows)


def choose_num_splits(num_programs: int, max_len: int, tile: int, sms: int, programs_per_sm: int = 2) -> int:
    """Splits of each sequence such that the GPU is full and ends evenly.

    After FlashAttention-2's heuristic: the fewest splits with at least 85 % of the best use of whole waves of programs. Deviation: a split
    is at most SPLIT_TOKENS long, so that one long sequence among short ones doesn't run alone at the end.

    Args:
        num_programs: programs of one split: sequences times KV heads (times chunks of query heads).
        max_len: slots of the longest sequence, or what its table holds (graphs are captured for that).
        tile: slots read at a time; no split is shorter.
        sms, programs_per_sm: of the GPU; how many programs run at once.
    """
    at_once = sms * programs_per_sm
    most = max(1, min(MAX_SPLITS, -(-max_len // tile)))
    least = min(most, max(1, -(-max_len // SPLIT_TOKENS)))
    use = {}
    for splits in range(least, most + 1):
        waves = num_programs * splits / at_once
        use[splits] = waves / -(-num_programs * splits // at_once)
    best = max(use.values())
    return next(splits for splits, share in use.items() if share >= 0.85 * best)


def decode_attention_work(
    lengths: Sequence[int], num_query_heads: int, num_kv_heads: int, head_dim: int, q_dtype: torch.dtype, kv_dtype: torch.dtype, *,
    window: int | None = None, num_sink_tokens: int = 0, scale_bytes: int = 0,
) -> Work:  # fmt: skip
    """Compulsory work of one call: visible K and V once, queries in, results out (table entries and lengths: under 1 %, left out).

    Args:
        lengths: slots of each sequence.
        scale_bytes: bytes of a slot and KV head's scale (int8: 2), for K and for V each.
    """
    num_bytes, num_flops = 0, 0
    for length in lengths:
        seen = length if window is None else min(length, window + min(num_sink_tokens, max(length - window, 0)))
        num_bytes += 2 * seen * num_kv_heads * (head_dim * kv_dtype.itemsize + scale_bytes)
        num_bytes += 2 * num_query_heads * head_dim * q_dtype.itemsize
        num_flops += 4 * seen * num_query_heads * head_dim
    return Work(num_bytes, num_flops)
