"""float32 storage."""

from __future__ import annotations

from kvlab.policies.base import KVDtypePolicy


class Fp32(KVDtypePolicy):
    """K and V are stored as float32: 4 bytes a number.

    Source: vLLM's `--kv-cache-dtype`.
    Parameters: none.
    Deviations: vLLM stores at most the model's dtype; here a narrower model may be stored wider. Lossy under a float64 model
        only.
    """

    def storage(self, model_dtype: str) -> str:
        """Always "float32"."""
        return "float32"
