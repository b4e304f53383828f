"""K and V in 8 bits: the numbers by hand, the error's bounds, and that blocks, swaps and copies move scales along."""

from __future__ import annotations

import math

import pytest
import torch
from model_support import metadata

from kvlab.cache.tensors import KVTensors
from kvlab.kernels.interface import LayerCache
from kvlab.kernels.quantize import FP8, dequantize, quantize_fp8, quantize_int8
from kvlab.kernels.torch_backend import TorchBackend
from kvlab.policies.kv_dtype import Fp8
from kvlab.types import UserError

BACKEND = TorchBackend()


def test_int8_by_hand() -> None:
    x = torch.tensor([[[254.0, -127.0, 1.0, 3.0]], [[0.0, 0.0, 0.0, 0.0]], [[1e9, 1.0, -1e9, 0.0]]])  # scales 2, 0, and the largest
    stored, scale = quantize_int8(x)
    assert stored.tolist() == [[[127, -64, 0, 2]], [[0, 0, 0, 0]], [[127, 0, -127, 0]]]  # -63.5, 0.5 and 1.5 go to the even neighbour
    assert scale.tolist() == [[2.0], [0.0], [65504.0]]
    assert dequantize(stored, scale, torch.float32)[0, 0].tolist() == [254.0, -128.0, 0.0, 4.0]


def test_numbers_too_small_for_a_scale_are_zero() -> None:
    """1e-9 / 127 is 0 in float16: the row is stored as zeros, as it is read."""
    stored, scale = quantize_int8(torch.tensor([[[1e-9, -1e-9, 0.0]]]))
    assert (stored.tolist(), scale.tolist()) == ([[[0, 0, 0]]], [[0.0]])


def test_a_product_with_a_scale_is_rounded_once() -> None:
    """127 x 1.005859375 = 127.744140625; bfloat16 has 127.5 and 128 there. The scale alone, rounded to 1.0078125, would give 128."""
    stored, scale = torch.tensor([[[127]]], dtype=torch.int8), torch.tensor([[1.005859375]], dtype=torch.float16)
    assert dequantize(stored, scale, torch.bfloat16).item() == 127.5
    layer = torch.tensor([1.005859375])
    assert dequantize(torch.tensor([[[120.0]]]).to(FP8), layer, torch.bfloat16).item() == 120.5  # 120.703125, not 120.9375 -> 121


def test_int8_is_off_by_half_a_step_and_the_scales_rounding() -> None:
    x = torch.randn(50, 3, 64, generator=torch.Generator().manual_seed(0), dtype=torch.float64) * torch.logspace(-3, 3, 50)[:, None, None]
    stored, scale = quantize_int8(x)
    error = (dequantize(stored, scale, torch.float64) - x).abs()
    most = x.abs().amax(-1, keepdim=True)
    # Largest step / 2, and 2^-11 of the row's maximum where the rounded scale no longer reaches it.
    assert (error <= most / 127 * 0.5 * (1 + 2**-10) + most * 2**-11).all()
    assert (stored.abs().amax(-1) >= 126).all()  # the range is used


def test_a_number_that_is_none_stays_visible() -> None:
    x = torch.tensor([[[1.0, math.nan], [1.0, 2.0]]])
    stored, scale = quantize_int8(x)
    values = dequantize(stored, scale, torch.float32)
    assert values[0, 0].isnan().all()
    assert values[0, 1].isfinite().all()
    assert quantize_fp8(x, None).float().isnan().tolist() == [[[False, True], [False, False]]]


def test_fp8_by_hand() -> None:
    x = torch.tensor([[[448.0, 1e4, -460.0, 1.0625, 1.1875, 2.0**-9, 2.0**-11]]])
    assert quantize_fp8(x, None).float().flatten().tolist() == [448.0, 448.0, -448.0, 1.0, 1.25, 2.0**-9, 0.0]  # ties to even
    scale = torch.tensor([4.0])
    values = dequantize(quantize_fp8(x, scale), scale, torch.float32)
    assert values.flatten()[:3].tolist() == [448.0, 1792.0, -448.0]


@pytest.mark.parametrize("dtype", [torch.int8, FP8])
def test_attention_reads_what_was_stored(dtype: torch.dtype) -> None:
    """Against a float64 cache that holds the dequantised numbers, over stale scales without a number in slots of nobody."""
    generator = torch.Generator().manual_seed(2)
    kv = KVTensors(1, 5, 3, 2, 8, dtype, scales=(0.5, 0.25) if dtype == FP8 else (1.0, 1.0))
    if kv.gpu_scales is not None:
        kv.gpu_scales.fill_(math.nan)
    cache = kv.layer(0)
    k, v = (torch.randn(7, 2, 8, generator=generator, dtype=torch.float64) for _ in range(2))
    q = torch.randn(7, 6, 8, generator=generator, dtype=torch.float64)
    tables, slots = [[4, 0, 2]], [12, 13, 14, 0, 1, 2, 6]
    BACKEND.write_kv(k, v, cache, metadata(slots, tables, [7], [7], 3))
    got = BACKEND.attention(q, cache, metadata(slots, tables, [7], [7], 3), 0.3)
    if dtype == torch.int8:
        kept = [dequantize(*quantize_int8(x), torch.float64) for x in (k, v)]
    else:
        kept = [dequantize(quantize_fp8(x, scale), scale, torch.float64) for x, scale in ((k, cache.k_scale), (v, cache.v_scale))]
    plain = LayerCache(torch.zeros(5, 3, 2, 8, dtype=torch.float64), torch.zeros(5, 3, 2, 8, dtype=torch.float64))
    BACKEND.write_kv(kept[0], kept[1], plain, metadata(slots, tables, [7], [7], 3))
    expected = BACKEND.attention(q, plain, metadata(slots, tables, [7], [7], 3), 0.3)
    assert torch.equal(got, expected)
    assert (kept[0] - k).abs().max() > 1e-3  # something was lost


@pytest.mark.parametrize(("dtype", "block_bytes"), [(torch.int8, 2 * 2 * 3 * 2 * (8 + 2)), (FP8, 2 * 2 * 3 * 2 * 8)])
def test_blocks_move_with_their_scales(dtype: torch.dtype, block_bytes: int) -> None:
    kv = KVTensors(2, 4, 3, 2, 8, dtype, num_cpu_blocks=2)
    assert (kv.block_bytes, kv.nbytes, kv.cpu_nbytes) == (block_bytes, 4 * block_bytes, 2 * block_bytes)
    for layer in range(2):
        new = torch.arange(1.0, 12 * 16 + 1).view(12, 2, 8) * (layer + 1) / 50
        BACKEND.write_kv(new, -new, kv.layer(layer), metadata(list(range(12)), [[0, 1, 2, 3]], [12], [12], 3))

    def values(block: int) -> torch.Tensor:
        layers = [kv.layer(layer) for layer in range(2)]
        pairs = [(c.k_NBKD, c.k_scale) for c in layers] + [(c.v_NBKD, c.v_scale) for c in layers]
        return torch.stack([dequantize(x[block], None if s is None else s[block], torch.float32) for x, s in pairs])

    before = [values(block) for block in range(4)]
    assert not torch.equal(before[0], before[1])
    kv.swap_out([(3, 0), (1, 1)], BACKEND)
    kv.copy([(0, 1), (2, 3)], BACKEND)
    assert torch.equal(values(1), before[0])
    assert torch.equal(values(3), before[2])
    kv.swap_in([(0, 2), (1, 0)], BACKEND)
    assert torch.equal(values(2), before[3])
    assert torch.equal(values(0), before[1])


def test_scales_that_cannot_be() -> None:
    with pytest.raises(UserError, match=r"Scales of K or V = 0.5 have no effect with float16: they are for fp8"):
        KVTensors(2, 1, 1, 1, 2, torch.float16, scales=(1.0, 0.5))
    with pytest.raises(UserError, match="3 scales are not allowed for K or V of 2 layers"):
        KVTensors(2, 1, 1, 1, 2, FP8, scales=((1.0, 1.0, 2.0), 1.0))
    for wrong in (0, -1.0, math.inf, [], [1.0, 0.0], "2"):
        with pytest.raises(UserError, match=r"Fp8.v_scale = .* is not allowed: a positive number"):
            Fp8(v_scale=wrong)  # type: ignore[arg-type]
    plain = KVTensors(2, 1, 1, 1, 2, FP8, scales=Fp8().scales()).layer(0)
    assert (plain.k_scale, plain.v_scale) == (None, None)
    kv = KVTensors(2, 1, 1, 1, 2, FP8, scales=Fp8(k_scale=[1.0, 0.5]).scales())
    scales = [scale for layer in range(2) for scale in (kv.layer(layer).k_scale, kv.layer(layer).v_scale)]
    assert [scale.tolist() for scale in scales if scale is not None] == [[1.0], [1.0], [0.5], [1.0]]
