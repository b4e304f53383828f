"""Reading what a replay needs of a trace: for each request its block ids, and where the file has them its time and lengths.

Formats, plain or gzipped, told apart by their first line:
- JSON lines as Mooncake publishes them: `{"timestamp": ms, "input_length": tokens, "output_length": tokens, "hash_ids": [ids]}`;
  an id names a block of 512 tokens and all before it. Only `hash_ids` is required.
- One access a line: an id (an integer or a word). Each line is a request of one block.
"""

from __future__ import annotations

import json
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from kvlab.types import UserError
from kvlab.workload.mooncake import TRACE_BLOCK_TOKENS
from kvlab.workload.traces import find_trace, numbered_lines


@dataclass(frozen=True)
class AccessTrace:
    """Requests in order.

    Attributes:
        name: of the file, or "requests". blocks: each request's block ids, head to tail.
        times_s: arrival (s) of each request, 0.0 where unknown.
        input_lengths, output_lengths: tokens, None where the trace has none. block_tokens: tokens an id stands for.
    """

    name: str
    blocks: Sequence[Sequence[Hashable]]
    times_s: Sequence[float]
    input_lengths: Sequence[int] | None = None
    output_lengths: Sequence[int] | None = None
    block_tokens: int = TRACE_BLOCK_TOKENS

    @property
    def num_accesses(self) -> int:
        """Block references."""
        return sum(map(len, self.blocks))

    @property
    def num_unique_blocks(self) -> int:
        """Distinct ids: the working set."""
        return len({block for blocks in self.blocks for block in blocks})


def as_trace(trace: str | Path | AccessTrace | Iterable[Any], limit: int | None = None) -> AccessTrace:
    """The first `limit` requests of a trace: a path or name (see `find_trace`), an AccessTrace, or sequences of block ids.

    UserError: no such file, a malformed row (with its number), or nothing in it.
    """
    if isinstance(trace, (str, Path)):
        return _read(find_trace(trace), limit)
    if isinstance(trace, AccessTrace):
        return trace if limit is None else _cut(trace, limit)
    blocks = list(islice(trace, limit))
    if not blocks:
        raise UserError("The trace holds no requests. Give a sequence of requests, each a sequence of block ids.")
    # Text and records (`Served`) are sequences as well, but not of block ids.
    others = (request for request in blocks if isinstance(request, (str, bytes)) or hasattr(request, "_fields"))
    if next(others, None) is not None or not all(isinstance(request, Sequence) for request in blocks):
        raise UserError("Each request of a trace is a sequence of block ids: [[1, 2], [1, 3]]; single accesses: [[1], [2]].")
    return AccessTrace("requests", blocks, [0.0] * len(blocks))


def _cut(trace: AccessTrace, limit: int) -> AccessTrace:
    lengths = (trace.input_lengths, trace.output_lengths)
    cut = [None if values is None else values[:limit] for values in lengths]
    return AccessTrace(trace.name, trace.blocks[:limit], trace.times_s[:limit], cut[0], cut[1], trace.block_tokens)


def _read(path: Path, limit: int | None) -> AccessTrace:
    rows = list(numbered_lines(path))
    if not rows:
        raise UserError(f"{path} holds no requests.")
    if not rows[0][1].lstrip().startswith("{"):
        return _accesses(path, rows[:limit])
    parsed = [_json_row(path, number, line) for number, line in rows[:limit]]
    blocks, times_ms, inputs, outputs = zip(*parsed, strict=True)
    return AccessTrace(
        path.name,
        blocks,
        [ms / 1000 for ms in times_ms],
        None if None in inputs else inputs,
        None if None in outputs else outputs,
    )


def _accesses(path: Path, rows: list[tuple[int, str]]) -> AccessTrace:
    """One id a line."""
    blocks: list[list[Hashable]] = []
    for number, line in rows:
        words = line.split()
        if len(words) != 1:
            raise UserError(f"{path}, line {number}: {line.strip()[:60]!r} is not one block id. One a line, or JSON lines.")
        blocks.append([int(words[0]) if words[0].isdecimal() else words[0]])
    return AccessTrace(path.name, blocks, [0.0] * len(blocks), block_tokens=1)


def _json_row(path: Path, number: int, line: str) -> tuple[list[int], float, int | None, int | None]:
    """(hash_ids, timestamp in ms, input_length, output_length) of one line."""

    def wrong(what: str) -> UserError:
        example = '{"hash_ids": [1, 2], "timestamp": 0, "input_length": 700, "output_length": 20}'
        return UserError(f"{path}, line {number}: {what}. A row is {example}; only hash_ids must be there.")

    try:
        row: Any = json.loads(line)
    except json.JSONDecodeError as error:
        raise wrong(f"not JSON ({error.msg} at column {error.colno})") from None
    if not isinstance(row, dict) or "hash_ids" not in row:
        raise wrong("no hash_ids")
    ids = row["hash_ids"]
    if not isinstance(ids, list) or not all(type(block) is int for block in ids):
        raise wrong("hash_ids is not a list of integers")
    time_ms = row.get("timestamp", 0)
    if isinstance(time_ms, bool) or not isinstance(time_ms, (int, float)):
        raise wrong(f"timestamp = {time_ms!r} is not a number (ms)")
    lengths = row.get("input_length"), row.get("output_length")
    for name, value in zip(("input_length", "output_length"), lengths, strict=True):
        if value is not None and (type(value) is not int or value < 0):
            raise wrong(f"{name} = {value!r} is not a number of tokens")
    return ids, float(time_ms), *lengths
