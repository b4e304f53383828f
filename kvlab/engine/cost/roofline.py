"""A step's time from a device's and a model's figures: the longer of arithmetic and memory traffic, and what it takes to launch."""

from __future__ import annotations

from typing import Any

from kvlab.engine.cost.base import CostModel, ModelShape, at_least, share
from kvlab.engine.cost.work import step_work
from kvlab.types import Plan, UserError

RATES = ("tflops", "gb_per_s", "transfer_gb_per_s")
SHARES = ("compute_efficiency", "memory_efficiency", "transfer_efficiency")
OVERHEADS = ("overhead_ms", "layer_overhead_us")


class Roofline(CostModel):
    """Overhead, then the matrix products, then attention, then transfers, each as long as its slower resource takes.

        products:  max(2 FLOPs a weight and token [head: a weight and sampled token], all weights read once)
        attention: max(FLOPs of all query-key pairs, K and V of every context read and of every new token written)

    Source: Williams et al., "Roofline", CACM 2009, applied to the two kinds of kernels of a decoder.
    Deviations: one efficiency for all sizes (small products reach less); activations are not counted; transfers between tiers and copies
        within the pool do not overlap with computation; one device.

    Args:
        tflops: matrix rate (10^12 FLOPs a second). gb_per_s: memory bandwidth (10^9 bytes a second).
        transfer_gb_per_s: bandwidth between tiers, one direction.
        compute_efficiency, memory_efficiency, transfer_efficiency: share of each that is reached, in (0, 1].
        overhead_ms: host time of a step. layer_overhead_us: launches and gaps between kernels of one layer.
    """

    def __init__(self, tflops: float = 500.0, gb_per_s: float = 3000.0, overhead_ms: float = 1.0, transfer_gb_per_s: float = 25.0,
                 compute_efficiency: float = 1.0, memory_efficiency: float = 1.0, transfer_efficiency: float = 1.0,
                 layer_overhead_us: float = 0.0) -> None:  # fmt: skip
        self.tflops = at_least(self, "tflops", tflops, 0, strict=True)
        self.gb_per_s = at_least(self, "gb_per_s", gb_per_s, 0, strict=True)
        self.transfer_gb_per_s = at_least(self, "transfer_gb_per_s", transfer_gb_per_s, 0, strict=True)
        self.overhead_ms = at_least(self, "overhead_ms", overhead_ms, 0)
        self.layer_overhead_us = at_least(self, "layer_overhead_us", layer_overhead_us, 0)
        self.compute_efficiency = share(self, "compute_efficiency", compute_efficiency)
        self.memory_efficiency = share(self, "memory_efficiency", memory_efficiency)
        self.transfer_efficiency = share(self, "transfer_efficiency", transfer_efficiency)
        self._shape: ModelShape | None = None

    def bind(self, shape: ModelShape) -> None:
        """Keep the model's shape."""
        self._shape = shape

    def describe(self) -> dict[str, Any]:
        """The figures it computes with; nothing here was measured against a real run."""
        return {"name": "Roofline", **{name: getattr(self, name) for name in (*RATES, *SHARES, *OVERHEADS)}}

    def step_s(self, plan: Plan) -> float:
        """Overhead + max(arithmetic, memory) of products and of attention + transfers."""
        shape = self._shape
        if shape is None:
            raise UserError("The roofline cost model needs a model's shape: call bind(shape) first.")
        flops_per_s = self.tflops * 1e12 * self.compute_efficiency
        bytes_per_s = self.gb_per_s * 1e9 * self.memory_efficiency
        work = step_work(plan)
        products = attention = 0.0
        if work.num_tokens:
            flops = 2 * (shape.num_parameters * work.num_tokens + shape.head_parameters * work.num_sampled_seqs)
            weights = shape.num_parameters + (shape.head_parameters if work.num_sampled_seqs else 0)
            products = max(flops / flops_per_s, weights * shape.bytes_per_parameter / bytes_per_s)
            kv_bytes = shape.kv_bytes_per_token * (work.num_kv_tokens_read + work.num_tokens)
            attention = max(shape.attention_flops * work.num_attention_pairs / flops_per_s, kv_bytes / bytes_per_s)
        moved = work.num_moved_blocks * shape.block_bytes / (self.transfer_gb_per_s * 1e9 * self.transfer_efficiency)
        copied = 2 * work.num_copied_blocks * shape.block_bytes / bytes_per_s
        overhead = self.overhead_ms / 1e3 + (shape.num_layers * self.layer_overhead_us / 1e6 if work.num_tokens else 0.0)
        return max(overhead + products + attention + moved + copied, 1e-9)
