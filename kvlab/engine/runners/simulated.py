"""Runs no model: tokens are a hash of the prefix, time comes from a cost model. The scheduler above it is the real one."""

from __future__ import annotations

from itertools import chain

import numpy as np
import numpy.typing as npt

from kvlab.engine.cost import Constant, CostModel
from kvlab.engine.runners.base import DeviceMemory, Ready, RunnerConfig
from kvlab.engine.runners.fake_tokens import FakeModel, hash_token, hash_tokens
from kvlab.types import Candidate, Outcome, Plan, ScheduledSeq, SeqStart

FEW = 12
"""Of fewer sequences one after the other is quicker than array operations."""

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


class SimulatedRunner:
    """Tokens from a hash of the prefix, step times from `cost`.

    Args:
        vocab_size: ids are in [0, vocab_size). cost: a cost model (bound to a model's shape where it needs one).
    """

    def __init__(self, vocab_size: int = 32_000, cost: CostModel | None = None) -> None:
        self.vocab_size = vocab_size
        self.cost = cost or Constant()
        self._rows = _Rows()
        self._model = FakeModel(vocab_size)

    @property
    def kv_bytes_allocated(self) -> int:
        """0: there are no tensors."""
        return 0

    def initialize(self, config: RunnerConfig) -> None:
        """Forget every sequence."""
        self._rows = _Rows()
        self._model = FakeModel(self.vocab_size, config.eos_token_ids)

    def device_memory(self) -> DeviceMemory | None:
        """None: nothing is measured."""
        return None

    def close(self) -> None:
        """Nothing to give back."""
        self._rows = _Rows()

    def submit(self, plan: Plan) -> Ready:
        """Carry out the plan at once."""
        rows = self._rows
        for seq_id in plan.released:
            rows.remove(seq_id)
        for start in plan.starts:
            rows.add(start, self._model.salt(start.seed, start.stream))
        forks: Forks = {}
        candidates: Candidates = {}
        tokens: tuple[tuple[int, ...], ...] = ()
        if len(plan.scheduled) < FEW:
            tokens = tuple([self._one(scheduled, ids, rows.place[scheduled.seq_id], forks, candidates)
                            for scheduled, ids in zip(plan.scheduled, plan.token_ids, strict=True)])  # fmt: skip
        else:
            seq_ids, first, num_new, num_samples = list(zip(*plan.scheduled, strict=True))[:4]
            places = np.array([rows.place[seq_id] for seq_id in seq_ids])
            positions = np.array(first)
            is_decode = rows.is_plain[places] & (rows.upto[places] == positions)
            if sum(num_new) != len(num_new) or num_samples.count(1) != len(num_samples):
                is_decode &= (np.array(num_new) == 1) & (np.array(num_samples) == 1)
            if is_decode.all():
                ids = np.fromiter(chain.from_iterable(plan.token_ids), np.uint64, len(places))
                tokens = tuple(zip(self._decode(places, positions, ids)))
            else:
                tokens = self._mixed_step(plan, places, positions, is_decode, forks, candidates)
        return Ready(Outcome(plan.step, tokens, forks, candidates, {}, self.cost.step_s(plan)))

    def _decode(self, places: npt.NDArray[np.int64], positions: npt.NDArray[np.int64], ids: npt.NDArray[np.uint64]) -> list[int]:
        """The next token of sequences that compute one token each, of which nothing is missing."""
        rows, model = self._rows, self._model
        hashes = rows.hash[places] + model.hash_each(ids, positions)
        rows.hash[places] = hashes
        rows.upto[places] = ends = positions + 1
        return model.next_tokens(hashes, ends, rows.salt[places], rows.is_sampled[places])

    def _mixed_step(self, plan: Plan, places: npt.NDArray[np.int64], positions: npt.NDArray[np.int64], is_decode: npt.NDArray[np.bool_],
                    forks: Forks, candidates: Candidates) -> tuple[tuple[int, ...], ...]:  # fmt: skip
        """Plain decodes together, the others one by one."""
        tokens: list[tuple[int, ...]] = [()] * len(places)
        which = np.flatnonzero(is_decode)
        if len(which):
            ids = np.array([plan.token_ids[i][0] for i in which], dtype=np.uint64)
            for i, token in zip(which, self._decode(places[which], positions[which], ids), strict=True):
                tokens[i] = (token,)
        for i in np.flatnonzero(~is_decode):
            tokens[i] = self._one(plan.scheduled[i], plan.token_ids[i], int(places[i]), forks, candidates)
        return tuple(tokens)

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
