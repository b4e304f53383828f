"""bfloat16 storage."""

from __future__ import annotations

from typing import ClassVar

from kvlab.policies.base import KVDtypePolicy


class Bf16(KVDtypePolicy):
    """K and V are stored as bfloat16: 2 bytes a number, 8 significant bits, the range of float32.

    Source: vLLM's `--kv-cache-dtype`.
    Parameters: none.
    Deviations: none. Lossless under a bfloat16 model only.
    """

    lossless: ClassVar[bool] = False

    def storage(self, model_dtype: str) -> str:
        """Always "bfloat16"."""
        return "bfloat16"
