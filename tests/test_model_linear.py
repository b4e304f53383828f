"""Packed products against values worked out by hand."""

from __future__ import annotations

import pytest
import torch

from kvlab.model.linear import Linear, can_pack

WEIGHT = [[1.0, 2.0], [3.0, 4.0], [-0.5, 0.25]]
BIAS = [0.5, -1.0, 8.0]
X = [[1.0, 10.0], [4.0, -2.0]]
PRODUCT = [[21.0, 43.0, 2.0], [0.0, 4.0, -2.5]]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64, torch.float16])
@pytest.mark.parametrize("has_bias", [False, True])
def test_a_product_is_the_same_packed_or_not(dtype: torch.dtype, has_bias: bool) -> None:
    bias = torch.tensor(BIAS if has_bias else [0.0] * 3, dtype=dtype)
    linear = Linear(torch.tensor(WEIGHT, dtype=dtype), bias if has_bias else None)
    packs = can_pack(linear.weight)
    expected = torch.tensor(PRODUCT, dtype=dtype) + bias
    with torch.inference_mode():
        torch.testing.assert_close(linear(torch.tensor(X, dtype=dtype)), expected, rtol=0, atol=0)
        linear.pack()
        torch.testing.assert_close(linear(torch.tensor(X, dtype=dtype)), expected, rtol=0, atol=0)
        assert (linear.is_packed, linear.weight.numel()) == (packs, 0 if packs else 6)
        if packs:
            residual = torch.tensor([[100.0, 0.0, 1.0], [-1.0, 2.0, 4.0]], dtype=dtype)
            sums = torch.tensor([[121.0, 43.0, 3.0], [-1.0, 6.0, 1.5]], dtype=dtype) + bias
            torch.testing.assert_close(linear.add_to(residual, torch.tensor(X, dtype=dtype)), sums, rtol=0, atol=0)


def test_which_weights_are_packed() -> None:
    assert [can_pack(torch.ones(2, 2, dtype=dtype)) for dtype in (torch.float64, torch.float16)] == [False, False]
    if torch.ops.mkldnn._is_mkldnn_bf16_supported():
        assert can_pack(torch.ones(2, 2, dtype=torch.bfloat16)) == can_pack(torch.ones(2, 2))
    else:
        assert not can_pack(torch.ones(2, 2, dtype=torch.bfloat16))
