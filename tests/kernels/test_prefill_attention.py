"""Triton prefill attention against the float64 reference: ragged chunks over cached blocks, masks, storage, bad input."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from attention_cases import BLOCK_SIZES, DEVICE, DTYPES, GROUPS, HEAD_DIMS, TOLERANCE, make_paged, on_host, worst_row

from kvlab.kernels.attention_reference import Masks, prefill_attention_reference
from kvlab.kernels.decode_attention import decode_attention
from kvlab.kernels.launch import LaunchConfig
from kvlab.kernels.prefill_attention import default_config, prefill_attention, prefill_attention_work

MASKS: tuple[dict[str, Any], ...] = (
    {}, {"window": 7}, {}, {"window": 20, "num_sink_tokens": 4}, {"soft_cap": 3.0}, {"sink": True},
    {"window": 9, "num_sink_tokens": 19, "sink": True, "soft_cap": 20.0},
)  # fmt: skip
STORAGE = ("same", "same", "fp8", "int8", "same", "bits", "fp8_slots", "same", "fp8_plain")


def starts_of(query_lens: list[int]) -> torch.Tensor:
    return torch.tensor([0, *query_lens]).cumsum(0).to(torch.int32).to(DEVICE)


def check(
    seed: int, dtype: torch.dtype, head_dim: int, group: int, block_size: int, storage: str, masks: dict[str, Any],
    config: LaunchConfig | None,
) -> None:  # fmt: skip
    """A whole prompt, a chunk over cached slots, nothing, one token over many slots."""
    gen = torch.Generator().manual_seed(seed)
    num_kv_heads = 2 if group < 5 else 1
    chunk, cached = torch.randint(2, 24, (2,), generator=gen).tolist()
    query_lens, contexts = [5, chunk, 0, 1], [5, chunk + cached, 0, 50]
    paged = make_paged(contexts, block_size, num_kv_heads, head_dim, dtype, storage, gen)
    q = torch.randn(sum(query_lens), num_kv_heads * group, head_dim, generator=gen).to(dtype).to(DEVICE)
    options = {name: value for name, value in masks.items() if name != "sink"}
    if "sink" in masks:
        options["sink_logits_H"] = torch.randn(num_kv_heads * group, generator=gen).to(DEVICE)
    scale = head_dim**-0.5
    out = prefill_attention(
        q, paged.k_NBKD, paged.v_NBKD, paged.tables_SM, starts_of(query_lens), torch.tensor(contexts, device=DEVICE), max(query_lens),
        scale, k_scale=paged.k_scale, v_scale=paged.v_scale, config=config, **options,
    )  # fmt: skip
    expected = prefill_attention_reference(
        q.cpu(), paged.k_NBKD.cpu(), paged.v_NBKD.cpu(), paged.tables_SM.cpu(), starts_of(query_lens).cpu(), torch.tensor(contexts),
        Masks(scale, **on_host(options)), **on_host({"k_scale": paged.k_scale, "v_scale": paged.v_scale}),
    )  # fmt: skip
    assert worst_row(out, expected) < TOLERANCE[dtype]


@pytest.mark.parametrize("index", range(20))
def test_covering_grid(index: int, seed: int) -> None:
    """Every head size with every group but one; every block size, storage and mask; 16-slot tiles so that short lengths take several."""
    group = GROUPS[index // 5 + (1 if index % 5 == 4 else 0)]
    config = LaunchConfig(16, 4, 2, 64 if group > 4 else 16)
    dtype, head_dim, block_size = DTYPES[index % 3], HEAD_DIMS[index % 5], BLOCK_SIZES[index % 8]
    check(seed + index, dtype, head_dim, group, block_size, STORAGE[index % 9], MASKS[index % 7], config)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_default_configuration(dtype: torch.dtype, seed: int) -> None:
    check(seed, dtype, 64, 3, 16, "same", {}, None)


@pytest.mark.full
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("block_size", BLOCK_SIZES)
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_full_product(head_dim: int, block_size: int, dtype: torch.dtype, seed: int) -> None:
    for index, group in enumerate(GROUPS):
        mix = index + head_dim // 16 + block_size
        config = LaunchConfig(16, 4, 2, 64 if group > 4 else 16)
        check(seed + mix, dtype, head_dim, group, block_size, STORAGE[mix % 9], MASKS[mix % 7], config)


def test_first_query_of_a_prompt_is_its_value_and_rows_past_the_last_start_are_left_alone(seed: int) -> None:
    gen = torch.Generator().manual_seed(seed)
    paged = make_paged([3], 16, 2, 64, torch.float32, "same", gen)
    q = torch.randn(5, 4, 64, generator=gen).to(DEVICE)
    out = torch.full((5, 4, 64), 7.0, device=DEVICE)
    lengths = torch.tensor([3], device=DEVICE)
    prefill_attention(q, paged.k_NBKD, paged.v_NBKD, paged.tables_SM, starts_of([3]), lengths, 3, 0.125, out=out)
    value = paged.v_NBKD[paged.tables_SM[0, 0].item(), 0]
    torch.testing.assert_close(out[0], value.repeat_interleave(2, dim=0), rtol=1e-6, atol=0)
    assert torch.equal(out[3:], torch.full((2, 4, 64), 7.0, device=DEVICE))


def test_chunks_equal_the_whole_and_the_last_token_equals_decode(seed: int) -> None:
    gen = torch.Generator().manual_seed(seed)
    paged = make_paged([40], 8, 2, 64, torch.float32, "same", gen)
    q = torch.randn(40, 4, 64, generator=gen).to(DEVICE)
    pool = (paged.k_NBKD, paged.v_NBKD, paged.tables_SM)

    def part(first: int, last: int) -> torch.Tensor:
        length = torch.tensor([last], device=DEVICE)
        return prefill_attention(q[first:last], *pool, starts_of([last - first]), length, last - first, 0.125)

    whole = part(0, 40)
    torch.testing.assert_close(torch.cat([part(0, 13), part(13, 39), part(39, 40)]), whole, rtol=1e-5, atol=1e-6)
    decoded = decode_attention(q[39:], *pool, torch.tensor([40], device=DEVICE), 0.125)
    torch.testing.assert_close(decoded, whole[39:], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("storage", ["same", "int8", "fp8"])
@pytest.mark.parametrize("block_size", [1, 17, 64])
def test_slots_between_sinks_and_window_are_not_read(block_size: int, storage: str, seed: int) -> None:
    """3 queries at slots 57 to 59 under a window of 7 see slots 51 on, and 5 sinks: in tiles of 16 both lie beside what nobody sees."""
    gen = torch.Generator().manual_seed(seed)
    paged = make_paged([60], block_size, 2, 64, torch.float32, storage, gen)
    q, length = torch.randn(3, 4, 64, generator=gen).to(DEVICE), torch.tensor([60], device=DEVICE)

    def attend() -> torch.Tensor:
        return prefill_attention(q, paged.k_NBKD, paged.v_NBKD, paged.tables_SM, starts_of([3]), length, 3, 0.125,
                                 window=7, num_sink_tokens=5, k_scale=paged.k_scale, v_scale=paged.v_scale,
                                 config=LaunchConfig(16, 4, 2, 16))  # fmt: skip

    whole = attend()
    assert bool(whole.isfinite().all())
    poisoned = (paged.k_scale, paged.v_scale) if storage == "int8" else (paged.k_NBKD, paged.v_NBKD)
    for slot in range(5, 51):
        for tensor in poisoned:
            assert tensor is not None
            row = tensor[paged.tables_SM[0, slot // block_size].item(), slot % block_size]
            row.copy_(torch.full(row.shape, float("nan")).to(row.dtype))
    assert torch.equal(attend(), whole)


@pytest.mark.parametrize("num_sink_tokens", [60, 2**31 - 1, 2**40])
def test_more_sinks_than_slots_show_everything(num_sink_tokens: int, seed: int) -> None:
    gen = torch.Generator().manual_seed(seed)
    paged = make_paged([60], 16, 2, 64, torch.float32, "same", gen)
    q, length = torch.randn(60, 4, 64, generator=gen).to(DEVICE), torch.tensor([60], device=DEVICE)
    pool = (paged.k_NBKD, paged.v_NBKD, paged.tables_SM)
    masks: dict[str, Any] = {"window": 3, "num_sink_tokens": num_sink_tokens}
    whole = prefill_attention(q, *pool, starts_of([60]), length, 60, 0.125)
    torch.testing.assert_close(prefill_attention(q, *pool, starts_of([60]), length, 60, 0.125, **masks), whole, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(decode_attention(q[59:], *pool, length, 0.125, **masks), whole[59:], rtol=1e-5, atol=1e-6)


def test_configurations_fit_what_they_serve() -> None:
    bf16, fp32, int8 = torch.bfloat16, torch.float32, torch.int8
    assert default_config(128, 4, bf16, bf16, (9, 0), 2048) == LaunchConfig(tile=64, num_warps=8, num_stages=3, rows=128)
    assert default_config(128, 4, bf16, bf16, (8, 0), 2048) == LaunchConfig(tile=32, num_warps=8, num_stages=3, rows=128)
    assert default_config(128, 4, bf16, int8, (8, 0), 2048).num_stages == 2
    assert default_config(256, 2, bf16, int8, (9, 0), 2048) == LaunchConfig(tile=16, num_warps=8, num_stages=3, rows=64)
    assert default_config(128, 4, bf16, bf16, (9, 0), 5) == LaunchConfig(tile=64, num_warps=4, num_stages=3, rows=32)
    for capability in ((8, 0), (9, 0)):
        assert default_config(256, 2, bf16, bf16, capability, 2048) == LaunchConfig(tile=32, num_warps=8, num_stages=3, rows=64)
    assert default_config(64, 3, fp32, fp32, (9, 0), 2048).rows == 16


def test_work_is_counted_by_hand() -> None:
    """2 new tokens after 3: 4 + 5 visible slots; K and V of 5 slots x 2 heads x 64 x 2 bytes, queries in and results out 2 x 4 x 64 x 2."""
    bf16 = torch.bfloat16
    assert prefill_attention_work([2], [5], 4, 2, 64, bf16, bf16) == (2 * 5 * 2 * 64 * 2 + 2 * 2 * 4 * 64 * 2, 4 * 9 * 4 * 64)
    # A window of 2 and one sink: 3 slots for each query; the slots 0, 2, 3, 4 are read.
    assert prefill_attention_work([2], [5], 4, 2, 64, bf16, bf16, window=2, num_sink_tokens=1) == (
        2 * 4 * 2 * 64 * 2 + 2 * 2 * 4 * 64 * 2, 4 * 6 * 4 * 64,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"starts": torch.zeros(2, dtype=torch.int32)}, r"query_starts_S1 must be contiguous int32 or int64 \[3\]"),
        ({"contexts": torch.zeros(2)}, "context_lens_S must be"),
        ({"out": torch.zeros(3, 4, 64)}, "out must be"),
        ({"k": torch.zeros(4, 16, 2, 64, dtype=torch.int8), "v": torch.zeros(4, 16, 2, 64, dtype=torch.int8)}, "needs k_scale and v_scale"),
        ({"num_sink_tokens": -1}, "num_sink_tokens not negative"),
    ],
)
def test_what_no_kernel_serves_is_refused(change: dict[str, Any], message: str) -> None:
    given: dict[str, Any] = {
        "q": torch.zeros(2, 4, 64), "k": torch.zeros(4, 16, 2, 64), "v": torch.zeros(4, 16, 2, 64),
        "tables": torch.zeros(2, 2, dtype=torch.int32), "starts": torch.tensor([0, 1, 2]), "contexts": torch.ones(2, dtype=torch.int32),
    } | change  # fmt: skip
    given = {name: value.to(DEVICE) if isinstance(value, torch.Tensor) else value for name, value in given.items()}
    arrays = [given.pop(name) for name in ("q", "k", "v", "tables", "starts", "contexts")]
    with pytest.raises(ValueError, match=message):
        prefill_attention(*arrays, 1, 0.125, **given)
