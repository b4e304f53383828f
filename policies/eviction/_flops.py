"""What it costs to compute a block again."""

from __future__ import annotations


def block_flops(depth: int, num_tokens: int, num_params: float, num_layers: int, hidden_size: int) -> float:
    """FLOPs of a forward pass over the `num_tokens` tokens of the block at `depth` (0: the first), with all before it in the cache.

    A token at position t (from 0) costs 2 P for the matrices of P parameters and 4 L H (t + 1) for attention: scores and weighted sum
    of t + 1 keys and values in L layers of H = query heads x head size. Over B tokens from position d B on that is

        2 P B + 4 L H (d B^2 + B (B + 1) / 2)
    """
    context = depth * num_tokens * num_tokens + num_tokens * (num_tokens + 1) / 2
    return 2 * num_params * num_tokens + 4 * num_layers * hidden_size * context
