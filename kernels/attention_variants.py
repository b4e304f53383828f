"""The compilations of the attention kernels that are checked ahead of time, with the shapes that they are launched for.

They come from the launch functions themselves, given tensors on the `meta` device: types, constants and alignment are those of a real
launch. Each option and each head size, type and way of paging stands in at least one variant.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from kvlab.kernels.decode_attention import decode_launches
from kvlab.kernels.launch import Launch, Variant
from kvlab.kernels.prefill_attention import prefill_launch

BF16, FP16, FP32, FP8, INT8 = torch.bfloat16, torch.float16, torch.float32, torch.float8_e4m3fn, torch.int8
NUM_SEQS, LENGTH, CHUNK = 64, 8192, 2048

# (query dtype, cache dtype, head size, query heads, KV heads, block size, options)
Shape = tuple[torch.dtype, torch.dtype, int, int, int, int, dict[str, Any]]
SHAPES: tuple[Shape, ...] = (
    (BF16, BF16, 128, 32, 8, 16, {}),  # Llama-3-8B
    (BF16, BF16, 128, 32, 8, 17, {}),
    (BF16, BF16, 128, 32, 8, 128, {}),
    (BF16, BF16, 128, 32, 1, 16, {}),
    (BF16, BF16, 64, 9, 3, 16, {}),  # SmolLM2-135M
    (BF16, BF16, 80, 32, 32, 16, {}),
    (FP16, FP16, 96, 32, 8, 16, {}),
    (BF16, BF16, 256, 8, 4, 16, {"soft_cap": 50.0, "window": 4096}),  # Gemma 2
    (BF16, BF16, 256, 8, 4, 16, {}),
    (BF16, BF16, 64, 64, 8, 16, {"sink": True, "window": 128}),  # gpt-oss
    (BF16, BF16, 128, 32, 8, 16, {"window": 1024, "num_sink_tokens": 4}),
    (BF16, INT8, 128, 32, 8, 16, {"scales": "slot"}),
    (BF16, INT8, 256, 8, 4, 16, {"scales": "slot"}),
    (BF16, FP8, 128, 32, 8, 16, {"scales": "layer"}),
    (FP32, FP32, 128, 32, 8, 16, {}),
    (FP32, FP32, 64, 9, 3, 16, {}),
)


ONES_SHAPES: tuple[Shape, ...] = (
    (BF16, BF16, 128, 1, 1, 1, {"window": 1, "num_sink_tokens": 1, "sink": True, "soft_cap": 1.0}),
    (BF16, INT8, 64, 3, 1, 1, {"scales": "slot"}),
    (BF16, FP8, 64, 8, 8, 1, {"scales": "layer"}),
    (FP32, FP32, 64, 1, 1, 1, {}),
)
"""Triton makes a constant of a number that is 1: all that can be 1 together (one KV head, slot, sequence, block, split), which other code
is compiled for."""

QUICK_SHAPES = (SHAPES[0], SHAPES[9], SHAPES[11], SHAPES[15], *ONES_SHAPES[:2])
"""Enough for a check on each change: bf16, window and sink logits, int8, float32, ones."""


def shipped_variants(capability: tuple[int, int] = (9, 0), shapes: Sequence[Shape] = (*SHAPES, *ONES_SHAPES)) -> list[Variant]:
    """What is compiled on a GPU of this compute capability for these shapes: decode, its reduction, prefill; each variant once.

    Decode is compiled with masses for the first shape and where sinks are kept, and with one split where there are sink logits.
    """
    launches: list[Launch] = []
    for shape in shapes:
        options = shape[6]
        with_mass = shape == SHAPES[0] or "num_sink_tokens" in options
        ones = shape in ONES_SHAPES
        for num_splits in (1, 2) if ones else (1,) if "sink" in options else (4,):
            launches += decode_of(shape, capability, with_mass=with_mass, num_splits=num_splits, ones=ones)
        launches.append(prefill_of(shape, capability, ones=ones))
    variants: list[Variant] = []
    for launch in launches:
        variant = launch.variant()
        if variant not in variants:
            variants.append(variant)
    return variants


def decode_of(shape: Shape, capability: tuple[int, int], *, with_mass: bool, num_splits: int, ones: bool = False) -> list[Launch]:
    """Launches of decode attention for a shape, on tensors without memory. `ones`: of one sequence of one block."""
    num_seqs, num_blocks = (1, 1) if ones else (NUM_SEQS, LENGTH // shape[5])
    q, cache, options = _tensors(shape, num_seqs)
    mass = torch.empty(num_seqs, cache.shape[3], num_blocks, device="meta") if with_mass else None
    return decode_launches(
        q, cache[0], cache[1], _ints(num_seqs, num_blocks), _ints(num_seqs), q.shape[2] ** -0.5, mass_out=mass, num_splits=num_splits,
        config=None, out=torch.empty_like(q), capability=capability, sms=132, **options,
    )  # fmt: skip


def prefill_of(shape: Shape, capability: tuple[int, int], *, ones: bool = False) -> Launch:
    """Launch of prefill attention for a shape: chunks of CHUNK tokens. `ones`: one token of one sequence of one block."""
    num_seqs, num_blocks, chunk = (1, 1, 1) if ones else (4, LENGTH // shape[5], CHUNK)
    q, cache, options = _tensors(shape, num_seqs * chunk)
    return prefill_launch(
        q, cache[0], cache[1], _ints(num_seqs, num_blocks), _ints(num_seqs + 1), _ints(num_seqs), chunk, q.shape[2] ** -0.5, config=None,
        out=torch.empty_like(q), capability=capability, **options,
    )  # fmt: skip


def _tensors(shape: Shape, num_tokens: int) -> tuple[torch.Tensor, torch.Tensor, dict[str, Any]]:
    q_dtype, kv_dtype, head_dim, num_heads, num_kv_heads, block_size, given = shape
    q = torch.empty(num_tokens, num_heads, head_dim, dtype=q_dtype, device="meta")
    cache = torch.empty(2, 1024, block_size, num_kv_heads, head_dim, dtype=kv_dtype, device="meta")
    options: dict[str, Any] = {"window": None, "num_sink_tokens": 0, "sink_logits_H": None, "soft_cap": None}
    options |= {name: value for name, value in given.items() if name in options}
    if given.get("sink"):
        options["sink_logits_H"] = torch.empty(num_heads, dtype=q_dtype, device="meta")
    kind = given.get("scales", "none")
    scales = {
        "none": None,
        "layer": torch.empty(1, dtype=FP32, device="meta"),
        "slot": torch.empty(cache.shape[1:4], dtype=FP16, device="meta"),
    }[kind]
    return q, cache, {**options, "k_scale": scales, "v_scale": scales}


def _ints(*shape: int) -> torch.Tensor:
    return torch.empty(shape, dtype=torch.int32, device="meta")
