"""float16 storage."""

from __future__ import annotations

from typing import ClassVar

from kvlab.policies.base import KVDtypePolicy


class Fp16(KVDtypePolicy):
    """K and V are stored as float16: 2 bytes a number, 11 significant bits, largest number 65,504.

    Source: vLLM's `--kv-cache-dtype`.
    Parameters: none.
    Deviations: none. Lossless under a float16 model only.
    """

    lossless: ClassVar[bool] = False

    def storage(self, model_dtype: str) -> str:
        """Always "float16"."""
        return "float16"
