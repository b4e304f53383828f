"""What synthetic conversations have in common, however many turns they have: when they begin, their prefix, who asks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from kvlab.types import UserError
from kvlab.workload import rng
from kvlab.workload.base import WorkloadContext
from kvlab.workload.distributions import Arrivals, draw_weighted, mapping
from kvlab.workload.prefix_tree import PrefixTree
from kvlab.workload.tokens import RandomTokens

NO_PREFIX: dict[str, Any] = {"depth": 0, "branching": 1, "tokens_per_node": 1}


@dataclass(frozen=True)
class PopulationSpec:
    """Parameters as a configuration gives them; see `Arrivals`, `PrefixTree`. Weights: {value: weight}, None for none."""

    arrivals: Mapping[str, Any] | None = None
    prefix: Mapping[str, Any] | None = None
    priorities: Mapping[Any, float] | None = None
    tenants: Mapping[str, float] | None = None

    def check(self) -> None:
        """UserError for wrong arrivals or a wrong prefix."""
        Arrivals("workload.arrivals", self.arrivals, [])
        PrefixTree("workload.prefix", self.prefix or NO_PREFIX)


class Population:
    """`count` conversations, drawn. Arrays only: token ids are made when asked for."""

    def __init__(self, ctx: WorkloadContext, spec: PopulationSpec, count: int, notes: list[str]) -> None:
        """Draw everything. UserError for a wrong specification."""
        self.arrivals_s = Arrivals("workload.arrivals", spec.arrivals, notes).draw(rng.generator(ctx.seed, rng.ARRIVALS), count)
        self.tree = PrefixTree("workload.prefix", spec.prefix or NO_PREFIX)
        self._leaves = self.tree.draw_leaves(rng.generator(ctx.seed, rng.PREFIX_PATH), count)
        weights = mapping("workload.priorities", spec.priorities or {}, "{0: 0.2, 1: 0.8}")
        priorities = {_priority(key): weight for key, weight in weights.items()}
        self._priorities = draw_weighted("workload.priorities", priorities, rng.generator(ctx.seed, rng.PRIORITY), count)
        self._tenants = draw_weighted("workload.tenants", spec.tenants, rng.generator(ctx.seed, rng.TENANT), count)
        self._prefix_tokens = RandomTokens(ctx, rng.PREFIX_TOKENS)

    def prefix(self, index: int) -> list[int]:
        """Token ids of the shared prefix of conversation `index`."""
        return self.tree.tokens(int(self._leaves[index]), self._prefix_tokens)

    def priority(self, index: int) -> int:
        """0 where none are drawn."""
        return 0 if self._priorities is None else int(self._priorities[index])

    def tenant(self, index: int) -> str:
        """Empty where none are drawn."""
        return "" if self._tenants is None else str(self._tenants[index])


def _priority(key: object) -> int:
    """A priority written as a yaml key, which may have become a string on its way."""
    try:
        return int(str(key))
    except ValueError:
        raise UserError(f"workload.priorities has the key {key!r}: priorities are whole numbers (lower goes first).") from None
