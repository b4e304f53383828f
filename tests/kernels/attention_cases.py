"""Random paged caches for the attention kernels' tests: scattered blocks, everything unused poisoned, tables with garbage at their ends."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any

import torch

DEVICE = os.environ.get("KVLAB_TEST_DEVICE", "cpu")
HEAD_DIMS = (64, 80, 96, 128, 256)
GROUPS = (1, 3, 5, 8, 32)
BLOCK_SIZES = (1, 3, 8, 16, 17, 32, 256, 544)
DTYPES = (torch.float32, torch.float16, torch.bfloat16)
TOLERANCE = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1e-2}
GARBAGE = 2**30


@dataclass
class Paged:
    """A paged cache of sequences with the given slots (the most over KV heads)."""

    k_NBKD: torch.Tensor
    v_NBKD: torch.Tensor
    tables_SM: torch.Tensor
    k_scale: torch.Tensor | None
    v_scale: torch.Tensor | None


def make_paged(
    lengths: list[int], block_size: int, num_kv_heads: int, head_dim: int, dtype: torch.dtype, storage: str, gen: torch.Generator
) -> Paged:
    """`storage`: "same" (as `dtype`), "int8" (scales per slot and head), "fp8" (one scale), "fp8_slots", "fp8_plain" or "bits" (fp8 as
    bytes, one scale)."""
    width = max(-(-length // block_size) for length in lengths) + 1
    num_blocks = len(lengths) * width + 2
    tables = torch.randperm(num_blocks, generator=gen)[: len(lengths) * width].view(len(lengths), width).to(torch.int32)
    used = torch.zeros(num_blocks, block_size, dtype=torch.bool)
    for row, length in zip(tables, lengths, strict=True):
        for slot in range(length):
            used[row[slot // block_size], slot % block_size] = True
        row[-(-length // block_size) :] = GARBAGE
    pools, scales = [], []
    for _ in range(2):
        numbers = torch.randn(num_blocks, block_size, num_kv_heads, head_dim, generator=gen)
        pool, scale = _store(numbers, dtype, storage, used, gen)
        pools.append(pool.to(DEVICE))
        scales.append(None if scale is None else scale.to(DEVICE))
    return Paged(pools[0], pools[1], tables.to(DEVICE), scales[0], scales[1])


def _store(
    numbers: torch.Tensor, dtype: torch.dtype, storage: str, used: torch.Tensor, gen: torch.Generator
) -> tuple[torch.Tensor, torch.Tensor | None]:
    if storage == "same":
        pool = numbers.to(dtype)
        pool[~used] = float("nan")
        return pool, None
    if storage == "int8":
        scale = numbers.abs().amax(-1) / 127
        pool = (numbers / scale[..., None]).round().to(torch.int8)
        scale = scale.half()
        scale[~used] = float("nan")
        return pool, scale
    bits = numbers.to(torch.float8_e4m3fn).view(torch.uint8)
    bits[~used] = 0x7F  # NaN
    scale = None
    if storage == "fp8_slots":
        scale = torch.rand(numbers.shape[:3], generator=gen) + 0.5
        scale[~used] = float("nan")
    elif storage != "fp8_plain":
        scale = torch.rand(1, generator=gen) + 0.5
    return bits if storage == "bits" else bits.view(torch.float8_e4m3fn), scale


def on_host(options: dict[str, Any]) -> dict[str, Any]:
    """For a reference: tensors among them on the CPU."""
    return {name: value.cpu() if isinstance(value, torch.Tensor) else value for name, value in options.items()}


def worst_row(out: torch.Tensor, expected: torch.Tensor) -> float:
    """The largest relative error of a row [D] in norm; NaN if any is NaN. A row that should be 0 must be."""
    error = (out.double().cpu() - expected.cpu()).norm(dim=-1)
    size = expected.cpu().norm(dim=-1)
    relative = torch.where(size > 0, error / size.clamp_min(1e-300), torch.where(error > 0, float("inf"), 0.0))
    return float("nan") if bool(out.isnan().any()) else float(relative.max())
