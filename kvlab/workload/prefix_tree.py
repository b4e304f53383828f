"""Shared prefixes as a tree: system prompts, then tools or examples under them, then the request's own text."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from kvlab.types import UserError, unknown_name
from kvlab.workload.distributions import mapping, number, whole
from kvlab.workload.tokens import RandomTokens

KEYS = ("depth", "branching", "tokens_per_node", "skew")


class PrefixTree:
    """A tree of `depth` levels below an empty root; each node has `branching` children and holds `tokens_per_node` tokens.

    A request takes one path from root to leaf, so two requests whose paths part at level k share k * tokens_per_node tokens.
    `skew`: Zipf exponent of the choice among children (0: uniform); child 0 is the most popular.
    depth 1, branching 1 is one system prompt that all share.
    """

    def __init__(self, name: str, config: Mapping[Any, Any]) -> None:
        """config: `{depth, branching, tokens_per_node, skew}`, skew optional."""
        mapping(name, config, "{depth: 2, branching: 4, tokens_per_node: 64}")
        for key in config:
            if key not in KEYS:
                raise unknown_name(f"key of {name}", str(key), KEYS)
        for key in KEYS[:3]:
            if key not in config:
                raise UserError(f"{name} needs {key}, for example {{depth: 2, branching: 4, tokens_per_node: 64}}.")
        self.depth = whole(f"{name}.depth", config["depth"], 0)
        self.branching = whole(f"{name}.branching", config["branching"], 1)
        self.tokens_per_node = whole(f"{name}.tokens_per_node", config["tokens_per_node"], 1)
        self.skew = number(f"{name}.skew", config.get("skew", 0), 0)
        if self.depth > 63 or self.branching**self.depth >= 2**56:
            raise UserError(f"{name}: {self.branching}^{self.depth} leaves are too many: at most 2^56, and 63 levels.")

    @property
    def num_tokens(self) -> int:
        """Length of the prefix of each request."""
        return self.depth * self.tokens_per_node

    def draw_leaves(self, rng: np.random.Generator, count: int) -> npt.NDArray[np.int64]:
        """`count` leaves; the digits of a leaf in base `branching` are its path."""
        popularity = 1 / np.arange(1, self.branching + 1) ** self.skew
        leaves = np.zeros(count, dtype=np.int64)
        for _ in range(self.depth):
            leaves = leaves * self.branching + rng.choice(self.branching, count, p=popularity / popularity.sum())
        return leaves

    def tokens(self, leaf: int, source: RandomTokens) -> list[int]:
        """Token ids on the path to a leaf. A node's stream is named by its path so far and its level."""
        nodes = [leaf // self.branching ** (self.depth - level) * 64 + level for level in range(1, self.depth + 1)]
        ids: list[int] = source.blocks(nodes, self.tokens_per_node).ravel().tolist() if nodes else []
        return ids
