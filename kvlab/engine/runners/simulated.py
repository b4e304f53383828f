"""Runs no model: tokens are a hash of the prefix, time comes from a cost model. The scheduler above it is the real one."""

from __future__ import annotations

from collections.abc import Sequence as Seqs

import numpy as np
import numpy.typing as npt

from kvlab.engine.cost import Constant, CostModel
from kvlab.engine.runners.base import DeviceMemory, Ready, RunnerConfig
from kvlab.engine.runners.fake_tokens import FakeModel, hash_token, hash_tokens, position_weights
from kvlab.engine.runners.late_tokens import LastTokens
from kvlab.types import Candidate, Outcome, Plan, ScheduledSeq, SeqStart
from kvlab.types.columns import Decodes, Ints, OneEach

FEW = 12
"""Of fewer sequences one after the other is quicker than array operations."""

AHEAD = 16
"""Steps for which the weights of positions are looked up at once."""

_ONE = np.array(1, dtype=np.uint64)

Forks = dict[int, tuple[int, ...]]
Candidates = dict[int, tuple[Candidate, ...]]


class _Rows:
    """The sequences a runner knows: for each the hash of its first `upto` tokens, in arrays, so that a step's decodes are one
    operation. A sequence has a place in the arrays while it lives; `is_plain`: one token a step, nothing masked."""

    def __init__(self) -> None:
        self.place: dict[int, int] = {}
        self.starts: dict[int, SeqStart] = {}
        self._free: list[int] = []
        self.hash = np.zeros(0, dtype=np.uint64)
        self.upto = np.zeros(0, dtype=np.int64)
        self.salt = np.zeros(0, dtype=np.uint64)
        self.is_sampled = np.zeros(0, dtype=np.bool_)
        self.is_plain = np.zeros(0, dtype=np.bool_)

    def add(self, start: SeqStart, salt: int) -> None:
        """A sequence without tokens. One that is known already begins anew."""
        self.remove(start.seq_id)
        if not self._free:
            size = len(self.hash)
            self._free = list(range(2 * size + 63, size - 1, -1))
            for name in ("hash", "upto", "salt", "is_sampled", "is_plain"):
                setattr(self, name, np.concatenate([getattr(self, name), np.zeros(size + 64, dtype=getattr(self, name).dtype)]))
        place = self.place[start.seq_id] = self._free.pop()
        self.starts[start.seq_id] = start
        sampling = start.sampling
        self.hash[place], self.upto[place], self.salt[place] = 0, 0, salt
        self.is_sampled[place] = sampling.temperature > 0
        self.is_plain[place] = not sampling.beam_width and not sampling.min_tokens

    def remove(self, seq_id: int) -> None:
        """Forget a sequence; one that isn't known is none."""
        place = self.place.pop(seq_id, None)
        if place is not None:
            del self.starts[seq_id]
            self._free.append(place)


class _Lanes:
    """Decodes that stay together from step to step (`Decodes`): their hashes, out of the rows meanwhile."""

    def __init__(self, rows: _Rows, scheduled: Decodes) -> None:
        self._seq_ids, self._first, self._offset = scheduled.seq_ids, scheduled.first, scheduled.offset
        self._places = places = np.array([rows.place[seq_id] for seq_id in scheduled.seq_ids])
        self._hashes = rows.hash[places]
        self._salts = rows.salt[places]
        self._is_sampled = rows.is_sampled[places]
        self._weights = self._noise = np.zeros((0, 0), dtype=np.uint64)  # of the next steps
        self._ahead = AHEAD
        self.are_plain = bool((rows.is_plain[places] & (rows.upto[places] == self._first + self._offset)).all())

    def goes_on(self, scheduled: Decodes) -> bool:
        """Whether these are the same sequences, one token later."""
        return (scheduled.seq_ids, scheduled.offset) == (self._seq_ids, self._offset) and scheduled.first is self._first

    def decode(self, model: FakeModel, ids: Ints) -> Ints:
        """The next token of each."""
        if self._ahead == AHEAD:
            self._look_ahead(model)
        now = self._ahead
        self._ahead += 1
        self._offset += 1
        new = ids.view(np.uint64) + _ONE
        new *= self._weights[now]
        self._hashes += new
        return model.pick(self._hashes ^ self._noise[now] if len(self._noise) else self._hashes)

    def _look_ahead(self, model: FakeModel) -> None:
        """What depends on positions alone, for some steps at once."""
        positions = np.arange(self._offset, self._offset + AHEAD)[:, None] + self._first
        self._weights = position_weights(int(positions.max()) + 1)[positions]
        if self._is_sampled.any():
            self._noise = model.noise(positions + 1, self._salts, self._is_sampled)
        self._ahead = 0

    def write(self, rows: _Rows) -> None:
        """Back into the rows. (A sequence that has been released has its place until its plan is carried out.)"""
        rows.hash[self._places] = self._hashes
        rows.upto[self._places] = self._first + self._offset


class SimulatedRunner:
    """Tokens from a hash of the prefix, step times from `cost`.

    Args:
        vocab_size: ids are in [0, vocab_size). cost: a cost model (bound to a model's shape where it needs one).
    """

    def __init__(self, vocab_size: int = 32_000, cost: CostModel | None = None) -> None:
        self.vocab_size = vocab_size
        self.cost = cost or Constant()
        self._rows = _Rows()
        self._lanes: _Lanes | None = None
        self._last: LastTokens | None = None  # where plans may not name them
        self._model = FakeModel(vocab_size)

    @property
    def kv_bytes_allocated(self) -> int:
        """0: there are no tensors."""
        return 0

    def initialize(self, config: RunnerConfig) -> None:
        """Forget every sequence."""
        self._rows = _Rows()
        self._lanes = None
        self._last = LastTokens() if config.depth else None
        self._model = FakeModel(self.vocab_size, config.eos_token_ids)

    def device_memory(self) -> DeviceMemory | None:
        """None: nothing is measured."""
        return None

    def close(self) -> None:
        """Nothing to give back."""
        self._rows = _Rows()

    def submit(self, plan: Plan) -> Ready:
        """Carry out the plan at once."""
        if self._last is not None:
            plan = self._last.fill(plan)
        rows, scheduled, ids = self._rows, plan.scheduled, plan.token_ids
        is_steady = isinstance(scheduled, Decodes) and isinstance(ids, OneEach)
        if self._lanes is not None and not (is_steady and self._lanes.goes_on(scheduled)):  # type: ignore[arg-type]
            self._lanes.write(rows)
            self._lanes = None
        for seq_id in plan.released:
            rows.remove(seq_id)
        for start in plan.starts:
            rows.add(start, self._model.salt(start.seed, start.stream))
        forks: Forks = {}
        candidates: Candidates = {}
        tokens: Seqs[tuple[int, ...]]
        if isinstance(scheduled, Decodes) and isinstance(ids, OneEach) and self._enter_lanes(scheduled):
            assert self._lanes is not None
            new = self._lanes.decode(self._model, ids.ids)
            tokens = OneEach(new, self._others(scheduled.rest, ids.rest, forks, candidates) if scheduled.rest else ())
        else:
            tokens = self._others(tuple(scheduled), tuple(ids), forks, candidates)
        outcome = Outcome(plan.step, tokens, forks, candidates, {}, self.cost.step_s(plan))
        if self._last is not None:
            self._last.note(plan, outcome)
        return Ready(outcome)

    def _enter_lanes(self, scheduled: Decodes) -> bool:
        """Whether the decodes at the head go on, or begin now, in columns."""
        if self._lanes is None:
            lanes = _Lanes(self._rows, scheduled)
            if not lanes.are_plain:
                return False
            self._lanes = lanes
        return True

    def _others(self, scheduled: tuple[ScheduledSeq, ...], token_ids: tuple[tuple[int, ...], ...], forks: Forks,
                candidates: Candidates) -> tuple[tuple[int, ...], ...]:  # fmt: skip
        """The tokens of sequences of any kind."""
        rows = self._rows
        if len(scheduled) < FEW:
            return tuple([self._one(each, ids, rows.place[each.seq_id], forks, candidates)
                          for each, ids in zip(scheduled, token_ids, strict=True)])  # fmt: skip
        seq_ids, first, num_new, num_samples = list(zip(*scheduled, strict=True))[:4]
        places = np.array([rows.place[seq_id] for seq_id in seq_ids])
        positions = np.array(first)
        is_decode = rows.is_plain[places] & (rows.upto[places] == positions)
        if sum(num_new) != len(num_new) or num_samples.count(1) != len(num_samples):
            is_decode &= (np.array(num_new) == 1) & (np.array(num_samples) == 1)
        tokens: list[tuple[int, ...]] = [()] * len(places)
        which = np.flatnonzero(is_decode)
        if len(which):
            ids = np.array([token_ids[i][0] for i in which.tolist()], dtype=np.uint64)
            for i, token in zip(which.tolist(), self._decode(places[which], positions[which], ids), strict=True):
                tokens[i] = (token,)
        for i in np.flatnonzero(~is_decode).tolist():
            tokens[i] = self._one(scheduled[i], token_ids[i], int(places[i]), forks, candidates)
        return tuple(tokens)

    def _decode(self, places: npt.NDArray[np.int64], positions: npt.NDArray[np.int64], ids: npt.NDArray[np.uint64]) -> list[int]:
        """The next token of sequences that compute one token each, of which nothing is missing."""
        rows, model = self._rows, self._model
        hashes = rows.hash[places] + model.hash_each(ids, positions)
        rows.hash[places] = hashes
        rows.upto[places] = ends = positions + 1
        tokens: list[int] = model.next_tokens(hashes, ends, rows.salt[places], rows.is_sampled[places]).tolist()
        return tokens

    def _one(self, scheduled: ScheduledSeq, ids: tuple[int, ...], place: int, forks: Forks,
             candidates: Candidates) -> tuple[int, ...]:  # fmt: skip
        """Any sequence: chunks, prefixes found in the cache or kept in a swap, several samples, beams."""
        rows, model, first = self._rows, self._model, scheduled.first_position
        start = rows.starts[scheduled.seq_id]
        value, upto = int(rows.hash[place]), int(rows.upto[place])
        if upto < first:
            value += hash_tokens(start.token_ids[upto:first], upto)
        value = (value + (hash_token(ids[0], first) if len(ids) == 1 else hash_tokens(ids, first))) % 2**64
        end = first + scheduled.num_new_tokens
        rows.hash[place], rows.upto[place] = value, end
        if not scheduled.num_samples:
            return ()
        if start.sampling.beam_width:
            candidates[scheduled.seq_id] = model.candidates(value, start.sampling)
            return ()
        args = value, end, start.num_prompt_tokens, start.sampling, start.seed
        if scheduled.num_samples > 1:
            forks[scheduled.seq_id] = tuple(model.next_token(*args, start.stream + i) for i in range(1, scheduled.num_samples))
        return (model.next_token(*args, start.stream),)
