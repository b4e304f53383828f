"""The torch backend against a plain float64 reference, and what must not matter: block size, placement, stale values."""

from __future__ import annotations

import dataclasses
import math
from itertools import pairwise

import pytest
import torch
from model_support import metadata

from kvlab.kernels.interface import AttentionMetadata, LayerCache
from kvlab.kernels.torch_backend import TorchBackend

BACKEND = TorchBackend()
HEADS = [(4, 4, 64), (3, 1, 80), (10, 2, 96), (8, 1, 128), (32, 1, 256), (9, 3, 64), (2, 2, 6)]
BATCHES = {
    "decodes": ([1, 5, 17, 33, 64], [1, 1, 1, 1, 1]),
    "equal decodes": ([16, 16, 16], [1, 1, 1]),
    "very ragged decodes": ([1, 1, 2, 3, 160, 3, 2, 161, 40], [1] * 9),
    "prompts": ([7, 16, 33], [7, 16, 33]),
    "chunks": ([20, 33, 50], [4, 16, 17]),
    "mixed": ([1, 30, 16, 5, 40], [1, 1, 16, 2, 9]),
    "one token": ([1], [1]),
}


def plain_attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, window: int | None, scale: float,
                    num_sinks: int = 0) -> torch.Tensor:  # fmt: skip
    """[Q, H, D] over [L, K, D], query i at slot L - Q + i; loops and float64."""
    out = torch.zeros_like(q, dtype=torch.float64)
    for i in range(q.shape[0]):
        last = k.shape[0] - q.shape[0] + i
        seen = [slot for slot in range(last + 1) if window is None or slot > last - window or slot < num_sinks]
        for head in range(q.shape[1]):
            kv_head = head // (q.shape[1] // k.shape[1])
            scores = k[seen, kv_head].double() @ q[i, head].double() * scale
            out[i, head] = torch.softmax(scores, 0) @ v[seen, kv_head].double()
    return out


def make_batch(contexts: list[int], queries: list[int], block_size: int, seed: int,
               window: int | None = None) -> tuple[AttentionMetadata, list[list[int]], int]:  # fmt: skip
    """Metadata over scattered blocks, the slots of every sequence, and the number of blocks (some unused)."""
    counts = [math.ceil(length / block_size) for length in contexts]
    num_blocks = sum(counts) + 3
    order = torch.randperm(num_blocks, generator=torch.Generator().manual_seed(seed)).tolist()
    bounds = [0, *torch.tensor(counts).cumsum(0).tolist()]
    tables = [order[start:end] for start, end in pairwise(bounds)]
    slots = [[table[i // block_size] * block_size + i % block_size for i in range(n)] for table, n in zip(tables, contexts, strict=True)]
    new = [slot for row, n in zip(slots, queries, strict=True) for slot in row[-n:]]
    return metadata(new, tables, contexts, queries, block_size, window), slots, num_blocks


def run(
    contexts: list[int], queries: list[int], heads: tuple[int, int, int], block_size: int, *, window: int | None = None, num_sinks: int = 0,
    dtype: torch.dtype = torch.float64, kv_dtype: torch.dtype | None = None, seed: int = 0,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """(result, reference) with every slot that belongs to nobody poisoned by NaN. Contents do not depend on block size or seed."""
    num_heads, num_kv_heads, head_dim = heads
    meta, slots, num_blocks = make_batch(contexts, queries, block_size, seed, window)
    meta = dataclasses.replace(meta, num_sink_tokens=num_sinks)
    generator = torch.Generator().manual_seed(1)
    kv_dtype = kv_dtype or dtype
    k_cache = torch.full((num_blocks, block_size, num_kv_heads, head_dim), math.nan, dtype=kv_dtype)
    v_cache = k_cache.clone()
    keys = [torch.randn(n, num_kv_heads, head_dim, dtype=torch.float64, generator=generator).to(dtype) for n in contexts]
    values = [torch.randn(n, num_kv_heads, head_dim, dtype=torch.float64, generator=generator).to(dtype) for n in contexts]
    for row, key, value, n in zip(slots, keys, values, queries, strict=True):
        k_cache.flatten(0, 1)[row[:-n]], v_cache.flatten(0, 1)[row[:-n]] = key[:-n].to(kv_dtype), value[:-n].to(kv_dtype)
    q = torch.randn(sum(queries), num_heads, head_dim, dtype=torch.float64, generator=generator).to(dtype)
    BACKEND.write_kv(torch.cat([k[-n:] for k, n in zip(keys, queries, strict=True)]),
                     torch.cat([v[-n:] for v, n in zip(values, queries, strict=True)]), LayerCache(k_cache, v_cache), meta)  # fmt: skip
    result = BACKEND.attention(q, LayerCache(k_cache, v_cache), meta, head_dim**-0.5)
    parts = q.split(queries)
    expected = [plain_attention(part, k.to(kv_dtype), v.to(kv_dtype), window, head_dim**-0.5, num_sinks)
                for part, k, v in zip(parts, keys, values, strict=True)]  # fmt: skip
    return result, torch.cat(expected)


@pytest.mark.parametrize("batch", BATCHES)
@pytest.mark.parametrize("block_size", [1, 3, 16, 17])
@pytest.mark.parametrize(("window", "num_sinks"), [(None, 0), (1, 0), (5, 0), (1, 1), (5, 3), (9, 20)])
def test_equals_the_reference(batch: str, block_size: int, window: int | None, num_sinks: int) -> None:
    result, expected = run(*BATCHES[batch], (6, 2, 16), block_size, window=window, num_sinks=num_sinks)
    torch.testing.assert_close(result, expected, rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.parametrize("block_size", [8, 32, 256])
def test_any_head_size_and_ratio(heads: tuple[int, int, int], block_size: int) -> None:
    result, expected = run(*BATCHES["mixed"], heads, block_size)
    torch.testing.assert_close(result, expected, rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize(("dtype", "kv_dtype", "atol"), [
    (torch.float32, torch.float32, 2e-6), (torch.float32, torch.float16, 2e-6), (torch.float32, torch.bfloat16, 2e-6),
    (torch.float16, torch.float16, 2e-3), (torch.bfloat16, torch.bfloat16, 1.6e-2), (torch.float64, torch.float32, 1e-12),
])  # fmt: skip
def test_storage_dtypes(dtype: torch.dtype, kv_dtype: torch.dtype, atol: float) -> None:
    """What is read is what storage kept: new tokens are rounded as much as old ones."""
    for batch in ("mixed", "decodes", "chunks"):
        result, expected = run(*BATCHES[batch], (6, 2, 32), 16, dtype=dtype, kv_dtype=kv_dtype)
        assert result.dtype == dtype
        torch.testing.assert_close(result.double(), expected, rtol=0, atol=atol)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("window", [None, 9])
def test_block_size_and_placement_change_no_bit(dtype: torch.dtype, window: int | None) -> None:
    for batch in BATCHES.values():
        first, _ = run(*batch, (9, 3, 64), 16, dtype=dtype, window=window)
        for block_size, seed in ((1, 3), (3, 4), (16, 5), (17, 6), (256, 7)):
            other, _ = run(*batch, (9, 3, 64), block_size, dtype=dtype, window=window, seed=seed)
            assert torch.equal(first, other), (batch, block_size)


def test_tokens_without_a_slot_are_not_written() -> None:
    k_cache = torch.zeros(3, 4, 2, 5)
    v_cache = torch.zeros(3, 4, 2, 5)
    new = torch.arange(1.0, 31.0).view(3, 2, 5)
    meta = metadata([9, -1, 2], [[2], [0], [0]], [2, 1, 3], [1, 1, 1], 4)
    BACKEND.write_kv(new, -new, LayerCache(k_cache, v_cache), meta)
    assert k_cache.view(12, 2, 5).abs().amax(dim=(1, 2)).nonzero().flatten().tolist() == [2, 9]
    assert torch.equal(k_cache[2, 1], new[0])
    assert torch.equal(v_cache[0, 2], -new[2])


def test_copies_read_all_sources_first() -> None:
    cache = torch.arange(2 * 2 * 4 * 3 * 1 * 2, dtype=torch.float32).view(2, 2, 4, 3, 1, 2)
    before = cache.clone()
    BACKEND.copy_blocks(cache, [(0, 1), (1, 2), (2, 0)])
    for source, destination in ((0, 1), (1, 2), (2, 0), (3, 3)):
        assert torch.equal(cache[:, :, destination], before[:, :, source])
    BACKEND.copy_blocks(cache, [])
    assert torch.equal(cache[:, :, 3], before[:, :, 3])


def test_gather_and_scatter_are_inverse() -> None:
    cache = torch.randn(3, 2, 5, 4, 2, 6, generator=torch.Generator().manual_seed(0))
    blocks = BACKEND.gather_blocks(cache, [4, 1])
    assert blocks.shape == (3, 2, 2, 4, 2, 6)
    assert torch.equal(blocks[:, :, 0], cache[:, :, 4])
    target = torch.zeros_like(cache)
    BACKEND.scatter_blocks(target, [0, 3], blocks)
    assert torch.equal(target[:, :, 3], cache[:, :, 1])
    assert target[:, :, [1, 2, 4]].abs().max() == 0


def test_slots_beyond_two_billion_elements() -> None:
    """The last block of a pool of more than 2^31 elements (4.3 GB of address space, of which a page or two is touched)."""
    num_blocks = 2**31 // (16 * 2 * 64) + 2
    k_cache = torch.empty(num_blocks, 16, 2, 64, dtype=torch.float16)  # pages are only touched where written
    v_cache = torch.empty_like(k_cache)
    meta = metadata([(num_blocks - 1) * 16 + 3], [[num_blocks - 1]], [4], [1], 16)
    k_cache[-1], v_cache[-1] = 0, 0
    BACKEND.write_kv(torch.ones(1, 2, 64).half(), torch.full((1, 2, 64), 2.0).half(), LayerCache(k_cache, v_cache), meta)
    out = BACKEND.attention(torch.zeros(1, 2, 64), LayerCache(k_cache, v_cache), meta, 0.125)
    torch.testing.assert_close(out, torch.full((1, 2, 64), 0.5))  # mean of 0, 0, 0 and 2


def test_indices_are_made_once_a_step() -> None:
    meta, _, _ = make_batch([5, 6], [1, 1], 4, 0)
    cache = torch.zeros(8, 4, 1, 2)
    new = torch.ones(2, 1, 2)
    BACKEND.write_kv(new, new, LayerCache(cache, cache.clone()), meta)
    first = meta.derived
    BACKEND.attention(new, LayerCache(cache, cache), meta, 1.0)
    assert first is not None
    assert meta.derived is first
    assert dataclasses.replace(meta, derived=None).derived is None
