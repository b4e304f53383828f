"""Recorded rows to pandas frames with the schema's dtypes, and the columns derived from them.

A frame looks the same whether its rows come from memory or from a file. Derived columns are computed here, not while a run goes.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import pandas as pd

from kvlab.trace.schema import TABLES, Column, recorded
from kvlab.types import RequestRecord

_STR = "str" if int(pd.__version__.split(".")[0]) >= 3 else "object"


def series(column: Column, values: Sequence[Any]) -> pd.Series:
    """Python values as a Series of the column's dtype; None becomes the dtype's null. Lists of numbers become numpy arrays."""
    if column.dtype == "int64?":
        return pd.Series(pd.array(list(values), dtype="Int64"))
    if column.dtype == "str":
        return pd.Series(list(values), dtype=_STR)
    if column.dtype in ("int64", "float64"):
        return pd.Series(list(values), dtype=column.dtype)
    cells = np.empty(len(values), dtype=object)
    for i, value in enumerate(values):
        cells[i] = np.asarray(value, dtype=np.float64) if column.dtype == "list<float64>" else _lists(value)
    return pd.Series(cells, dtype=object)


def _lists(value: Any) -> Any:
    """Nested tuples as nested lists; a missing cell as an empty one."""
    if value is None:
        return []
    return [_lists(v) for v in value] if isinstance(value, (tuple, list, np.ndarray)) else value


def raw_frame(table: str, rows: Sequence[Sequence[Any]]) -> pd.DataFrame:
    """Rows in the order of `schema.recorded(table)` as a frame, without derived columns."""
    columns = recorded(table)
    cells: Iterable[Sequence[Any]] = zip(*rows, strict=True) if rows else ((),) * len(columns)
    return pd.DataFrame({c.name: series(c, values) for c, values in zip(columns, cells, strict=True)})


def empty_frame(table: str) -> pd.DataFrame:
    """A table without rows, all its columns in place."""
    return with_derived(table, raw_frame(table, []))


def request_row(record: RequestRecord) -> tuple[Any, ...]:
    """A RequestRecord in the order of the requests table: spans and outputs as one list a field."""
    r = record
    states, starts, ends = ([span[i] for span in r.spans] for i in range(3))
    return (
        *r[: r._fields.index("token_times_s") + 1], states, starts, ends,
        [ids for ids, _ in r.outputs], [why for _, why in r.outputs], r.texts,
        r.tenant, r.session_id, r.turn, r.priority, r.detail, r.cache_until,
    )  # fmt: skip


def with_derived(table: str, frame: pd.DataFrame) -> pd.DataFrame:
    """The frame with its derived columns, in the schema's order."""
    return frame.assign(**derived(table, frame))[[c.name for c in TABLES[table]]]


DERIVED_FROM = {
    "steps": {"now_s", "end_s", "num_output_tokens", "num_prompt_tokens_computed", "kv_blocks_used", "kv_blocks_total"},
    "requests": {"arrival_s", "first_scheduled_s", "finish_s", "token_times_s"},
}
"""What a table's derived columns are computed from."""


def derived(table: str, frame: pd.DataFrame, previous_end_s: float | None = None) -> dict[str, np.ndarray]:
    """A table's derived columns. `frame` needs those of `DERIVED_FROM`; `previous_end_s`: end of the step before its first row."""
    if table == "steps":
        return _derive_steps(frame, previous_end_s)
    return _derive_requests(frame) if table == "requests" else {}


def _derive_steps(steps: pd.DataFrame, previous_end_s: float | None) -> dict[str, np.ndarray]:
    before = steps["end_s"].shift(1)
    if previous_end_s is not None and len(steps):
        before.iloc[0] = previous_end_s
    start = np.fmax(steps["now_s"].to_numpy(), before.to_numpy(dtype=np.float64))
    seconds = np.maximum(steps["end_s"].to_numpy() - start, 0.0)
    return {
        "step_ms": seconds * 1e3,
        "output_tokens_per_s": _ratio(steps["num_output_tokens"], seconds, np.nan),
        "prompt_tokens_per_s": _ratio(steps["num_prompt_tokens_computed"], seconds, np.nan),
        "kv_cache_usage": _ratio(steps["kv_blocks_used"], steps["kv_blocks_total"].to_numpy(), 0.0),
    }


def _ratio(numerator: pd.Series, denominator: np.ndarray, otherwise: float) -> np.ndarray:
    """numerator / denominator where the denominator is above 0, else `otherwise`."""
    out = np.full(len(numerator), otherwise, dtype=np.float64)
    np.divide(numerator.to_numpy(), denominator, out=out, where=denominator > 0)
    return out


def _derive_requests(requests: pd.DataFrame) -> dict[str, np.ndarray]:
    times = list(requests["token_times_s"])
    gaps = [np.diff(t) for t in times]
    first = np.array([t[0] if len(t) else np.nan for t in times], dtype=np.float64)
    last = np.array([t[-1] if len(t) else np.nan for t in times], dtype=np.float64)
    num_gaps = np.array([len(g) for g in gaps], dtype=np.float64)
    tpot = np.divide(last - first, num_gaps, out=np.full(len(gaps), np.nan), where=num_gaps > 0)
    arrival = requests["arrival_s"].to_numpy()
    return {
        "queue_time_s": requests["first_scheduled_s"].to_numpy() - arrival,
        "ttft_s": first - arrival,
        "tpot_s": tpot,
        "itl_mean_s": tpot,  # the mean of the gaps telescopes to the same number
        "itl_p99_s": np.array([_percentile(g, 0.99) for g in gaps], dtype=np.float64),
        "itl_max_s": np.array([g.max() if len(g) else np.nan for g in gaps], dtype=np.float64),
        "e2el_s": requests["finish_s"].to_numpy() - arrival,
    }


def _percentile(values: np.ndarray, fraction: float) -> float:
    """numpy's linear percentile, without the 50 microseconds that np.percentile takes for a short array."""
    if not len(values):
        return np.nan
    ordered = np.sort(values)
    below = int(fraction * (len(values) - 1))
    above = min(below + 1, len(values) - 1)
    return float(ordered[below] + (ordered[above] - ordered[below]) * (fraction * (len(values) - 1) - below))
