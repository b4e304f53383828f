"""What decode and prefill attention check and prepare alike: the paged cache as their kernels read it, and the masks' settings.

Shapes: S sequences, H query heads, K KV heads, D head size, B block size, N blocks, M blocks of a table row.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from kvlab.kernels.triton_common import FP8_CAPABILITY, next_power_of_2

QUERY_TYPES = (torch.float32, torch.float16, torch.bfloat16)
MAX_HEAD_DIM = 256
MOST_SINKS = 2**30
"""More than a table has slots; kernels round their number up in 32 bits."""
NO_SCALES, LAYER_SCALES, SLOT_SCALES = 0, 1, 2


@dataclass(frozen=True, slots=True)
class PagedArgs:
    """Arguments of a kernel that describe the cache and the masks; `args` and `constexprs` go to the kernel by name."""

    num_kv_heads: int
    heads_per_group: int
    head_dim: int
    padded_dim: int
    block_size: int
    cache_itemsize: int
    args: dict[str, Any]
    constexprs: dict[str, Any]


def paged_args(
    q_XHD: torch.Tensor, k_cache_NBKD: torch.Tensor, v_cache_NBKD: torch.Tensor, block_tables_SM: torch.Tensor, scale: float,
    capability: tuple[int, int], *, window: int | None, num_sink_tokens: int, sink_logits_H: torch.Tensor | None, soft_cap: float | None,
    k_scale: torch.Tensor | None, v_scale: torch.Tensor | None,
) -> PagedArgs:  # fmt: skip
    """Check the arguments that both kernels take; raise ValueError that names the first that no kernel serves.

    Values on the device (table entries, lengths) are not read: that would wait for it. They must lie within the cache.
    """
    _check_tensors(q_XHD, k_cache_NBKD, v_cache_NBKD, block_tables_SM)
    num_heads, head_dim = q_XHD.shape[1:]
    block_size, num_kv_heads = k_cache_NBKD.shape[1:3]
    if num_heads % num_kv_heads:
        raise ValueError(f"{num_heads} query heads can't share {num_kv_heads} KV heads evenly")
    _check_masks(num_heads, window, num_sink_tokens, sink_logits_H, soft_cap)
    scales = _scale_kind(k_cache_NBKD, k_scale, v_scale)
    scale_strides = k_scale.stride() if scales == SLOT_SCALES and k_scale is not None else (0, 0, 0)
    strides = k_cache_NBKD.stride()
    args = {
        "q_ptr": q_XHD, "k_ptr": _readable(k_cache_NBKD, capability), "v_ptr": _readable(v_cache_NBKD, capability),
        "table_ptr": block_tables_SM, "k_scale_ptr": k_scale, "v_scale_ptr": v_scale, "sink_ptr": sink_logits_H, "scale": float(scale),
        "soft_cap": None if soft_cap is None else float(soft_cap), "window": window,
        "num_sinks": None if window is None else min(num_sink_tokens, MOST_SINKS), "block_size": block_size,
        "heads_per_group": num_heads // num_kv_heads, "stride_block": strides[0], "stride_slot": strides[1], "stride_head": strides[2],
        "table_stride": block_tables_SM.stride(0), "scale_stride_block": scale_strides[0], "scale_stride_slot": scale_strides[1],
        "scale_stride_head": scale_strides[2],
    }  # fmt: skip
    constexprs = {
        "D": head_dim, "PADDED_D": max(16, next_power_of_2(head_dim)),
        "BLOCK_SIZE": block_size if block_size & (block_size - 1) == 0 else 0, "SCALES": scales, "WINDOW": window is not None,
        "SOFT_CAP": soft_cap is not None, "SINK_LOGITS": sink_logits_H is not None,
    }  # fmt: skip
    return PagedArgs(
        num_kv_heads, num_heads // num_kv_heads, head_dim, constexprs["PADDED_D"], block_size, k_cache_NBKD.element_size(), args, constexprs
    )


def _readable(cache: torch.Tensor, capability: tuple[int, int]) -> torch.Tensor:
    """float8_e4m3fn as its bytes where the GPU lacks the type (the kernels decode bytes by shifts)."""
    return cache.view(torch.uint8) if cache.dtype == torch.float8_e4m3fn and capability < FP8_CAPABILITY else cache


def _check_tensors(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, tables: torch.Tensor) -> None:
    if q.dim() != 3 or q.dtype not in QUERY_TYPES or q.stride(2) != 1:
        raise ValueError(f"queries must be [tokens, H, D] of float32, float16 or bfloat16 with D contiguous, not {_about(q)}")
    if k.dim() != 4 or k.shape != v.shape or k.stride() != v.stride() or k.dtype != v.dtype or k.stride(3) != 1:
        raise ValueError(
            f"K and V must be [N, B, K, D] of one shape, dtype and strides, with D contiguous, not {_about(k)} and {_about(v)}"
        )
    if k.dtype not in (*QUERY_TYPES, torch.float8_e4m3fn, torch.uint8, torch.int8):
        raise ValueError(f"the kernels read float32, float16, bfloat16, float8_e4m3fn (or its bytes as uint8) and int8, not {k.dtype}")
    if k.shape[3] != q.shape[2] or not 1 <= q.shape[2] <= MAX_HEAD_DIM:
        raise ValueError(f"queries and cache must have one head size of at most {MAX_HEAD_DIM}, not {q.shape[2]} and {k.shape[3]}")
    if tables.dim() != 2 or tables.dtype not in (torch.int32, torch.int64) or (tables.shape[1] > 1 and tables.stride(1) != 1):
        raise ValueError(f"block tables must be int32 or int64 [S, M] with contiguous rows, not {_about(tables)}")


def _check_masks(
    num_heads: int, window: int | None, num_sink_tokens: int, sink_logits_H: torch.Tensor | None, soft_cap: float | None
) -> None:
    if (window is not None and window < 1) or num_sink_tokens < 0:
        raise ValueError(f"window must be positive or None and num_sink_tokens not negative, not {window} and {num_sink_tokens}")
    if soft_cap is not None and not soft_cap > 0:
        raise ValueError(f"soft_cap must be positive or None, not {soft_cap}")
    if sink_logits_H is not None and (sink_logits_H.shape != (num_heads,) or sink_logits_H.stride(0) != 1):
        raise ValueError(f"sink_logits_H must be contiguous [{num_heads}], not {_about(sink_logits_H)}")


def _scale_kind(cache: torch.Tensor, k_scale: torch.Tensor | None, v_scale: torch.Tensor | None) -> int:
    if k_scale is None or v_scale is None:
        if k_scale is not v_scale:
            raise ValueError("k_scale and v_scale must be given both or neither")
        if cache.dtype == torch.int8:
            raise ValueError("an int8 cache needs k_scale and v_scale")
        return NO_SCALES
    if k_scale.shape != v_scale.shape or k_scale.dtype != v_scale.dtype or k_scale.stride() != v_scale.stride():
        raise ValueError(f"k_scale and v_scale must have one shape, dtype and strides, not {_about(k_scale)} and {_about(v_scale)}")
    if k_scale.numel() == 1 and k_scale.dim() <= 1:
        return LAYER_SCALES
    if k_scale.shape == cache.shape[:3]:
        return SLOT_SCALES
    raise ValueError(f"scales must have one element, or [N, B, K] = {list(cache.shape[:3])}, not {_about(k_scale)}")


def _about(tensor: torch.Tensor) -> str:
    return f"{tensor.dtype} {list(tensor.shape)} with strides {list(tensor.stride())}"
