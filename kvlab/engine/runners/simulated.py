"""Runs no model: tokens are a hash of the prefix, time comes from a cost model. The scheduler above it is the real one."""

from __future__ import annotations

from kvlab.engine.cost import Constant, CostModel
from kvlab.engine.runners.base import DeviceMemory, Ready, RunnerConfig
from kvlab.engine.runners.fake_tokens import FakeModel, hash_token, hash_tokens
from kvlab.types import Candidate, Outcome, Plan, SeqStart


class _Row:
    """A sequence: the hash of its first `upto` tokens."""

    __slots__ = ("hash", "start", "upto")

    def __init__(self, start: SeqStart) -> None:
        self.start = start
        self.hash = 0
        self.upto = 0


class SimulatedRunner:
    """Tokens from a hash of the prefix, step times from `cost`.

    Args:
        vocab_size: ids are in [0, vocab_size). cost: a cost model (bound to a model's shape where it needs one).
    """

    def __init__(self, vocab_size: int = 32_000, cost: CostModel | None = None) -> None:
        self.vocab_size = vocab_size
        self.cost = cost or Constant()
        self._rows: dict[int, _Row] = {}
        self._model = FakeModel(vocab_size)

    @property
    def kv_bytes_allocated(self) -> int:
        """0: there are no tensors."""
        return 0

    def initialize(self, config: RunnerConfig) -> None:
        """Forget every sequence."""
        self._rows.clear()
        self._model = FakeModel(self.vocab_size, config.eos_token_ids)

    def device_memory(self) -> DeviceMemory | None:
        """None: nothing is measured."""
        return None

    def close(self) -> None:
        """Nothing to give back."""
        self._rows.clear()

    def submit(self, plan: Plan) -> Ready:
        """Carry out the plan at once."""
        rows, model = self._rows, self._model
        for seq_id in plan.released:
            rows.pop(seq_id, None)
        for start in plan.starts:
            rows[start.seq_id] = _Row(start)
        tokens: list[tuple[int, ...]] = []
        forks: dict[int, tuple[int, ...]] = {}
        candidates: dict[int, tuple[Candidate, ...]] = {}
        for scheduled, ids in zip(plan.scheduled, plan.token_ids, strict=True):
            row = rows[scheduled.seq_id]
            start = row.start
            first = scheduled.first_position
            if row.upto < first:  # a prefix found in the cache, or kept in a swap
                row.hash += hash_tokens(start.token_ids[row.upto : first], row.upto)
            row.hash = (row.hash + (hash_token(ids[0], first) if len(ids) == 1 else hash_tokens(ids, first))) % 2**64
            row.upto = end = first + scheduled.num_new_tokens
            if not scheduled.num_samples:
                tokens.append(())
                continue
            if start.sampling.beam_width:
                candidates[scheduled.seq_id] = model.candidates(row.hash, start.sampling)
                tokens.append(())
                continue
            args = row.hash, end, start.num_prompt_tokens, start.sampling, start.seed
            tokens.append((model.next_token(*args, start.stream),))
            if scheduled.num_samples > 1:
                forks[scheduled.seq_id] = tuple(model.next_token(*args, start.stream + i) for i in range(1, scheduled.num_samples))
        return Ready(Outcome(plan.step, tuple(tokens), forks, candidates, {}, self.cost.step_s(plan)))
