"""Tokens that a plan names as `LATE`, for runners that know them on the host."""

from __future__ import annotations

from kvlab.types import LATE, Outcome, Plan


class LastTokens:
    """The token that each sequence sampled last, of the plans carried out so far. Only for depth 1: at depth 0 nobody asks."""

    def __init__(self) -> None:
        self._last: dict[int, int] = {}

    def fill(self, plan: Plan) -> Plan:
        """The plan with every token named."""
        ids = [(self._last[s.seq_id],) if late == (LATE,) else late for s, late in zip(plan.scheduled, plan.token_ids, strict=True)]
        return plan._replace(token_ids=tuple(ids))

    def note(self, plan: Plan, outcome: Outcome) -> None:
        """What the next plan may ask for."""
        for seq_id in plan.released:
            self._last.pop(seq_id, None)
        self._last.update({entry.seq_id: ids[0] for entry, ids in zip(plan.scheduled, outcome.tokens, strict=True) if ids})
