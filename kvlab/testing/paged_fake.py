"""A runner with a fake model and a real (fake) paged cache: what it decodes depends on every block being where the plan says.

Each slot keeps a token, its position and a hash of everything before it (as K and V of a real model depend on the whole prefix).
The next token is made from what is *read back* through the block table, so a fault of the bookkeeping (a wrong table, a missing
copy, a stale block, transfers in the wrong order) becomes an assertion that names the block, or a wrong token.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
import numpy.typing as npt

from kvlab.engine.cost import Constant, CostModel
from kvlab.engine.runners.base import DeviceMemory, Ready, RunnerConfig
from kvlab.engine.runners.fake_tokens import FakeModel, hash_tokens
from kvlab.types import Candidate, Outcome, Plan, ScheduledSeq, SeqStart

GARBAGE = -7_777_777
_MASK = 2**64 - 1


class _Row:
    """What the runner knows of a sequence: its table, and (to check what is read) the tokens it was told."""

    __slots__ = ("prefixes", "start", "table", "tokens")

    def __init__(self, start: SeqStart) -> None:
        self.start = start
        self.table: list[int] = []
        self.tokens = list(start.token_ids)
        self.prefixes = [0]  # prefixes[p]: hash of the first p tokens

    def tell(self, first: int, ids: Sequence[int]) -> None:
        """Note tokens from position `first` on; they must agree with those known."""
        known = self.tokens[first : first + len(ids)]
        assert list(ids[: len(known)]) == known, f"sequence {self.start.seq_id} is given {ids} at {first}, it had {known}"
        assert first <= len(self.tokens), f"sequence {self.start.seq_id} knows {len(self.tokens)} tokens and computes from {first}"
        self.tokens += ids[len(known) :]

    def prefix(self, end: int) -> int:
        """Hash of the first `end` tokens."""
        while len(self.prefixes) <= end:
            p = len(self.prefixes) - 1
            self.prefixes.append((self.prefixes[p] + hash_tokens((self.tokens[p],), p)) & _MASK)
        return self.prefixes[end]


class _Tier:
    """Slots of one tier, full of garbage at first."""

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.tokens = np.full((num_blocks, block_size), GARBAGE, dtype=np.int64)
        self.positions = np.full((num_blocks, block_size), GARBAGE, dtype=np.int64)
        self.prefixes = np.full((num_blocks, block_size), 2**64 - 7_777_777, dtype=np.uint64)

    def take(self, block_ids: Sequence[int]) -> list[npt.NDArray[np.generic]]:
        """The contents of blocks."""
        return [array[list(block_ids)] for array in (self.tokens, self.positions, self.prefixes)]

    def put(self, block_ids: Sequence[int], contents: list[npt.NDArray[np.generic]]) -> None:
        """Overwrite blocks."""
        for array, content in zip((self.tokens, self.positions, self.prefixes), contents, strict=True):
            array[list(block_ids)] = content


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
            assert self._rows.pop(seq_id, None) is not None, f"step {plan.step} releases sequence {seq_id}, which is not known"
        for start in plan.starts:
            assert start.seq_id not in self._rows, f"step {plan.step} starts sequence {start.seq_id}, which is known"
            self._rows[start.seq_id] = _Row(start)
        for seq_id, block_ids in plan.fresh_tables.items():
            self._rows[seq_id].table = list(block_ids)
        for seq_id, block_ids in plan.tables.items():
            assert seq_id not in plan.fresh_tables, f"sequence {seq_id} gets a whole table and an addition"
            self._rows[seq_id].table += block_ids

    def _move_blocks(self, plan: Plan) -> None:
        gpu, cpu = self._gpu, self._cpu
        for transfers, tiers in ((plan.swap_out, ("gpu", "cpu")), (plan.swap_in, ("cpu", "gpu"))):
            assert all((t.source_tier, t.destination_tier) == tiers for t in transfers), f"{transfers} leave {tiers}"
            assert all(1 <= t.num_tokens <= self.config.block_size for t in transfers), f"{transfers}: filled slots"
        _distinct("swapped out to", (t.destination for t in plan.swap_out))
        cpu.put([t.destination for t in plan.swap_out], gpu.take([t.source for t in plan.swap_out]))
        sources, destinations = [c.source for c in plan.copies], [c.destination for c in plan.copies]
        _distinct("copied to", destinations)
        gpu.put(destinations, gpu.take(sources))  # all sources are read before any destination is written
        _distinct("swapped in to", (t.destination for t in plan.swap_in))
        gpu.put([t.destination for t in plan.swap_in], cpu.take([t.source for t in plan.swap_in]))

    def _run(self, plan: Plan) -> Outcome:
        _distinct("scheduled as sequence", (s.seq_id for s in plan.scheduled))
        written: set[tuple[int, int]] = set()
        for scheduled, ids in zip(plan.scheduled, plan.token_ids, strict=True):
            self._write(scheduled, ids, written)
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
            if len(drawn) > 1:
                forks[scheduled.seq_id] = drawn[1:]
        return Outcome(plan.step, tuple(tokens), forks, candidates, {}, self.cost.step_s(plan))

    def _slots(self, scheduled: ScheduledSeq, first: int, end: int) -> tuple[list[int], list[int]]:
        """(block ids, slots in them) of positions first .. end-1."""
        size, table = self.config.block_size, self._rows[scheduled.seq_id].table
        indices = [p - scheduled.num_dropped_tokens for p in range(first, end)]
        assert scheduled.num_dropped_tokens % size == 0, f"{scheduled}: dropped tokens are no whole blocks"
        assert indices[0] >= 0, f"sequence {scheduled.seq_id} needs position {first}; {scheduled.num_dropped_tokens} tokens were dropped"
        assert indices[-1] < len(table) * size, f"sequence {scheduled.seq_id} has blocks {table} of {size}: none for position {end - 1}"
        return [table[i // size] for i in indices], [i % size for i in indices]

    def _write(self, scheduled: ScheduledSeq, ids: Sequence[int], written: set[tuple[int, int]]) -> None:
        row, first = self._rows[scheduled.seq_id], scheduled.first_position
        assert scheduled.num_new_tokens == len(ids) >= 1, f"{scheduled}: {len(ids)} token ids"
        row.tell(first, ids)
        blocks, slots = self._slots(scheduled, first, first + len(ids))
        for i, (block, slot) in enumerate(zip(blocks, slots, strict=True)):
            assert (block, slot) not in written, f"slot {slot} of block {block} is written twice in one step (sequence {scheduled.seq_id})"
            written.add((block, slot))
            self._gpu.tokens[block, slot] = ids[i]
            self._gpu.positions[block, slot] = first + i
            self._gpu.prefixes[block, slot] = row.prefix(first + i + 1)

    def _read(self, scheduled: ScheduledSeq) -> int:
        """Hash of what the last new token sees, read through the table; everything that any new token sees is checked."""
        row, window = self._rows[scheduled.seq_id], self.config.window
        end = scheduled.first_position + scheduled.num_new_tokens
        seen = max(0, scheduled.first_position - window + 1) if window else 0
        blocks, slots = self._slots(scheduled, seen, end)
        positions, tokens = self._gpu.positions[blocks, slots], self._gpu.tokens[blocks, slots]
        wrong = np.flatnonzero(positions != np.arange(seen, end))
        if len(wrong):
            i = int(wrong[0])
            raise AssertionError(f"sequence {scheduled.seq_id} reads position {seen + i} in slot {slots[i]} of block {blocks[i]}, "
                                 f"which holds {_name(int(positions[i]))} (table {row.table})")  # fmt: skip
        row.prefix(end)
        wrong = np.flatnonzero(self._gpu.prefixes[blocks, slots] != np.array(row.prefixes[seen + 1 : end + 1], dtype=np.uint64))
        if len(wrong):
            i = int(wrong[0])
            raise AssertionError(f"sequence {scheduled.seq_id} reads position {seen + i} in slot {slots[i]} of block {blocks[i]}, "
                                 f"computed after another prefix (token {tokens[i]} there, {row.tokens[seen + i]} wanted)")  # fmt: skip
        last = max(0, end - window) if window else 0
        return hash_tokens(tokens[last - seen :], last)


def _name(position: int) -> str:
    return "nothing" if position == GARBAGE else f"position {position}"


def _distinct(what: str, ids: Iterable[int]) -> None:
    seen: set[int] = set()
    for number in ids:
        assert number not in seen, f"{number} is {what} twice in one step"
        seen.add(number)
