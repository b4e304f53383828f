"""Reading what a replay needs of a trace: for each request its block ids, and where the file has them its time and lengths.

Formats, plain or gzipped, told apart by their first line:
- JSON lines as Mooncake publishes them: `{"timestamp": ms, "input_length": tokens, "output_length": tokens, "hash_ids": [ids]}`;
  an id names a block of 512 tokens and all before it. Only `hash_ids` is required.
- One access a line: an id (an integer or a word). Each line is a request of one block.
"""

from __future__ import annotations

import gzip
import json
import zlib
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from kvlab.types import UserError

MOONCAKE_BLOCK_TOKENS = 512


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
    block_tokens: int = MOONCAKE_BLOCK_TOKENS

    @property
    def num_accesses(self) -> int:
        """Block references."""
        return sum(map(len, self.blocks))

    @property
    def num_unique_blocks(self) -> int:
        """Distinct ids: the working set."""
        return len({block for blocks in self.blocks for block in blocks})


def as_trace(trace: str | Path | AccessTrace | Iterable[Sequence[Hashable]], limit: int | None = None) -> AccessTrace:
    """A trace from a path, an AccessTrace, or an iterable of requests (sequences of block ids); its first `limit` requests.

    UserError: no such file, a malformed row (with its number), or nothing in it.
    """
    if limit is not None and limit < 1:
        raise UserError(f"limit = {limit!r} is not allowed: at least 1 request (leave it out for all).")
    if isinstance(trace, (str, Path)):
        return _read(Path(trace), limit)
    if isinstance(trace, AccessTrace):
        return trace if limit is None else _cut(trace, limit)
    blocks = list(islice(trace, limit))
    if not blocks:
        raise UserError("The trace holds no requests. Give a sequence of requests, each a sequence of block ids.")
    if any(isinstance(request, (str, bytes)) or not isinstance(request, Sequence) for request in blocks):
        raise UserError("Each request of a trace is a sequence of block ids: [[1, 2], [1, 3]]; single accesses: [[1], [2]].")
    return AccessTrace("requests", blocks, [0.0] * len(blocks))


def _cut(trace: AccessTrace, limit: int) -> AccessTrace:
    lengths = (trace.input_lengths, trace.output_lengths)
    cut = [None if values is None else values[:limit] for values in lengths]
    return AccessTrace(trace.name, trace.blocks[:limit], trace.times_s[:limit], cut[0], cut[1], trace.block_tokens)


def _read(path: Path, limit: int | None) -> AccessTrace:
    try:
        with (gzip.open if path.suffix == ".gz" else open)(path, "rt", encoding="utf-8") as file:
            rows = [(number, line) for number, line in enumerate(file, 1) if line.strip()]
    except FileNotFoundError:
        raise UserError(f"No trace at {path}. Give the path of a .jsonl or .txt file, plain or .gz.") from None
    except (OSError, EOFError, UnicodeDecodeError, zlib.error) as error:
        raise UserError(f"{path} can't be read as {'gzipped ' if path.suffix == '.gz' else ''}text: {error}.") from None
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
