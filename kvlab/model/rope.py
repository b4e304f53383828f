"""Rotary position embeddings: frequencies with scaling, cosine and sine tables (kvlab.kernels.rotary applies them).

Shapes: D head size, P positions.
"""

from __future__ import annotations

import math

import torch

from kvlab.model.config import LlamaConfig, RopeScaling


def inverse_frequencies(config: LlamaConfig) -> torch.Tensor:
    """Angular frequency of each pair of coordinates, float32 [D/2], computed as transformers does (float32: it is what models were
    trained with, and a table in float64 would be another model)."""
    exponents = torch.arange(0, config.head_dim, 2, dtype=torch.int64).float() / config.head_dim
    inv_freq = 1.0 / (config.rope_theta**exponents)
    if config.rope_scaling is None:
        return inv_freq
    if config.rope_scaling.kind == "linear":
        return inv_freq / config.rope_scaling.factor
    return _llama3(inv_freq, config.rope_scaling)


def _llama3(inv_freq: torch.Tensor, scaling: RopeScaling) -> torch.Tensor:
    """Llama 3.1: short wavelengths stay, long ones are divided by `factor`, those between are blended."""
    context = scaling.original_max_position_embeddings
    low_wavelength, high_wavelength = context / scaling.low_freq_factor, context / scaling.high_freq_factor
    wavelength = 2 * math.pi / inv_freq
    scaled = torch.where(wavelength > low_wavelength, inv_freq / scaling.factor, inv_freq)
    smooth = (context / wavelength - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
    blended = (1 - smooth) * scaled / scaling.factor + smooth * scaled
    is_between = ~(wavelength < high_wavelength) & ~(wavelength > low_wavelength)
    return torch.where(is_between, blended, scaled)


def rotary_table(config: LlamaConfig, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Cosines and sines of every position, [P, 2, 1, D] in `dtype`; the angles are taken in float32 as transformers does.

    The first half of the sines is negative: rotating is then `x * cos + swap_halves(x) * sin`, without a negation per token.
    """
    positions = torch.arange(config.max_position_embeddings, dtype=torch.float32)
    angles = positions[:, None] * inverse_frequencies(config)[None, :]
    cos, sin = angles.cos(), angles.sin()
    table = torch.stack([torch.cat([cos, cos], dim=-1), torch.cat([-sin, sin], dim=-1)], dim=1)
    return table[:, :, None, :].to(dtype=dtype, device=device)
