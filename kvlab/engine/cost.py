"""What a step costs on a simulated machine: a function of the plan, in seconds."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import NamedTuple

from kvlab.types import Plan, UserError


class ModelShape(NamedTuple):
    """What a cost model must know of a model. Bytes are of its storage types.

    Attributes:
        num_parameters: weights that every token passes through. weight_bytes: bytes of all weights.
        kv_bytes_per_token: K and V of one token over all layers. attention_flops: FLOPs of one query against one key and value,
            over all layers and heads (4 * layers * query heads * head size).
        block_bytes: one KV block over all layers (for transfers).
    """

    num_parameters: int
    weight_bytes: int
    kv_bytes_per_token: int
    attention_flops: int
    block_bytes: int


class CostModel(ABC):
    """Seconds of a step."""

    def bind(self, shape: ModelShape) -> None:  # noqa: B027 - optional
        """Told once, before the first step, which model runs."""

    @abstractmethod
    def step_s(self, plan: Plan) -> float:
        """Time of the plan's step (s), more than 0 for a step that computes something."""


class Constant(CostModel):
    """Every step takes the same time.

    Args:
        step_ms: milliseconds a step.
    """

    def __init__(self, step_ms: float = 10.0) -> None:
        if not step_ms > 0:
            raise UserError(f"Constant.step_ms = {step_ms!r} is not allowed: more than 0 (milliseconds).")
        self.step_ms = step_ms

    def step_s(self, plan: Plan) -> float:
        """The constant."""
        return self.step_ms / 1e3


class Roofline(CostModel):
    """A step takes its overhead and the longer of its arithmetic and its memory traffic; transfers between tiers come on top.

    Source: Williams et al., "Roofline", CACM 2009, with the whole step as one kernel.
    Deviations: one efficiency for all sizes, no overlap of transfers, writes of K and V not counted.

    Args:
        tflops: matrix rate reached (10^12 FLOPs a second). gb_per_s: memory bandwidth reached (10^9 bytes a second).
        overhead_ms: launch and host time of a step. transfer_gb_per_s: bandwidth between tiers.
    """

    def __init__(self, tflops: float = 500.0, gb_per_s: float = 3000.0, overhead_ms: float = 1.0, transfer_gb_per_s: float = 25.0) -> None:
        for name, value in (("tflops", tflops), ("gb_per_s", gb_per_s), ("transfer_gb_per_s", transfer_gb_per_s)):
            if not value > 0:
                raise UserError(f"Roofline.{name} = {value!r} is not allowed: more than 0.")
        if overhead_ms < 0:
            raise UserError(f"Roofline.overhead_ms = {overhead_ms!r} is not allowed: 0 or more.")
        self.tflops = tflops
        self.gb_per_s = gb_per_s
        self.overhead_ms = overhead_ms
        self.transfer_gb_per_s = transfer_gb_per_s
        self._shape: ModelShape | None = None

    def bind(self, shape: ModelShape) -> None:
        """Keep the model's shape."""
        self._shape = shape

    def step_s(self, plan: Plan) -> float:
        """Overhead + max(arithmetic, memory) + transfers."""
        shape = self._shape
        if shape is None:
            raise UserError("The roofline cost model needs a model's shape: call bind(shape) first.")
        num_new = keys_read = pairs = 0
        for s in plan.scheduled:
            n, end = s.num_new_tokens, s.first_position + s.num_new_tokens - s.num_dropped_tokens
            num_new += n
            keys_read += end
            pairs += n * end - n * (n - 1) // 2
        arithmetic = (2 * shape.num_parameters * num_new + shape.attention_flops * pairs) / (self.tflops * 1e12)
        memory = (shape.weight_bytes + shape.kv_bytes_per_token * keys_read) / (self.gb_per_s * 1e9)
        moved = (len(plan.swap_in) + len(plan.swap_out)) * shape.block_bytes / (self.transfer_gb_per_s * 1e9)
        copied = 2 * len(plan.copies) * shape.block_bytes / (self.gb_per_s * 1e9)
        return self.overhead_ms / 1e3 + (max(arithmetic, memory) if num_new else 0.0) + moved + copied
