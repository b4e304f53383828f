"""Triton: rotary position embedding of new queries and keys, and re-rotation of keys that lie in the cache.

The references are kvlab.kernels.rotary and, below, `rerotate_keys_reference`.
Shapes: T tokens, H heads (of queries and keys together), D head size, P positions of the rotary table, N blocks, B block size, K KV heads,
C keys moved.
"""

from __future__ import annotations

import torch
import triton.language as tl

from kvlab.kernels.interface import LayerCache
from kvlab.kernels.launch import Launch, LaunchConfig
from kvlab.kernels.quantize import FP8, as_movable, dequantize, quantize_fp8, quantize_int8
from kvlab.kernels.triton_cache_write import pack
from kvlab.kernels.triton_common import Arg, cast, dequantise, fp8_readable, jit, jit_for_any, next_power_of_2, require_device
from kvlab.kernels.work import Work

# ------------------------------------------------------------------ new queries and keys


@jit
def rotary_kernel(
    x_ptr: Arg, cos_ptr: Arg, sin_ptr: Arg, out_ptr: Arg, x_stride_t: Arg, x_stride_h: Arg, cos_stride: Arg, sin_stride: Arg,
    num_heads: Arg,
    HEAD_DIM: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK_HALF: tl.constexpr,
) -> None:  # fmt: skip
    """One program: BLOCK_H heads of a token. out[first] = x1 cos1 + x2 sin1, out[second] = x2 cos2 + x1 sin2."""
    token = tl.program_id(0).to(tl.int64)
    heads = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)
    half = tl.arange(0, BLOCK_HALF)
    HALF: tl.constexpr = HEAD_DIM // 2
    in_half = half < HALF
    mask = (heads < num_heads)[:, None] & in_half[None, :]
    place = x_ptr + token * x_stride_t + heads[:, None] * x_stride_h + half[None, :]
    first = tl.load(place, mask=mask, other=0.0).to(tl.float32)
    second = tl.load(place + HALF, mask=mask, other=0.0).to(tl.float32)
    cos, sin = cos_ptr + token * cos_stride + half, sin_ptr + token * sin_stride + half
    cos_first = tl.load(cos, mask=in_half, other=0.0).to(tl.float32)[None, :]
    cos_second = tl.load(cos + HALF, mask=in_half, other=0.0).to(tl.float32)[None, :]
    sin_first = tl.load(sin, mask=in_half, other=0.0).to(tl.float32)[None, :]
    sin_second = tl.load(sin + HALF, mask=in_half, other=0.0).to(tl.float32)[None, :]
    kind: tl.constexpr = out_ptr.dtype.element_ty
    out = out_ptr + (token * num_heads + heads[:, None]) * HEAD_DIM + half[None, :]
    tl.store(out, cast(first * cos_first + second * sin_first, kind), mask=mask)
    tl.store(out + HALF, cast(second * cos_second + first * sin_second, kind), mask=mask)


def heads_per_program(num_heads: int, head_dim: int) -> int:
    """Heads that a program takes: about 2,048 numbers."""
    return min(next_power_of_2(num_heads), max(1, 2048 // next_power_of_2(head_dim)))


def rotary(heads_THD: torch.Tensor, cos_T1D: torch.Tensor, sin_T1D: torch.Tensor) -> torch.Tensor:
    """See kvlab.kernels.rotary.rotary; computed in float32 and rounded once. Tokens and heads of `heads_THD` may be strided. Returns a
    contiguous [T, H, D].

    Raises:
        ValueError: an odd head size, float64, or tensors where Triton can't run.
    """
    out_THD = torch.empty(heads_THD.shape, dtype=heads_THD.dtype, device=heads_THD.device)
    launch(heads_THD, cos_T1D, sin_T1D, out_THD).run()
    return out_THD


def launch(heads_THD: torch.Tensor, cos_T1D: torch.Tensor, sin_T1D: torch.Tensor, out_THD: torch.Tensor) -> Launch:
    """The launch of `rotary`."""
    require_device(heads_THD)
    num_tokens, num_heads, head_dim = heads_THD.shape
    if head_dim % 2 or heads_THD.dtype.itemsize > 4 or heads_THD.stride(2) != 1:
        raise ValueError(f"rotary takes heads of an even number of consecutive numbers of at most 4 bytes, not {head_dim} of "
                         f"{heads_THD.dtype}")  # fmt: skip
    block_h = heads_per_program(num_heads, head_dim)
    args = {"x_ptr": heads_THD, "cos_ptr": cos_T1D, "sin_ptr": sin_T1D, "out_ptr": out_THD, "x_stride_t": heads_THD.stride(0),
            "x_stride_h": heads_THD.stride(1), "cos_stride": cos_T1D.stride(0), "sin_stride": sin_T1D.stride(0),
            "num_heads": num_heads}  # fmt: skip
    constexprs = {"HEAD_DIM": head_dim, "BLOCK_H": block_h, "BLOCK_HALF": next_power_of_2(head_dim // 2)}
    return Launch(rotary_kernel, (num_tokens, -(-num_heads // block_h)), args, constexprs, LaunchConfig(16, 4, 1))


def work(num_tokens: int, num_heads: int, head_dim: int, itemsize: int) -> Work:
    """Heads read and written, cosines and sines read once a token."""
    return Work(2 * num_tokens * (num_heads + 1) * head_dim * itemsize, 3 * num_tokens * num_heads * head_dim)


# ------------------------------------------------------------------ keys in the cache
#
# A key at position p is R(p) k. Turned by the difference it is R(p' - p) R(p) k = R(p') k: a compressed or streaming cache (StreamingLLM
# numbers positions within the cache) moves keys without knowing k. cos(p' - p) comes from the table at |p' - p|; sin changes its sign.


@jit_for_any("slots_ptr", "moves_ptr")
def rerotate_kernel(
    k_ptr: Arg, scale_ptr: Arg, table_ptr: Arg, slots_ptr: Arg, moves_ptr: Arg, num_kv_heads: Arg, table_stride_p: Arg, table_stride_x: Arg,
    HEAD_DIM: tl.constexpr, BLOCK_HALF: tl.constexpr, SCALES: tl.constexpr, FP8_BITS: tl.constexpr,
) -> None:  # fmt: skip
    """One program: one KV head of one key. SCALES: 0 none, 1 the layer's, 2 the slot's own (which is found anew)."""
    key, head = tl.program_id(0), tl.program_id(1)
    slot = tl.load(slots_ptr + key)
    if slot >= 0:
        move = tl.load(moves_ptr + key)
        half = tl.arange(0, BLOCK_HALF)
        HALF: tl.constexpr = HEAD_DIM // 2
        mask = half < HALF
        row = slot.to(tl.int64) * num_kv_heads + head
        place = k_ptr + row * HEAD_DIM + half
        first = dequantise(tl.load(place, mask=mask, other=0.0), tl.float32)
        second = dequantise(tl.load(place + HALF, mask=mask, other=0.0), tl.float32)
        scale = 1.0
        if SCALES == 1:
            scale = tl.load(scale_ptr).to(tl.float32)
        elif SCALES == 2:
            scale = tl.load(scale_ptr + row).to(tl.float32)
        first, second = first * scale, second * scale
        angle = table_ptr + tl.abs(move).to(tl.int64) * table_stride_p + half
        sign = tl.where(move < 0, -1.0, 1.0)
        cos = tl.load(angle, mask=mask, other=0.0).to(tl.float32)
        sin = tl.load(angle + table_stride_x + HALF, mask=mask, other=0.0).to(tl.float32) * sign
        new_first, new_second = first * cos - second * sin, second * cos + first * sin
        if SCALES == 2:
            most = tl.maximum(tl.max(tl.abs(new_first), axis=0), tl.max(tl.abs(new_second), axis=0))
            missing = tl.sum((new_first != new_first).to(tl.int32) + (new_second != new_second).to(tl.int32), axis=0)
            stored_scale = tl.minimum(most / 127.0, 65504.0).to(tl.float16)
            stored_scale = tl.where(missing > 0, float("nan"), stored_scale.to(tl.float32)).to(tl.float16)
            tl.store(scale_ptr + row, stored_scale)
            scale = stored_scale.to(tl.float32)
        tl.store(place, pack(new_first, scale, k_ptr.dtype.element_ty, FP8_BITS), mask=mask)
        tl.store(place + HALF, pack(new_second, scale, k_ptr.dtype.element_ty, FP8_BITS), mask=mask)


def rerotate_keys(cache: LayerCache, slots_C: torch.Tensor, moves_C: torch.Tensor, rotary_P21D: torch.Tensor) -> None:
    """Turn stored keys by a difference of positions, in place.

    Args:
        slots_C: int64 pool slots, distinct; -1 is skipped. moves_C: int64, new position - old position, |move| < P.
        rotary_P21D: the model's table (kvlab.model.rope.rotary_table).

    Rounding adds up: a key moved m times is rounded m + 1 times to its storage type.

    Raises:
        ValueError: float64 storage or tensors where Triton can't run.
    """
    rerotate_launch(cache, slots_C, moves_C, rotary_P21D).run()


def rerotate_launch(cache: LayerCache, slots_C: torch.Tensor, moves_C: torch.Tensor, rotary_P21D: torch.Tensor) -> Launch:
    """The launch of `rerotate_keys`."""
    require_device(cache.k_NBKD)
    if cache.k_NBKD.dtype == torch.float64:
        raise ValueError("rerotate_keys has no float64: use rerotate_keys_reference")
    num_kv_heads, head_dim = cache.k_NBKD.shape[2:]
    stored = fp8_readable(cache.k_NBKD)
    scale = cache.k_scale
    args = {"k_ptr": stored, "scale_ptr": stored if scale is None else scale, "table_ptr": rotary_P21D, "slots_ptr": slots_C,
            "moves_ptr": moves_C, "num_kv_heads": num_kv_heads, "table_stride_p": rotary_P21D.stride(0),
            "table_stride_x": rotary_P21D.stride(1)}  # fmt: skip
    constexprs = {"HEAD_DIM": head_dim, "BLOCK_HALF": next_power_of_2(head_dim // 2), "FP8_BITS": stored.dtype == torch.uint8,
                  "SCALES": 0 if scale is None else 1 if scale.dim() == 1 else 2}  # fmt: skip
    return Launch(rerotate_kernel, (len(slots_C), num_kv_heads), args, constexprs, LaunchConfig(16, 1, 1))


def rerotate_keys_reference(cache: LayerCache, slots_C: torch.Tensor, moves_C: torch.Tensor, rotary_P21D: torch.Tensor) -> None:
    """`rerotate_keys` on torch operations: any storage type, any device."""
    kept = slots_C >= 0
    slots, moves = slots_C[kept], moves_C[kept]
    stored = as_movable(cache.k_NBKD).flatten(0, 1)
    scale = cache.k_scale if cache.k_scale is None or cache.k_scale.dim() == 1 else cache.k_scale.flatten(0, 1)[slots]
    wide = torch.float64 if cache.k_NBKD.dtype == torch.float64 else torch.float32
    keys = dequantize(stored[slots].view(cache.k_NBKD.dtype), scale, wide)
    cos, sin = rotary_P21D[moves.abs()].to(wide).unbind(1)
    sin = sin * torch.where(moves < 0, -1.0, 1.0).to(wide)[:, None, None]
    first, second = keys.chunk(2, dim=-1)
    turned = keys * cos + torch.cat([second, first], dim=-1) * sin
    if cache.k_scale is not None and cache.k_scale.dim() > 1:
        turned, new_scale = quantize_int8(turned)
        cache.k_scale.flatten(0, 1)[slots] = new_scale
    elif cache.k_NBKD.dtype == FP8:
        turned = quantize_fp8(turned, cache.k_scale)
    stored[slots] = as_movable(turned.to(cache.k_NBKD.dtype))
