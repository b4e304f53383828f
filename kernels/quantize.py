"""Torch reference: K and V as 8-bit numbers with scales, and back. value = stored * scale.

- int8: symmetric, one float16 scale a token and KV head, max|x| / 127. A slot's content depends on its own token alone, so neither block
  size nor chunks, swaps and forks change a bit of it. (KIVI and KVQuant find per-token scales right for V; K loses more so than with
  scales per channel, which would tie tokens to each other.)
- fp8 e4m3: one float32 scale a layer, saturating at 448, as vLLM's `--kv-cache-dtype fp8` does.

Quantising computes in float32 (float64 is rounded to it first). NaN stays NaN: in fp8 as such, in int8 through the scale.

Shapes: T tokens, K KV heads, D head size.
"""

from __future__ import annotations

import torch

INT8_MAX = 127
FP8_MAX = 448.0
SCALE_MAX = 65504.0
"""Largest float16: int8 holds up to 8.3 million, more saturates."""

FP8 = torch.float8_e4m3fn
QUANTIZED = (torch.int8, FP8)


def quantize_int8(x_TKD: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(int8 [T, K, D], float16 scales [T, K]). Half a step is rounded to even; a row of zeros has scale 0."""
    x = x_TKD.to(torch.float32)
    # Divided by a tensor: by a Python number CUDA multiplies by the reciprocal instead, and rounds otherwise than a CPU.
    scale_TK = (x.abs().amax(-1) / x.new_full((), INT8_MAX)).clamp_(max=SCALE_MAX).to(torch.float16)
    steps = scale_TK.to(torch.float32)
    steps = torch.where(steps == 0, 1.0, steps)[..., None]
    # max|x| / scale may be a little over 127, because the scale was rounded. int8 knows no NaN: there the scale says it.
    return (x / steps).round_().nan_to_num_(0.0).clamp_(-INT8_MAX, INT8_MAX).to(torch.int8), scale_TK


def quantize_fp8(x_TKD: torch.Tensor, scale: torch.Tensor | None) -> torch.Tensor:
    """float8_e4m3fn [T, K, D] of x / scale (None: 1), saturated at +-448."""
    x = x_TKD.to(torch.float32)
    if scale is not None:
        x = x / scale
    return x.clamp(-FP8_MAX, FP8_MAX).to(FP8)


def dequantize(stored_TKD: torch.Tensor, scale: torch.Tensor | None, dtype: torch.dtype) -> torch.Tensor:
    """Stored numbers times their scale as `dtype`, [T, K, D] or [rows, D]. scale: None (1), float32 [1], or float16 [T, K] or [rows].

    The product is taken in float32 (float64 for float64) and rounded once.
    """
    if scale is None:
        return stored_TKD.to(dtype)
    wide = torch.promote_types(torch.float32, dtype)
    factor = scale.to(wide) if len(scale) == 1 and scale.dim() == 1 else scale.to(wide)[..., None]
    return stored_TKD.to(wide).mul_(factor).to(dtype)


def as_movable(x: torch.Tensor) -> torch.Tensor:
    """A view that index operations take: torch moves bytes, not float8."""
    return x.view(torch.uint8) if x.dtype == FP8 else x
