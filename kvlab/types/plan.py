"""What one step does (`Plan`) and what came of it (`Outcome`): plain data that can be pickled, printed and compared.

The same plan goes to every runner (torch, simulated, recorded) and, later, to every tensor-parallel rank, so it holds all that
a runner needs: token ids, changes of block tables, copies and transfers. A runner keeps a row per sequence and applies the changes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from kvlab.types.columns import ScheduledSeq
from kvlab.types.sampling import SamplingParams

LATE = -1
"""Stands in `Plan.token_ids` for the token that the step in flight samples for the same sequence (depth 1): the runner has it."""


class SeqStart(NamedTuple):
    """All that a runner must know about a sequence it has not seen, or has been told to forget.

    `cause`: "admit" (first entry), "resume" (after recompute), "swap_in", "fork" (n > 1, beams).
    `token_ids`: every token so far, prompt and output. `stream`: the sequence's index in its group, part of its randomness.
    """

    seq_id: int
    group_id: int
    cause: str
    sampling: SamplingParams
    seed: int
    stream: int
    num_prompt_tokens: int
    token_ids: tuple[int, ...]


class BlockCopy(NamedTuple):
    """Copy all slots of block `source` to block `destination` within the gpu tier, before anything is written in this step."""

    source: int
    destination: int


class BlockTransfer(NamedTuple):
    """Move a block between tiers; a block is (tier, index). `num_tokens`: filled slots (what a byte count is taken from)."""

    source_tier: str
    source: int
    destination_tier: str
    destination: int
    num_tokens: int


class Admitted(NamedTuple):
    """A group entered running. `kind`: "new", "resumed" or "swapped_in"; tokens are those of its first sequence, `num_cached_tokens`
    of them found in the cache or brought back from swap."""

    group_id: int
    request_id: str
    kind: str
    num_tokens: int
    num_cached_tokens: int


class Preempted(NamedTuple):
    """A group gave way. `mode`: "recompute" or "swap"; `wanted_mode` differs when swap space was short. `cause`: "blocks" (a running
    group could not grow) or "scheduling" (a waiting group was to go first)."""

    group_id: int
    request_id: str
    mode: str
    wanted_mode: str
    num_computed_tokens: int
    num_blocks: int
    cause: str = "blocks"


class Blocked(NamedTuple):
    """The group at the head of a queue was not let in. `by`: "blocks", "watermark", "policy", "max_num_seqs",
    "tokens", "in_flight" (blocks that a step in flight still touches) ..."""

    group_id: int
    request_id: str
    by: str


class Plan(NamedTuple):
    """Everything one step does. Order of execution in a runner: forget `released`, add `starts`, apply `tables`, then
    `swap_out`, `copies`, `swap_in`, then the forward pass over `scheduled` with `token_ids`, then sampling. (Copies stand between
    the transfers: a destination may have been swapped out in this step, and a source may be swapped into.)

    Attributes:
        step: 0-based step number. now_s: the clock's time (s) at which every decision of the step was made.
        scheduled: what is computed; `token_ids[i]` are the ids for `scheduled[i]` (length num_new_tokens). Tuples, or columns that
            equal them (see `kvlab.types.columns`) where most sequences decode. An only id may be `LATE`.
        tables: seq_id -> block ids to append to the runner's row; `fresh_tables`: seq_id -> the whole row anew.
        released: sequences the runner must forget (finished, dropped, preempted, aborted) before the step.
        ended: (group_id, request_id, reason) of groups that the scheduler itself ended in this step (kv_capacity).
        blocked: why the first group of each queue stayed out.
        attention_window: latest positions that a token sees, itself included (a compression policy's); None: all. `num_sink_tokens`:
            first ones that it sees besides.
    """

    step: int
    now_s: float
    scheduled: Sequence[ScheduledSeq] = ()
    token_ids: Sequence[tuple[int, ...]] = ()
    starts: tuple[SeqStart, ...] = ()
    tables: dict[int, tuple[int, ...]] = {}  # noqa: RUF012 - never mutated; a NamedTuple default
    fresh_tables: dict[int, tuple[int, ...]] = {}  # noqa: RUF012
    released: tuple[int, ...] = ()
    swap_out: tuple[BlockTransfer, ...] = ()
    swap_in: tuple[BlockTransfer, ...] = ()
    copies: tuple[BlockCopy, ...] = ()
    admitted: tuple[Admitted, ...] = ()
    preempted: tuple[Preempted, ...] = ()
    blocked: tuple[Blocked, ...] = ()
    ended: tuple[tuple[int, str, str], ...] = ()
    watermark_blocks: int = 0
    attention_window: int | None = None
    num_sink_tokens: int = 0

    @property
    def num_new_tokens(self) -> int:
        """Tokens computed in this step, all sequences together."""
        return sum(s.num_new_tokens for s in self.scheduled)

    @property
    def is_empty(self) -> bool:
        """Nothing to run: no token, no copy, no transfer."""
        return not (self.scheduled or self.swap_out or self.swap_in or self.copies)

    def decisions(self) -> tuple[object, ...]:
        """What was decided, without token contents and clock: two runs decided the same iff these are equal step for step."""
        return (
            self.step, tuple(self.scheduled), tuple(sorted(self.tables.items())), tuple(sorted(self.fresh_tables.items())),
            self.released, self.swap_out, self.swap_in, self.copies, self.admitted, self.preempted, self.blocked, self.ended,
        )  # fmt: skip


class Candidate(NamedTuple):
    """A continuation offered to beam search: log-probability (natural log, float64) of `token_id` after its beam."""

    token_id: int
    logprob: float


class TokenLogprobs(NamedTuple):
    """Log-probability of the accepted token and of the k most likely ones (ids, values), k = SamplingParams.logprobs."""

    logprob: float
    top_ids: tuple[int, ...] = ()
    top_logprobs: tuple[float, ...] = ()


class Outcome(NamedTuple):
    """What a runner produced for a plan.

    Attributes:
        tokens: one tuple per `plan.scheduled` entry: the accepted tokens (0..k; () where num_samples is 0 or the group is a beam). A
            tuple of them, or columns that equal it.
        forks: seq_id -> first tokens of the n - 1 further samples (streams 1..n-1) drawn from the same logits.
        candidates: seq_id -> the best continuations of beam-search sequences, best first (ties: lower id): 2 * beam_width, or
            (1 + end ids) * beam_width where several ids end a sequence, so that enough live ones are left.
        logprobs: seq_id -> one entry per accepted token, then one per fork, where the request asked for them.
        execute_s: time the runner took (wall or virtual seconds).
    """

    step: int
    tokens: Sequence[tuple[int, ...]]
    forks: dict[int, tuple[int, ...]] = {}  # noqa: RUF012
    candidates: dict[int, tuple[Candidate, ...]] = {}  # noqa: RUF012
    logprobs: dict[int, tuple[TokenLogprobs, ...]] = {}  # noqa: RUF012
    execute_s: float = 0.0


class RecordedStep(NamedTuple):
    """One step of a recorded run: with the clock's readings, all that a replay needs.

    `now_s`, `end_s`: the engine's clock when the plan was made and after its commit. `seq_ids`, `num_new_tokens`: the plan's
    scheduled sequences, to notice a replay that decides otherwise.
    """

    now_s: float
    end_s: float
    seq_ids: tuple[int, ...]
    num_new_tokens: tuple[int, ...]
    outcome: Outcome
