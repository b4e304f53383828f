"""Torch reference: rotary position embedding of queries and keys.

Shapes: T tokens, H heads (of queries and keys together), D head size.
"""

from __future__ import annotations

import torch


def rotary(x_THD: torch.Tensor, cos_T1D: torch.Tensor, sin_T1D: torch.Tensor) -> torch.Tensor:
    """Turn heads by their positions' angles, [T, H, D]. Halves layout, as in Hugging Face checkpoints.

    The first half of `sin` is negated already (kvlab.model.rope.rotary_table): x * cos + swap_halves(x) * sin.
    """
    return torch.addcmul(x_THD * cos_T1D, x_THD.roll(x_THD.shape[-1] // 2, dims=-1), sin_T1D)
