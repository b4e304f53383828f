"""8-bit floating point storage."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from kvlab.policies.base import KVDtypePolicy
from kvlab.types import UserError

Scale = float | Sequence[float]


class Fp8(KVDtypePolicy):
    """K and V are stored as float8 e4m3 (4 significant bits, largest number 448): 1 byte a number. stored = x / scale, saturated at +-448.

    Source: vLLM's `--kv-cache-dtype fp8` with its `k_scale` and `v_scale`.
    Parameters: k_scale: of K, positive, one number for all layers or a list of one a layer; None: 1.0, which
        holds what stays below 448 as it is.
        v_scale: of V, the same.
    Deviations: scales are given, not calibrated while running (vLLM's `--calculate-kv-scales`).
    """

    lossless: ClassVar[bool] = False

    def __init__(self, k_scale: Scale | None = None, v_scale: Scale | None = None) -> None:
        self.k_scale, self.v_scale = k_scale, v_scale
        for name, scale in (("k_scale", k_scale), ("v_scale", v_scale)):
            values = list(scale) if isinstance(scale, Sequence) else [1.0 if scale is None else scale]
            if not values or not all(_is_positive(value) for value in values):
                raise UserError(f"Fp8.{name} = {scale!r} is not allowed: a positive number, a list of one a layer, or null (1.0).")

    def storage(self, model_dtype: str) -> str:
        """Always "float8_e4m3fn"."""
        return "float8_e4m3fn"

    def scales(self) -> tuple[float | tuple[float, ...], float | tuple[float, ...]]:
        """As given."""
        return _plain(self.k_scale), _plain(self.v_scale)


def _is_positive(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and 0 < value < 1e30  # also 10**400 is an int


def _plain(scale: Scale | None) -> float | tuple[float, ...]:
    if scale is None:
        return 1.0
    return tuple(float(value) for value in scale) if isinstance(scale, Sequence) else float(scale)
