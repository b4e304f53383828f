"""The recorder: an engine listener that turns steps, requests and block events into frames, in memory or in a run folder.

In the hot path it only appends tuples; every few seconds rows are written as part files (see `store`) and dropped from memory.
"""

from __future__ import annotations

import functools
import os
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import pandas as pd

from kvlab.trace import store
from kvlab.trace.frames import raw_frame, request_row, with_derived
from kvlab.trace.outcomes import outcome_row
from kvlab.trace.plans import plan_row
from kvlab.trace.schema import TABLES
from kvlab.types import BlockEvent, Outcome, Plan, RequestRecord, StepStats, UserError

LONG_ROWS = ("outcomes", "plans")
LONG_ROW = 16
"""Rows of these tables hold a number or more for every running sequence: the buffer takes a sixteenth as many."""

RSS_SAMPLE_S = 0.001  # a system call: steps of a simulation share one
DEVICE_SAMPLE_S = 0.05  # torch's memory statistics take tens of microseconds to read: sampled, not read each step


@dataclass(frozen=True, slots=True)
class RecordConfig:
    """What to keep. `outcomes` is what `runner=recorded` replays, `plans` is for comparing decisions."""

    steps: bool = True
    requests: bool = True
    blocks: bool = False
    outcomes: bool = False
    plans: bool = False


class MemorySource(Protocol):
    """Where measured bytes come from; every runner is one."""

    @property
    def kv_bytes_allocated(self) -> int:
        """Bytes of the KV tensors, from the tensors."""

    def device_memory(self) -> Sequence[int] | None:
        """(allocated, reserved) bytes on the device; None where there is none."""


class Recorder:
    """Listens to an engine. With a folder it writes as the run goes; without one it keeps every row in memory.

    Args:
        folder: run folder (it must exist), or None for memory only. A probe file is written at once, so that a folder without
            space or permission fails before work starts.
        record: which tables to keep.
        memory: the runner, asked for measured bytes.
        buffer_rows, buffer_s: rows and seconds kept in memory between two writes; seconds grow to 1 % of the run's length.

    Raises UserError, naming the path, when the disk refuses; what was recorded before stays readable. Use as a context manager,
    or call `close()`: it turns the part files into one file a table (`steps.parquet`, `requests.parquet` ...).
    """

    def __init__(
        self,
        folder: Path | None,
        record: RecordConfig = RecordConfig(),
        *,
        memory: MemorySource | None = None,
        buffer_rows: int = 4096,
        buffer_s: float = 2.0,
    ) -> None:
        self.folder = folder
        self.record = record
        self._memory = memory
        self._buffer_s = buffer_s
        self._rows: dict[str, list[Sequence[Any]]] = {t: [] for t in TABLES if getattr(record, t)}
        self._limits = {t: max(1, buffer_rows // LONG_ROW) if t in LONG_ROWS else buffer_rows for t in self._rows}
        self._num_parts = dict.fromkeys(self._rows, 0)
        self._rss = _rss_reader(os.getpid())
        self._rss_bytes: int | None = None
        self._rss_s = float("-inf")
        self._device: tuple[int | None, int | None] = (None, None)
        self._device_s = float("-inf")
        self._kv_bytes: int | None = None  # the runner makes its tensors later than this
        self._owed_s = 0.0
        self._closed = False
        self._started_s = self._flushed_s = time.perf_counter()
        if folder is not None:
            self._prepare(folder)

    def _prepare(self, folder: Path) -> None:
        """Make the folder for parts; fails here if the folder can't be written, or holds another run."""
        if any(folder.glob(f"{store.PARTS}/*-*")) or any((folder / f"{t}{store.suffix()}").exists() for t in self._rows):
            raise UserError(f"{folder} holds the records of another run. Choose another run folder, or remove them.")
        try:
            (folder / store.PARTS).mkdir(exist_ok=True)
        except OSError as error:
            raise store.disk_error(folder, error) from error
        probe = folder / store.PARTS / "probe"
        with store.atomic(probe) as file:
            file.write(bytes(1 << 16))
        probe.unlink()

    # ------------------------------------------------------------- listening

    @property
    def wants_block_events(self) -> bool:
        """True when block events are recorded."""
        return self.record.blocks

    def on_step(self, plan: Plan, outcome: Outcome, stats: StepStats) -> None:
        """Keep one step's row, with what is measured here and the time it took."""
        start = time.perf_counter()
        if self.folder is not None:
            self._flush_if_due(start)
        if self.record.outcomes:
            self._rows["outcomes"].append(outcome_row(plan, outcome, stats))
        if self.record.plans:
            self._rows["plans"].append(plan_row(plan))
        rows = self._rows.get("steps")
        if rows is None:
            return
        if self._rss is not None and start - self._rss_s > RSS_SAMPLE_S:
            self._rss_s, self._rss_bytes = start, self._rss()
        if self._memory is not None and start - self._device_s > DEVICE_SAMPLE_S:
            self._sample_device(start)
        record_ms = (time.perf_counter() - start + self._owed_s) * 1e3
        self._owed_s = 0.0
        rows.append((*stats, record_ms, self._rss_bytes, self._kv_bytes, *self._device))

    def on_request(self, record: RequestRecord) -> None:
        """Keep one ended request's row."""
        start = time.perf_counter()
        rows = self._rows.get("requests")
        if rows is not None:
            rows.append(request_row(record))
        self._owed_s += time.perf_counter() - start

    def on_block(self, event: BlockEvent) -> None:
        """Keep one block event's row."""
        self._rows["blocks"].append(event)

    def _sample_device(self, now: float) -> None:
        assert self._memory is not None
        self._device_s = now
        self._kv_bytes = self._memory.kv_bytes_allocated
        measured = self._memory.device_memory()
        self._device = (None, None) if measured is None else (measured[0], measured[1])

    # --------------------------------------------------------------- writing

    def _flush_if_due(self, now: float) -> None:
        wait_s = max(self._buffer_s, 0.01 * (now - self._started_s))
        if now - self._flushed_s > wait_s:
            self.flush()
            return
        full = [table for table, rows in self._rows.items() if len(rows) >= self._limits[table]]
        if full:
            self._write(full)

    def flush(self) -> None:
        """Write buffered rows to the folder and drop them from memory. Does nothing without a folder."""
        self._flushed_s = time.perf_counter()
        self._write(self._rows)

    def _write(self, tables: Iterable[str]) -> None:
        if self.folder is None or self._closed:
            return
        for table in tables:
            rows = self._rows[table]
            if rows:
                try:
                    store.write_part(self.folder, table, self._num_parts[table] + 1, rows)
                except UserError:
                    self._closed = True  # a disk that refused will refuse again
                    raise
                self._num_parts[table] += 1
                rows.clear()

    def close(self) -> None:
        """Write what is left and merge the parts into one file a table. Does nothing when called again, or after a disk error."""
        if self._closed:
            return
        if self.folder is not None:
            self._merge(self.folder)
            with suppress(OSError):  # not empty: a part that could not be read is kept
                (self.folder / store.PARTS).rmdir()
        self._closed = True

    def _merge(self, folder: Path) -> None:
        """One file a table. The last rows go straight into it; where it can't be written, into a part like those before."""
        if store.suffix() != ".parquet":
            self.flush()
        try:
            for table, rows in self._rows.items():
                store.merge_parts(folder, table, rows)
                rows.clear()
        except UserError:
            with suppress(UserError):
                self.flush()
            raise

    def __enter__(self) -> Recorder:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    # --------------------------------------------------------------- reading

    def steps(self, columns: Sequence[str] | None = None) -> pd.DataFrame:
        """One row a step so far; columns of `schema.STEPS`, or some of them."""
        return self._frame("steps", columns)

    def requests(self, columns: Sequence[str] | None = None) -> pd.DataFrame:
        """One row an ended request so far; columns of `schema.REQUESTS`, or some of them."""
        return self._frame("requests", columns)

    def blocks(self) -> pd.DataFrame:
        """One row a block event so far; columns of `schema.BLOCKS`."""
        return self._frame("blocks")

    def _frame(self, table: str, columns: Sequence[str] | None = None) -> pd.DataFrame:
        if self.folder is not None:
            self.flush()
            return store.read_table(self.folder, table, columns=columns)
        frame = with_derived(table, raw_frame(table, self._rows.get(table, [])))
        return frame if columns is None else frame[[c for c in frame if c in columns]]


@functools.cache
def _rss_reader(pid: int) -> Callable[[], int] | None:
    """A function that reads this process's resident bytes: two microseconds on Linux, psutil's elsewhere, None without it."""
    try:
        statm, page_bytes = os.open(f"/proc/{pid}/statm", os.O_RDONLY), os.sysconf("SC_PAGE_SIZE")
    except OSError:
        try:
            import psutil
        except ImportError:
            return None
        process = psutil.Process(pid)
        return lambda: int(process.memory_info().rss)
    return lambda: int(os.pread(statm, 64, 0).split()[1]) * page_bytes
