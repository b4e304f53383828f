"""BurstGPT's traces (CSV): months of requests of a campus service to ChatGPT and GPT-4; real lengths and arrivals, no content.

Source: Wang et al., "BurstGPT: A Real-world Workload Dataset to Optimize LLM Serving Systems" (2024, arXiv 2401.17644),
github.com/HPMLL/BurstGPT. Columns: Timestamp (s), Model, Request tokens, Response tokens, Total tokens, Log Type; since 2.0 also
Session ID and Elapsed time. Rows with 0 response tokens are requests that failed.
"""

from __future__ import annotations

import csv
import math
from array import array
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from kvlab.types import Request, UserError
from kvlab.workload import rng
from kvlab.workload.azure import scaled
from kvlab.workload.base import Workload, WorkloadContext
from kvlab.workload.distributions import number
from kvlab.workload.sampling import LengthSampling
from kvlab.workload.tokens import RandomTokens
from kvlab.workload.trace_window import TraceWindow
from kvlab.workload.traces import MAX_TOKENS, TraceRows, find_trace, numbered_lines, trace_folders

COLUMNS = ("Timestamp", "Model", "Request tokens", "Response tokens", "Log Type")


def read_burstgpt(path: Path, limit: int | None = None, model: str | None = None, log_type: str | None = None) -> TraceRows:
    """Read a trace (.csv or .csv.gz): the rows that did not fail, in the file's order, arrivals as its timestamps.

    limit: stop after so many of them. model, log_type: only rows of that model ("ChatGPT", "GPT-4") and kind ("Conversation log",
    "API log"). Failed rows are left out and counted in `notes`, as in the files that the authors publish without them.

    Raises:
        UserError: no header with the columns, a malformed row (with its number), or no row of that model and kind.
    """
    lines = numbered_lines(path)
    header = next(lines, (0, ""))[1]
    names = [name.strip() for name in header.split(",")]
    if any(column not in names for column in COLUMNS):
        raise UserError(f"{path}: the first line must be a header with {', '.join(COLUMNS)}, not {header[:80]!r}.")
    places = [names.index(column) for column in COLUMNS]
    rows, inputs, outputs = array("q"), array("q"), array("q")
    arrivals_s = array("d")
    num_failed = 0
    seen: dict[str, set[str]] = {"Model": set(), "Log Type": set()}
    for line_number, line in lines:
        if limit is not None and len(rows) >= limit:
            break
        where = f"{path}, line {line_number}"
        cells = next(csv.reader([line])) if '"' in line else line.split(",")
        if len(cells) != len(names):
            raise UserError(f"{where}: {len(cells)} columns where the header has {len(names)}: {line[:80]!r}.")
        time, row_model, num_input, num_output, row_type = (cells[place].strip() for place in places)
        seen["Model"].add(row_model)
        seen["Log Type"].add(row_type)
        if (model is not None and row_model != model) or (log_type is not None and row_type != log_type):
            continue
        arrival_s = _seconds(where, time)
        lengths = _tokens(where, COLUMNS[2], num_input), _tokens(where, COLUMNS[3], num_output)
        if lengths[1] == 0:
            num_failed += 1
            continue
        rows.append(line_number)
        arrivals_s.append(arrival_s)
        inputs.append(lengths[0])
        outputs.append(lengths[1])
    for column, wanted in (("Model", model), ("Log Type", log_type)):
        if wanted is not None and wanted not in seen[column]:
            raise UserError(f"{path} has no rows with {column} {wanted!r}; it has {', '.join(sorted(seen[column])) or 'none at all'}.")
    notes = [f"{path.name}: {num_failed} rows without response tokens (requests that failed) were left out."] if num_failed else []
    columns = (np.array(column, dtype=np.int64) for column in (rows, inputs, outputs))
    row_array, input_array, output_array = columns
    return TraceRows(path, row_array, np.array(arrivals_s, dtype=np.float64), input_array, output_array, notes=notes)


def _seconds(where: str, text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not math.isfinite(value):
        raise UserError(f"{where}: Timestamp = {text!r} is not a number of seconds.")
    return value


def _tokens(where: str, column: str, text: str) -> int:
    try:
        value = int(text)
    except ValueError:
        raise UserError(f"{where}: {column} = {text!r} is not a whole number of tokens.") from None
    if value < 0:
        raise UserError(f"{where}: {column} = {value} is negative.")
    if value > MAX_TOKENS:
        raise UserError(f"{where}: {column} = {value} is no length: {MAX_TOKENS:,} tokens at most.")
    return value


class BurstGPTWorkload(Workload):
    """A BurstGPT trace; it has no content, so each prompt is random tokens of its own and nothing is shared."""

    def __init__(
        self,
        path: str | Path,
        *,
        folder: str | Path | None = None,
        model: str | None = None,
        log_type: str | None = None,
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
        """path: a file, or a name that `find_trace` knows, looked for in `folder` first. model, log_type: see `read_burstgpt`.
        length_scale multiplies lengths; the result is at least 1. time_scale to max_output: see `TraceWindow`."""
        super().__init__(concurrency=concurrency, abort=abort)
        self._path, self._folder = path, folder
        self._model, self._log_type = model, log_type
        self._length_scale = number("workload.length_scale", length_scale, 0)
        self._window = TraceWindow(time_scale, skip, limit, max_input, max_output)
        self._sampling = LengthSampling(sampling, ignore_eos)

    def build(self, ctx: WorkloadContext) -> Sequence[float]:
        """Read and check the file, as far as it is needed."""
        path = find_trace(self._path, trace_folders(self._folder))
        self._trace = read_burstgpt(path, self._window.num_rows, model=self._model, log_type=self._log_type)
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
            request_id=f"burstgpt-{line}",
            prompt_token_ids=self._tokens.tokens(line, int(chosen.input_lens[index])),
            sampling=self._sampling.params(int(chosen.output_lens[index])),
            oracle_output_len=int(chosen.reachable_lens[index]),
        )
