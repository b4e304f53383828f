"""What a search wants: figures of a run with a direction, the Pareto front over several, and bounds on them while a run goes."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import pandas as pd

from kvlab.trace.summary import FIGURES
from kvlab.types import UserError, unknown_name

POOL = "kv_pool_tokens"
"""Tokens that the KV pool can hold (num_blocks x block_size): what a configuration asks of memory, whatever else is in the process."""

_RISING = ("throughput", "goodput", "hit_rate")
"""Figures with one of these in their name are better when larger, all others when smaller."""


class Objective(NamedTuple):
    """A figure of the summary (or `kv_pool_tokens`) and whether more is better."""

    figure: str
    maximize: bool

    def loss(self, value: float | None) -> float:
        """The value, turned so that smaller is better; infinite where it is not defined."""
        return math.inf if value is None or math.isnan(value) else -value if self.maximize else value

    def __str__(self) -> str:
        return f"{'max' if self.maximize else 'min'}:{self.figure}"


def objective(text: str) -> Objective:
    """"p99_ttft_ms", "max:output_token_throughput_per_s". UserError: no such figure (with the nearest), or direction."""
    direction, colon, figure = text.rpartition(":")
    if colon and direction not in ("min", "max"):
        raise unknown_name("direction of an objective", direction, ("min", "max"))
    names = [f.key for f in FIGURES] + [POOL]
    if figure not in names:
        raise unknown_name("objective", figure, names)
    return Objective(figure, direction == "max" if colon else any(word in figure for word in _RISING))


def value_of(figure: str, config: Mapping[str, Any], summary: Mapping[str, Any]) -> float | None:
    """An objective's value in a run that ended."""
    value = config["num_blocks"] * config["block_size"] if figure == POOL else summary.get(figure)
    return None if value is None else float(value)


def dominates(first: Sequence[float], second: Sequence[float]) -> bool:
    """Losses: nowhere worse and somewhere better."""
    return all(a <= b for a, b in zip(first, second, strict=True)) and any(a < b for a, b in zip(first, second, strict=True))


def unserved(summary: Mapping[Any, Any]) -> str:
    """"40 of 60 requests refused", of a run that refused any: its figures are those of an easier workload. Else nothing."""
    refused = summary.get("num_refused")
    return f"{int(refused)} of {int(summary['num_requests'])} requests refused" if refused and refused == refused else ""


def kept_off(frame: pd.DataFrame, refusing: bool = False) -> pd.Series:
    """Why each row of `runs.frame` can't be on a front: its status if it did not finish, `unserved` if it refused requests; else "".

    Args:
        refusing: whether runs that refused requests may be on it.
    """
    why = [
        str(row["status"]) if row.get("status", "finished") != "finished" else "" if refusing else unserved(row)
        for row in frame.to_dict("records")
    ]
    return pd.Series(why, index=frame.index, dtype=object)


def undominated(losses: Sequence[Sequence[float]]) -> list[bool]:
    """For each row of losses whether no other one dominates it; rows with one that is infinite (not defined) never stand."""
    finite = [all(map(math.isfinite, row)) for row in losses]
    rivals = {tuple(row) for row, ok in zip(losses, finite, strict=True) if ok}
    return [ok and not any(dominates(other, row) for other in rivals) for row, ok in zip(losses, finite, strict=True)]


def pareto_front(frame: pd.DataFrame, objectives: Sequence[str | Objective], refusing: bool = False) -> pd.DataFrame:
    """Rows of `runs.frame` that no other row beats in every objective, sorted by the first one; unfinished runs are left out.

    Args:
        refusing: whether runs that refused requests may be on it. Where not, `front.attrs["refusing"]` counts those left out for that.

    Raises:
        UserError: no objective, or one that isn't a column.
    """
    wanted = [o if isinstance(o, Objective) else objective(o) for o in objectives]
    if not wanted:
        raise UserError("A Pareto front needs at least one objective, e.g. 'p99_ttft_ms'.")
    rows = frame[(kept_off(frame, refusing=True) == "").to_numpy(dtype=bool)].copy()
    refused = (kept_off(rows, refusing) != "").to_numpy(dtype=bool)
    rows = rows[~refused]
    rows.attrs["refusing"] = int(refused.sum())
    if any(o.figure == POOL for o in wanted) and {"num_blocks", "block_size"} <= set(rows):
        rows[POOL] = rows["num_blocks"] * rows["block_size"]
    if rows.empty:  # nothing has finished: figures are no columns then
        return rows.reindex(columns=list(dict.fromkeys([*rows, *(o.figure for o in wanted)])))
    for goal in wanted:
        if goal.figure not in rows:
            raise unknown_name("column", goal.figure, map(str, rows.columns))
    losses = list(zip(*([goal.loss(float(v)) for v in rows[goal.figure]] for goal in wanted), strict=True))
    order = sorted((i for i, stands in enumerate(undominated(losses)) if stands), key=lambda i: losses[i][0])
    front = rows.iloc[order].reset_index(drop=True)
    front.attrs["refusing"] = int(refused.sum())
    return front


class SoFar(NamedTuple):
    """What a run has shown until now. `ttft_s`, `tpot_s`, `e2el_s`: of requests that have finished; `totals`: sums and peaks of steps."""

    elapsed_s: float
    num_requests: int
    latencies_s: Mapping[str, Sequence[float]]
    totals: Mapping[str, float]
    pool_tokens: int


def best_possible(goal: Objective, seen: SoFar, most_output_tokens: float) -> float:
    """The best value that a run can still end with, as a loss; -inf where nothing is known.

    Time only grows, and so do counts and peaks. Of N requests, a p99 is at least the value that more than a hundredth of N have passed;
    a mean at least the sum so far over N. Throughput is at most `most_output_tokens` over the time that has passed already.
    """
    figure = goal.figure
    if figure == POOL:
        return goal.loss(float(seen.pool_tokens))
    if figure == "duration_s":
        return goal.loss(seen.elapsed_s) if not goal.maximize else -math.inf
    if goal.maximize:
        tokens = {"output_token_throughput_per_s": most_output_tokens, "request_throughput_per_s": float(seen.num_requests)}
        return -tokens[figure] / seen.elapsed_s if figure in tokens and seen.elapsed_s > 0 else -math.inf
    if figure in seen.totals:
        return seen.totals[figure]
    statistic, _, rest = figure.partition("_")
    values = np.sort(np.asarray(seen.latencies_s.get(rest.removesuffix("_ms"), ()), dtype=np.float64))[::-1] * 1e3
    if not len(values) or not seen.num_requests:
        return -math.inf
    if statistic == "mean":
        return float(values.sum()) / seen.num_requests
    share = {"p99": 0.01, "median": 0.5}.get(statistic)
    # Linear interpolation lies between the order statistics at floor and ceil of (N - 1) q: the lower one is a bound.
    place = None if share is None else seen.num_requests - 1 - math.floor((seen.num_requests - 1) * (1 - share) + 1e-9)
    return float(values[place]) if place is not None and place < len(values) else -math.inf
