"""Alibaba's Qwen-Bailian traces (JSON lines): two hours of a cloud's requests with sessions and 16-token block ids.

Source: Wang et al., "KVCache Cache in the Wild" (USENIX ATC 2025), github.com/alibaba-edu/qwen-bailian-usagetraces-anon. A row has
chat_id, parent_chat_id (-1: a session's first request), timestamp (s), input_length, output_length, type, turn, hash_ids.
"""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from kvlab.types import Request, UserError
from kvlab.workload.base import Workload, WorkloadContext
from kvlab.workload.distributions import whole
from kvlab.workload.hashed import (
    BlockPrompts,
    HashedTrace,
    caching_column,
    caching_field,
    ids_field,
    json_row,
    length_field,
    scaled,
    scaled_cache_until,
    time_field,
    wrong_count,
)
from kvlab.workload.rng import mix
from kvlab.workload.sampling import LengthSampling
from kvlab.workload.trace_window import TraceWindow
from kvlab.workload.traces import Ints, find_trace, numbered_lines, trace_folders

TRACE_BLOCK_TOKENS = 16
"""Tokens a hash id stands for. An id names the tokens of its own block only."""

FIELDS = ("chat_id", "parent_chat_id", "timestamp", "input_length", "output_length", "hash_ids")
ROW = f"A Qwen-Bailian trace has {', '.join(FIELDS)}, and may have type and turn."
_NO_PARENT = -1


@dataclass
class QwenBailianTrace(HashedTrace):
    """A HashedTrace of full blocks (the hash of a last, partial one covers padding and is left out). `roots`: the first chat of
    each row's session; `turns`: 0-based."""

    roots: Ints
    turns: Ints

    def chained(self) -> Ints:
        """`hash_ids` renamed so that an id stands for its block and all before it: numbers from 0, by first appearance."""
        return chain_ids(self.hash_ids, self.starts)


def read_qwen_bailian(path: Path, limit: int | None = None) -> QwenBailianTrace:
    """Read a trace (.jsonl or .jsonl.gz). A row may have `cache` and `cache_until`, as a Mooncake trace's.

    limit: stop after so many rows that have input tokens.

    Repairs, counted in `notes`: one id more than the length needs is dropped. Also counted: parents that no earlier row has.

    Raises:
        UserError: a broken line, a field that is missing or wrong, a negative length, fewer ids than full blocks or more than
            one beyond them; always with the line's number.
    """
    rows, inputs, outputs, starts, ids, roots, turns = (array("q") for _ in range(7))
    arrivals_s, untils = array("d"), array("q")
    starts.append(0)
    root_of: dict[int, int] = {}
    num_usable = num_surplus = num_orphans = 0
    for line_number, line in numbered_lines(path):
        if limit is not None and num_usable >= limit:
            break
        where = f"{path}, line {line_number}"
        row = json_row(where, line, FIELDS, ROW)
        num_input, hash_ids = length_field(where, row, "input_length"), ids_field(where, row)
        num_full, num_needed = num_input // TRACE_BLOCK_TOKENS, -(-num_input // TRACE_BLOCK_TOKENS)
        if not num_full <= len(hash_ids) <= num_needed + 1:
            rule = f"there must be one per {TRACE_BLOCK_TOKENS} tokens"
            raise wrong_count(where, len(hash_ids), num_input, TRACE_BLOCK_TOKENS, rule, first=False)
        num_surplus += len(hash_ids) > num_needed
        chat, parent = (_chat(where, row, name) for name in ("chat_id", "parent_chat_id"))
        num_orphans += parent != _NO_PARENT and parent not in root_of
        root_of[chat] = root_of.get(parent, chat)
        untils.append(caching_field(where, row))
        rows.append(line_number)
        arrivals_s.append(time_field(where, row, "seconds"))
        inputs.append(num_input)
        outputs.append(length_field(where, row, "output_length"))
        ids.extend(hash_ids[:num_full])
        starts.append(len(ids))
        roots.append(root_of[chat])
        turns.append(max(0, _turn(where, row) - 1))
        num_usable += num_input > 0
    notes = []
    if num_surplus:
        notes.append(f"{path.name}: {num_surplus} of {len(rows)} rows have one hash id more than their length needs; it was left out.")
    if num_orphans:
        notes.append(f"{path.name}: {num_orphans} of {len(rows)} rows name a parent that no earlier row has; each begins a session.")
    columns = (np.array(column, dtype=np.int64) for column in (rows, inputs, outputs, starts, ids, roots, turns))
    row_array, input_array, output_array, start_array, id_array, root_array, turn_array = columns
    return QwenBailianTrace(path, row_array, np.array(arrivals_s), input_array, output_array, start_array, id_array,
                            TRACE_BLOCK_TOKENS, root_array, turn_array, notes=notes, cache_until=caching_column(untils))  # fmt: skip


def _chat(where: str, row: dict[str, Any], name: str) -> int:
    value = row[name]
    if type(value) is not int or not -1 <= value < 2**62:
        raise UserError(f"{where}: {name} = {value!r} is not allowed: a whole number (parent_chat_id -1: a session's first request).")
    return value


def _turn(where: str, row: dict[str, Any]) -> int:
    value = row.get("turn", 1)
    if type(value) is not int:
        raise UserError(f"{where}: turn = {value!r} is not allowed: a whole number.")
    return value


def chain_ids(hash_ids: Ints, starts: Ints) -> Ints:
    """Ids that stand for a block and all before it in its row, from ids that stand for a block: numbers from 0, by first appearance.

    Block by block over all rows at once: 64-bit words, mixed with that of the block before. With n different prefixes two fall
    together with a probability of about n^2 / 2^65 (ten million: 3e-6).
    """
    lengths = np.diff(starts)
    words = mix(hash_ids.astype(np.uint64) + np.uint64(0x9E3779B97F4A7C15))
    order = np.argsort(-lengths, kind="stable")  # rows that still have a block at a depth come first
    firsts, num_rows = starts[:-1][order], np.searchsorted(-lengths[order], -np.arange(1, lengths.max(initial=0) + 1), side="right")
    for depth in range(1, len(num_rows)):
        places = firsts[: num_rows[depth]] + depth
        words[places] = mix(words[places] ^ (words[places - 1] * np.uint64(0xBF58476D1CE4E5B9)))
    _, first_seen, labels = np.unique(words, return_index=True, return_inverse=True)
    rank = np.empty(len(first_seen), dtype=np.int64)
    rank[np.argsort(first_seen, kind="stable")] = np.arange(len(first_seen))
    chained: Ints = rank[labels]
    return chained


class QwenBailianWorkload(Workload):
    """A Qwen-Bailian trace with token ids: the same hash id is the same 16 tokens in every request; a prompt's last, partial block
    is tokens of its own. Requests carry their session and turn, and arrive when the trace says.

    `block_tokens` < 16 shrinks the trace for small models. Deviation from the traced service: what a model answers is not what the
    next turn quotes, so blocks of outputs are not hit by later prompts.
    """

    def __init__(
        self,
        path: str | Path,
        *,
        folder: str | Path | None = None,
        block_tokens: int = TRACE_BLOCK_TOKENS,
        time_scale: float = 1.0,
        skip: int = 0,
        limit: int | None = None,
        max_input: int | None = None,
        max_output: int | None = None,
        ignore_eos: bool = True,
        sampling: Mapping[str, Any] | None = None,
        concurrency: int | None = None,
        abort: Mapping[str, Any] | None = None,
    ) -> None:
        """path: a file, or a name that `find_trace` knows, looked for in `folder` first. time_scale to max_output: `TraceWindow`."""
        super().__init__(concurrency=concurrency, abort=abort)
        self._path, self._folder = path, folder
        self._block_tokens = whole("workload.block_tokens", block_tokens, 1)
        self._window = TraceWindow(time_scale, skip, limit, max_input, max_output)
        self._sampling = LengthSampling(sampling, ignore_eos)

    def build(self, ctx: WorkloadContext) -> Sequence[float]:
        """Read and check the file, as far as it is needed."""
        self._trace = read_qwen_bailian(find_trace(self._path, trace_folders(self._folder)), self._window.num_rows)
        advice = "Shrink the trace with workload.block_tokens, or clip it with workload.max_input."
        self._chosen = self._window.choose(
            self._trace, lambda lens: scaled(lens, self._block_tokens, TRACE_BLOCK_TOKENS), ctx, self.notes, advice
        )
        self._sampling.params(int(self._chosen.output_lens.min()))
        self._prompts = BlockPrompts(ctx, self._trace, self._block_tokens)
        self.notes += self._prompts.collisions(self._chosen.rows)
        arrivals_s: list[float] = self._chosen.arrivals_s.tolist()
        return arrivals_s

    def make(self, index: int) -> Request:
        """Request `index` of those chosen; its blocks become tokens now."""
        chosen, trace = self._chosen, self._trace
        row = int(chosen.rows[index])
        return Request(
            request_id=f"qwen-{trace.rows[row]}",
            prompt_token_ids=self._prompts.tokens(row, int(chosen.input_lens[index])),
            sampling=self._sampling.params(int(chosen.output_lens[index])),
            oracle_output_len=int(chosen.reachable_lens[index]),
            cache_until=scaled_cache_until(self._trace, row, int(chosen.input_lens[index]), self._block_tokens),
            session_id=f"chat-{trace.roots[row]}",
            turn=int(trace.turns[row]),
        )
