"""8-bit integers with scales."""

from __future__ import annotations

from typing import ClassVar

from kvlab.policies.base import KVDtypePolicy


class Int8(KVDtypePolicy):
    """K and V are stored as whole numbers of -127 to 127 times a float16 scale, one a token and KV head: head size + 2 bytes for the K
    (or V) of a head. A slot's content depends on its token alone, so block size, chunks, swaps and forks change no bit of it.

    Source: symmetric per-token quantisation as in KIVI (Liu et al., 2024, https://arxiv.org/abs/2402.02750), section 3.1, at 8 bits.
    Parameters: none.
    Deviations: K too is quantised per token and head; KIVI takes K per channel, over groups of tokens, which would tie a slot's content to
        its neighbours. No zero point.
    """

    lossless: ClassVar[bool] = False

    def storage(self, model_dtype: str) -> str:
        """Always "int8"."""
        return "int8"
