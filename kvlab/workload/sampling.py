"""Sampling parameters from configurations and files, with messages that say where a wrong one stands."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from kvlab.types import SamplingParams, UserError, unknown_name
from kvlab.workload.distributions import mapping

NAMES = tuple(f.name for f in fields(SamplingParams) if f.init)
"""Every sampling parameter."""


def sampling_params(where: str, *layers: Mapping[Any, Any] | None) -> SamplingParams:
    """SamplingParams of several layers, the later ones winning. UserError (with `where`) for unknown names and wrong values."""
    merged: dict[str, Any] = {}
    for layer in layers:
        for key, value in mapping(where, layer or {}, "{temperature: 0.8, max_tokens: 64}").items():
            if key not in NAMES:
                raise UserError(f"{where}: {unknown_name('sampling parameter', str(key), NAMES)}")
            merged[str(key)] = value
    try:
        return SamplingParams(**merged)
    except UserError as error:
        raise UserError(f"{where}: {str(error).removeprefix('SamplingParams.')}") from error


class LengthSampling:
    """Sampling of workloads that know output lengths: a request's length is its max_tokens. `ignore_eos` makes it exact."""

    def __init__(self, sampling: Mapping[Any, Any] | None, ignore_eos: bool) -> None:
        """sampling: further parameters. UserError for a wrong one, and for max_tokens, which would have no effect."""
        self._made: dict[int, SamplingParams] = {}  # frozen, so requests of a length share one
        self._layers: tuple[Mapping[Any, Any], ...] = ({"ignore_eos": ignore_eos}, sampling or {})
        mapping("workload.sampling", self._layers[1], "{temperature: 0.8}")
        if "max_tokens" in self._layers[1]:
            raise UserError("workload.sampling.max_tokens has no effect here: output lengths come from output_len or the trace.")
        min_tokens = self._layers[1].get("min_tokens", 0)
        self.params(max(1, min_tokens if isinstance(min_tokens, int) else 1))

    def params(self, output_len: int) -> SamplingParams:
        """SamplingParams of a request of that length; UserError if min_tokens is above it."""
        if output_len not in self._made:
            if len(self._made) > 4096:
                self._made.clear()
            self._made[output_len] = sampling_params("workload.sampling", *self._layers, {"max_tokens": output_len})
        return self._made[output_len]
