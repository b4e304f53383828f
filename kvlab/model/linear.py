"""Linear layers, with weights packed by oneDNN on CPUs where that is faster.

Measured on a 2-core AVX-512 machine with SmolLM2's shapes in float32 (experiments/bench/bench_linear.py): all products of a step take
28 / 53 / 93 ms for 1 / 8 / 32 tokens with plain weights and 31 / 34 / 72 ms with packed ones; from 192 tokens on there is no difference.
On two cores of an AMD Zen 5: 34 / 65 / 101 ms plain, 16 / 20 / 34 ms packed; layouts for other batch sizes gain nothing over one for 32.
In bfloat16, where oneDNN has it, packed weights make a whole decode step about a third shorter than plain ones at 1 sequence.
"""

from __future__ import annotations

import platform
from typing import Any

import torch
import torch.nn.functional as F

PACKED_FOR_NUM_TOKENS = 32
"""The batch size oneDNN chooses its layout for. It runs other sizes as well: layouts for 8 and 32 tokens did equally from 1 to 1,024."""


class Linear:
    """y = x W^T + b for W [out, in]."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> None:
        self.weight, self.bias = weight, bias
        self._packed: Any = None

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """[T, in] -> [T, out]."""
        if self._packed is not None:
            result: torch.Tensor = torch.ops.mkldnn._linear_pointwise(x, self._packed, self.bias, "none", [], "")
            return result
        return F.linear(x, self.weight, self.bias)

    @property
    def is_packed(self) -> bool:
        """Whether the weight is packed: `add_to` works then."""
        return self._packed is not None

    def add_to(self, residual: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        """residual + x W^T + b, [T, out], of a packed weight: the sum is part of the product. `residual` may be overwritten."""
        result: torch.Tensor = torch.ops.mkldnn._linear_pointwise.binary(x, residual, self._packed, self.bias, "add")
        return result

    def pack(self) -> None:
        """Pack the weight if oneDNN can and it pays (float32, and bfloat16 where the processor has it, on an x86 CPU); `weight` is empty
        afterwards, to hold it only once."""
        if self._packed is None and can_pack(self.weight):
            self._packed = _packed(self.weight)
            self.weight = self.weight.new_empty(0)


def can_pack(weight: torch.Tensor) -> bool:
    """Whether this build of torch has oneDNN's packed products for such a weight."""
    return (
        weight.dtype in (torch.float32, torch.bfloat16)
        and weight.device.type == "cpu"
        and platform.machine().lower() in ("x86_64", "amd64")
        and torch.backends.mkldnn.is_available()
        and hasattr(torch.ops.mkldnn, "_reorder_linear_weight")
        and hasattr(torch.ops.mkldnn, "_linear_pointwise")
        and (weight.dtype == torch.float32 or torch.ops.mkldnn._is_mkldnn_bf16_supported())
    )


def _packed(weight: torch.Tensor) -> Any:
    with torch.no_grad():  # the operator exists for plain tensors only, and refuses those that could need a gradient
        return torch.ops.mkldnn._reorder_linear_weight(weight.detach(), PACKED_FOR_NUM_TOKENS)
