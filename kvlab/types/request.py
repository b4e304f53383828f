"""A request as a workload hands it to the engine."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import NamedTuple

from kvlab.types.sampling import SamplingParams
from kvlab.types.token_ids import as_whole, is_yes_or_no


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
        cache: False keeps all its tokens out of the prefix cache. cache_until: tokens from this position on (0-based, counted from the
            prompt's start through the output) are kept out: a block is published only if all its tokens lie before it. A position that
            the request does not reach keeps nothing out. Such a request hits what others have published all the same, and
            recomputes what it did not publish when it comes back from a preemption by recompute. Give one of the two.
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
    cache: bool = True
    cache_until: int | None = None

    @property
    def num_cacheable_tokens(self) -> int:
        """Tokens, prompt and output, from the first on that may be published; more than any sequence has where all may."""
        return 0 if not self.cache else sys.maxsize if self.cache_until is None else int(self.cache_until)

    @property
    def known_output_len(self) -> int | None:
        """`oracle_output_len`; without one max_tokens, where nothing else can end the request; None: not known."""
        if self.oracle_output_len is None and self.sampling.has_known_length:
            return self.sampling.max_tokens
        return self.oracle_output_len


def wrong_caching(cache: object, cache_until: object) -> str:
    """What is wrong with a request's `cache` and `cache_until`, and what is allowed; "" where nothing is."""
    if not is_yes_or_no(cache):
        return f"cache = {cache!r:.60} is not allowed: true or false"
    position = as_whole(cache_until)
    if cache_until is not None and (position is None or position < 0):
        return f"cache_until = {cache_until!r:.60} is not allowed: a position in tokens, 0 (nothing may be cached) or more, or null"
    if not cache and cache_until is not None:
        return f"cache = false and cache_until = {cache_until} are two answers to one question: give one of them"
    return ""


class RequestShape(NamedTuple):
    """Lengths of a request to come, in tokens. `num_output_tokens`: of each of its sequences, as far as known (else its limit).
    `num_shared_tokens`: longest beginning of the prompt that an earlier request's prompt has too; 0 where nothing is shared."""

    num_prompt_tokens: int
    num_output_tokens: int
    num_shared_tokens: int = 0
    num_sequences: int = 1
