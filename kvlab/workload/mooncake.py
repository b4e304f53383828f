"""Mooncake's traces (JSON lines: timestamp, input_length, output_length, hash_ids): real lengths, arrivals and prefix sharing.

Source: Qin et al., "Mooncake: Trading More Storage for Less Computation" (FAST 2025), github.com/kvcache-ai/Mooncake.
"""

from __future__ import annotations

import json
import math
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from kvlab.types import Request, UserError
from kvlab.workload import rng
from kvlab.workload.base import Workload, WorkloadContext
from kvlab.workload.distributions import whole
from kvlab.workload.sampling import LengthSampling
from kvlab.workload.tokens import RandomTokens
from kvlab.workload.trace_window import TraceWindow
from kvlab.workload.traces import Ints, TraceRows, find_trace, numbered_lines

TRACE_BLOCK_TOKENS = 512
"""Tokens a hash id stands for; an id is chained, so it names its block and all before it. The last block may be partial."""


@dataclass
class MooncakeTrace(TraceRows):
    """`hash_ids[starts[i] : starts[i + 1]]` are the block ids of row i. Rows in the file's order, arrivals as its timestamps."""

    starts: Ints
    hash_ids: Ints

    def ids(self, row: int) -> Ints:
        """Block ids of row `row`."""
        return self.hash_ids[self.starts[row] : self.starts[row + 1]]


def read_mooncake(path: Path) -> MooncakeTrace:
    """Read a trace (.jsonl or .jsonl.gz). Fields other than the four are ignored.

    Raises:
        UserError: a broken line, a field that is missing or of a wrong type, a count of ids that is not
            ceil(input_length / 512); always with the line's number.
    """
    rows, inputs, outputs, starts, ids = (array("q") for _ in range(5))
    arrivals_s = array("d")
    starts.append(0)
    for line_number, line in numbered_lines(path):
        timestamp_ms, num_input, num_output, hash_ids = _parse(f"{path}, line {line_number}", line)
        rows.append(line_number)
        arrivals_s.append(timestamp_ms / 1000)
        inputs.append(num_input)
        outputs.append(num_output)
        ids.extend(hash_ids)
        starts.append(len(ids))
    lengths = (np.array(column, dtype=np.int64) for column in (rows, inputs, outputs, starts, ids))
    row_array, input_array, output_array, start_array, id_array = lengths
    return MooncakeTrace(path, row_array, np.array(arrivals_s), input_array, output_array, start_array, id_array)


def _parse(where: str, line: str) -> tuple[float, int, int, list[int]]:
    try:
        row = json.loads(line)
    except ValueError as error:
        raise UserError(f"{where}: broken JSON ({error}).") from error
    if not isinstance(row, dict):
        raise UserError(f"{where}: a JSON object is expected, not {type(row).__name__}.")
    for name in ("timestamp", "input_length", "output_length", "hash_ids"):
        if name not in row:
            raise UserError(f"{where}: the field {name!r} is missing. A Mooncake trace has timestamp (ms), input_length,"
                            " output_length and hash_ids.")  # fmt: skip
    timestamp_ms, num_input, num_output, ids = (row[k] for k in ("timestamp", "input_length", "output_length", "hash_ids"))
    if isinstance(timestamp_ms, bool) or not isinstance(timestamp_ms, (int, float)) or not math.isfinite(timestamp_ms):
        raise UserError(f"{where}: timestamp = {timestamp_ms!r} is not allowed: milliseconds.")
    for name, value in (("input_length", num_input), ("output_length", num_output)):
        if type(value) is not int:
            raise UserError(f"{where}: {name} = {value!r} is not allowed: a whole number of tokens.")
    if not isinstance(ids, list) or not all(type(i) is int and 0 <= i < 2**62 for i in ids):
        raise UserError(f"{where}: hash_ids must be a list of whole numbers >= 0.")
    if num_input >= 0 and len(ids) != -(-num_input // TRACE_BLOCK_TOKENS):
        raise UserError(f"{where}: {len(ids)} hash_ids for {num_input} input tokens; there must be one per {TRACE_BLOCK_TOKENS}"
                        " tokens, the last may be partial.")  # fmt: skip
    return timestamp_ms, num_input, num_output, ids


def scaled(lengths: Ints, block_tokens: int) -> Ints:
    """Lengths when a block of 512 tokens becomes one of `block_tokens`: full blocks stay full, a rest rounds down, at least 1."""
    full, rest = np.divmod(lengths, TRACE_BLOCK_TOKENS)
    return full * block_tokens + np.where(rest > 0, np.maximum(1, rest * block_tokens // TRACE_BLOCK_TOKENS), 0)


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
        """path: a file, or a name that `find_trace` knows. time_scale to max_output: see `TraceWindow`."""
        super().__init__(concurrency=concurrency, abort=abort)
        self._path = path
        self._block_tokens = whole("workload.block_tokens", block_tokens, 1)
        self._window = TraceWindow(time_scale, skip, limit, max_input, max_output)
        self._sampling = LengthSampling(sampling, ignore_eos)

    def build(self, ctx: WorkloadContext) -> Sequence[float]:
        """Read and check the whole file."""
        self._trace = read_mooncake(find_trace(self._path))
        advice = "Shrink the trace with workload.block_tokens, or clip it with workload.max_input."
        self._chosen = self._window.choose(self._trace, lambda lens: scaled(lens, self._block_tokens), ctx, self.notes, advice)
        self._sampling.params(int(self._chosen.output_lens.min()))
        self._tokens = RandomTokens(ctx, rng.BLOCK_TOKENS)
        self._note_collisions()
        arrivals_s: list[float] = self._chosen.arrivals_s.tolist()
        return arrivals_s

    def _note_collisions(self) -> None:
        """Small vocabularies and short blocks can make different ids the same tokens: sharing that the trace does not have."""
        num_ids = len(np.unique(np.concatenate([self._trace.ids(row) for row in self._chosen.rows])))
        num_values = self._tokens.num_allowed
        log_pairs = 2 * math.log(num_ids) - math.log(2) - self._block_tokens * math.log(num_values)
        if log_pairs > math.log(0.01):
            self.notes.append(f"{num_ids} hash ids as blocks of {self._block_tokens} tokens out of {num_values}: expect about"
                              f" {math.exp(log_pairs):.2g} pairs of equal blocks; more block_tokens avoid them.")  # fmt: skip

    def make(self, index: int) -> Request:
        """Request `index` of those chosen; its blocks become tokens now."""
        chosen = self._chosen
        row, num_input = int(chosen.rows[index]), int(chosen.input_lens[index])
        ids = self._trace.ids(row)[: -(-num_input // self._block_tokens)]
        token_ids: list[int] = self._tokens.blocks(ids, self._block_tokens).ravel()[:num_input].tolist()
        return Request(
            request_id=f"mooncake-{self._trace.rows[row]}",
            prompt_token_ids=token_ids,
            sampling=self._sampling.params(int(chosen.output_lens[index])),
            oracle_output_len=int(chosen.reachable_lens[index]),
        )
