"""Tokens that a plan names as `LATE`, for runners that know them on the host."""

from __future__ import annotations

from collections.abc import Sequence as Seqs

import numpy as np

from kvlab.types import LATE, Outcome, Plan, ScheduledSeq
from kvlab.types.columns import Decodes, Ints, OneEach


class LastTokens:
    """The token that each sequence sampled last, of the plans carried out so far. Only for depth 1: at depth 0 nobody asks.

    Those of a step whose plan and outcome are columns stay one, as the next step asks for the same mostly.
    """

    def __init__(self) -> None:
        self._last: dict[int, int] = {}
        self._seq_ids: tuple[int, ...] = ()
        self._ids: Ints = np.zeros(0, dtype=np.int64)

    def fill(self, plan: Plan) -> Plan:
        """The plan with every token named."""
        scheduled, ids = plan.scheduled, plan.token_ids
        if not isinstance(scheduled, Decodes) or not isinstance(ids, OneEach):
            return plan._replace(token_ids=self._filled(scheduled, ids))
        head = ids.ids
        if head[0] == LATE:  # then all are
            if scheduled.seq_ids != self._seq_ids:
                self._spread()
                head = np.array([self._last[seq_id] for seq_id in scheduled.seq_ids])
            else:
                head = self._ids
        return plan._replace(token_ids=OneEach(head, self._filled(scheduled.rest, ids.rest) if scheduled.rest else ()))

    def note(self, plan: Plan, outcome: Outcome) -> None:
        """What the next plan may ask for."""
        scheduled, tokens = plan.scheduled, outcome.tokens
        if isinstance(scheduled, Decodes) and isinstance(tokens, OneEach) and len(tokens.ids) == len(scheduled.seq_ids):
            if scheduled.seq_ids != self._seq_ids:
                self._spread()
            self._seq_ids, self._ids = scheduled.seq_ids, tokens.ids
            scheduled, tokens = scheduled.rest, tokens.rest
        else:
            self._spread()
        for seq_id in plan.released:
            self._last.pop(seq_id, None)
        if scheduled:
            self._last.update({entry.seq_id: ids[0] for entry, ids in zip(scheduled, tokens, strict=True) if ids})

    def _filled(self, scheduled: Seqs[ScheduledSeq], token_ids: Seqs[tuple[int, ...]]) -> tuple[tuple[int, ...], ...]:
        if len(self._seq_ids):
            self._spread()
        return tuple([(self._last[s.seq_id],) if ids == (LATE,) else ids for s, ids in zip(scheduled, token_ids, strict=True)])

    def _spread(self) -> None:
        """The column's tokens, each on its own."""
        self._last.update(zip(self._seq_ids, self._ids.tolist(), strict=True))
        self._seq_ids, self._ids = (), self._ids[:0]
