"""The compilations of all kernels but attention that are checked ahead of time, from their launches on tensors of the `meta` device.

Shapes are Llama-3-8B's (hidden size 4,096, 32 query and 8 KV heads of 128) and SmolLM2-135M's (576, 9 and 3 of 64).
"""

from __future__ import annotations

from typing import Any

import torch

from kvlab.kernels import triton_activation, triton_block_copy, triton_cache_write, triton_norm, triton_rotary
from kvlab.kernels.interface import LayerCache
from kvlab.kernels.launch import Launch, Variant
from kvlab.kernels.quantize import FP8
from kvlab.kernels.triton_common import FP8_CAPABILITY

NUM_TOKENS, NUM_BLOCKS, BLOCK_SIZE = 256, 1024, 16
LLAMA, SMOLLM = (4096, 14336, 32, 8, 128), (576, 1536, 9, 3, 64)
ONES = (2, 1, 1, 1, 2)
"""The least there may be: Triton makes constants of numbers that are 1."""
Sizes = tuple[int, int, int, int, int]


def small_variants(capability: tuple[int, int], every: bool = False) -> list[Variant]:
    """What a GPU of this compute capability compiles, each once. `every`: all types and both models' shapes; else bf16 and Llama's, and the
    cache write and re-rotation of each storage type; and both the least shape."""
    launches: list[Launch] = []
    for sizes in (LLAMA, SMOLLM, ONES) if every else (LLAMA, ONES):
        for dtype in (torch.bfloat16, torch.float16, torch.float32) if every else (torch.bfloat16,):
            launches += _between_products(sizes, dtype)
            launches += [_write(sizes, dtype, storage, capability) for storage in (dtype, torch.int8, FP8)]
            launches += [_rerotate(sizes, storage, capability) for storage in (dtype, torch.int8, FP8)]
    launches += _moves()
    variants: list[Variant] = []
    for launch in launches:
        if (variant := launch.variant()) not in variants:
            variants.append(variant)
    return variants


def _empty(*shape: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def _between_products(sizes: Sizes, dtype: torch.dtype) -> list[Launch]:
    hidden, inner, heads, kv_heads, head_dim = sizes
    x, weight = _empty(NUM_TOKENS, hidden, dtype=dtype), _empty(hidden, dtype=dtype)
    fused = _empty(NUM_TOKENS, heads + 2 * kv_heads, head_dim, dtype=dtype)[:, : heads + kv_heads]
    cos, sin = _empty(NUM_TOKENS, 2, 1, head_dim, dtype=dtype).unbind(1)
    gate_up = _empty(NUM_TOKENS, 2 * inner, dtype=dtype)
    return [
        triton_norm.launch(x, None, weight, torch.empty_like(x), 1e-5), triton_norm.launch(x, x, weight, torch.empty_like(x), 1e-5),
        triton_rotary.launch(fused, cos, sin, torch.empty_like(fused)),
        triton_activation.launch(gate_up, _empty(NUM_TOKENS, inner, dtype=dtype)),
    ]  # fmt: skip


def _cache(sizes: Sizes, storage: torch.dtype, capability: tuple[int, int]) -> LayerCache:
    kv_heads, head_dim = sizes[3:]
    stored = torch.uint8 if storage == FP8 and capability < FP8_CAPABILITY else storage
    pool = _empty(NUM_BLOCKS, BLOCK_SIZE, kv_heads, head_dim, dtype=stored)
    scale: Any = None
    if storage == torch.int8:
        scale = _empty(NUM_BLOCKS, BLOCK_SIZE, kv_heads, dtype=torch.float16)
    elif storage == FP8:
        scale = _empty(1, dtype=torch.float32)
    return LayerCache(pool, pool, scale, scale)


def _write(sizes: Sizes, dtype: torch.dtype, storage: torch.dtype, capability: tuple[int, int]) -> Launch:
    heads, kv_heads, head_dim = sizes[2:]
    fused = _empty(NUM_TOKENS, heads + 2 * kv_heads, head_dim, dtype=dtype)
    k, v = fused[:, heads : heads + kv_heads], fused[:, heads + kv_heads :]
    return triton_cache_write.launch(k, v, _cache(sizes, storage, capability), _empty(NUM_TOKENS, dtype=torch.int64))


def _rerotate(sizes: Sizes, storage: torch.dtype, capability: tuple[int, int]) -> Launch:
    numbers = _empty(NUM_TOKENS, dtype=torch.int64)
    table = _empty(8192, 2, 1, sizes[4], dtype=torch.bfloat16)
    return triton_rotary.rerotate_launch(_cache(sizes, storage, capability), numbers, numbers, table)


def _moves() -> list[Launch]:
    pool, ids = _empty(32, 2, NUM_BLOCKS, 16, 8, 128, dtype=torch.bfloat16), _empty(64, dtype=torch.int64)
    staging = pool[:, :, :64].contiguous()
    least, one = _empty(1, 2, 1, 1, 1, dtype=torch.float32), _empty(1, dtype=torch.int64)  # an int8 scale or two: a word
    return [triton_block_copy.launch(pool, pool, ids, ids, 64), triton_block_copy.launch(pool, staging, ids, None, 64),
            triton_block_copy.launch(staging, pool, None, ids, 64), triton_block_copy.launch(least, least, one, None, 1)]  # fmt: skip
