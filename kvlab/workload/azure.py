"""Azure's LLM inference traces (CSV: TIMESTAMP, ContextTokens, GeneratedTokens): real lengths and arrivals, no content.

Source: Patel et al., "Splitwise" (ISCA 2024) and Stojkovic et al., "DynamoLLM" (HPCA 2025), github.com/Azure/AzurePublicDataset.
"""

from __future__ import annotations

import re
from array import array
from collections.abc import Mapping, Sequence
from datetime import datetime
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from kvlab.types import Request, UserError
from kvlab.workload import rng
from kvlab.workload.base import Workload, WorkloadContext
from kvlab.workload.distributions import number
from kvlab.workload.sampling import LengthSampling
from kvlab.workload.tokens import RandomTokens
from kvlab.workload.trace_window import TraceWindow
from kvlab.workload.traces import MAX_TOKENS, Ints, TraceRows, find_trace, numbered_lines, trace_folders

COLUMNS = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")
# Seven digits of a second (2023) and a zone (2024) are more than datetime keeps: the fraction is read apart.
TIME = re.compile(r"(\d{4}-\d\d-\d\d[ T]\d\d:\d\d:\d\d)(\.\d+)?(Z|[+-]\d\d:\d\d)?")


def read_azure(path: Path, limit: int | None = None) -> TraceRows:
    """Read a trace (.csv or .csv.gz). Rows are in the file's order, arrivals relative to its first row (s).

    limit: stop after so many rows that have input tokens.

    Raises:
        UserError: no header with the three columns, or a malformed row, with its line number.
    """
    lines = numbered_lines(path)
    header = next(lines, (0, ""))[1]
    names = [name.strip() for name in header.split(",")]
    if any(column not in names for column in COLUMNS):
        raise UserError(f"{path}: the first line must be a header with {', '.join(COLUMNS)}, not {header[:80]!r}.")
    places = [names.index(column) for column in COLUMNS]
    rows, inputs, outputs, seconds = array("q"), array("q"), array("q"), array("q")
    fractions = array("d")
    num_usable = 0
    for line_number, line in lines:
        if limit is not None and num_usable >= limit:
            break
        where, cells = f"{path}, line {line_number}", line.split(",")
        if len(cells) != len(names):
            raise UserError(f"{where}: {len(cells)} columns where the header has {len(names)}: {line[:80]!r}.")
        time, num_input, num_output = (cells[place].strip() for place in places)
        second, fraction = _seconds(where, time)
        seconds.append(second)
        fractions.append(fraction)
        inputs.append(_length(where, COLUMNS[1], num_input))
        outputs.append(_length(where, COLUMNS[2], num_output))
        rows.append(line_number)
        num_usable += inputs[-1] > 0
    whole_s = np.array(seconds, dtype=np.int64)
    # Whole seconds are subtracted as integers: a float of seconds since 1970 would keep only about 0.2 microseconds.
    arrivals_s = (whole_s - whole_s[:1]) + (np.array(fractions) - np.array(fractions[:1]))
    row_array, input_array, output_array = (np.array(column, dtype=np.int64) for column in (rows, inputs, outputs))
    return TraceRows(path, row_array, arrivals_s, input_array, output_array)


def _seconds(where: str, text: str) -> tuple[int, float]:
    """A timestamp as whole seconds and their fraction."""
    match = TIME.fullmatch(text)
    try:
        if match is None:
            raise ValueError
        second = _whole_second(match[1], match[3] or "+00:00")
    except ValueError:
        raise UserError(f"{where}: TIMESTAMP = {text!r} is not a time like 2023-11-16 18:15:46.6805900.") from None
    return second, float(match[2] or 0)


@lru_cache(maxsize=64)
def _whole_second(text: str, zone: str) -> int:
    """Seconds since 1970; rows of one second follow one another. ValueError: no such time."""
    return int(datetime.fromisoformat(text + zone.replace("Z", "+00:00")).timestamp())


def _length(where: str, column: str, text: str) -> int:
    try:
        value = int(text)
    except ValueError:
        raise UserError(f"{where}: {column} = {text!r} is not a whole number of tokens.") from None
    if abs(value) > MAX_TOKENS:
        raise UserError(f"{where}: {column} = {value} is no length: {MAX_TOKENS:,} tokens at most.")
    return value


def scaled(lengths: Ints, scale: float) -> Ints:
    """Lengths times `scale`, rounded, at least 1."""
    scaled_lens: Ints = np.maximum(1, np.rint(lengths * scale)).astype(np.int64)
    return scaled_lens


class AzureWorkload(Workload):
    """An Azure trace; the trace has no content, so each prompt is random tokens of its own and nothing is shared."""

    def __init__(
        self,
        path: str | Path,
        *,
        folder: str | Path | None = None,
        length_scale: float = 1.0,
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
        """path: a file, or a name that `find_trace` knows, looked for in `folder` first. length_scale multiplies lengths (for small
        models); the result is at least 1. time_scale to max_output: see `TraceWindow`."""
        super().__init__(concurrency=concurrency, abort=abort)
        self._path, self._folder = path, folder
        self._length_scale = number("workload.length_scale", length_scale, 0)
        self._window = TraceWindow(time_scale, skip, limit, max_input, max_output)
        self._sampling = LengthSampling(sampling, ignore_eos)

    def build(self, ctx: WorkloadContext) -> Sequence[float]:
        """Read and check the file, as far as it is needed."""
        self._trace = read_azure(find_trace(self._path, trace_folders(self._folder)), self._window.num_rows)
        advice = "Shrink the trace with workload.length_scale, or clip it with workload.max_input."
        self._chosen = self._window.choose(self._trace, lambda lens: scaled(lens, self._length_scale), ctx, self.notes, advice)
        self._sampling.params(int(self._chosen.output_lens.min()))
        self._tokens = RandomTokens(ctx, rng.TOKENS)
        arrivals_s: list[float] = self._chosen.arrivals_s.tolist()
        return arrivals_s

    def make(self, index: int) -> Request:
        """Request `index` of those chosen; its tokens are named by its line in the file."""
        chosen = self._chosen
        line = int(self._trace.rows[chosen.rows[index]])
        return Request(
            request_id=f"azure-{line}",
            prompt_token_ids=self._tokens.tokens(line, int(chosen.input_lens[index])),
            sampling=self._sampling.params(int(chosen.output_lens[index])),
            oracle_output_len=int(chosen.reachable_lens[index]),
        )
