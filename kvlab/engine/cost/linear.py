"""A step's time as a sum over its work: so much a step, a prompt token, a decoding sequence, a KV entry read."""

from __future__ import annotations

from kvlab.engine.cost.base import CostModel, at_least
from kvlab.engine.cost.work import StepWork, step_work
from kvlab.types import Plan, UserError

SCALES = {
    "step_ms": 1e-3, "chunk_ms": 1e-3, "chunk_token_us": 1e-6, "decode_seq_us": 1e-6, "kv_token_ns": 1e-9, "pair_ns": 1e-9,
    "block_us": 1e-6,
}  # fmt: skip
"""The coefficients in the order of `features`, with the seconds of one unit of each."""


def features(work: StepWork) -> tuple[int, int, int, int, int, int, int]:
    """What the coefficients stand before: (1, chunks, tokens in chunks, decoding sequences, KV entries read, query-key pairs, blocks)."""
    num_decodes = work.num_decode_seqs
    return (1, work.num_seqs - num_decodes, work.num_tokens - num_decodes, num_decodes, work.num_kv_tokens_read,
            work.num_attention_pairs, work.num_moved_blocks + work.num_copied_blocks)  # fmt: skip


class Linear(CostModel):
    """A sum of costs, each proportional to one kind of work. What `fitted` learns from a recorded run; here the figures are given.

    A chunk is a sequence of which more than one token is computed: a prompt, a part of one, or what comes back after a preemption.

    Args:
        step_ms: of every step (ms). chunk_ms: of every chunk (ms). chunk_token_us: of every token in a chunk (us).
        decode_seq_us: of every sequence of a single new token (us). kv_token_ns: of every K and V entry read (ns).
        pair_ns: of every query-key pair (ns). block_us: of every block moved between tiers or copied (us).
    """

    def __init__(self, step_ms: float = 5.0, chunk_ms: float = 0.0, chunk_token_us: float = 30.0, decode_seq_us: float = 20.0,
                 kv_token_ns: float = 50.0, pair_ns: float = 0.0, block_us: float = 0.0) -> None:  # fmt: skip
        self.step_ms = at_least(self, "step_ms", step_ms, 0)
        self.chunk_ms = at_least(self, "chunk_ms", chunk_ms, 0)
        self.chunk_token_us = at_least(self, "chunk_token_us", chunk_token_us, 0)
        self.decode_seq_us = at_least(self, "decode_seq_us", decode_seq_us, 0)
        self.kv_token_ns = at_least(self, "kv_token_ns", kv_token_ns, 0)
        self.pair_ns = at_least(self, "pair_ns", pair_ns, 0)
        self.block_us = at_least(self, "block_us", block_us, 0)
        self._seconds = tuple(getattr(self, name) * scale for name, scale in SCALES.items())
        if not any(self._seconds[:5]):
            raise UserError("Linear: every coefficient is 0, and a step must take time. Give step_ms=... or another one above 0.")

    @property
    def coefficients(self) -> dict[str, float]:
        """By name, each in the unit that its name carries."""
        return {name: getattr(self, name) for name in SCALES}

    def step_s(self, plan: Plan) -> float:
        """The sum (s); a step whose work costs nothing takes a nanosecond."""
        return max(1e-9, sum(map(float.__mul__, self._seconds, map(float, features(step_work(plan))))))
