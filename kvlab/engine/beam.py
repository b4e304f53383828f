"""Beam search of one request, as bookkeeping: candidates in; continuations, forks, drops and finished hypotheses out.

Follows transformers' `generate(num_beams=k, do_sample=False)` (5.x, its vectorised beam search): the same order of candidates,
scores, stop rule and ends. Deviation: scores are float64, where transformers adds up float32; ties go to the better beam, then
the lower token id. Knows no runner and no cache: whoever calls it gives a fork its parent's history.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple

from kvlab.engine.stopping import end_token_ids
from kvlab.types import Candidate, SamplingParams


class Beam(NamedTuple):
    """A live beam: its sequence, its output tokens and their summed log-probability."""

    seq_id: int
    token_ids: tuple[int, ...]
    logprob: float


class Hypothesis(NamedTuple):
    """A beam that ended. `score` = `logprob` / (output tokens ** length_penalty); `reason`: "stop", "length" or the caller's."""

    token_ids: tuple[int, ...]
    score: float
    logprob: float
    reason: str


class BeamMove(NamedTuple):
    """Sequence `seq_id` is now sequence `parent` plus `token_id`; `logprob` is its sum. Equal ids: it goes on in place."""

    seq_id: int
    parent: int
    token_id: int
    logprob: float


class BeamStep(NamedTuple):
    """What one step did to the live beams.

    Attributes:
        continued: beams that go on in place, each with its best surviving child, best first.
        forks: further children: new sequences with their parent's history *before* this step, best first.
        dropped: sequences to let go: beams without a child, or all of them when the search is done.
        ended: hypotheses that ended in this step and are among the best now.
        is_done: the search is over; `BeamState.best` has the result.
    """

    continued: tuple[BeamMove, ...]
    forks: tuple[BeamMove, ...]
    dropped: tuple[int, ...]
    ended: tuple[Hypothesis, ...]
    is_done: bool


def num_beam_candidates(beam_width: int, num_end_ids: int) -> int:
    """Continuations needed of each beam: even if every end id of every beam is among them, `beam_width` live ones are left."""
    return max(2, 1 + num_end_ids) * beam_width


class BeamState:
    """The beams of one request.

    Args:
        seq_id: the prompt's sequence, the first beam. beam_width: live beams kept, and hypotheses compared.
        n: hypotheses that `best` returns.
        end_ids: ids that end a beam (EOS unless ignored, stop ids), but not before `min_tokens` outputs exist.
        length_penalty, early_stopping, max_tokens: as in SamplingParams.
    """

    def __init__(self, seq_id: int, beam_width: int, n: int, length_penalty: float, early_stopping: bool, end_ids: Iterable[int],
                 max_tokens: int, min_tokens: int = 0) -> None:  # fmt: skip
        self.beam_width, self.n = beam_width, n
        self.length_penalty, self.early_stopping = length_penalty, early_stopping
        self.end_ids = frozenset(end_ids)
        self.max_tokens, self.min_tokens = max_tokens, min_tokens
        self.live: tuple[Beam, ...] = (Beam(seq_id, (), 0.0),)
        """Live beams, best first."""
        self.is_done = False
        self._finished: list[Hypothesis] = []

    @classmethod
    def of(cls, seq_id: int, sampling: SamplingParams, eos_token_ids: Iterable[int], max_tokens: int | None = None) -> BeamState:
        """From a request's parameters; `max_tokens` where the engine allows fewer than the request asks for."""
        limit = sampling.max_tokens if max_tokens is None else min(max_tokens, sampling.max_tokens)
        return cls(seq_id, sampling.beam_width, sampling.n, sampling.length_penalty, sampling.early_stopping,
                   end_token_ids(sampling, eos_token_ids), limit, sampling.min_tokens)  # fmt: skip

    @property
    def num_output_tokens(self) -> int:
        """Output tokens of every live beam."""
        return len(self.live[0].token_ids) if self.live else 0

    def advance(self, candidates: Mapping[int, Sequence[Candidate]], new_seq_id: Callable[[], int]) -> BeamStep:
        """One step.

        Args:
            candidates: for each live beam's sequence its best continuations (`num_beam_candidates` of them, or all there are).
            new_seq_id: called for each fork, best first.
        """
        if self.is_done:
            raise RuntimeError("This beam search is done; it takes no further step.")
        length = self.num_output_tokens + 1
        is_last = length >= self.max_tokens
        ended: list[Hypothesis] = []
        children: list[tuple[Beam, int, float]] = []
        for place, (negative, rank, token_id) in enumerate(self._best_candidates(candidates, length)):
            parent, logprob = self.live[rank], -negative
            ends = token_id in self.end_ids
            if not (ends or is_last):
                if len(children) < self.beam_width:
                    children.append((parent, token_id, logprob))
            elif place < self.beam_width:  # those behind stand by only so that enough live beams are left
                reason = "stop" if ends else "length"
                ended.append(Hypothesis((*parent.token_ids, token_id), self._score(logprob, length), logprob, reason))
        self._finish(ended)
        self.is_done = not children or self._cannot_improve(children[0][2], length)
        kept = tuple(hypothesis for hypothesis in ended if hypothesis in self._finished)
        if self.is_done:
            dropped = tuple(beam.seq_id for beam in self.live)
            self.live = ()
            return BeamStep((), (), dropped, kept, True)
        return self._move(children, kept, new_seq_id)

    def stop(self, reason: str) -> tuple[int, ...]:
        """End the search from outside (no room): live beams become hypotheses as they are. Returns the sequences to let go."""
        length = self.num_output_tokens
        self._finish([Hypothesis(b.token_ids, self._score(b.logprob, length), b.logprob, reason) for b in self.live])
        dropped = tuple(beam.seq_id for beam in self.live)
        self.live, self.is_done = (), True
        return dropped

    def best(self) -> tuple[Hypothesis, ...]:
        """The `n` best hypotheses that ended, best first."""
        return tuple(self._finished[: self.n])

    def _best_candidates(self, candidates: Mapping[int, Sequence[Candidate]], length: int) -> list[tuple[float, int, int]]:
        """(-summed log-probability, rank of the beam, token id), best first, as many as may matter."""
        masked = self.end_ids if length <= self.min_tokens else frozenset()
        every = [(-(beam.logprob + candidate.logprob), rank, candidate.token_id) for rank, beam in enumerate(self.live)
                 for candidate in candidates[beam.seq_id] if candidate.token_id not in masked]  # fmt: skip
        return heapq.nsmallest(num_beam_candidates(self.beam_width, len(self.end_ids)), every)

    def _score(self, logprob: float, length: int) -> float:
        return float(logprob / max(length, 1) ** self.length_penalty)

    def _finish(self, ended: list[Hypothesis]) -> None:
        """Keep the best `beam_width` of all that ended; the sort is stable, so the earlier one wins a tie."""
        self._finished = sorted(self._finished + ended, key=lambda hypothesis: -hypothesis.score)[: self.beam_width]

    def _cannot_improve(self, best_logprob: float, length: int) -> bool:
        """transformers' stop rule: as many hypotheses as beams, and either early stopping or a best live beam that, were it to
        end at its present length, would not beat the worst of them."""
        if len(self._finished) < self.beam_width:
            return False
        return self.early_stopping or self._score(best_logprob, length) <= self._finished[-1].score

    def _move(self, children: list[tuple[Beam, int, float]], ended: tuple[Hypothesis, ...],
              new_seq_id: Callable[[], int]) -> BeamStep:  # fmt: skip
        """The surviving children become the live beams."""
        continued: list[BeamMove] = []
        forks: list[BeamMove] = []
        live: list[Beam] = []
        taken: set[int] = set()
        for parent, token_id, logprob in children:
            in_place = parent.seq_id not in taken
            taken.add(parent.seq_id)
            move = BeamMove(parent.seq_id if in_place else new_seq_id(), parent.seq_id, token_id, logprob)
            (continued if in_place else forks).append(move)
            live.append(Beam(move.seq_id, (*parent.token_ids, token_id), logprob))
        dropped = tuple(beam.seq_id for beam in self.live if beam.seq_id not in taken)
        self.live = tuple(live)
        return BeamStep(tuple(continued), tuple(forks), dropped, ended, False)
