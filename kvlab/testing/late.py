"""A runner whose steps really are late: it carries a plan out when its outcome is asked for, and checks what is in flight meanwhile."""

from __future__ import annotations

from collections.abc import Iterable

from kvlab.engine.runners.base import DeviceMemory, Runner, RunnerConfig
from kvlab.types import Outcome, Plan

UNTOLD, NOBODY, SWAP = -1, -2, -3
"""In the place of a sequence: one whose table the runner has not been told yet, none any more, swap space."""


class LateRunner:
    """Any synchronous runner, made late.

    Args:
        inner: carries plans out, in order.

    Raises (from `submit`):
        AssertionError: more plans in flight than depth + 1, or a plan that writes a slot which one in flight reads or writes for somebody
            else (a device may run them at the same time, or on two streams).
    """

    def __init__(self, inner: Runner) -> None:
        self.inner = inner
        self.most_in_flight = 0
        self._flying: list[_Late] = []
        self._tables: dict[int, list[int]] = {}

    @property
    def kv_bytes_allocated(self) -> int:
        """The inner runner's."""
        return self.inner.kv_bytes_allocated

    def initialize(self, config: RunnerConfig) -> None:
        """Nothing is in flight."""
        self._config = config
        self._flying, self._tables = [], {}
        self.inner.initialize(config)

    def device_memory(self) -> DeviceMemory | None:
        """The inner runner's."""
        return self.inner.device_memory()

    def close(self) -> None:
        """Nothing is in flight."""
        self._flying = []
        self.inner.close()

    def submit(self, plan: Plan) -> _Late:
        """Only note it."""
        late = _Late(self, plan)
        self._note_tables(plan)
        late.writes, late.reads = self._writes(plan), self._reads(plan)
        for other in self._flying:
            clash = [slot for slot, owner in late.writes.items() if not other.touched(slot) & {owner, UNTOLD} and other.touched(slot)]
            assert not clash, f"step {plan.step} writes (tier, slot) {clash[:4]}, which step {other.plan.step}, in flight, touches"
        self._flying.append(late)
        self.most_in_flight = max(self.most_in_flight, len(self._flying))
        assert len(self._flying) <= self._config.depth + 1, f"{len(self._flying)} plans are in flight at depth {self._config.depth}"
        return late

    def run_until(self, late: _Late) -> None:
        """Carry out what is in flight up to this one."""
        while late in self._flying:
            first = self._flying.pop(0)
            first.outcome = self.inner.submit(first.plan).result()

    def _note_tables(self, plan: Plan) -> None:
        for seq_id in plan.released:
            del self._tables[seq_id]
        for start in plan.starts:
            self._tables[start.seq_id] = []
        for seq_id, block_ids in plan.fresh_tables.items():
            self._tables[seq_id] = list(block_ids)
        for seq_id, block_ids in plan.tables.items():
            self._tables[seq_id] += block_ids

    def _all(self, tier: str, block_id: int) -> Iterable[tuple[str, int]]:
        size = self._config.block_size
        return ((tier, slot) for slot in range(block_id * size, (block_id + 1) * size))

    def _slots(self, seq_id: int, first: int, end: int) -> Iterable[tuple[str, int]]:
        size, table = self._config.block_size, self._tables[seq_id]
        return (("gpu", table[i // size] * size + i % size) for i in range(first, end))

    def _writes(self, plan: Plan) -> dict[tuple[str, int], int]:
        """Slot -> sequence that holds its block."""
        owner = {block_id: seq_id for seq_id, table in self._tables.items() for block_id in table}
        found: dict[tuple[str, int], int] = {}
        for transfer in (*plan.swap_out, *plan.swap_in):
            for slot in self._all(transfer.destination_tier, transfer.destination):
                found[slot] = owner.get(transfer.destination, UNTOLD) if transfer.destination_tier == "gpu" else SWAP
        for copy in plan.copies:
            found |= {slot: owner.get(copy.destination, UNTOLD) for slot in self._all("gpu", copy.destination)}
        for entry in plan.scheduled:
            first = entry.first_position - entry.num_dropped_tokens
            found |= dict.fromkeys(self._slots(entry.seq_id, first, first + entry.num_new_tokens), entry.seq_id)
        return found

    def _reads(self, plan: Plan) -> dict[tuple[str, int], set[int]]:
        """Slot -> sequences that it is read for."""
        found: dict[tuple[str, int], set[int]] = {}
        holders: dict[int, set[int]] = {}
        untold = {seq_id for seq_id, table in self._tables.items() if not table}  # forks: they may hold what is copied
        for seq_id, table in self._tables.items():
            for block_id in table:
                holders.setdefault(block_id, set()).add(seq_id)
        moved = [(t.source_tier, t.source) for t in (*plan.swap_out, *plan.swap_in)] + [("gpu", copy.source) for copy in plan.copies]
        for tier, block_id in moved:
            for slot in self._all(tier, block_id):
                found.setdefault(slot, set()).update(holders.get(block_id, {NOBODY}) | untold if tier == "gpu" else {NOBODY})
        for entry in plan.scheduled:
            end = entry.first_position + entry.num_new_tokens - entry.num_dropped_tokens
            for slot in self._slots(entry.seq_id, 0, end):
                found.setdefault(slot, set()).add(entry.seq_id)
        return found


class _Late:
    """A handle whose step runs when somebody asks."""

    def __init__(self, runner: LateRunner, plan: Plan) -> None:
        self.plan = plan
        self.outcome: Outcome | None = None
        self.writes: dict[tuple[str, int], int] = {}
        self.reads: dict[tuple[str, int], set[int]] = {}
        self._runner = runner

    def touched(self, slot: tuple[str, int]) -> set[int]:
        """For whom the slot is read or written."""
        return self.reads.get(slot, set()) | ({self.writes[slot]} if slot in self.writes else set())

    def __repr__(self) -> str:
        return f"<step {self.plan.step}>"

    def result(self) -> Outcome:
        """Run it."""
        self._runner.run_until(self)
        assert self.outcome is not None
        return self.outcome
