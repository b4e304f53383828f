"""Conversations of several turns: the next prompt is the last prompt, what was answered, and new tokens of the user."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from kvlab.types import Request, RequestRecord
from kvlab.workload import rng
from kvlab.workload.base import Workload, WorkloadContext
from kvlab.workload.distributions import Numbers, whole
from kvlab.workload.limits import check_lengths
from kvlab.workload.population import Population, PopulationSpec
from kvlab.workload.sampling import LengthSampling
from kvlab.workload.tokens import RandomTokens

ANSWERED = ("stop", "length")
"""Finish reasons after which a user goes on; after an abort or a refusal the conversation is over."""


class MultiTurnWorkload(Workload):
    """`num_sessions` conversations. A turn begins `think_s` after the turn before it has finished.

    In a closed loop a conversation keeps its slot while its user thinks. A conversation ends early when a turn was aborted or
    refused, or when the next prompt would leave no room within max_model_len; `num_early_ends` counts those.
    """

    def __init__(
        self,
        num_sessions: int,
        turns: object,
        prompt_len: object,
        turn_len: object,
        output_len: object,
        *,
        think_s: object = 0.0,
        arrivals: Mapping[str, Any] | None = None,
        prefix: Mapping[str, Any] | None = None,
        priorities: Mapping[Any, float] | None = None,
        tenants: Mapping[str, float] | None = None,
        ignore_eos: bool = True,
        sampling: Mapping[str, Any] | None = None,
        concurrency: int | None = None,
        abort: Mapping[str, Any] | None = None,
    ) -> None:
        """turns: per conversation. prompt_len: the first turn's own tokens; turn_len: tokens a later turn adds; output_len: of
        each turn; think_s: seconds between turns (all as `Numbers`). The rest: `PopulationSpec`."""
        super().__init__(concurrency=concurrency, abort=abort)
        self._count = whole("workload.num_sessions", num_sessions, 1)
        self._lens = {"turns": turns, "prompt_len": prompt_len, "turn_len": turn_len, "output_len": output_len}
        self._think_s = think_s
        self._spec = PopulationSpec(arrivals, prefix, priorities, tenants)
        self._sampling = LengthSampling(sampling, ignore_eos)
        self.num_early_ends = 0

    def check(self) -> None:
        """Arrivals, prefix, lengths and pauses."""
        self._spec.check()
        for name, spec in self._lens.items():
            Numbers(f"workload.{name}", spec, [], minimum=1)
        Numbers("workload.think_s", self._think_s, [])

    def build(self, ctx: WorkloadContext) -> Sequence[float]:
        """Draw the number of turns, and the lengths and pauses of every turn, answered or not."""
        self._max_model_len = ctx.max_model_len
        self._people = Population(ctx, self._spec, self._count, self.notes)
        self._tokens = RandomTokens(ctx, rng.TOKENS)
        self._new_tokens = RandomTokens(ctx, rng.TURN_LEN)
        numbers = {name: Numbers(f"workload.{name}", spec, self.notes, minimum=1) for name, spec in self._lens.items()}
        self._turns = numbers["turns"].integers(rng.generator(ctx.seed, rng.TURNS), self._count)
        self._first = np.concatenate([[0], np.cumsum(self._turns)])  # row of each conversation's turn 0
        total = int(self._first[-1])
        self._prompt_lens = numbers["prompt_len"].integers(rng.generator(ctx.seed, rng.PROMPT_LEN), self._count)
        self._turn_lens = numbers["turn_len"].integers(rng.generator(ctx.seed, rng.TURN_LEN), total)
        self._output_lens = numbers["output_len"].integers(rng.generator(ctx.seed, rng.OUTPUT_LEN), total)
        self._pauses_s = Numbers("workload.think_s", self._think_s, self.notes).reals(rng.generator(ctx.seed, rng.THINK), total)
        first_outputs = self._output_lens[self._first[:-1]]
        advice = "Give workload.prompt_len a max, or take a smaller mean or prefix."
        check_lengths(ctx, self._prompt_lens + self._people.tree.num_tokens, first_outputs, self.notes, advice)
        self._sampling.params(int(self._output_lens.min()))
        self._num_requests, self.num_early_ends = total, 0
        arrivals_s: list[float] = self._people.arrivals_s.tolist()
        return arrivals_s

    def make(self, index: int) -> Request:
        """Turn 0 of conversation `index`."""
        own = self._tokens.tokens(index, int(self._prompt_lens[index]))
        return self._turn(index, 0, self._people.prefix(index) + own)

    def _turn(self, index: int, turn: int, token_ids: list[int]) -> Request:
        output_len = int(self._output_lens[self._first[index] + turn])
        return Request(
            request_id=f"session-{index}-turn-{turn}",
            prompt_token_ids=token_ids,
            sampling=self._sampling.params(output_len),
            priority=self._people.priority(index),
            tenant=self._people.tenant(index),
            oracle_output_len=min(output_len, self._max_model_len - len(token_ids)),
            session_id=f"session-{index}",
            turn=turn,
        )

    def has_next(self, request: Request) -> bool:
        """Whether the conversation has further turns."""
        return request.turn + 1 < int(self._turns[_index(request)])

    def follow_up(self, request: Request, record: RequestRecord) -> Request | None:
        """The next turn: prompt + first output + new tokens, `think_s` after the finish."""
        index, turn = _index(request), request.turn + 1
        row = int(self._first[index]) + turn
        answer = record.outputs[0][0] if record.outputs else ()
        num_tokens = len(request.prompt_token_ids) + len(answer) + int(self._turn_lens[row])
        if record.finish_reason not in ANSWERED or not answer or num_tokens >= self._max_model_len:
            self._ended_early(int(self._turns[index]) - turn)
            return None
        new = self._new_tokens.tokens(row, int(self._turn_lens[row]))
        following = self._turn(index, turn, [*request.prompt_token_ids, *answer, *new])
        following.arrival_s = record.finish_s + float(self._pauses_s[row])
        return following

    def _ended_early(self, num_turns_lost: int) -> None:
        """Count it, and keep one note that says how many there are."""
        self._num_requests -= num_turns_lost
        self.num_early_ends += 1
        if self.num_early_ends == 1:
            self._note_at = len(self.notes)
            self.notes.append("")
        count = f"{self.num_early_ends} of {self._count} conversations"
        self.notes[self._note_at] = f"{count} ended early: a turn was not answered, or max_model_len was reached."

    @property
    def num_requests(self) -> int | None:
        """Turns of all conversations, less those that early ends have cost."""
        return self._num_requests if self._loop is not None else None


def _index(request: Request) -> int:
    """The number of a request's conversation."""
    return int((request.session_id or "").removeprefix("session-"))
