"""The kernels between matrix products and attention, in Triton's interpreter against float64: norms, rotary, activation, re-rotation."""

from __future__ import annotations

import pytest
import torch

from kvlab.kernels import activation, norm, triton_activation, triton_norm, triton_rotary
from kvlab.kernels import rotary as reference_rotary
from kvlab.kernels.interface import LayerCache
from kvlab.kernels.quantize import FP8, dequantize, quantize_fp8, quantize_int8
from kvlab.model import tiny
from kvlab.model.rope import rotary_table

TOLERANCE = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1e-2}
DTYPES = pytest.mark.parametrize("dtype", list(TOLERANCE), ids=lambda dtype: str(dtype)[6:])


def close(got: torch.Tensor, expected: torch.Tensor) -> None:
    """Relative to each row's largest number: what a model's next product sees."""
    assert got.isfinite().all()
    size = expected.abs().amax(-1, keepdim=True)
    error = ((got.double() - expected).abs() / size).max().item()
    assert error < TOLERANCE[got.dtype], error


def draw(*shape: int, dtype: torch.dtype, seed: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


@DTYPES
@pytest.mark.parametrize(("rows", "columns"), [(3, 64), (2, 576), (5, 100), (1, 1)])
def test_rms_norm(dtype: torch.dtype, rows: int, columns: int, seed: int) -> None:
    wide = draw(rows, columns + 16, dtype=dtype, seed=seed) * 3
    x, weight = wide[:, :columns], draw(columns, dtype=dtype, seed=seed + 1)
    x64 = x.double()
    expected = x64 / (x64.square().mean(-1, keepdim=True) + 1e-5).sqrt() * weight.double()
    close(triton_norm.rms_norm(x, weight, 1e-5), expected)
    residual = draw(rows, columns, dtype=dtype, seed=seed + 2)
    total = (residual.double() + x64).to(dtype)
    normed, kept = triton_norm.add_rms_norm(x, residual, weight, 1e-5)
    assert kept is residual
    torch.testing.assert_close(residual, total, rtol=2e-7 if dtype == torch.float32 else 0, atol=0)
    total = residual.double()
    close(normed, total / (total.square().mean(-1, keepdim=True) + 1e-5).sqrt() * weight.double())


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_norms_and_activations_round_where_the_reference_does(dtype: torch.dtype, seed: int) -> None:
    """Nearly all numbers are the same bits; the rest differ by the last bit, where float32 sums differ in order."""
    x, weight = draw(4, 576, dtype=dtype, seed=seed), draw(576, dtype=dtype, seed=seed + 1)
    same = triton_norm.rms_norm(x, weight, 1e-5) == norm.rms_norm(x, weight, 1e-5)
    assert same.float().mean() > 0.98
    same = triton_activation.silu_and_mul(x) == activation.silu_and_mul(x)
    assert same.float().mean() > 0.98


@DTYPES
@pytest.mark.parametrize(("tokens", "columns"), [(3, 48), (1, 1500), (2, 1)])
def test_silu_and_mul(dtype: torch.dtype, tokens: int, columns: int, seed: int) -> None:
    x = draw(tokens, 2 * columns, dtype=dtype, seed=seed) * 4
    x[0, 0] = -200.0  # exp(200) is beyond float32
    gate, up = x.double().chunk(2, -1)
    got, expected = triton_activation.silu_and_mul(x), gate * torch.sigmoid(gate) * up
    torch.testing.assert_close(got.double(), expected, rtol=TOLERANCE[dtype], atol=1e-6)


@DTYPES
@pytest.mark.parametrize(("heads", "head_dim"), [(4, 64), (12, 64), (3, 80), (7, 96), (2, 128), (40, 128), (5, 256), (1, 6)])
def test_rotary(dtype: torch.dtype, heads: int, head_dim: int, seed: int) -> None:
    """Heads are a view into a wider projection, as the model's are."""
    x = draw(3, heads + 2, head_dim, dtype=dtype, seed=seed)[:, :heads]
    angles = draw(3, head_dim // 2, dtype=torch.float64, seed=seed + 1) * 7
    cos, sin = torch.cat([angles.cos()] * 2, -1), torch.cat([-angles.sin(), angles.sin()], -1)
    table = torch.stack([cos, sin], 1)[:, :, None].to(dtype)
    cos_T1D, sin_T1D = table.unbind(1)
    got = triton_rotary.rotary(x, cos_T1D, sin_T1D)
    first, second = x.double().chunk(2, -1)
    pairs = torch.complex(first, second) * torch.complex(cos_T1D.double()[..., : head_dim // 2], sin_T1D.double()[..., head_dim // 2 :])
    close(got, torch.cat([pairs.real, pairs.imag], -1))
    close(reference_rotary.rotary(x, cos_T1D, sin_T1D), torch.cat([pairs.real, pairs.imag], -1))


@pytest.mark.parametrize(
    ("storage", "tolerance"), [(torch.float32, 2e-5), (torch.float16, 2e-3), (torch.bfloat16, 1.6e-2), (FP8, 0.13), (torch.int8, 0.02)]
)
def test_keys_are_turned_to_their_new_positions(storage: torch.dtype, tolerance: float, seed: int) -> None:
    """A key stored at position p and moved to p' is what rotating the plain key to p' gives; others keep every bit."""
    config = tiny().shape()
    head_dim, heads, table = config.head_dim, 3, rotary_table(tiny().shape(), 4096, torch.float32, torch.device("cpu"))
    plain = draw(6, heads, head_dim, dtype=torch.float32, seed=seed)
    old, new = torch.tensor([0, 5, 40, 100, 7, 9]), torch.tensor([3, 2, 44, 1, 7, 9])

    def rotated(positions: torch.Tensor) -> torch.Tensor:
        return reference_rotary.rotary(plain, *table[positions].unbind(1))

    slots = torch.tensor([7, 0, 11, 3, 5, -1])
    results = []
    for rerotate in (triton_rotary.rerotate_keys, triton_rotary.rerotate_keys_reference):
        scale = torch.tensor([0.02]) if storage == FP8 else torch.zeros(4, 3, heads, dtype=torch.float16) if storage == torch.int8 else None
        cache = LayerCache(torch.zeros(4, 3, heads, head_dim).to(storage), torch.zeros(1), scale)
        rows = rotated(old)
        if storage == torch.int8:
            rows, row_scale = quantize_int8(rows)
            assert scale is not None
            scale.flatten(0, 1)[slots[:5]] = row_scale[:5]
        elif storage == FP8:
            rows = quantize_fp8(rows, scale)
        bits = cache.k_NBKD.flatten(0, 1).view(torch.uint8) if storage == FP8 else cache.k_NBKD.flatten(0, 1)
        bits[slots[:5]] = rows[:5].view(torch.uint8) if storage == FP8 else rows[:5].to(storage)
        before = bits.clone()
        rerotate(cache, slots, new - old, table)
        changed = (bits != before).flatten(1).any(-1).nonzero().flatten().tolist()
        assert set(changed) <= {0, 3, 7, 11}
        row_scale = None if scale is None else scale if storage == FP8 else scale.flatten(0, 1)
        values = dequantize(cache.k_NBKD.flatten(0, 1), row_scale, torch.float32)
        wanted = rotated(new)[:5]
        assert ((values[slots[:5]] - wanted).abs().amax(-1) / wanted.abs().amax(-1)).max() < tolerance
        results.append(values)
    torch.testing.assert_close(results[0], results[1], rtol=tolerance, atol=tolerance / 4)


def test_what_they_refuse() -> None:
    with pytest.raises(ValueError, match="rms_norm takes rows of up to 16384"):
        triton_norm.rms_norm(torch.zeros(1, 16385), torch.zeros(16385), 1e-5)
    with pytest.raises(ValueError, match="even number of consecutive numbers"):
        triton_rotary.rotary(torch.zeros(1, 1, 5), torch.zeros(1, 1, 5), torch.zeros(1, 1, 5))
    with pytest.raises(ValueError, match="at most 4 bytes"):
        triton_activation.silu_and_mul(torch.zeros(1, 4, dtype=torch.float64))
    assert triton_activation.silu_and_mul(torch.zeros(0, 4)).shape == (0, 2)
