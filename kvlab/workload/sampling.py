"""Sampling parameters from configurations and files, with messages that say where a wrong one stands."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import Any

from kvlab.types import SamplingParams, UserError, unknown_name
from kvlab.workload.distributions import mapping

TYPES: dict[str, str] = {f.name: str(f.type) for f in fields(SamplingParams) if f.init}
"""Name -> annotation of every sampling parameter."""


def sampling_params(where: str, *layers: Mapping[Any, Any] | None) -> SamplingParams:
    """SamplingParams of several layers, the later ones winning. UserError (with `where`) for unknown names and wrong values."""
    merged: dict[str, Any] = {}
    for layer in layers:
        for key, value in mapping(where, layer or {}, "{temperature: 0.8, max_tokens: 64}").items():
            if key not in TYPES:
                raise UserError(f"{where}: {unknown_name('sampling parameter', str(key), TYPES)}")
            merged[str(key)] = _typed(where, str(key), value)
    try:
        return SamplingParams(**merged)
    except UserError as error:
        raise UserError(f"{where}: {error}") from error


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


def _typed(where: str, key: str, value: Any) -> Any:
    """The value in the parameter's type, or a UserError."""
    kind = TYPES[key]
    if value is None and "None" in kind:
        return None
    if kind.startswith("tuple"):
        element: type = str if "str" in kind else int
        many = value if isinstance(value, Sequence) and not isinstance(value, str) else (value,)
        if all(isinstance(v, element) and not isinstance(v, bool) for v in many):
            return tuple(many)
        allowed = "a string or strings" if element is str else "an id or ids"
        raise UserError(f"{where}: {key} = {value!r} is not allowed: {allowed}.")
    if kind == "bool":
        if isinstance(value, bool):
            return value
        raise UserError(f"{where}: {key} = {value!r} is not allowed: true or false.")
    if isinstance(value, int) and not isinstance(value, bool):
        return float(value) if kind == "float" else value
    if kind == "float" and isinstance(value, float):
        return value
    raise UserError(f"{where}: {key} = {value!r} is not allowed: a {'number' if kind == 'float' else 'whole number'}.")
