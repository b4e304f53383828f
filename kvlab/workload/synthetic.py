"""Synthetic requests: arrivals, lengths, shared prefixes, priorities and tenants from distributions; random token ids."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from kvlab.types import Request
from kvlab.workload import rng
from kvlab.workload.base import Workload, WorkloadContext
from kvlab.workload.distributions import Numbers, whole
from kvlab.workload.limits import check_lengths
from kvlab.workload.population import Population, PopulationSpec
from kvlab.workload.sampling import LengthSampling
from kvlab.workload.tokens import RandomTokens

AT_ONCE = 16
"""Requests whose token ids are drawn together."""


class SyntheticWorkload(Workload):
    """Independent requests. A prompt is a path of the prefix tree (if there is one), then `prompt_len` tokens of its own.

    Every quantity is drawn from a stream of its own: another rate leaves prompts and lengths as they were.
    """

    def __init__(
        self,
        num_requests: int,
        prompt_len: object,
        output_len: object,
        *,
        arrivals: Mapping[str, Any] | None = None,
        prefix: Mapping[str, Any] | None = None,
        priorities: Mapping[Any, float] | None = None,
        tenants: Mapping[str, float] | None = None,
        ignore_eos: bool = True,
        sampling: Mapping[str, Any] | None = None,
        concurrency: int | None = None,
        abort: Mapping[str, Any] | None = None,
    ) -> None:
        """Lengths in tokens (see `Numbers`); output_len becomes max_tokens and oracle_output_len. The rest: `PopulationSpec`."""
        super().__init__(concurrency=concurrency, abort=abort)
        self._count = whole("workload.num_requests", num_requests, 1)
        self._prompt_len, self._output_len = prompt_len, output_len
        self._spec = PopulationSpec(arrivals, prefix, priorities, tenants)
        self._sampling = LengthSampling(sampling, ignore_eos)

    def check(self) -> None:
        """Arrivals, prefix and lengths."""
        self._spec.check()
        for name, spec in (("prompt_len", self._prompt_len), ("output_len", self._output_len)):
            Numbers(f"workload.{name}", spec, [], minimum=1)

    def build(self, ctx: WorkloadContext) -> Sequence[float]:
        """Draw arrivals, lengths and prefixes."""
        self._people = Population(ctx, self._spec, self._count, self.notes)
        self._tokens = RandomTokens(ctx, rng.TOKENS)
        self._drawn: dict[int, list[int]] = {}
        prompt_len = Numbers("workload.prompt_len", self._prompt_len, self.notes, minimum=1)
        output_len = Numbers("workload.output_len", self._output_len, self.notes, minimum=1)
        self._prompt_lens = prompt_len.integers(rng.generator(ctx.seed, rng.PROMPT_LEN), self._count)
        self._output_lens = output_len.integers(rng.generator(ctx.seed, rng.OUTPUT_LEN), self._count)
        advice = "Give workload.prompt_len a max, or take a smaller mean or prefix."
        total = self._prompt_lens + self._people.tree.num_tokens
        self._reachable = check_lengths(ctx, total, self._output_lens, self.notes, advice)
        self._sampling.params(int(self._output_lens.min()))
        arrivals_s: list[float] = self._people.arrivals_s.tolist()
        return arrivals_s

    def _draw(self, first: int) -> None:
        """Token ids of the next requests, all at once."""
        indices = range(first, min(first + AT_ONCE, self._count))
        lens = self._prompt_lens[first : first + AT_ONCE].tolist()
        ids = self._tokens.blocks(indices, max(lens))
        self._drawn = {index: row[:num].tolist() for index, row, num in zip(indices, ids, lens, strict=True)}

    def make(self, index: int) -> Request:
        """Request `index`, with its token ids."""
        if index not in self._drawn:
            self._draw(index)
        own = self._drawn.pop(index)
        return Request(
            request_id=f"synthetic-{index}",
            prompt_token_ids=self._people.prefix(index) + own,
            sampling=self._sampling.params(int(self._output_lens[index])),
            priority=self._people.priority(index),
            tenant=self._people.tenant(index),
            oracle_output_len=int(self._reachable[index]),
        )
