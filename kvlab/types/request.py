"""A request as a workload hands it to the engine."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from kvlab.types.sampling import SamplingParams


@dataclass(slots=True)
class Request:
    """One prompt and what to do with it.

    Attributes:
        request_id: unique in a run.
        prompt_token_ids: at least one id. `prompt`: the text it came from, where there is one.
        arrival_s: seconds from the run's start at which the engine may see it.
        priority: lower goes first (vLLM). tenant: who pays, for fair policies.
        cache_salt: requests with different salts never share cached blocks.
        oracle_output_len: the true number of output tokens where a trace knows it; only oracle policies may look.
        abort_at_s: the client leaves at this time (None: never).
        session_id, turn: conversation and 0-based turn, for multi-turn workloads.
    """

    request_id: str
    prompt_token_ids: list[int]
    sampling: SamplingParams
    prompt: str | None = None
    arrival_s: float = 0.0
    priority: int = 0
    tenant: str = ""
    cache_salt: str = ""
    oracle_output_len: int | None = None
    abort_at_s: float | None = None
    session_id: str | None = None
    turn: int = 0

    @property
    def known_output_len(self) -> int | None:
        """`oracle_output_len`; without one max_tokens, where nothing else can end the request; None: not known."""
        if self.oracle_output_len is None and self.sampling.has_known_length:
            return self.sampling.max_tokens
        return self.oracle_output_len


class RequestShape(NamedTuple):
    """Lengths of a request to come, in tokens. `num_output_tokens`: of each of its sequences, as far as known (else its limit).
    `num_shared_tokens`: longest beginning of the prompt that an earlier request's prompt has too; 0 where nothing is shared."""

    num_prompt_tokens: int
    num_output_tokens: int
    num_shared_tokens: int = 0
    num_sequences: int = 1
