"""Sampling parameters of a request, checked when made."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Set
from dataclasses import dataclass, field, fields
from typing import Any

from kvlab.types.errors import UserError
from kvlab.types.token_ids import as_real, as_whole, is_yes_or_no, token_ids

LOWEST_TEMPERATURE = 1e-200
"""A lower temperature is 0: no difference between two logits of a model survives a division by it but an infinite one."""


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How tokens are chosen and when a request ends. Names and defaults follow vLLM's SamplingParams where it has them.

    Numbers may be numpy's; a whole number, a text or true/false is never taken for one of the others. UserError: any wrong value.

    Attributes:
        n: parallel samples (with `beam_width` 0). Sample i of a request uses random stream i.
        beam_width: > 0 selects beam search of that width (neutral temperature and penalties, no stop strings, no logprobs); the
            `n` best beams are returned, n <= beam_width.
        length_penalty: a beam's score is (sum of log-probabilities) / (output tokens ** length_penalty).
        early_stopping: beam search ends when beam_width beams have ended (True), or when no running beam can still win (False).
        temperature: 0 is greedy, and so is anything below `LOWEST_TEMPERATURE` (it becomes 0). Infinity: all that the filters leave is
            equally likely (see `kvlab.engine.sampler`). top_k: 0 is off. top_p, min_p: nucleus and minimum-probability filters.
        repetition_penalty: > 0, 1 is off, over prompt and output. presence/frequency_penalty: in [-2, 2], over output.
        seed: None takes one from the engine's seed and the request's id. Draws depend on (seed, stream, position) alone.
        max_tokens, min_tokens: output tokens. stop: a string or strings; stop_token_ids: an id or ids that end the sequence (kept in
            the output ids, not in the text unless include_stop_str). None is none of them.
        include_stop_str: keep the stop string in the text. ignore_eos: EOS does not end a sequence.
        logprobs: None, or how many top log-probabilities to return with each token (0: the chosen one's alone).
    """

    n: int = 1
    beam_width: int = 0
    length_penalty: float = 1.0
    early_stopping: bool = False
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    seed: int | None = None
    max_tokens: int = 16
    min_tokens: int = 0
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    include_stop_str: bool = False
    ignore_eos: bool = False
    logprobs: int | None = None
    needs_logits_processing: bool = field(init=False, repr=False, default=False)

    def __post_init__(self) -> None:
        def check(ok: bool, name: str, allowed: str) -> None:
            if not ok:
                raise UserError(f"SamplingParams.{name} = {getattr(self, name)!r:.80} is not allowed: {allowed}.")

        for one in fields(self):
            if one.init:
                value, words = _typed(str(one.type), getattr(self, one.name))
                check(not words, one.name, words)
                object.__setattr__(self, one.name, value)
        if self.temperature < LOWEST_TEMPERATURE:
            check(self.temperature >= 0, "temperature", "0 (greedy) or more")
            object.__setattr__(self, "temperature", 0.0)
        check(self.n >= 1, "n", "at least 1")
        check(self.beam_width >= 0, "beam_width", "0 (off) or the number of beams")
        if self.beam_width:
            check(self.n <= self.beam_width, "n", f"at most beam_width ({self.beam_width})")
            neutral = (self.temperature == 0 and self.top_k == 0 and self.top_p == 1 and self.min_p == 0
                       and (self.presence_penalty, self.frequency_penalty, self.repetition_penalty) == (0, 0, 1))  # fmt: skip
            check(neutral, "beam_width", "beam search takes no temperature, filters or penalties; leave them at their defaults")
            check(not self.stop, "stop", "beam search takes stop_token_ids but no stop strings (a beam is a sequence of tokens)")
            check(self.logprobs is None, "logprobs", "beam search returns scores instead; leave it at None")
        for name in ("length_penalty", "repetition_penalty"):
            check(math.isfinite(getattr(self, name)), name, "a finite number")
        check(self.top_k >= 0, "top_k", "0 (off) or more")
        check(0 < self.top_p <= 1, "top_p", "in (0, 1]")
        check(0 <= self.min_p < 1, "min_p", "in [0, 1)")
        check(self.repetition_penalty > 0, "repetition_penalty", "more than 0; 1 is off")
        check(-2 <= self.presence_penalty <= 2, "presence_penalty", "in [-2, 2]; 0 is off")
        check(-2 <= self.frequency_penalty <= 2, "frequency_penalty", "in [-2, 2]; 0 is off")
        check(self.max_tokens >= 1, "max_tokens", "at least 1")
        check(0 <= self.min_tokens <= self.max_tokens, "min_tokens", f"between 0 and max_tokens ({self.max_tokens})")
        check(all(self.stop), "stop", "non-empty strings")
        check(self.logprobs is None or 0 <= self.logprobs <= 64, "logprobs", "None or 0 to 64")
        processing = (self.repetition_penalty != 1 or self.presence_penalty != 0 or self.frequency_penalty != 0)  # fmt: skip
        object.__setattr__(self, "needs_logits_processing", processing)

    @property
    def num_sequences(self) -> int:
        """Sequences the request holds while it decodes: beam_width, else n."""
        return self.beam_width or self.n

    @property
    def has_known_length(self) -> bool:
        """Nothing but max_tokens ends the request: its output length is known beforehand."""
        return self.ignore_eos and not self.stop and not self.stop_token_ids


def _typed(kind: str, value: Any) -> tuple[Any, str]:
    """A value in a parameter's type, given as its annotation, and what is allowed where it is not of that type ("": it is)."""
    if kind.startswith("tuple[str"):
        strings = _strings(value)
        return strings, "a string or strings" if strings is None else ""
    if kind.startswith("tuple[int"):
        many: Any = [value] if as_whole(value) is not None else sorted(value) if isinstance(value, Set) else value
        ids = [] if value is None else token_ids(many)
        return (None, "an id or ids") if ids is None else (tuple(ids), "")
    if value is None and "None" in kind:
        return None, ""
    if kind == "bool":
        return (bool(value), "") if is_yes_or_no(value) else (value, "true or false")
    number = as_real(value) if kind == "float" else as_whole(value)
    words = "a number" if kind == "float" else "None or a whole number" if "None" in kind else "a whole number"
    return number, words if number is None else ""


def _strings(value: Any) -> tuple[str, ...] | None:
    """None: not strings. Sets are sorted: their order is another in every process."""
    if value is None or isinstance(value, str):
        return () if value is None else (value,)
    if isinstance(value, (bytes, bytearray, Mapping)) or not isinstance(value, Iterable):
        return None
    strings = tuple(value)
    if not all(isinstance(one, str) for one in strings):
        return None
    return tuple(sorted(strings)) if isinstance(value, Set) else strings
