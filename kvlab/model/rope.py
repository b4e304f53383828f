"""Rotary position embeddings: frequencies with scaling, cosine and sine tables (kvlab.kernels.rotary applies them).

Shapes: D head size, P positions.
"""

from __future__ import annotations

import math

import torch

from kvlab.model.config import LlamaConfig, RopeScaling

_CHUNK = 65536
"""Positions whose angles are computed at a time."""


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


def rotary_table(config: LlamaConfig, num_positions: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Cosines and sines of positions 0 to P - 1, [P, 2, 1, D] in `dtype`; the angles are taken in float32 as transformers does.

    The first half of the sines is negative: rotating is then `x * cos + swap_halves(x) * sin`, without a negation per token.
    """
    table = torch.empty(num_positions, 2, 1, config.head_dim, dtype=dtype, device=device)
    frequencies = inverse_frequencies(config)
    half = config.head_dim // 2
    for start in range(0, num_positions, _CHUNK):  # what is made on the way stays small beside the table
        positions = torch.arange(start, min(start + _CHUNK, num_positions), dtype=torch.float32)
        angles = positions[:, None] * frequencies[None, :]
        rows = table[start : start + _CHUNK, :, 0]
        cos, sin = angles.cos().to(dtype), angles.sin().to(dtype)
        rows[:, 0, :half], rows[:, 0, half:], rows[:, 1, :half], rows[:, 1, half:] = cos, cos, -sin, sin
    return table
