"""Cost-aware."""

from __future__ import annotations

from kvlab.policies.base import KeyEviction, is_number, require
from kvlab.policies.eviction._flops import block_flops
from kvlab.types import BlockView


class CostAware(KeyEviction):
    """The block goes whose uses x cost of computing it again is smallest: attention makes a block dearer the later it stands.

    The cost of the block at depth d of B tokens is 2 P B + 4 L H (d B^2 + B (B + 1) / 2) FLOPs: P parameters, L layers, hidden size H.

    Source: frequency x cost, the value of GreedyDual-Size-Frequency without its aging (Cherkasova, HP Labs HPL-98-69R1, 1998), with the
        FLOPs of a transformer's forward pass (Kaplan et al., "Scaling laws for neural language models", 2020,
        https://arxiv.org/abs/2001.08361, table 1).
    Parameters: num_params: parameters of the model, num_layers: its layers, hidden_size: query heads x head size (defaults: Llama 3 8B).
        Only their ratio matters: it says at which depth attention doubles the cost.
    Deviations: uses are the insert and the hits since. The blocks before it count as cached. Among equal values the one used longest
        ago goes.
    """

    def __init__(self, num_params: float = 8.03e9, num_layers: int = 32, hidden_size: int = 4096) -> None:
        require(_is_positive(num_params), self, "num_params", num_params, "a number above 0")
        require(_is_positive(num_layers), self, "num_layers", num_layers, "a number above 0")
        require(_is_positive(hidden_size), self, "hidden_size", hidden_size, "a number above 0")
        self.num_params = num_params
        self.num_layers = num_layers
        self.hidden_size = hidden_size
        super().__init__()

    def key(self, block: BlockView) -> tuple[float, ...]:
        """(uses x FLOPs, tick of its last use)."""
        flops = block_flops(block.depth, block.num_tokens, self.num_params, self.num_layers, self.hidden_size)
        return ((block.num_hits + 1) * flops, block.used_tick)


def _is_positive(value: object) -> bool:
    return is_number(value) and value > 0
