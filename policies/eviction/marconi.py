"""Marconi: recency and FLOPs saved per byte."""

from __future__ import annotations

from kvlab.policies.base import EvictionPolicy, is_number, require
from kvlab.policies.eviction._flops import block_flops
from kvlab.policies.eviction._heap import KeyHeap
from kvlab.types import BlockView, Now

RENEWALS = 4
"""The scales are measured so many times while as many blocks as there are candidates go."""
TOLERANCE = 0.05
"""Relative change of their ratio from which on all candidates are valued anew."""
NUM_EXACT = 32
"""With so many candidates or fewer they are, before each eviction."""


class Marconi(EvictionPolicy):
    """The block goes whose recency + alpha x FLOPs saved per byte is smallest, both on a scale from 0 to 1 over the candidates: of two
    used at about the same time the deeper one stays, since attention makes it dearer to compute again.

    Source: Pan et al., "Marconi: prefix caching for the era of hybrid LLMs" (MLSys 2025), section 4.2, https://arxiv.org/abs/2411.19379
    Parameters: alpha: weight of the FLOPs, at least 0 (0: lru). num_params: parameters of the model, num_layers: its layers,
        hidden_size: query heads x head size (defaults: Llama 3 8B).
    Deviations: recency is the tick of the last use. Every block has the same bytes, so FLOPs per byte are those of its own tokens
        (2 P B + 4 L H (d B^2 + B (B + 1) / 2) at depth d with B tokens, P parameters, L layers, hidden size H). The ends of the two scales
        are taken anew each time a quarter of the candidates has gone, and used if their ratio has changed by a twentieth: exact up to
        32 candidates, amortized O(log n) always. alpha is given; Marconi finds it by replaying past requests.
    """

    def __init__(self, alpha: float = 1.0, num_params: float = 8.03e9, num_layers: int = 32, hidden_size: int = 4096) -> None:
        for name, value in (("num_params", num_params), ("num_layers", num_layers), ("hidden_size", hidden_size)):
            require(is_number(value) and value > 0, self, name, value, "a number above 0")
        require(is_number(alpha) and alpha >= 0, self, "alpha", alpha, "a number of at least 0")
        self.alpha = alpha
        self.num_params = num_params
        self.num_layers = num_layers
        self.hidden_size = hidden_size
        self.reset()

    def reset(self) -> None:
        """As new."""
        self._ticks_per_flop = 0.0  # alpha x (span of ticks / span of FLOPs), as last measured
        self._flops: dict[int, float] = {}  # by depth
        self._heap = KeyHeap()  # candidates by (value, tick of last use, FLOPs)
        self._num_left = 0  # evictions until it is measured again

    def release(self, block: BlockView, now: Now, preempted: bool) -> None:
        """A candidate."""
        flops = self._flops.get(block.depth)
        if flops is None:
            flops = block_flops(block.depth, block.num_tokens, self.num_params, self.num_layers, self.hidden_size)
            self._flops[block.depth] = flops
        tick = block.used_tick
        self._heap.push(block.block_id, (tick + self._ticks_per_flop * flops, tick, flops))

    def hit(self, block: BlockView, now: Now) -> None:
        """Held."""
        self._heap.drop(block.block_id)

    def evict(self, block: BlockView, now: Now) -> None:
        """Gone."""
        self._heap.drop(block.block_id)
        self._num_left -= 1

    def victim(self, now: Now) -> int:
        """The smallest value."""
        if self._num_left <= 0 or len(self._heap) <= NUM_EXACT:
            self._measure()
        return self._heap.first()

    def _measure(self) -> None:
        """Both scales from all candidates: recency / span + alpha x FLOPs / span sorts as recency + alpha x (span / span) x FLOPs."""
        entries = self._heap.entries()
        ticks = [key[1] for key, _ in entries]
        costs = [key[2] for key, _ in entries]
        span_of_flops = max(costs) - min(costs)
        weight = self.alpha * (max(ticks) - min(ticks)) / span_of_flops if span_of_flops else 0.0
        self._num_left = len(entries) // RENEWALS
        tolerance = TOLERANCE * weight if len(entries) > NUM_EXACT else 0.0
        if abs(weight - self._ticks_per_flop) > tolerance:
            self._ticks_per_flop = weight
            self._heap = KeyHeap.of([((tick + weight * flops, tick, flops), block_id) for (_, tick, flops), block_id in entries])
