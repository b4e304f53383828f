"""Torch reference: the gate of a Llama's feed-forward part.

Shapes: T tokens, F intermediate size.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F


def silu_and_mul(gate_up_T2F: torch.Tensor) -> torch.Tensor:
    """silu(gate) * up, [T, F], of a row that holds the gate's F numbers, then up's."""
    gate_TF, up_TF = gate_up_T2F.chunk(2, dim=-1)
    return F.silu(gate_TF).mul_(up_TF)
