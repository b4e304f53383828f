"""Errors of the attention kernels against float64, over head sizes, query heads a KV head, block sizes and types.

Each case is a ragged batch in a pool whose unused slots hold NaN. The error is the norm of the difference over the norm of the
reference, and a value that is not a number never passes. Inputs are fresh in every run; the seed is in the report.

Shapes: T tokens, S sequences, H query heads, K KV heads, D head size.
"""

from __future__ import annotations

import itertools
import secrets
from collections.abc import Callable, Iterator

import torch

from kvlab.gpucheck.findings import Finding, at_most
from kvlab.gpucheck.pools import Pool, contiguous, make_pool
from kvlab.gpucheck.sizes import Sizes
from kvlab.kernels.decode_attention import decode_attention
from kvlab.kernels.prefill_attention import prefill_attention

BOUNDS = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1e-2}
MAX_CHUNK = 40
"""New tokens of a prefill chunk in the grid; the rest of a sequence's slots is context from earlier chunks."""


def correctness(device: torch.device, sizes: Sizes) -> list[Finding]:
    """The worst error of each kernel and type over the whole grid, and the case it was found at."""
    seed = secrets.randbits(31)
    found = []
    for kernel, check in (("decode attention", _decode_error), ("prefill attention", _prefill_error)):
        for dtype, bound in BOUNDS.items():
            worst, at, count = _worst(check, dtype, device, sizes, seed)
            goal, ok = at_most(worst, bound, "relative to float64")
            note = f"{count} cases, seed {seed}; worst at {at}"
            found.append(Finding("correctness", kernel, worst, "", {"dtype": str(dtype).removeprefix("torch.")}, None, goal, ok, note))
    return found


Check = Callable[[Pool, int, torch.dtype, int], float]


def _worst(check: Check, dtype: torch.dtype, device: torch.device, sizes: Sizes, seed: int) -> tuple[float, str, int]:
    worst, at, count = -1.0, "", 0
    for head_dim, group, block_size in _grid(sizes):
        num_kv_heads = 2
        pool = make_pool(list(sizes.grid_lengths), block_size, num_kv_heads, head_dim, dtype, device, seed + count, poison=True)
        error = check(pool, group * num_kv_heads, dtype, seed + count)
        count += 1
        if not error <= worst:  # also where it is not a number
            worst, at = error, f"head_dim={head_dim} group={group} block_size={block_size}"
    return worst, at, count


def _grid(sizes: Sizes) -> Iterator[tuple[int, int, int]]:
    """(head size, query heads a KV head, block size)."""
    return itertools.product(sizes.grid_head_dims, sizes.grid_group_sizes, sizes.grid_block_sizes)


def _queries(num: int, num_heads: int, pool: Pool, dtype: torch.dtype, seed: int) -> torch.Tensor:
    device = pool.k_NBKD.device
    generator = torch.Generator(device).manual_seed(seed)
    return torch.empty(num, num_heads, pool.k_NBKD.shape[3], dtype=dtype, device=device).normal_(generator=generator)


def _decode_error(pool: Pool, num_heads: int, dtype: torch.dtype, seed: int) -> float:
    q_SHD = _queries(len(pool.lengths), num_heads, pool, dtype, seed)
    scale = q_SHD.shape[2] ** -0.5
    out = decode_attention(q_SHD, pool.k_NBKD, pool.v_NBKD, pool.tables_SM, pool.lengths_S, scale)
    wanted = torch.cat([attended(q_SHD[seq : seq + 1], *contiguous(pool, seq), scale) for seq in range(len(pool.lengths))])
    return relative_error(out, wanted)


def _prefill_error(pool: Pool, num_heads: int, dtype: torch.dtype, seed: int) -> float:
    chunks = [min(length, MAX_CHUNK) for length in pool.lengths]
    starts = [0, *itertools.accumulate(chunks)]
    q_THD = _queries(starts[-1], num_heads, pool, dtype, seed)
    scale = q_THD.shape[2] ** -0.5
    starts_S1 = torch.tensor(starts, dtype=torch.int32, device=q_THD.device)
    out = prefill_attention(q_THD, pool.k_NBKD, pool.v_NBKD, pool.tables_SM, starts_S1, pool.lengths_S, max(chunks), scale)
    wanted = [attended(q_THD[a:b], *contiguous(pool, seq), scale) for seq, (a, b) in enumerate(itertools.pairwise(starts))]
    return relative_error(out, torch.cat(wanted))


def attended(q_THD: torch.Tensor, k_LKD: torch.Tensor, v_LKD: torch.Tensor, scale: float) -> torch.Tensor:
    """Causal attention of the last T of L slots in float64, [T, H, D]."""
    num_new, num_heads = q_THD.shape[:2]
    length, num_kv_heads = k_LKD.shape[:2]
    q, k, v = (x.double().transpose(0, 1) for x in (q_THD, k_LKD, v_LKD))
    k, v = (x.repeat_interleave(num_heads // num_kv_heads, dim=0) for x in (k, v))
    scores_HTL = q @ k.transpose(1, 2) * scale
    slots = torch.arange(length, device=q.device)
    hidden_TL = slots[None, :] > slots[length - num_new :, None]
    return (scores_HTL.masked_fill(hidden_TL, -torch.inf).softmax(-1) @ v).transpose(0, 1)


def relative_error(out: torch.Tensor, wanted: torch.Tensor) -> float:
    """Norm of the difference over the norm of what is wanted; NaN where `out` holds one."""
    return float((out.double() - wanted).norm() / wanted.norm())
