"""The contract of cost models, and what they may know of a model."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from typing import Any, NamedTuple

from kvlab.types import Plan, UserError


class ModelShape(NamedTuple):
    """What a cost model must know of a model.

    Attributes:
        num_parameters: weights of the layers, which every token passes through. head_parameters: those of the output head, which
            sampled positions pass through. (An input embedding is looked up, not multiplied: it is in neither.)
        bytes_per_parameter: of their storage type. num_layers: each starts its own kernels.
        kv_bytes_per_token: K and V of one token over all layers, as stored. attention_flops: FLOPs of one query against one key and
            its value, over all layers and heads (4 * layers * query heads * head size).
        block_bytes: one KV block over all layers.
    """

    num_parameters: int
    head_parameters: int
    bytes_per_parameter: int
    num_layers: int
    kv_bytes_per_token: int
    attention_flops: int
    block_bytes: int


class CostModel(ABC):
    """Seconds of a step."""

    def bind(self, shape: ModelShape) -> None:  # noqa: B027 - optional
        """Told once, before the first step, which model runs."""

    @abstractmethod
    def step_s(self, plan: Plan) -> float:
        """Time of the plan's step (s), more than 0: a clock that stands still would order nothing."""

    def describe(self) -> dict[str, Any]:
        """What a reader of a simulated figure should know: the class, and how far it can be trusted where that was measured."""
        return {"name": type(self).__name__}


def at_least(owner: object, name: str, value: object, low: float, strict: bool = False) -> float:
    """A parameter as a finite number of at least (`strict`: above) `low`; a UserError names the class and the parameter."""
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
    if is_number and (value > low if strict else value >= low):  # type: ignore[operator]
        return float(value)  # type: ignore[arg-type]
    allowed = f"a number above {low:g}" if strict else f"a number of at least {low:g}"
    raise UserError(f"{type(owner).__name__}.{name} = {value!r} is not allowed: {allowed}.")


def share(owner: object, name: str, value: object) -> float:
    """A parameter in (0, 1]."""
    if isinstance(value, (int, float)) and not isinstance(value, bool) and 0 < value <= 1:
        return float(value)
    raise UserError(f"{type(owner).__name__}.{name} = {value!r} is not allowed: a number in (0, 1], the share of the peak that is reached.")
