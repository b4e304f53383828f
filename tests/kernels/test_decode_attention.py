"""Triton decode attention against the float64 reference: head sizes, groups, block sizes, storage, masks, splits, masses, bad input."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from attention_cases import BLOCK_SIZES, DEVICE, DTYPES, GROUPS, HEAD_DIMS, TOLERANCE, make_paged, on_host, worst_row

from kvlab.kernels.attention_reference import Masks, decode_attention_reference
from kvlab.kernels.decode_attention import choose_num_splits, decode_attention, decode_attention_work, default_config
from kvlab.kernels.launch import LaunchConfig

MASKS: tuple[dict[str, Any], ...] = (
    {}, {"window": 7}, {"window": 20, "num_sink_tokens": 4}, {"soft_cap": 3.0}, {"sink": True},
    {"window": 9, "num_sink_tokens": 19, "sink": True, "soft_cap": 20.0},
)  # fmt: skip
STORAGE = ("same", "same", "fp8", "int8", "same", "bits", "fp8_slots", "same", "fp8_plain")
SPLITS = (1, 3, 7, 2)


def check(
    seed: int, dtype: torch.dtype, head_dim: int, group: int, block_size: int, storage: str, masks: dict[str, Any], num_splits: int | None,
    per_head: bool, tile: int, with_mass: bool,
) -> None:  # fmt: skip
    gen = torch.Generator().manual_seed(seed)
    num_kv_heads = 2 if group < 5 else 1
    lengths_SK = torch.stack([torch.randint(low, high, (num_kv_heads,), generator=gen) for low, high in ((1, 2), (2, 20), (33, 56))])
    lengths = lengths_SK if per_head else lengths_SK[:, 0]
    most = lengths_SK.amax(1).tolist() if per_head else lengths.tolist()
    paged = make_paged(most, block_size, num_kv_heads, head_dim, dtype, storage, gen)
    q = torch.randn(3, num_kv_heads * group, head_dim, generator=gen).to(dtype).to(DEVICE)
    options = {name: value for name, value in masks.items() if name != "sink"}
    if "sink" in masks:
        options["sink_logits_H"] = torch.randn(num_kv_heads * group, generator=gen).to(DEVICE)
    scale = head_dim**-0.5
    mass = torch.full((3, num_kv_heads, paged.tables_SM.shape[1]), float("nan"), device=DEVICE) if with_mass else None
    out = decode_attention(
        q, paged.k_NBKD, paged.v_NBKD, paged.tables_SM, lengths.to(DEVICE), scale, k_scale=paged.k_scale, v_scale=paged.v_scale,
        mass_out=mass, num_splits=num_splits, config=LaunchConfig(tile, 4, 2, 32 if group > 16 else 16), **options,
    )  # fmt: skip
    expected, expected_mass = decode_attention_reference(
        q.cpu(), paged.k_NBKD.cpu(), paged.v_NBKD.cpu(), paged.tables_SM.cpu(), lengths, Masks(scale, **on_host(options)),
        **on_host({"k_scale": paged.k_scale, "v_scale": paged.v_scale}),
    )  # fmt: skip
    assert worst_row(out, expected) < TOLERANCE[dtype]
    assert mass is None or (mass.double().cpu() - expected_mass).abs().max() < 1e-5 * group


@pytest.mark.parametrize("index", range(25))
def test_covering_grid(index: int, seed: int) -> None:
    """All pairs of head size and group; every block size, storage, mask and number of splits; 16-slot tiles, so that lengths take many."""
    check(
        seed + index, DTYPES[index % 3], HEAD_DIMS[index % 5], GROUPS[index // 5], BLOCK_SIZES[index % 8], STORAGE[index % 9],
        MASKS[index % 6], SPLITS[index % 4], per_head=index % 7 > 3, tile=16 if index % 5 else 32,
        with_mass=index % 2 == 0 and index != 24,
    )  # fmt: skip


@pytest.mark.full
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("block_size", BLOCK_SIZES)
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_full_product(head_dim: int, block_size: int, dtype: torch.dtype, seed: int) -> None:
    for index, group in enumerate(GROUPS):
        mix = index + head_dim // 16 + block_size
        check(
            seed + mix, dtype, head_dim, group, block_size, STORAGE[mix % 9], MASKS[mix % 6], SPLITS[mix % 4], mix % 2 == 0, 16, group < 32
        )


def plain(seed: int, lengths: list[int], block_size: int = 16, dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, Any]:
    gen = torch.Generator().manual_seed(seed)
    return torch.randn(len(lengths), 4, 64, generator=gen).to(dtype).to(DEVICE), make_paged(lengths, block_size, 2, 64, dtype, "same", gen)


def call(q: torch.Tensor, paged: Any, lengths: list[int], **options: Any) -> torch.Tensor:
    return decode_attention(q, paged.k_NBKD, paged.v_NBKD, paged.tables_SM, torch.tensor(lengths, device=DEVICE), 0.125, **options)


def test_one_slot_is_its_value_and_none_is_zero(seed: int) -> None:
    q, paged = plain(seed, [1, 0])
    for num_splits in (1, 4):
        out = call(q, paged, [1, 0], num_splits=num_splits)
        value = paged.v_NBKD[paged.tables_SM[0, 0].item(), 0]
        torch.testing.assert_close(out[0], value.repeat_interleave(2, dim=0), rtol=1e-6, atol=0)
        assert torch.equal(out[1], torch.zeros_like(out[1]))


def test_equal_logits_average_and_mass_counts_slots(seed: int) -> None:
    """q = 0: each of 40 slots weighs 1/40 for each of the 2 query heads of a KV head; blocks of 16 hold 16, 16 and 8."""
    q, paged = plain(seed, [40])
    mass = torch.full((1, 2, 4), float("nan"), device=DEVICE)
    out = call(torch.zeros_like(q), paged, [40], mass_out=mass, num_splits=2, config=LaunchConfig(16, 4, 2))
    torch.testing.assert_close(mass.cpu(), torch.tensor([0.8, 0.8, 0.4, 0.0]).expand(1, 2, 4), rtol=1e-6, atol=0)
    values = torch.cat([paged.v_NBKD[block] for block in paged.tables_SM[0, :3].tolist()])[:40]
    torch.testing.assert_close(out[0, ::2], values.mean(0), rtol=1e-5, atol=1e-6)


def test_sink_logit_takes_its_share(seed: int) -> None:
    """One slot with logit 0 beside a sink of logit log 3: a quarter of the value."""
    q, paged = plain(seed, [1])
    sinks = torch.full((4,), 3.0).log().to(DEVICE)
    for num_splits in (1, 3):
        out = call(torch.zeros_like(q), paged, [1], sink_logits_H=sinks, num_splits=num_splits)
        value = paged.v_NBKD[paged.tables_SM[0, 0].item(), 0]
        torch.testing.assert_close(out[0], 0.25 * value.repeat_interleave(2, dim=0), rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("block_size", [1, 8, 17])
def test_bits_do_not_depend_on_the_block_size(block_size: int, seed: int) -> None:
    """The same K and V in blocks of another size: the same tiles, so the same bits."""
    q, paged = plain(seed, [50], 64)
    length, block = 50, paged.tables_SM[0, 0].item()
    width = -(-length // block_size)
    pools = []
    for pool in (paged.k_NBKD, paged.v_NBKD):
        slots = torch.full((width * block_size, 2, 64), float("nan"), device=DEVICE)
        slots[:length] = pool[block, :length]
        pools.append(slots.view(width, block_size, 2, 64).flip(0).contiguous())
    tables = torch.arange(width - 1, -1, -1, dtype=torch.int32, device=DEVICE)[None]
    config = LaunchConfig(16, 4, 2)
    other = decode_attention(q, pools[0], pools[1], tables, torch.tensor([length], device=DEVICE), 0.125, num_splits=2, config=config)
    assert torch.equal(other, call(q, paged, [length], num_splits=2, config=config))


def test_strided_cache_and_output(seed: int) -> None:
    """A layer's view of a cache of all layers, [L, N, 2, B, K, D] here, queries as a part of a fused projection, out given."""
    q, paged = plain(seed, [20])
    big = torch.full((paged.k_NBKD.shape[0], 3, 16, 2, 64), float("nan"), device=DEVICE)
    big[:, 0], big[:, 2] = paged.k_NBKD, paged.v_NBKD
    fused = torch.full((1, 8, 64), float("nan"), device=DEVICE)
    fused[:, 2:6] = q
    out = torch.zeros(1, 8, 64, device=DEVICE)
    lengths = torch.tensor([20], device=DEVICE)
    decode_attention(fused[:, 2:6], big[:, 0], big[:, 2], paged.tables_SM.long(), lengths, 0.125, out=out[:, 4:])
    assert torch.equal(out[:, 4:], call(q, paged, [20]))
    assert torch.equal(out[:, :4], torch.zeros(1, 4, 64, device=DEVICE))


@pytest.mark.full
def test_offsets_past_2_to_the_31(tmp_path: Path, seed: int) -> None:
    """A pool of 2^31 + numbers, in a sparse file: the last block's offset doesn't fit 32 bits."""
    block, num_blocks = 16 * 2 * 64, 2**31 // (16 * 2 * 64) + 8
    flat = torch.from_file(str(tmp_path / "pool"), shared=True, size=num_blocks * block, dtype=torch.float16)
    pool = (flat if DEVICE == "cpu" else torch.empty(len(flat), dtype=torch.float16, device=DEVICE)).view(num_blocks, 16, 2, 64)
    q, paged = plain(seed, [30], dtype=torch.float16)
    near, far = paged.tables_SM[0, :2].tolist(), [num_blocks - 1, num_blocks - 5]
    for source, target in zip(near, far, strict=True):
        pool[target] = paged.k_NBKD[source]
    tables, lengths = torch.tensor([far], dtype=torch.int32, device=DEVICE), torch.tensor([30], device=DEVICE)
    out = decode_attention(q, pool, pool, tables, lengths, 0.125)
    assert torch.equal(out, decode_attention(q, paged.k_NBKD, paged.k_NBKD, paged.tables_SM, lengths, 0.125))


def test_number_of_splits() -> None:
    """132 SMs with 2 programs each hold 264: 8 programs want 29 splits or more, for 85 % of a wave; 512 programs of 8k tokens 4, of at
    most 2,048 each; no split is under a tile; a full GPU with short sequences isn't split."""
    assert choose_num_splits(8, 131072, 64, 132) == 64  # of 2,048 each; 512 of two waves' 528 places
    assert choose_num_splits(8, 4096, 64, 132) == 29
    assert choose_num_splits(512, 8192, 64, 132) == 4
    assert choose_num_splits(264, 1024, 64, 132) == 1
    assert choose_num_splits(8, 64, 64, 132) == 1
    assert choose_num_splits(1, 160, 64, 132) == 3
    assert choose_num_splits(4, 10_000_000, 64, 132) == 128


def test_configurations_fit_what_they_serve() -> None:
    bf16, fp32 = torch.bfloat16, torch.float32
    assert default_config(128, 4, bf16, (9, 0)) == LaunchConfig(tile=64, num_warps=4, num_stages=5, rows=16)
    assert default_config(80, 32, bf16, (8, 0)).rows == 32
    assert default_config(256, 71, bf16, (9, 0)) == LaunchConfig(tile=32, num_warps=4, num_stages=5, rows=64)
    assert default_config(128, 32, fp32, (9, 0)) == LaunchConfig(tile=32, num_warps=4, num_stages=5, rows=16)


def test_work_is_counted_by_hand() -> None:
    """10 slots x 2 KV heads x 64 x 2 bytes x (K, V) = 5,120; q and out 2 x 4 x 64 x 2 = 1,024; 4 x 10 x 4 x 64 operations."""
    assert decode_attention_work([10], 4, 2, 64, torch.bfloat16, torch.bfloat16) == (6144, 10240)
    windowed = decode_attention_work([10], 4, 2, 64, torch.bfloat16, torch.int8, window=5, num_sink_tokens=2, scale_bytes=2)
    assert windowed == (2 * 7 * 2 * (64 + 2) + 1024, 4 * 7 * 4 * 64)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"q": torch.zeros(2, 3, 64)}, "3 query heads can't share 2 KV heads"),
        ({"q": torch.zeros(2, 4, 64, dtype=torch.float64)}, "queries must be"),
        ({"q": torch.zeros(2, 4, 32)}, "one head size"),
        ({"k": torch.zeros(4, 8, 2, 64)}, "one shape"),
        ({"tables": torch.zeros(2, 2)}, "block tables must be int32 or int64"),
        ({"tables": torch.zeros(3, 2, dtype=torch.int32)}, "2 queries and 3 rows"),
        ({"lengths": torch.zeros(2, 3, dtype=torch.int32)}, r"lengths must be int32 or int64, \[2\] or \[2, 2\]"),
        ({"window": 0}, "window must be positive"),
        ({"soft_cap": -1.0}, "soft_cap must be positive"),
        ({"sink_logits_H": torch.zeros(2)}, "sink_logits_H must be contiguous"),
        ({"k_scale": torch.ones(1)}, "both or neither"),
        ({"k_scale": torch.ones(3), "v_scale": torch.ones(3)}, "scales must have one element"),
        ({"mass_out": torch.zeros(2, 2, 5)}, "mass_out must be float32"),
        ({"out": torch.zeros(2, 4, 32)}, "out must be"),
        ({"num_splits": 0}, "num_splits must be positive"),
        ({"q": torch.zeros(64).expand(65536, 4, 64)}, "room for 65,535 sequences, not 65,536"),
    ],
)  # fmt: skip
def test_what_no_kernel_serves_is_refused(change: dict[str, Any], message: str) -> None:
    given: dict[str, Any] = {
        "q": torch.zeros(2, 4, 64), "k": torch.zeros(4, 16, 2, 64), "v": torch.zeros(4, 16, 2, 64),
        "tables": torch.zeros(2, 2, dtype=torch.int32), "lengths": torch.ones(2, dtype=torch.int32),
    } | change  # fmt: skip
    given = {name: value.to(DEVICE) if isinstance(value, torch.Tensor) else value for name, value in given.items()}
    arrays = [given.pop(name) for name in ("q", "k", "v", "tables", "lengths")]
    with pytest.raises(ValueError, match=message):
        decode_attention(*arrays, 0.125, **given)


@pytest.mark.parametrize("config", [(8, 16), (48, 16), (16, 24)])
def test_configurations_that_cannot_be_compiled_are_refused(config: tuple[int, int]) -> None:
    with pytest.raises(ValueError, match="must be a power of two and at least 16"):
        LaunchConfig(config[0], 4, 2, config[1])
