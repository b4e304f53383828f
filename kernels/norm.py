"""Torch reference: RMSNorm, alone and with the residual sum before it.

Shapes: T tokens, E hidden size.
"""

from __future__ import annotations

from functools import lru_cache

import torch
import torch.nn.functional as F


def rms_norm(x_TE: torch.Tensor, weight_E: torch.Tensor, eps: float) -> torch.Tensor:
    """x / sqrt(mean(x^2) + eps) * weight, [T, E] of x's dtype.

    Half types: in float32, rounded before the weight is applied, as transformers does. float64 stays float64.
    """
    if x_TE.dtype.itemsize >= 4 and x_TE.device.type == "cpu":  # torch's own makes twice as many passes there
        norm_T1 = torch.linalg.vector_norm(x_TE, dim=-1, keepdim=True)
        scale_T1 = torch.addcmul(_constant(eps, x_TE.dtype), norm_T1, norm_T1, value=1 / x_TE.shape[-1]).rsqrt_()
        return torch.mul(x_TE, scale_T1).mul_(weight_E)
    if x_TE.dtype.itemsize >= 4:
        return F.rms_norm(x_TE, (x_TE.shape[-1],), weight_E, eps)
    return weight_E * F.rms_norm(x_TE.float(), (x_TE.shape[-1],), None, eps).to(x_TE.dtype)


def add_rms_norm(x_TE: torch.Tensor, residual_TE: torch.Tensor, weight_E: torch.Tensor,
                 eps: float) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """`residual += x` (in place, rounded to its dtype), then the norm of the sum. Returns (normed, residual), both [T, E]."""
    residual_TE.add_(x_TE)
    return rms_norm(residual_TE, weight_E, eps), residual_TE


@lru_cache(maxsize=16)
def _constant(value: float, dtype: torch.dtype) -> torch.Tensor:
    with torch.inference_mode(False):  # it may be used outside of it too
        return torch.tensor(value, dtype=dtype)
