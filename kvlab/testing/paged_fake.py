"""A runner with a fake model and a real (fake) paged cache: what it decodes depends on every block being where the plan says.

Each slot keeps a token, its position and a hash of everything up to it (as K and V of a real model depend on the whole prefix).
The next token is made from what is *read back* through the block table, so a fault of the bookkeeping (a wrong table, a missing
copy, a stale block, transfers in the wrong order) becomes an assertion that names the block, or a wrong token.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
import numpy.typing as npt

from kvlab.engine.cost import Constant, CostModel
from kvlab.engine.runners.base import DeviceMemory, Ready, RunnerConfig
from kvlab.engine.runners.fake_tokens import FakeModel, hash_token, hash_tokens
from kvlab.types import LATE, Candidate, Outcome, Plan, ScheduledSeq, SeqStart

Ints = npt.NDArray[np.int64]
GARBAGE = -7_777_777
_MASK = 2**64 - 1


class _Row:
    """What the runner knows of a sequence: its table, and (to check what is read) the tokens it was told.

    `prefixes[p]`: hash of the first p tokens. `slots`: pool slot of each of the table's slots.
    """

    __slots__ = ("last", "prefixes", "slots", "start", "table", "tokens")

    def __init__(self, start: SeqStart) -> None:
        self.start = start
        self.last = -1  # sampled last
        self.table: list[int] = []
        self.slots: Ints = np.zeros(0, dtype=np.int64)
        self.tokens: list[int] = []
        self.prefixes = np.zeros(2 * len(start.token_ids) + 64, dtype=np.uint64)
        self.tell(0, start.token_ids)

    def tell(self, first: int, ids: Sequence[int]) -> None:
        """Note tokens from position `first` on; they must agree with those known."""
        known = self.tokens[first : first + len(ids)]
        assert list(ids[: len(known)]) == known, f"sequence {self.start.seq_id} is given {ids} at {first}, it had {known}"
        assert first <= len(self.tokens), f"sequence {self.start.seq_id} knows {len(self.tokens)} tokens and computes from {first}"
        for token in ids[len(known) :]:
            end = len(self.tokens)
            if end + 1 >= len(self.prefixes):
                self.prefixes = np.concatenate((self.prefixes, np.zeros_like(self.prefixes)))
            self.prefixes[end + 1] = (int(self.prefixes[end]) + hash_token(token, end)) & _MASK
            self.tokens.append(token)

    def set_table(self, table: list[int], block_size: int) -> None:
        """The block table, whole."""
        self.table = table
        self.slots = (np.array(table, dtype=np.int64)[:, None] * block_size + np.arange(block_size)).ravel()


class _Tier:
    """Slots of one tier, full of garbage at first."""

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.block_size = block_size
        self.tokens = np.full(num_blocks * block_size, GARBAGE, dtype=np.int64)
        self.positions = np.full(num_blocks * block_size, GARBAGE, dtype=np.int64)
        self.prefixes = np.full(num_blocks * block_size, 2**64 + GARBAGE, dtype=np.uint64)

    def _slots(self, block_ids: Sequence[int]) -> Ints:
        slots: Ints = (np.array(block_ids, dtype=np.int64)[:, None] * self.block_size + np.arange(self.block_size)).ravel()
        return slots

    def take(self, block_ids: Sequence[int]) -> list[npt.NDArray[np.generic]]:
        """The contents of blocks."""
        slots = self._slots(block_ids)
        return [array[slots] for array in (self.tokens, self.positions, self.prefixes)]

    def put(self, block_ids: Sequence[int], contents: list[npt.NDArray[np.generic]]) -> None:
        """Overwrite blocks."""
        slots = self._slots(block_ids)
        for array, content in zip((self.tokens, self.positions, self.prefixes), contents, strict=True):
            array[slots] = content


class PagedFakeRunner:
    """Applies plans to a fake paged cache, in the order that `Plan` states. With full attention its tokens equal SimulatedRunner's.

    Args:
        vocab_size: ids are in [0, vocab_size). cost: a cost model.

    Raises (from `submit`):
        AssertionError: something is read that is not there, written twice in a step, or scheduled without blocks.
    """

    def __init__(self, vocab_size: int = 32_000, cost: CostModel | None = None) -> None:
        self.vocab_size = vocab_size
        self.cost = cost or Constant()

    @property
    def kv_bytes_allocated(self) -> int:
        """0: no KV tensors."""
        return 0

    def initialize(self, config: RunnerConfig) -> None:
        """A cache full of garbage, no sequences."""
        self.config = config
        self._model = FakeModel(self.vocab_size, config.eos_token_ids)
        self._gpu = _Tier(config.num_blocks, config.block_size)
        self._cpu = _Tier(config.num_cpu_blocks, config.block_size)
        self._rows: dict[int, _Row] = {}
        self._last_step = -1

    def device_memory(self) -> DeviceMemory | None:
        """None: nothing is measured."""
        return None

    def close(self) -> None:
        """Forget every sequence."""
        self._rows = {}

    @property
    def known_sequences(self) -> dict[int, tuple[int, ...]]:
        """seq_id -> block table, of every sequence it has been told of and not to forget."""
        return {seq_id: tuple(row.table) for seq_id, row in self._rows.items()}

    def submit(self, plan: Plan) -> Ready:
        """Carry out the plan at once."""
        assert plan.step > self._last_step, f"step {plan.step} comes after step {self._last_step}"
        self._last_step = plan.step
        self._apply(plan)
        self._move_blocks(plan)
        return Ready(self._run(plan))

    def _apply(self, plan: Plan) -> None:
        for seq_id in plan.released:
            assert seq_id in self._rows, f"step {plan.step} releases sequence {seq_id}, which is not known"
            del self._rows[seq_id]
        for start in plan.starts:
            assert start.seq_id not in self._rows, f"step {plan.step} starts sequence {start.seq_id}, which is known"
            self._rows[start.seq_id] = _Row(start)
        for seq_id, block_ids in plan.fresh_tables.items():
            self._rows[seq_id].set_table(list(block_ids), self.config.block_size)
        for seq_id, block_ids in plan.tables.items():
            assert seq_id not in plan.fresh_tables, f"sequence {seq_id} gets a whole table and an addition"
            self._rows[seq_id].set_table([*self._rows[seq_id].table, *block_ids], self.config.block_size)

    def _move_blocks(self, plan: Plan) -> None:
        gpu, cpu = self._gpu, self._cpu
        for transfers, tiers in ((plan.swap_out, ("gpu", "cpu")), (plan.swap_in, ("cpu", "gpu"))):
            assert all((t.source_tier, t.destination_tier) == tiers for t in transfers), f"{transfers} leave {tiers}"
            assert all(1 <= t.num_tokens <= self.config.block_size for t in transfers), f"{transfers}: filled slots"
        if plan.swap_out:
            _distinct("swapped out to", (t.destination for t in plan.swap_out))
            cpu.put([t.destination for t in plan.swap_out], gpu.take([t.source for t in plan.swap_out]))
        if plan.copies:  # all sources are read before any destination is written
            _distinct("copied to", (c.destination for c in plan.copies))
            gpu.put([c.destination for c in plan.copies], gpu.take([c.source for c in plan.copies]))
        if plan.swap_in:
            _distinct("swapped in to", (t.destination for t in plan.swap_in))
            gpu.put([t.destination for t in plan.swap_in], cpu.take([t.source for t in plan.swap_in]))

    def _run(self, plan: Plan) -> Outcome:
        """Writes of all sequences come before any read, as in a model's layers."""
        _distinct("scheduled as sequence", (s.seq_id for s in plan.scheduled))
        token_ids = [(self._rows[s.seq_id].last,) if ids == (LATE,) else ids for s, ids in zip(plan.scheduled, plan.token_ids, strict=True)]
        written = [self._write(scheduled, ids) for scheduled, ids in zip(plan.scheduled, token_ids, strict=True)]
        if written:
            _distinct(f"a slot (of {self.config.block_size} a block) written", np.concatenate(written).tolist())
        tokens: list[tuple[int, ...]] = []
        forks: dict[int, tuple[int, ...]] = {}
        candidates: dict[int, tuple[Candidate, ...]] = {}
        for scheduled in plan.scheduled:
            prefix = self._read(scheduled)
            start = self._rows[scheduled.seq_id].start
            if scheduled.num_samples and start.sampling.beam_width:
                candidates[scheduled.seq_id] = self._model.candidates(prefix, start.sampling)
                tokens.append(())
                continue
            position = scheduled.first_position + scheduled.num_new_tokens
            drawn = tuple(
                self._model.next_token(prefix, position, start.num_prompt_tokens, start.sampling, start.seed, start.stream + i)
                for i in range(scheduled.num_samples)
            )
            tokens.append(drawn[:1])
            self._rows[scheduled.seq_id].last = drawn[0] if drawn else -1
            if len(drawn) > 1:
                forks[scheduled.seq_id] = drawn[1:]
        return Outcome(plan.step, tuple(tokens), forks, candidates, {}, self.cost.step_s(plan))

    def _slots(self, scheduled: ScheduledSeq, positions: Ints) -> Ints:
        """Pool slots of positions. Sinks lie in blocks that stay at the head."""
        row, dropped, size = self._rows[scheduled.seq_id], scheduled.num_dropped_tokens, self.config.block_size
        assert dropped % size == 0, f"{scheduled}: dropped tokens are no whole blocks"
        head = -(-self.config.num_sink_tokens // size) * size
        slots = np.where(positions < head, positions, positions - dropped)
        lost = slots < np.where(positions < head, 0, head)
        name = f"sequence {scheduled.seq_id} (table {row.table})"
        assert not lost.any(), f"{name} needs positions {positions[lost]}, but {dropped} tokens were dropped from position {head} on"
        assert slots.max(initial=-1) < len(row.slots), f"{name} has no block for position {positions.max()}"
        return row.slots[slots]

    def _write(self, scheduled: ScheduledSeq, ids: Sequence[int]) -> Ints:
        row, first, gpu = self._rows[scheduled.seq_id], scheduled.first_position, self._gpu
        assert min(ids, default=0) >= 0, f"{scheduled}: no token is known for it"
        assert scheduled.num_new_tokens == len(ids) >= 1, f"{scheduled}: {len(ids)} token ids"
        row.tell(first, ids)
        slots = self._slots(scheduled, np.arange(first, first + len(ids)))
        gpu.tokens[slots] = ids
        gpu.positions[slots] = np.arange(first, first + len(ids))
        gpu.prefixes[slots] = row.prefixes[first + 1 : first + len(ids) + 1]
        return slots

    def _read(self, scheduled: ScheduledSeq) -> int:
        """Hash of what the last new token sees, read through the table; everything that any new token sees is checked."""
        row, window, gpu = self._rows[scheduled.seq_id], self.config.window, self._gpu
        end = scheduled.first_position + scheduled.num_new_tokens
        start = max(0, scheduled.first_position - window + 1) if window else 0
        num_sinks = min(self.config.num_sink_tokens, start)
        seen = np.concatenate((np.arange(num_sinks), np.arange(start, end)))
        slots = self._slots(scheduled, seen)
        wrong = gpu.positions[slots] != seen
        if wrong.any():
            position = int(gpu.positions[slots][wrong.argmax()])
            there = "nothing" if position == GARBAGE else f"position {position}"
            raise AssertionError(f"{self._where(scheduled, seen[wrong.argmax()], slots[wrong.argmax()])}, which holds {there}")
        wrong = gpu.prefixes[slots] != row.prefixes[seen + 1]
        if wrong.any():
            where = self._where(scheduled, seen[wrong.argmax()], slots[wrong.argmax()])
            raise AssertionError(f"{where}, computed after another prefix")
        last = max(0, end - window) if window else 0
        in_window = hash_tokens(gpu.tokens[slots[num_sinks + last - start :]], last)
        num_sinks = min(self.config.num_sink_tokens, last)
        return in_window ^ hash_tokens(gpu.tokens[self._slots(scheduled, np.arange(num_sinks))], 0) if num_sinks else in_window

    def _where(self, scheduled: ScheduledSeq, position: int, pool_slot: int) -> str:
        row = self._rows[scheduled.seq_id]
        block, slot = divmod(int(pool_slot), self.config.block_size)
        return f"sequence {scheduled.seq_id} (table {row.table}) reads position {position} in slot {slot} of block {block}"


def _distinct(what: str, ids: Iterable[int]) -> None:
    seen: set[int] = set()
    for number in ids:
        assert number not in seen, f"{number} is {what} twice in one step"
        seen.add(number)
