"""What a replay needs of a trace: for each request its block ids, and where the file has them its time and lengths.

Formats, plain or gzipped, told apart by their beginning (`format_of`):

| format | ids | block |
|---|---|---|
| mooncake: JSON lines, only `hash_ids` is required | the file's, chained | 512 tokens (or `trace_block_tokens`), the last may be partial |
| qwen_bailian: JSON lines with `chat_id` | the file's, chained here: they name a block's own tokens only | 16 tokens, full ones |
| sharegpt: JSON list (or lines) of `conversations` | hashes of tokens, chained | `block_size` tokens, full ones |
| azure, burstgpt: CSV of lengths | none: each request's blocks are its own and **nothing can hit**; a note says so | `block_size` tokens |
| accesses: one id a line | the file's; each line is a request of one block | unknown |

A row of the first three may have `cache` (false) or `cache_until` (a position in tokens): `kvlab.types.Request` says what they mean.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import islice
from pathlib import Path
from typing import Any, overload

import numpy as np

from kvlab.types import UserError, wrong_caching
from kvlab.workload.azure import read_azure
from kvlab.workload.burstgpt import read_burstgpt
from kvlab.workload.hashed import HashedTrace
from kvlab.workload.mooncake import TRACE_BLOCK_TOKENS, read_mooncake
from kvlab.workload.qwen_bailian import QwenBailianTrace, read_qwen_bailian
from kvlab.workload.traces import Ints, TraceRows, beginning, check_and_repair, find_trace, numbered_lines, trace_folders

DEFAULT_BLOCK_SIZE = 16
NOTHING_SHARED = "the trace has no content: each request's blocks are its own, so that nothing can hit; evictions and occupancy are real"


@dataclass(frozen=True)
class ReadOptions:
    """How a file is read.

    Attributes:
        block_size: tokens per block, for formats without ids of their own (None: 16).
        trace_block_tokens: tokens an id of a Mooncake file stands for (None: 512).
        tokenizer: for texts: None for UTF-8 bytes, an object with `encode` and `apply_chat`, or the name of a model ("smollm2") or
            the folder of one.
        interleave: conversations of a ShareGPT file that take turns, one request each; 1: one after the other.
        folder: where a trace's name is looked for before the folders of KVLAB_TRACES.
    """

    block_size: int | None = None
    trace_block_tokens: int | None = None
    tokenizer: Any = None
    interleave: int = 1
    folder: str | Path | None = None

    def __post_init__(self) -> None:
        for name in ("block_size", "trace_block_tokens", "interleave"):
            value = getattr(self, name)
            if value is not None and (type(value) is not int or value < 1):
                raise UserError(f"{name} = {value!r} is not allowed: a whole number of at least 1.")

    def find(self, trace: str | Path) -> Path:
        """The file of a trace; see `kvlab.workload.traces.find_trace`."""
        return find_trace(trace, trace_folders(self.folder))

    def refuse_unused(self, path: Path, kind: str, but: Sequence[str] = ()) -> None:
        """UserError for an option (other than those of `but`) that has no effect on a format."""
        used = {
            "block_size": kind in ("azure", "burstgpt", "sharegpt"), "trace_block_tokens": kind == "mooncake",
            "tokenizer": kind == "sharegpt", "interleave": kind == "sharegpt",
        }  # fmt: skip
        for name, has_effect in used.items():
            default = 1 if name == "interleave" else None
            if getattr(self, name) != default and not has_effect and name not in but:
                raise UserError(f"{name} has no effect on {path.name}, a trace of the format {kind}. Leave it out.")


class BlockRows(Sequence[list[int]]):
    """Block ids of requests in two arrays: those of request i are `ids[starts[i] : starts[i + 1]]`; its items are lists.

    Without `ids` each block is one of its own: its id is its place.
    """

    def __init__(self, starts: Ints, ids: Ints | None) -> None:
        self.starts, self.ids = starts, ids

    def __len__(self) -> int:
        return len(self.starts) - 1

    @overload
    def __getitem__(self, index: int) -> list[int]: ...
    @overload
    def __getitem__(self, index: slice) -> BlockRows: ...
    def __getitem__(self, index: int | slice) -> list[int] | BlockRows:
        """A request's ids, or the first so many requests."""
        if isinstance(index, slice):
            first, last, step = index.indices(len(self))
            if (first, step) != (0, 1):
                raise ValueError("only the first requests can be cut out: rows[:n]")
            return BlockRows(self.starts[: last + 1], self.ids)
        row = range(len(self))[index]
        return self._between(int(self.starts[row]), int(self.starts[row + 1]))

    def __iter__(self) -> Iterator[list[int]]:
        first = int(self.starts[0])
        for last in self.starts[1:].tolist():
            yield self._between(first, last)
            first = last

    def _between(self, first: int, last: int) -> list[int]:
        return list(range(first, last)) if self.ids is None else self.ids[first:last].tolist()

    @property
    def num_accesses(self) -> int:
        """Block references."""
        return int(self.starts[-1] - self.starts[0])

    @property
    def num_unique(self) -> int:
        """Distinct ids."""
        return self.num_accesses if self.ids is None else len(np.unique(self.ids[self.starts[0] : self.starts[-1]]))


@dataclass(frozen=True)
class AccessTrace:
    """Requests in order.

    Attributes:
        name: of the file, or "requests". blocks: each request's block ids, head to tail.
        times_s: arrival (s) of each request, never falling, 0.0 where unknown.
        input_lengths, output_lengths: tokens, None where the trace has none. block_tokens: tokens an id stands for.
        cache_until: of each request the position (tokens) from which its blocks are kept out of the cache: a miss of theirs is a miss and
            brings nothing in (see `kvlab.types.Request`); None for a request: no block is, None for all: nobody's is.
        notes: what a reader of the results should know (rows repaired ...), a sentence each.
    """

    name: str
    blocks: Sequence[Sequence[Hashable]]
    times_s: Sequence[float]
    input_lengths: Sequence[int] | None = None
    output_lengths: Sequence[int] | None = None
    block_tokens: int = TRACE_BLOCK_TOKENS
    notes: tuple[str, ...] = field(default=(), kw_only=True)
    cache_until: Sequence[int | None] | None = field(default=None, kw_only=True)

    def __post_init__(self) -> None:
        """UserError for parts that don't go together."""
        if not len(self.blocks):
            raise UserError(f"The trace {self.name} holds no requests. Give a sequence of requests, each a sequence of block ids.")
        if type(self.block_tokens) is not int or self.block_tokens < 1:
            raise UserError(f"The trace {self.name}: block_tokens = {self.block_tokens!r} is not allowed: a whole number of at least 1.")
        for name in ("times_s", "input_lengths", "output_lengths", "cache_until"):
            values = getattr(self, name)
            if values is not None and len(values) != len(self.blocks):
                raise UserError(f"The trace {self.name}: {len(values)} {name} for {len(self.blocks)} requests; one each is needed.")
        for row, until in enumerate(self.cache_until or ()):
            if words := wrong_caching(True, until):
                raise UserError(f"The trace {self.name}: request {row}: {words}.")
        times = np.asarray(self.times_s, dtype=np.float64)
        early = np.flatnonzero(~(np.diff(times) >= 0))
        if early.size:
            row = int(early[0]) + 1
            when = f"at {times[row]} s, before request {row - 1} at {times[row - 1]} s"
            raise UserError(f"The trace {self.name}: request {row} arrives {when}. Sort the requests by arrival.")
        if not isinstance(self.blocks, BlockRows):
            self._check_ids()
        if self.input_lengths is not None and not isinstance(self.blocks, BlockRows):
            self._check_lengths(self.input_lengths)

    def _check_ids(self) -> None:
        """Ids of one kind: to Python 1, 1.0 and True are equal, and policies know a block by its id as text, in which 1 and "1" are."""
        kinds = {type(block) for blocks in self.blocks for block in blocks}
        whole = all(issubclass(kind, (int, np.integer)) and kind is not bool for kind in kinds)
        if not whole and kinds not in ({str}, {bytes}):
            names = ", ".join(sorted(kind.__name__ for kind in kinds))
            raise UserError(f"The trace {self.name} has block ids of the types {names}: whole numbers, or texts, or bytes are allowed.")

    def _check_lengths(self, lengths: Sequence[int]) -> None:
        """A request has one id for every full block, and at most one more."""
        for row, (blocks, length) in enumerate(zip(self.blocks, lengths, strict=True)):
            if length < 1 or not length // self.block_tokens <= len(blocks) <= -(-length // self.block_tokens):
                raise UserError(f"The trace {self.name}: request {row} has {len(blocks)} block ids for {length} input tokens"
                                f" in blocks of {self.block_tokens}.")  # fmt: skip

    def num_cacheable_blocks(self) -> list[int] | None:
        """Of each request, how many of its first blocks may be cached; None: all of all. A last, partial block may be where the whole
        prompt may."""
        if self.cache_until is None:
            return None
        nums = []
        for row, until in enumerate(self.cache_until):
            is_whole = until is None or (self.input_lengths is not None and until >= self.input_lengths[row])
            nums.append(len(self.blocks[row]) if until is None or is_whole else until // self.block_tokens)
        return nums

    @cached_property
    def num_accesses(self) -> int:
        """Block references."""
        return self.blocks.num_accesses if isinstance(self.blocks, BlockRows) else sum(map(len, self.blocks))

    @cached_property
    def num_unique_blocks(self) -> int:
        """Distinct ids: the working set."""
        if isinstance(self.blocks, BlockRows):
            return self.blocks.num_unique
        return len({block for blocks in self.blocks for block in blocks})


Trace = str | Path | AccessTrace | Iterable[Any]


def as_trace(trace: Trace, limit: int | None = None, reading: ReadOptions | None = None) -> AccessTrace:
    """The first `limit` requests of a trace: a path or name (see `find_trace`), an AccessTrace, or sequences of block ids.

    In a file, those are the first of its rows; then they are sorted by arrival, where a file needs that (the notes say so).

    Raises:
        UserError: no such file, a malformed row (with its number), an option without effect, or nothing in it.
    """
    if isinstance(trace, (str, Path)):
        return _read((reading or ReadOptions()).find(trace), limit, reading or ReadOptions())
    if isinstance(trace, AccessTrace):
        return trace if limit is None else _cut(trace, limit)
    if not isinstance(trace, Iterable):
        raise UserError(f"trace = {trace!r:.60} is not allowed: a path, a trace's name, an AccessTrace, or sequences of block ids.")
    blocks = list(islice(trace, limit))
    # Text and records (`Served`) are sequences as well, but not of block ids.
    others = (request for request in blocks if isinstance(request, (str, bytes)) or hasattr(request, "_fields"))
    if next(others, None) is not None or not all(isinstance(request, Sequence) for request in blocks):
        raise UserError("Each request of a trace is a sequence of block ids: [[1, 2], [1, 3]]; single accesses: [[1], [2]].")
    return AccessTrace("requests", blocks, [0.0] * len(blocks))


def _cut(trace: AccessTrace, limit: int) -> AccessTrace:
    lengths = (trace.input_lengths, trace.output_lengths)
    cut = [None if values is None else values[:limit] for values in lengths]
    until = None if trace.cache_until is None else trace.cache_until[:limit]
    return replace(trace, blocks=trace.blocks[:limit], times_s=trace.times_s[:limit], input_lengths=cut[0], output_lengths=cut[1],
                   cache_until=until)  # fmt: skip


def format_of(path: Path) -> str:
    """The format of a file, by its beginning. UserError: empty, unreadable, or CSV with columns of neither format."""
    text = beginning(path)
    if not text:
        raise UserError(f"{path} holds no requests.")
    if text[0] == "[":
        return "sharegpt"
    line = text.split("\n", 1)[0]
    if text[0] == "{":
        return "sharegpt" if '"conversations"' in line else "qwen_bailian" if '"chat_id"' in line else "mooncake"
    if "ContextTokens" in line:
        return "azure"
    if "Request tokens" in line:
        return "burstgpt"
    if "," in line:
        raise UserError(f"{path}: {line.strip()[:80]!r} is no header of a known CSV format. Azure's has TIMESTAMP, ContextTokens,"
                        " GeneratedTokens; BurstGPT's Timestamp, Model, Request tokens, Response tokens, Log Type.")  # fmt: skip
    return "accesses"


def _read(path: Path, limit: int | None, reading: ReadOptions) -> AccessTrace:
    kind = format_of(path)
    reading.refuse_unused(path, kind)
    if kind == "accesses":
        return _accesses(path, limit)
    if kind == "sharegpt":
        from kvlab.replay.conversations import access_sharegpt  # here: it may need a model's tokenizer

        return access_sharegpt(path, limit, reading)
    if kind in ("azure", "burstgpt"):
        rows = read_azure(path, limit) if kind == "azure" else read_burstgpt(path, limit)
        return _own_blocks(rows, reading.block_size or DEFAULT_BLOCK_SIZE)
    if kind == "qwen_bailian":
        return _hashed(read_qwen_bailian(path, limit))
    hashed = read_mooncake(path, limit, reading.trace_block_tokens or TRACE_BLOCK_TOKENS, needed=("hash_ids",))
    if num_unchained := hashed.num_unchained():
        hashed.notes.append(f"{path.name}: {num_unchained} ids follow different ids in different rows. Ids of this format stand for all"
                            " before them too: if these don't, hits are counted that attention can't use.")  # fmt: skip
    return _hashed(hashed)


def _hashed(rows: HashedTrace) -> AccessTrace:
    """Rows with block ids, in order of arrival."""
    notes: list[str] = []
    order = check_and_repair(rows, notes, mend_outputs=False)
    ids, starts = rows.chained() if isinstance(rows, QwenBailianTrace) else rows.hash_ids, rows.starts
    if not np.array_equal(order, np.arange(len(rows))):
        lengths = np.diff(starts)[order]
        ids = np.concatenate([ids[starts[row] : starts[row + 1]] for row in order])
        starts = np.concatenate([np.zeros(1, dtype=np.int64), np.cumsum(lengths)])
    inputs = rows.input_lens[order].tolist() if rows.has_lengths else None
    outputs = rows.output_lens[order].tolist() if rows.has_lengths else None
    times_s: list[float] = rows.arrivals_s[order].tolist()
    return AccessTrace(rows.path.name, BlockRows(starts, ids), times_s, inputs, outputs, rows.block_tokens, notes=tuple(notes),
                       cache_until=rows.cache_untils(order))  # fmt: skip


def _own_blocks(rows: TraceRows, block_size: int) -> AccessTrace:
    """Rows without content: every block is new."""
    notes: list[str] = []
    order = check_and_repair(rows, notes, mend_outputs=False)
    inputs = rows.input_lens[order]
    starts = np.concatenate([np.zeros(1, dtype=np.int64), np.cumsum(-(-inputs // block_size))])
    notes.append(f"{rows.path.name}: {NOTHING_SHARED}.")
    return AccessTrace(rows.path.name, BlockRows(starts, None), rows.arrivals_s[order].tolist(), inputs.tolist(),
                       rows.output_lens[order].tolist(), block_size, notes=tuple(notes))  # fmt: skip


def _accesses(path: Path, limit: int | None) -> AccessTrace:
    """One id a line; numbers where all are (7 and 07 are two texts)."""
    ids: list[str] = []
    for number, line in islice(numbered_lines(path), limit):
        words = line.split()
        if len(words) != 1:
            raise UserError(f"{path}, line {number}: {line.strip()[:60]!r} is not one block id. One a line, or JSON lines.")
        ids.append(words[0])
    blocks: Sequence[Sequence[Hashable]] = [[block] for block in ids]
    if all(block.isascii() and block.isdigit() and len(block) < 19 and (block[0] != "0" or block == "0") for block in ids):
        blocks = BlockRows(np.arange(len(ids) + 1), np.array([*map(int, ids)], dtype=np.int64))
    return AccessTrace(path.name, blocks, [0.0] * len(ids), block_tokens=1)
