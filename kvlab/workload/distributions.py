"""Numbers and arrival times from named distributions, as configurations spell them: `{kind: lognormal, mean: 200, cv: 1}`."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from kvlab.types import UserError, unknown_name

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]

# kind -> (needed parameters, optional ones)
NUMBER_KINDS: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "fixed": (("value",), ()),
    "uniform": (("min", "max"), ()),
    "lognormal": (("mean", "cv"), ("min", "max")),
    "exponential": (("mean",), ("min", "max")),
}
ARRIVAL_KINDS: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "poisson": (("rate",), ()),
    "gamma": (("rate", "cv"), ()),
    "fixed": (("rate",), ()),
    "all_at_once": ((), ()),
}


def parse(
    name: str, spec: Mapping[Any, Any], kinds: Mapping[str, tuple[Sequence[str], Sequence[str]]], notes: list[str]
) -> tuple[str, dict[str, float]]:
    """(kind, parameters) of a specification. A null counts as absent; a parameter of another kind has no effect and is noted.

    UserError for an unknown kind or key, a missing parameter, or a value that is no finite number.
    """
    kind = spec.get("kind")
    if kind not in kinds:
        raise unknown_name(f"{name}.kind", str(kind), kinds)
    needed, optional = kinds[str(kind)]
    known = {key for pair in kinds.values() for keys in pair for key in keys}
    values: dict[str, float] = {}
    for key, value in spec.items():
        if key == "kind" or (key in known and value is None):
            continue
        if key not in known:
            raise unknown_name(f"key of {name}", str(key), ["kind", *known])
        if key not in needed and key not in optional:
            notes.append(f"{name}.{key} has no effect with kind={kind}.")
            continue
        values[str(key)] = number(f"{name}.{key}", value)
    for key in needed:
        if key not in values:
            raise UserError(f"{name} with kind={kind} needs {key}; it takes {', '.join((*needed, *optional)) or 'nothing'}.")
    return str(kind), values


def number(name: str, value: object, minimum: float = -math.inf) -> float:
    """A finite number of at least `minimum`, or a UserError that names the parameter."""
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value) or value < minimum:
        raise UserError(f"{name} = {value!r} is not allowed: a number" + (f" >= {minimum:g}." if minimum > -math.inf else "."))
    return float(value)


def whole(name: str, value: object, minimum: int) -> int:
    """A whole number of at least `minimum`, or a UserError that names the parameter."""
    if isinstance(value, bool) or not isinstance(value, int) or value < minimum:
        raise UserError(f"{name} = {value!r} is not allowed: a whole number >= {minimum}.")
    return value


def mapping(name: str, value: object, example: str) -> Mapping[Any, Any]:
    """`value` if it is a mapping, or a UserError that shows one."""
    if not isinstance(value, Mapping):
        raise UserError(f"{name} = {value!r} is not allowed: a mapping, for example {example}.")
    return value


class Numbers:
    """A distribution of non-negative numbers (lengths in tokens, seconds, turns).

    Kinds: fixed (value), uniform (min, max; both included for lengths), lognormal (mean and cv of the distribution before the
    optional min and max clip it; cv = standard deviation / mean), exponential (mean; min, max). A plain number means fixed.
    """

    def __init__(self, name: str, spec: object, notes: list[str], minimum: float = 0) -> None:
        """name: the parameter, for messages. minimum: what values may not be under (1 for lengths). Notes are appended."""
        self.name = name
        if not isinstance(spec, Mapping):
            spec = {"kind": "fixed", "value": spec}
        self.kind, self.values = parse(name, spec, NUMBER_KINDS, notes)
        self._notes = notes
        for key, value in self.values.items():
            number(f"{name}.{key}", value, 0 if key in ("cv", "mean") else minimum)
        self.min = self.values.get("min", minimum)
        self.max = self.values.get("max", math.inf)
        if self.min > self.max:
            raise UserError(f"{name}.min = {self.min:g} is above {name}.max = {self.max:g}.")
        if self.kind in ("lognormal", "exponential") and self.values["mean"] <= 0:
            raise UserError(f"{name}.mean = {self.values['mean']:g} is not allowed: more than 0.")

    def reals(self, rng: np.random.Generator, count: int) -> Floats:
        """`count` draws."""
        v = self.values
        if self.kind == "fixed":
            return np.full(count, v["value"])
        if self.kind == "uniform":
            return rng.uniform(v["min"], v["max"], count)
        if self.kind == "exponential":
            return self._clip(rng.exponential(v["mean"], count))
        variance = math.log1p(v["cv"] ** 2)
        return self._clip(rng.lognormal(math.log(v["mean"]) - variance / 2, math.sqrt(variance), count).astype(np.float64))

    def integers(self, rng: np.random.Generator, count: int) -> Ints:
        """`count` draws, rounded to whole numbers."""
        for key in ("value", "min", "max"):
            if self.values.get(key, 0.0) % 1:
                raise UserError(f"{self.name}.{key} = {self.values[key]:g} is not allowed: a whole number.")
        if self.kind == "uniform":
            return rng.integers(int(self.min), int(self.max) + 1, count)
        return np.rint(self.reals(rng, count)).astype(np.int64)

    def _clip(self, drawn: Floats) -> Floats:
        num_above = int((drawn > self.max).sum())
        if num_above:
            self._notes.append(f"{self.name}: {num_above} of {len(drawn)} draws were above max and became {self.max:g}.")
        return np.clip(drawn, self.min, self.max)


class Arrivals:
    """Arrival times; the first is 0.

    Kinds: poisson (rate, requests per second), gamma (rate; cv, the coefficient of variation of the gaps: 1 is Poisson, more is
    burstier; BurstGPT and vLLM's benchmark give the shape 1 / cv^2), fixed (rate; even gaps), all_at_once.
    """

    def __init__(self, name: str, spec: Mapping[Any, Any] | None, notes: list[str]) -> None:
        """spec: `{kind: poisson, rate: 2}`; None is all_at_once."""
        spec = {"kind": "all_at_once"} if spec is None else mapping(name, spec, "{kind: poisson, rate: 2}")
        self.kind, self.values = parse(name, spec, ARRIVAL_KINDS, notes)
        for key, value in self.values.items():
            if value <= 0:
                raise UserError(f"{name}.{key} = {value:g} is not allowed: more than 0.")

    def draw(self, rng: np.random.Generator, count: int) -> Floats:
        """`count` times (s), ascending."""
        if self.kind == "all_at_once" or count == 0:
            return np.zeros(count)
        mean_gap_s = 1 / self.values["rate"]
        if self.kind == "fixed":
            return np.arange(count, dtype=np.float64) * mean_gap_s
        shape = 1.0 if self.kind == "poisson" else 1 / self.values["cv"] ** 2
        gaps_s = rng.gamma(shape, mean_gap_s / shape, count - 1)
        return np.concatenate([np.zeros(1), np.cumsum(gaps_s)])


def draw_weighted(name: str, weights: Mapping[Any, float] | None, rng: np.random.Generator, count: int) -> list[Any] | None:
    """`count` keys of `{key: weight}` drawn by weight; None for no weights."""
    if not weights:
        return None
    mapping(name, weights, "{a: 0.5, b: 0.5}")
    keys = list(weights)
    shares = np.array([number(f"{name}[{key!r}]", weights[key], 0) for key in keys])
    if shares.sum() <= 0:
        raise UserError(f"{name}: at least one weight must be more than 0.")
    return [keys[i] for i in rng.choice(len(keys), count, p=shares / shares.sum())]
