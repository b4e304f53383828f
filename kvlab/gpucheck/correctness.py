"""Errors of the attention kernels against float64, over head sizes, query heads a KV head, block sizes and types.

Each case is a ragged batch in a pool whose unused slots hold NaN. The error is the norm of the difference over the norm of the
reference, and a value that is not a number never passes. Inputs are fresh in every run; the seed is in the report.

bfloat16 takes the whole grid, other types a part of it in which every two values of different axes meet: most of the time goes into
compiling, a second or two a case. On CUDA several processes share the cases out for that reason.

Shapes: T tokens, S sequences, H query heads, K KV heads, D head size.
"""

from __future__ import annotations

import itertools
import math
import multiprocessing
import os
import secrets
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from typing import NamedTuple

import torch

from kvlab.gpucheck.findings import Finding, at_most
from kvlab.gpucheck.pools import Pool, contiguous, make_pool
from kvlab.gpucheck.sizes import Sizes
from kvlab.kernels.decode_attention import decode_attention
from kvlab.kernels.interface import LayerCache
from kvlab.kernels.prefill_attention import prefill_attention
from kvlab.kernels.quantize import FP8, as_movable, dequantize, quantize_fp8, quantize_int8
from kvlab.kernels.triton_cache_write import write_kv

BOUNDS = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1e-2}
MAX_CHUNK = 40
"""New tokens of a prefill chunk in the grid; the rest of a sequence's slots is context from earlier chunks."""
NUM_KV_HEADS = 2
FP8_SCALE = 0.37
MOST_WORKERS = 14


class Case(NamedTuple):
    """Head size, query heads a KV head, block size."""

    head_dim: int
    group: int
    block_size: int


@dataclass(frozen=True)
class Task:
    """Cases that one process takes. `storage`: None: as `dtype`; else int8 or fp8, written by the cache write's kernel."""

    kernel: str
    dtype: torch.dtype
    storage: torch.dtype | None
    cases: tuple[Case, ...]
    lengths: tuple[int, ...]
    seed: int


def correctness(device: torch.device, sizes: Sizes) -> list[Finding]:
    """The worst error of each kernel and type over its cases, and the case it was found at."""
    seed = secrets.randbits(31)
    found = []
    tasks = tasks_of(sizes, seed)
    errors = _run(tasks, device)
    for kernel, dtype, storage in dict.fromkeys((task.kernel, task.dtype, task.storage) for task in tasks):
        mine = [(error, case) for task, some in zip(tasks, errors, strict=True) for error, case in zip(some, task.cases, strict=True)
                if (task.kernel, task.dtype, task.storage) == (kernel, dtype, storage)]  # fmt: skip
        worst, case = max(mine, key=lambda pair: (math.isnan(pair[0]), pair[0]))  # what is not a number is worst
        goal, ok = at_most(worst, BOUNDS[dtype], "relative to float64")
        setting = {"dtype": _name(dtype)} | ({"kv_dtype": _name(storage)} if storage else {})
        note = f"{len(mine)} cases, seed {seed}; worst at " + " ".join(f"{name}={value}" for name, value in case._asdict().items())
        found.append(Finding("correctness", kernel, worst, "", setting, None, goal, ok, note))
    return found


def tasks_of(sizes: Sizes, seed: int) -> list[Task]:
    """All cases, in pieces of a few."""
    axes = (sizes.grid_head_dims, sizes.grid_group_sizes, sizes.grid_block_sizes)
    whole = [Case(*case) for case in itertools.product(*axes)]
    kinds: list[tuple[torch.dtype, torch.dtype | None]] = [(dtype, None) for dtype in BOUNDS]
    kinds += [(torch.bfloat16, FP8), (torch.bfloat16, torch.int8)]
    tasks = []
    for kernel, (dtype, storage) in itertools.product(("decode attention", "prefill attention"), kinds):
        cases = whole if dtype == torch.bfloat16 and storage is None else pairwise(*axes)
        for first in range(0, len(cases), 8):
            tasks.append(Task(kernel, dtype, storage, tuple(cases[first : first + 8]), sizes.grid_lengths, seed))
    return tasks


def pairwise(head_dims: Sequence[int], groups: Sequence[int], block_sizes: Sequence[int]) -> list[Case]:
    """Cases in which every two values of two axes meet at least once: the two longer axes in full, the third going round."""
    axes = [head_dims, groups, block_sizes]
    short, *longer = sorted(range(3), key=lambda axis: len(axes[axis]))
    cases = []
    for (i, a), (j, b) in itertools.product(enumerate(axes[longer[0]]), enumerate(axes[longer[1]])):
        values = {longer[0]: a, longer[1]: b, short: axes[short][(i + j) % len(axes[short])]}
        cases.append(Case(values[0], values[1], values[2]))
    return cases


def _run(tasks: Sequence[Task], device: torch.device) -> list[list[float]]:
    if device.type != "cuda":
        return [errors_of(task, str(device)) for task in tasks]
    workers = max(1, min(MOST_WORKERS, len(tasks), len(os.sched_getaffinity(0)) - 2))
    with ProcessPoolExecutor(workers, multiprocessing.get_context("spawn")) as pool:
        return list(pool.map(errors_of, tasks, itertools.repeat(str(device))))


def errors_of(task: Task, device: str) -> list[float]:
    """Relative error of each case."""
    check = _decode_error if task.kernel == "decode attention" else _prefill_error
    errors = []
    for index, case in enumerate(task.cases):
        seed = task.seed + index
        pool = make_pool(list(task.lengths), case.block_size, NUM_KV_HEADS, case.head_dim, task.dtype, torch.device(device), seed,
                         poison=True)  # fmt: skip
        cache = LayerCache(pool.k_NBKD, pool.v_NBKD)
        if task.storage is not None:
            cache, pool = stored(pool, task.storage)
        errors.append(check(pool, cache, case.group * NUM_KV_HEADS, task.dtype, seed))
    return errors


def stored(pool: Pool, storage: torch.dtype) -> tuple[LayerCache, Pool]:
    """(the pool as int8 or fp8, the float64 numbers that it stands for).

    Raises:
        RuntimeError: the kernel wrote other bits than the torch reference does on a CPU, in a slot that somebody owns.
    """
    k, v = (x.flatten(0, 1) for x in (pool.k_NBKD, pool.v_NBKD))
    shape, device = pool.k_NBKD.shape, pool.k_NBKD.device
    numbers = [torch.zeros(shape, dtype=storage, device=device) for _ in range(2)]
    if storage == FP8:
        scales = [torch.full((1,), FP8_SCALE, device=device) for _ in range(2)]
    else:
        scales = [torch.zeros(shape[:3], dtype=torch.float16, device=device) for _ in range(2)]
    cache = LayerCache(numbers[0], numbers[1], scales[0], scales[1])
    write_kv(k, v, cache, torch.arange(len(k), device=device))
    owned = ~k.isnan().flatten(1).any(1)
    wide = []
    for x, got, scale in zip((k, v), numbers, scales, strict=True):
        wanted, rows = (quantize_fp8(x.cpu(), scale.cpu()), scale) if storage == FP8 else quantize_int8(x.cpu())
        wanted, rows = wanted.to(device), rows.to(device)
        same = torch.equal(as_movable(got).flatten(0, 1)[owned], as_movable(wanted)[owned])
        if not same or (storage != FP8 and not torch.equal(scale.flatten(0, 1)[owned], rows[owned])):
            raise RuntimeError(f"The cache write's kernel and its torch reference differ in {_name(storage)}: {tuple(shape)}.")
        # Rows of nobody hold NaN, or in int8 whatever a scale of NaN makes of them: nobody reads them.
        wide.append(dequantize(as_movable(got).flatten(0, 1).view(storage), rows, torch.float64).view(shape))
    return cache, Pool(wide[0], wide[1], pool.tables_SM, pool.lengths_S, pool.lengths)


def _queries(num: int, num_heads: int, pool: Pool, dtype: torch.dtype, seed: int) -> torch.Tensor:
    device = pool.k_NBKD.device
    generator = torch.Generator(device).manual_seed(seed)
    return torch.empty(num, num_heads, pool.k_NBKD.shape[3], dtype=dtype, device=device).normal_(generator=generator)


def _decode_error(pool: Pool, cache: LayerCache, num_heads: int, dtype: torch.dtype, seed: int) -> float:
    q_SHD = _queries(len(pool.lengths), num_heads, pool, dtype, seed)
    scale = q_SHD.shape[2] ** -0.5
    out = decode_attention(q_SHD, cache.k_NBKD, cache.v_NBKD, pool.tables_SM, pool.lengths_S, scale, k_scale=cache.k_scale,
                           v_scale=cache.v_scale)  # fmt: skip
    wanted = torch.cat([attended(q_SHD[seq : seq + 1], *contiguous(pool, seq), scale) for seq in range(len(pool.lengths))])
    return relative_error(out, wanted)


def _prefill_error(pool: Pool, cache: LayerCache, num_heads: int, dtype: torch.dtype, seed: int) -> float:
    chunks = [min(length, MAX_CHUNK) for length in pool.lengths]
    starts = [0, *itertools.accumulate(chunks)]
    q_THD = _queries(starts[-1], num_heads, pool, dtype, seed)
    scale = q_THD.shape[2] ** -0.5
    starts_S1 = torch.tensor(starts, dtype=torch.int32, device=q_THD.device)
    out = prefill_attention(q_THD, cache.k_NBKD, cache.v_NBKD, pool.tables_SM, starts_S1, pool.lengths_S, max(chunks), scale,
                            k_scale=cache.k_scale, v_scale=cache.v_scale)  # fmt: skip
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


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
