"""How many tokens of a group are computed in a step: the batching policy's word, checked, shared out among its sequences."""

from __future__ import annotations

from typing import Any

from kvlab.engine.sequence import Sequence, SequenceGroup
from kvlab.policies.base import BatchingPolicy
from kvlab.types import IllegalDecision


class Chunks:
    """Asks `policy`; `limit`: the most tokens of a step (max_num_batched_tokens)."""

    def __init__(self, policy: BatchingPolicy, limit: int) -> None:
        self._policy = policy
        self._limit = limit

    def work_of(self, group: SequenceGroup, budget: int) -> list[tuple[Sequence, int, int]]:
        """(sequence, tokens, samples) for each sequence of the group that has something to compute within `budget`."""
        chunk, limit = self._policy.chunk, self._limit
        seqs = group.seqs
        if len(seqs) == 1 and group.beam is None:
            seq = seqs[0]
            missing = len(seq.tokens) - seq.num_computed
            n = chunk(missing, budget, limit) if missing else 0
            if n != missing or not n:
                self._check(n, missing, budget)
                return [(seq, n, 0)] if n else []
            return [(seq, n, 1 if group.is_forked else group.sampling.n)]
        work = self._share_out(seqs, budget, 0)
        if group.beam is not None:
            # Beams sample together or not at all: unless all reach their end in this step, each stops one token short of it.
            all_end = sum(samples for _, _, samples in work) == len(seqs)
            return work if all_end else self._share_out(seqs, budget, 1)
        if not group.is_forked:
            work = [(s, n, group.sampling.n if samples else 0) for s, n, samples in work]
        return work

    def _share_out(self, seqs: list[Sequence], budget: int, num_left: int) -> list[tuple[Sequence, int, int]]:
        """The budget, first come first served, to sequences that miss more than `num_left` tokens."""
        work = []
        for seq in seqs:
            missing = len(seq.tokens) - seq.num_computed - num_left
            if seq.attach_to is not None or budget <= 0 or missing <= 0:
                continue
            n = self._policy.chunk(missing, budget, self._limit)
            self._check(n, missing, budget)
            if n:
                work.append((seq, n, 1 if n == missing and not num_left else 0))
                budget -= n
        return work

    def _check(self, n: Any, missing: int, budget: int) -> None:
        if not isinstance(n, int) or not 0 <= n <= min(missing, budget):
            raise IllegalDecision("batching", self._policy, f"compute {n!r} of {missing} tokens with a budget of {budget}",
                                  f"0 to {min(missing, budget)}")  # fmt: skip
