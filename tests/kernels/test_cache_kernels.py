"""Kernels that write and move the cache, in the interpreter: the bits of the torch reference, and nothing but what was asked for."""

from __future__ import annotations

import math

import pytest
import torch

from kvlab.kernels import block_copy, triton_block_copy, triton_cache_write
from kvlab.kernels.cache_write import write_kv
from kvlab.kernels.interface import AttentionMetadata, LayerCache
from kvlab.kernels.quantize import FP8, as_movable

STORAGE = [torch.float32, torch.float16, torch.bfloat16, FP8, torch.int8]


def empty_cache(num_blocks: int, block_size: int, heads: int, head_dim: int, storage: torch.dtype) -> LayerCache:
    """Every slot holds something recognisable: NaN, or -128, which int8 never stores."""
    def pool() -> torch.Tensor:
        if storage == torch.int8:
            return torch.full((num_blocks, block_size, heads, head_dim), -128, dtype=storage)
        return torch.full((num_blocks, block_size, heads, head_dim), math.nan).to(storage)

    def scale(value: float) -> torch.Tensor | None:
        if storage == torch.int8:
            return torch.full((num_blocks, block_size, heads), math.nan, dtype=torch.float16)
        return torch.tensor([value]) if storage == FP8 else None

    return LayerCache(pool(), pool(), scale(0.03), scale(0.5))


def bits(cache: LayerCache) -> list[torch.Tensor]:
    tensors = [cache.k_NBKD, cache.v_NBKD, cache.k_scale, cache.v_scale]
    return [tensor.contiguous().view(torch.uint8) for tensor in tensors if tensor is not None]


@pytest.mark.parametrize("storage", STORAGE, ids=lambda storage: str(storage)[6:])
@pytest.mark.parametrize(("dtype", "block_size", "heads", "head_dim"), [
    (torch.float32, 1, 1, 64), (torch.float32, 17, 3, 80), (torch.float16, 3, 8, 96), (torch.bfloat16, 16, 5, 128),
    (torch.float32, 4, 9, 256),
])  # fmt: skip
def test_writes_the_references_bits(storage: torch.dtype, dtype: torch.dtype, block_size: int, heads: int, head_dim: int,
                                    seed: int) -> None:  # fmt: skip
    generator = torch.Generator().manual_seed(seed)
    num_blocks = max(2, 24 // block_size)
    fused = torch.randn(7, 2 * heads + 3, head_dim, generator=generator, dtype=torch.float64) * 20  # K and V are views, as in the model
    fused[0, 0] = 0.0
    fused[1, 0, 0], fused[2, 0, 0] = 500.0, 2.0**-9
    k, v = fused.to(dtype)[:, :heads], fused.to(dtype)[:, heads : 2 * heads]
    slots = torch.randperm(num_blocks * block_size, generator=generator)[:7]
    slots[3] = -1
    meta = AttentionMetadata(slots, torch.zeros(7, 1, dtype=torch.int64), torch.ones(7), [1] * 7, [1] * 7, 7, block_size)
    expected, got = (empty_cache(num_blocks, block_size, heads, head_dim, storage) for _ in range(2))
    untouched = bits(got)[0].clone()
    write_kv(k, v, expected, meta)
    triton_cache_write.write_kv(k, v, got, slots)
    for ours, theirs in zip(bits(got), bits(expected), strict=True):
        assert torch.equal(ours, theirs)
    changed = (bits(got)[0] != untouched).flatten(0, 1).flatten(1).any(-1).nonzero().flatten().tolist()
    assert changed == sorted(slot for slot in slots.tolist() if slot >= 0)


def test_fp8_by_bits_for_gpus_without_the_type() -> None:
    """All float16 numbers: the kernel's bits for sm_80 are torch's conversion, ties, subnormals and saturation included."""
    every = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(torch.float16)
    x = every[every.isfinite()].float()
    x = torch.cat([x, torch.tensor([math.nan, 449.0, -1e30, 2.0**-10, 3 * 2.0**-10, 0.0, -0.0])])
    x = torch.nn.functional.pad(x, (0, -len(x) % 256))
    rows = x.view(-1, 1, 256)[::9]  # the interpreter takes a while for all
    stored = torch.zeros(len(rows), 1, 1, 256, dtype=torch.uint8)
    launch = triton_cache_write.launch(rows, rows, LayerCache(stored, stored), torch.arange(len(rows)))
    launch.run()
    expected = rows.clamp(-448, 448).to(FP8).view(torch.uint8)
    nan = expected & 0x7F == 0x7F
    assert torch.equal(stored.flatten(0, 1)[~nan], expected[~nan])
    assert (stored.flatten(0, 1)[nan] & 0x7F == 0x7F).all()


def test_a_number_that_is_none_stays_visible_in_int8_and_fp8() -> None:
    x = torch.ones(1, 2, 64)
    x[0, 0, 3] = math.nan
    for storage in (torch.int8, FP8):
        cache = empty_cache(1, 1, 2, 64, storage)
        triton_cache_write.write_kv(x, x, cache, torch.tensor([0]))
        if storage == torch.int8:
            assert cache.k_scale is not None
            assert cache.k_scale.isnan().tolist() == [[[True, False]]]
        else:
            assert cache.k_NBKD.float().isnan().sum() == 1


def test_a_slot_beyond_two_billion_elements() -> None:
    """4.3 GB of address space, of which a page or two is touched."""
    num_blocks = 2**31 // (16 * 2 * 64) + 2
    cache = LayerCache(*(torch.empty(num_blocks, 16, 2, 64, dtype=torch.float16) for _ in range(2)))
    cache.k_NBKD[0], cache.v_NBKD[-1] = 0, 0
    slot = (num_blocks - 1) * 16 + 3
    triton_cache_write.write_kv(torch.ones(1, 2, 64).half(), torch.full((1, 2, 64), 2.0).half(), cache, torch.tensor([slot]))
    assert cache.k_NBKD[-1, 3].unique().tolist() == [1.0]
    assert cache.v_NBKD[-1].sum(dim=(1, 2)).tolist() == [0.0] * 3 + [256.0] + [0.0] * 12
    assert cache.k_NBKD[0].abs().max() == 0


@pytest.mark.parametrize("shape", [(2, 2, 6, 3, 2, 8), (1, 2, 5, 16, 3, 64), (1, 2, 5, 1, 1, 5), (2, 2, 6, 17, 3)], ids=str)
@pytest.mark.parametrize("dtype", [*STORAGE, torch.float64], ids=lambda dtype: str(dtype)[6:])
def test_blocks_move_as_in_the_reference(shape: tuple[int, ...], dtype: torch.dtype, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    cache = torch.randint(-100, 100, shape, generator=generator).to(dtype)
    as_movable(cache)[:, :, 3] = torch.randint(0, 100, as_movable(cache)[:, :, 3].shape, generator=generator).to(as_movable(cache).dtype)

    def check(ours: torch.Tensor, theirs: torch.Tensor) -> None:
        assert torch.equal(ours.contiguous().view(torch.uint8), theirs.contiguous().view(torch.uint8))

    blocks = triton_block_copy.gather_blocks(cache, [4, 1])
    check(blocks, block_copy.gather_blocks(cache, [4, 1]))
    ours, theirs = cache.clone(), cache.clone()
    triton_block_copy.scatter_blocks(ours, [0, 3], blocks)
    block_copy.scatter_blocks(theirs, [0, 3], blocks)
    check(ours, theirs)
    for pairs in ([(0, 1), (2, 3)], [(0, 1), (1, 2), (2, 0)], [(1, 1)], []):  # apart; a ring; onto itself; nothing
        triton_block_copy.copy_blocks(ours, pairs)
        block_copy.copy_blocks(theirs, pairs)
        check(ours, theirs)
