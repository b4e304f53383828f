"""As the model computes."""

from __future__ import annotations

from kvlab.policies.base import KVDtypePolicy


class Auto(KVDtypePolicy):
    """K and V are stored in the dtype that the model computes in: nothing is lost.

    Source: vLLM's `--kv-cache-dtype auto`.
    Parameters: none.
    Deviations: none.
    """

    def storage(self, model_dtype: str) -> str:
        """The model's own."""
        return model_dtype
