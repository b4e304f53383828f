"""Traces whose prompts are lists of block ids: what their rows have in common, and how ids become tokens.

An id stands for the tokens of a block. Where a format's ids are chained an id also stands for all before it; tokens made of ids are
the same in both cases, because an engine chains blocks itself.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from kvlab.types import UserError, wrong_caching
from kvlab.workload import rng
from kvlab.workload.base import WorkloadContext
from kvlab.workload.tokens import RandomTokens
from kvlab.workload.traces import MAX_TOKENS, Ints, TraceRows

COMMON_BLOCK_TOKENS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)
"""Block sizes that a message offers as an explanation of a wrong number of ids."""


@dataclass
class HashedTrace(TraceRows):
    """`hash_ids[starts[i] : starts[i + 1]]` are the block ids of row i. Rows in the file's order, arrivals as its timestamps (s).

    `block_tokens`: tokens an id stands for. `cache_until`: of each row, the position (in the file's tokens) from which it is kept out of
    the prefix cache, -1: not at all; None: no row is.
    """

    starts: Ints
    hash_ids: Ints
    block_tokens: int
    cache_until: Ints | None = field(default=None, kw_only=True)

    def ids(self, row: int) -> Ints:
        """Block ids of row `row`."""
        return self.hash_ids[self.starts[row] : self.starts[row + 1]]

    def cache_untils(self, rows: Ints) -> list[int | None] | None:
        """`cache_until` of these rows; None: none of the trace's rows is kept out."""
        if self.cache_until is None:
            return None
        return [None if until < 0 else until for until in self.cache_until[rows].tolist()]

    def num_unchained(self) -> int:
        """Distinct ids that stand after different ids in different rows: 0 where an id names its block and all before it."""
        parents = np.concatenate([np.full(1, -1, dtype=np.int64), self.hash_ids])[: len(self.hash_ids)]
        firsts = self.starts[:-1][np.diff(self.starts) > 0]
        parents[firsts] = -1
        order = np.lexsort((parents, self.hash_ids))
        ids, befores = self.hash_ids[order], parents[order]
        return len(np.unique(ids[1:][(ids[1:] == ids[:-1]) & (befores[1:] != befores[:-1])]))


# ------------------------------------------------------------------ fields of a JSON line


def json_row(where: str, line: str, fields: Sequence[str], format_words: str) -> dict[str, Any]:
    """The object of a line; UserError if it is none or lacks one of the fields. `format_words`: what a row of the format has."""
    try:
        row = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise UserError(f"{where}: broken JSON ({error}).") from error
    if not isinstance(row, dict):
        raise UserError(f"{where}: a JSON object is expected, not {type(row).__name__}.")
    for name in fields:
        if name not in row:
            raise UserError(f"{where}: the field {name!r} is missing. {format_words}")
    return row


def time_field(where: str, row: dict[str, Any], unit: str) -> float:
    """`timestamp`, a finite number; 0 where there is none."""
    value = row.get("timestamp", 0)
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not abs(value) < 1e18:
        raise UserError(f"{where}: timestamp = {value!r} is not allowed: {unit}.")
    return float(value)


def length_field(where: str, row: dict[str, Any], name: str) -> int:
    """A length in tokens, 0 or more."""
    value = row[name]
    if type(value) is not int:
        raise UserError(f"{where}: {name} = {value!r} is not allowed: a whole number of tokens.")
    if value < 0:
        raise UserError(f"{where}: {name.replace('_', ' ')} {value} is negative.")
    if value > MAX_TOKENS:
        raise UserError(f"{where}: {name.replace('_', ' ')} {value} is no length: {MAX_TOKENS:,} tokens at most.")
    return value


def ids_field(where: str, row: dict[str, Any]) -> list[int]:
    """`hash_ids`, whole numbers of at least 0."""
    ids = row["hash_ids"]
    if not isinstance(ids, list) or not all(type(i) is int and 0 <= i < 2**62 for i in ids):
        raise UserError(f"{where}: hash_ids must be a list of whole numbers >= 0.")
    return ids


def caching_field(where: str, row: dict[str, Any]) -> int:
    """The position from which a row is kept out of the prefix cache, by its `cache` or `cache_until`; -1: not at all."""
    cache, until = row.get("cache", True), row.get("cache_until")
    if words := wrong_caching(cache, until):
        raise UserError(f"{where}: {words}.")
    return 0 if not cache else -1 if until is None else min(until, MAX_TOKENS)


def caching_column(values: Sequence[int]) -> Ints | None:
    """A trace's `cache_until` from its rows'."""
    column: Ints = np.array(values, dtype=np.int64)
    return column if (column >= 0).any() else None


def wrong_count(where: str, num_ids: int, num_tokens: int, block_tokens: int, rule: str, first: bool) -> UserError:
    """The error of a row whose number of ids does not go with its length; says which block size would fit."""
    fits = [size for size in COMMON_BLOCK_TOKENS if size != block_tokens and -(-num_tokens // size) == num_ids]
    hint = ""
    if fits and first:
        hint = f" The ids fit blocks of {fits[0]} tokens: say trace_block_tokens={fits[0]} if that is what they are."
    elif fits:
        hint = f" They fit blocks of {fits[0]} tokens: one trace can't mix block sizes."
    return UserError(f"{where}: {num_ids} hash_ids for {num_tokens} input tokens; {rule}.{hint}")


# ------------------------------------------------------------------------- ids to tokens


def scaled(lengths: Ints, block_tokens: int, trace_block_tokens: int) -> Ints:
    """Lengths when a block of the trace becomes one of `block_tokens`: full blocks stay full, a rest rounds down, at least 1."""
    full, rest = np.divmod(lengths, trace_block_tokens)
    return full * block_tokens + np.where(rest > 0, np.maximum(1, rest * block_tokens // trace_block_tokens), 0)


def scaled_cache_until(trace: HashedTrace, row: int, input_len: int, block_tokens: int) -> int | None:
    """A row's `cache_until` when its prompt becomes `input_len` tokens, and a block of the trace `block_tokens`: rounded down within the
    prompt, and counted from its end on where it lies behind it."""
    until = -1 if trace.cache_until is None else int(trace.cache_until[row])
    if until < 0:
        return None
    beyond = max(0, until - int(trace.input_lens[row]))
    inside = input_len if until >= trace.input_lens[row] else min(input_len, until * block_tokens // trace.block_tokens)
    return inside + beyond * block_tokens // trace.block_tokens


class BlockPrompts:
    """Prompts made of block ids: `block_tokens` tokens an id, the same id always the same ones.

    Tokens of a prompt beyond its ids (formats that name full blocks only) are its row's own.
    """

    def __init__(self, ctx: WorkloadContext, trace: HashedTrace, block_tokens: int) -> None:
        """UserError when no ordinary id is left."""
        self._trace, self._block_tokens = trace, block_tokens
        self._blocks = RandomTokens(ctx, rng.BLOCK_TOKENS)
        self._own = RandomTokens(ctx, rng.TOKENS)

    def tokens(self, row: int, length: int) -> list[int]:
        """The prompt of a row, `length` tokens (scaled)."""
        ids = self._trace.ids(row)[: -(-length // self._block_tokens)]
        token_ids: list[int] = self._blocks.blocks(ids, self._block_tokens).ravel()[:length].tolist() if len(ids) else []
        if len(token_ids) < length:
            token_ids += self._own.tokens(int(self._trace.rows[row]), length - len(token_ids))
        return token_ids

    def collisions(self, rows: Ints) -> list[str]:
        """A note where small vocabularies and short blocks make different ids the same tokens: sharing that the trace lacks."""
        num_ids = len(np.unique(np.concatenate([self._trace.ids(row) for row in rows])))
        num_values = self._blocks.num_allowed
        log_pairs = 2 * math.log(max(1, num_ids)) - math.log(2) - self._block_tokens * math.log(num_values)
        if log_pairs <= math.log(0.01):
            return []
        return [f"{num_ids} hash ids as blocks of {self._block_tokens} tokens out of {num_values}: expect about"
                f" {math.exp(log_pairs):.2g} pairs of equal blocks; more block_tokens avoid them."]  # fmt: skip
