"""Mooncake's traces (JSON lines: timestamp, input_length, output_length, hash_ids): real lengths, arrivals and prefix sharing.

Source: Qin et al., "Mooncake: Trading More Storage for Less Computation" (FAST 2025), github.com/kvcache-ai/Mooncake.
"""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence
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
from kvlab.workload.sampling import LengthSampling
from kvlab.workload.trace_window import TraceWindow
from kvlab.workload.traces import find_trace, numbered_lines, trace_folders

TRACE_BLOCK_TOKENS = 512
"""Tokens a hash id stands for; an id is chained, so it names its block and all before it. The last block may be partial."""

FIELDS = ("timestamp", "input_length", "output_length", "hash_ids")
ROW = "A Mooncake trace has timestamp (ms), input_length, output_length and hash_ids."


def read_mooncake(
    path: Path, limit: int | None = None, block_tokens: int = TRACE_BLOCK_TOKENS, needed: Sequence[str] = FIELDS
) -> HashedTrace:
    """Read a trace (.jsonl or .jsonl.gz). A row may have `cache` and `cache_until` (tokens of the file; see `kvlab.types.Request`); other
    fields than these and the four are ignored.

    limit: stop after so many rows that have input tokens. block_tokens: tokens an id stands for. needed: fields that must be there;
    without "input_length" the lengths may be missing, on all rows or on none.

    Raises:
        UserError: a broken line, a field that is missing or wrong, a negative length, a count of ids that is not
            ceil(input_length / block_tokens); always with the line's number.
    """
    rows, inputs, outputs, starts, ids = (array("q") for _ in range(5))
    arrivals_s, untils = array("d"), array("q")
    starts.append(0)
    has_lengths, num_usable = True, 0
    for line_number, line in numbered_lines(path):
        if limit is not None and num_usable >= limit:
            break
        where = f"{path}, line {line_number}"
        row = json_row(where, line, needed, ROW)
        hash_ids = ids_field(where, row)
        if not rows:
            has_lengths = "input_length" in row
        if ("input_length" in row) != has_lengths:
            what = "no" if has_lengths else "an"
            raise UserError(f"{where}: {what} input_length, unlike the rows before. Give it on every row or on none.")
        num_input = length_field(where, row, "input_length") if has_lengths else 0
        if has_lengths and len(hash_ids) != -(-num_input // block_tokens):
            rule = f"there must be one per {block_tokens} tokens, the last may be partial"
            raise wrong_count(where, len(hash_ids), num_input, block_tokens, rule, not len(rows))
        untils.append(caching_field(where, row))
        rows.append(line_number)
        arrivals_s.append(time_field(where, row, "milliseconds") / 1000)
        inputs.append(num_input)
        outputs.append(length_field(where, row, "output_length") if "output_length" in row else 0)
        ids.extend(hash_ids)
        starts.append(len(ids))
        num_usable += 1 if num_input or not has_lengths else 0
    columns = (np.array(column, dtype=np.int64) for column in (rows, inputs, outputs, starts, ids))
    row_array, input_array, output_array, start_array, id_array = columns
    return HashedTrace(path, row_array, np.array(arrivals_s), input_array, output_array, start_array, id_array, block_tokens,
                       has_lengths=has_lengths, cache_until=caching_column(untils))  # fmt: skip


class MooncakeWorkload(Workload):
    """A Mooncake trace with token ids: the same hash id is the same tokens in every request, so real kernels can run it.

    `block_tokens` < 512 shrinks the trace for small models: each hash block becomes that many tokens, outputs shrink alike.
    Deviation from the traced service: what a model answers is not what the trace's next turn quotes, so blocks of outputs
    are not hit by later prompts.
    """

    def __init__(
        self,
        path: str | Path,
        *,
        folder: str | Path | None = None,
        block_tokens: int = TRACE_BLOCK_TOKENS,
        trace_block_tokens: int = TRACE_BLOCK_TOKENS,
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
        """path: a file, or a name that `find_trace` knows, looked for in `folder` first. trace_block_tokens: tokens an id stands for
        in the file. time_scale to max_output: see `TraceWindow`."""
        super().__init__(concurrency=concurrency, abort=abort)
        self._path, self._folder = path, folder
        self._block_tokens = whole("workload.block_tokens", block_tokens, 1)
        self._trace_block_tokens = whole("workload.trace_block_tokens", trace_block_tokens, 1)
        self._window = TraceWindow(time_scale, skip, limit, max_input, max_output)
        self._sampling = LengthSampling(sampling, ignore_eos)

    def build(self, ctx: WorkloadContext) -> Sequence[float]:
        """Read and check the file, as far as it is needed."""
        size = self._trace_block_tokens
        path = find_trace(self._path, trace_folders(self._folder))
        self._trace = read_mooncake(path, self._window.num_rows, size)
        advice = "Shrink the trace with workload.block_tokens, or clip it with workload.max_input."
        self._chosen = self._window.choose(self._trace, lambda lens: scaled(lens, self._block_tokens, size), ctx, self.notes, advice)
        self._sampling.params(int(self._chosen.output_lens.min()))
        self._prompts = BlockPrompts(ctx, self._trace, self._block_tokens)
        self.notes += self._prompts.collisions(self._chosen.rows)
        arrivals_s: list[float] = self._chosen.arrivals_s.tolist()
        return arrivals_s

    def make(self, index: int) -> Request:
        """Request `index` of those chosen; its blocks become tokens now."""
        chosen = self._chosen
        row = int(chosen.rows[index])
        return Request(
            request_id=f"mooncake-{self._trace.rows[row]}",
            prompt_token_ids=self._prompts.tokens(row, int(chosen.input_lens[index])),
            sampling=self._sampling.params(int(chosen.output_lens[index])),
            oracle_output_len=int(chosen.reachable_lens[index]),
            cache_until=scaled_cache_until(self._trace, row, int(chosen.input_lens[index]), self._block_tokens),
        )
