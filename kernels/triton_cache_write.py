"""Triton: writing new keys and values into their slots, converted to what the cache stores. The reference is kvlab.kernels.cache_write.

int8 and fp8 follow kvlab.kernels.quantize number for number (the division is rounded correctly, half a step goes to the even neighbour).
Shapes: T tokens, K KV heads, D head size, N blocks, B block size.
"""

from __future__ import annotations

import torch
import triton.language as tl

from kvlab.kernels.interface import LayerCache
from kvlab.kernels.launch import Launch, LaunchConfig
from kvlab.kernels.quantize import QUANTIZED
from kvlab.kernels.triton_common import INTERPRET, Arg, cast, fp8_readable, jit, jit_for_any, next_power_of_2, require_device
from kvlab.kernels.work import Work


@jit
def divide(x: Arg, y: Arg) -> Arg:
    """x / y in float32, correctly rounded (a plain `/` compiles to an approximation)."""
    if INTERPRET:
        return x / y
    else:
        return tl.math.div_rn(x, y)


@jit
def fp8_bits(x: Arg) -> Arg:
    """float32 -> the bits of float8 e4m3, nearest even, saturating; for GPUs without the type. NaN is 0x7F."""
    bits = x.to(tl.uint32, bitcast=True)
    sign = (bits >> 24) & 0x80
    magnitude = tl.minimum(tl.abs(x), 448.0)
    # Normal numbers: round the significand to 3 bits, exponent bias 127 -> 7. Below 2^-6: whole multiples of 2^-9.
    wide = magnitude.to(tl.uint32, bitcast=True)
    rounded = wide + 0x7FFFF + ((wide >> 20) & 1)
    normal = (rounded >> 20) - (120 << 3)
    shifted = magnitude * 512.0 + 12582912.0  # 1.5 * 2^23: the sum's last bit is worth 1
    subnormal = shifted.to(tl.uint32, bitcast=True) - 0x4B400000
    number = tl.where(magnitude < 0.015625, subnormal, normal)
    return tl.where(x == x, number | sign, 0x7F).to(tl.uint8)


@jit
def pack(x: Arg, scale: Arg, kind: tl.constexpr, FP8_BITS: tl.constexpr) -> Arg:
    """float32 numbers as the cache's type, divided by `scale` where that is int8 or fp8."""
    if kind == tl.int8:
        steps = divide(x, tl.where(scale == 0, 1.0, scale))
        steps = tl.where(steps == steps, tl.minimum(tl.maximum(steps, -127.0), 127.0), 0.0)
        return ((steps + 12582912.0) - 12582912.0).to(tl.int8)  # adding 1.5 * 2^23 rounds to whole numbers, half to even
    elif FP8_BITS:
        return fp8_bits(divide(x, scale))
    elif kind == tl.float8e4nv:
        value = divide(x, scale)
        if INTERPRET:  # whose own conversion makes 384 of NaN
            return fp8_bits(value).to(tl.float8e4nv, bitcast=True)
        # minimum and maximum drop NaN.
        clamped = tl.where(value == value, tl.minimum(tl.maximum(value, -448.0), 448.0), value)
        return clamped.to(tl.float8e4nv)
    else:
        return cast(x, kind)


@jit_for_any("slots_ptr")
def cache_write_kernel(
    k_ptr: Arg, v_ptr: Arg, k_cache_ptr: Arg, v_cache_ptr: Arg, k_scale_ptr: Arg, v_scale_ptr: Arg, slots_ptr: Arg,
    k_stride_t: Arg, k_stride_h: Arg, v_stride_t: Arg, v_stride_h: Arg, num_kv_heads: Arg,
    HEAD_DIM: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_D: tl.constexpr, SCALES: tl.constexpr, FP8_BITS: tl.constexpr,
) -> None:  # fmt: skip
    """One program: K (axis 1 at 0) or V (at 1) of a token, BLOCK_K heads at a time. SCALES: 0 none, 1 the layer's, 2 the slot's own."""
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots_ptr + token).to(tl.int64)
    if slot >= 0:
        if tl.program_id(1) == 0:
            _write(k_ptr + token * k_stride_t, k_stride_h, k_cache_ptr, k_scale_ptr, slot, num_kv_heads, HEAD_DIM, BLOCK_K, BLOCK_D, SCALES,
                   FP8_BITS)  # fmt: skip
        else:
            _write(v_ptr + token * v_stride_t, v_stride_h, v_cache_ptr, v_scale_ptr, slot, num_kv_heads, HEAD_DIM, BLOCK_K, BLOCK_D, SCALES,
                   FP8_BITS)  # fmt: skip


@jit
def _write(
    x_ptr: Arg, head_stride: Arg, cache_ptr: Arg, scale_ptr: Arg, slot: Arg, num_kv_heads: Arg,
    HEAD_DIM: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_D: tl.constexpr, SCALES: tl.constexpr, FP8_BITS: tl.constexpr,
) -> None:  # fmt: skip
    columns = tl.arange(0, BLOCK_D)
    for start in range(0, num_kv_heads, BLOCK_K):
        heads = start + tl.arange(0, BLOCK_K)
        mask = (heads < num_kv_heads)[:, None] & (columns < HEAD_DIM)[None, :]
        x = tl.load(x_ptr + heads[:, None] * head_stride + columns[None, :], mask=mask, other=0.0)
        rows = slot * num_kv_heads + heads
        out = cache_ptr + rows[:, None] * HEAD_DIM + columns[None, :]
        if SCALES == 2:
            wide = x.to(tl.float32)
            most = tl.max(tl.abs(wide), axis=1)
            missing = tl.sum((wide != wide).to(tl.int32), axis=1)
            scale = tl.minimum(divide(most, 127.0), 65504.0).to(tl.float16)
            scale = tl.where(missing > 0, float("nan"), scale.to(tl.float32)).to(tl.float16)
            tl.store(scale_ptr + rows, scale, mask=heads < num_kv_heads)
            tl.store(out, pack(wide, scale.to(tl.float32)[:, None], cache_ptr.dtype.element_ty, FP8_BITS), mask=mask)
        elif SCALES == 1:
            scale = tl.load(scale_ptr).to(tl.float32)
            tl.store(out, pack(x.to(tl.float32), scale, cache_ptr.dtype.element_ty, FP8_BITS), mask=mask)
        elif x.dtype == cache_ptr.dtype.element_ty:
            tl.store(out, x, mask=mask)
        else:
            tl.store(out, pack(x.to(tl.float32), 1.0, cache_ptr.dtype.element_ty, FP8_BITS), mask=mask)


def heads_per_pass(num_kv_heads: int, head_dim: int) -> int:
    """KV heads that a program takes at a time: about 2,048 numbers."""
    return min(next_power_of_2(num_kv_heads), max(1, 2048 // next_power_of_2(head_dim)))


def write_kv(k_TKD: torch.Tensor, v_TKD: torch.Tensor, cache: LayerCache, slot_mapping_T: torch.Tensor) -> None:
    """Write each token's key and value at its slot; -1 is skipped. See kvlab.kernels.cache_write.write_kv.

    Tokens and heads of K and V may be strided (views into a fused projection).

    Raises:
        ValueError: float64, a cache that isn't contiguous, or tensors where Triton can't run.
    """
    launch(k_TKD, v_TKD, cache, slot_mapping_T).run()


def launch(k_TKD: torch.Tensor, v_TKD: torch.Tensor, cache: LayerCache, slot_mapping_T: torch.Tensor) -> Launch:
    """The launch of `write_kv`."""
    require_device(k_TKD)
    num_tokens, num_kv_heads, head_dim = k_TKD.shape
    k_cache, v_cache = fp8_readable(cache.k_NBKD), fp8_readable(cache.v_NBKD)
    is_packed = k_TKD.stride(2) == v_TKD.stride(2) == 1 and k_cache.is_contiguous() and v_cache.is_contiguous()
    if k_TKD.dtype.itemsize > 4 or not is_packed:
        raise ValueError("write_kv takes heads of consecutive numbers of at most 4 bytes, and contiguous caches")
    k_scale, v_scale, scales = write_scales(cache)
    args = {"k_ptr": k_TKD, "v_ptr": v_TKD, "k_cache_ptr": k_cache, "v_cache_ptr": v_cache, "k_scale_ptr": k_scale, "v_scale_ptr": v_scale,
            "slots_ptr": slot_mapping_T, "k_stride_t": k_TKD.stride(0), "k_stride_h": k_TKD.stride(1), "v_stride_t": v_TKD.stride(0),
            "v_stride_h": v_TKD.stride(1), "num_kv_heads": num_kv_heads}  # fmt: skip
    constexprs = {"HEAD_DIM": head_dim, "BLOCK_K": heads_per_pass(num_kv_heads, head_dim), "BLOCK_D": next_power_of_2(head_dim),
                  "SCALES": scales, "FP8_BITS": k_cache.dtype == torch.uint8}  # fmt: skip
    return Launch(cache_write_kernel, (num_tokens, 2), args, constexprs, LaunchConfig(16, 4, 1))


def write_scales(cache: LayerCache) -> tuple[torch.Tensor, torch.Tensor, int]:
    """(K's, V's, SCALES of the kernel)."""
    if cache.k_scale is None or cache.v_scale is None:
        return cache.k_NBKD, cache.k_NBKD, 0  # not read
    return cache.k_scale, cache.v_scale, 1 if cache.k_scale.dim() == 1 else 2


def work(num_tokens: int, num_kv_heads: int, head_dim: int, itemsize: int, storage: torch.dtype) -> Work:
    """K and V read and written, slots read, int8's scales written."""
    numbers = 2 * num_tokens * num_kv_heads * head_dim
    scales = 2 * num_tokens * num_kv_heads * 2 if storage == torch.int8 else 0
    return Work(numbers * (itemsize + storage.itemsize) + scales + 8 * num_tokens, (3 if storage in QUANTIZED else 0) * numbers)
