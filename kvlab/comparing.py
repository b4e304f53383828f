"""Two runs side by side: what they were configured as, how their figures differ and how sure that is, where they decided differently."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from kvlab.confidence import bootstrap
from kvlab.decisions import DecisionDifference, first_difference
from kvlab.flat import flatten
from kvlab.results import Run
from kvlab.tables import text_table
from kvlab.trace.summary import FIGURES, FINISHED
from kvlab.types import UserError

LATENCIES = {"ttft": "ttft_s", "tpot": "tpot_s", "e2el": "e2el_s", "queue_time": "queue_time_s"}
DRAWS = 1000
ROUNDING = 1e-7
"""Relative differences up to this are rounding (of clocks that count from different starts), whatever their interval."""
MEANING = (
    "Intervals: 95 %, percentile bootstrap over requests ({how}):\nwhat the difference would be for other requests of the same kind. "
    "Requests of one run share queue and cache, so that true intervals\nare wider; figures without one need repeats (repeats=5, "
    "runs.aggregate())."
)


@dataclass(frozen=True)
class Comparison:
    """What `compare` found.

    Attributes:
        names: of the two runs. config: columns key, a, b, a row for each key that differs.
        figures: columns figure, a, b, difference (b - a), low, high (its 95 % interval; NaN: none can be had from one run), beyond_noise
            (the interval leaves out 0; None where there is none). paired: both served the same requests, resampled together.
        notes: what is odd about a run (killed, damaged tables): its figures are those of what was recorded.
        decisions: the first different decision; None where plans were not recorded (`decisions_note` says what to do).
    """

    names: tuple[str, str]
    config: pd.DataFrame
    figures: pd.DataFrame
    paired: bool
    decisions: DecisionDifference | None
    decisions_note: str
    notes: tuple[str, str] = ("", "")

    def __str__(self) -> str:
        a, b = self.names
        config = [[str(x) for x in row] for row in self.config.itertuples(index=False)]
        figures = [_figure_cells(row) for _, row in self.figures.iterrows()]
        how = "the same requests in both, resampled together" if self.paired else "each run's own"
        return "\n".join([
            f"a: {a}{self.notes[0]}\nb: {b}{self.notes[1]}\n\nConfiguration",
            text_table(["key", "a", "b"], config) if config else "  the same",
            "\nFigures", text_table(["figure", "a", "b", "b - a", "95 % of b - a", "beyond noise"], figures), MEANING.format(how=how),
            "\nDecisions", str(self.decisions) if self.decisions is not None else self.decisions_note,
        ])  # fmt: skip


def compare(first: Run | str | Path, second: Run | str | Path, seed: int = 0) -> Comparison:
    """Compare two runs: `print(kvlab.compare("runs/a", "runs/b"))`.

    Args:
        first, second: runs, or their folders. seed: of the bootstrap.

    Raises:
        UserError: no such folder, or one that holds no run, or nothing recorded.
    """
    a, b = _run(first), _run(second)
    paired, samples = _samples(a, b)
    note = ""
    try:
        decisions = first_difference(a, b)
    except UserError as error:
        decisions, note = None, str(error)
    names = (a.name, b.name) if a.name != b.name else (str(a.folder or a.name), str(b.folder or b.name))
    figures = _figures(a.summary, b.summary, samples, paired, seed)
    return Comparison(names, _config(a.config, b.config), figures, paired, decisions, note, (remark(a), remark(b)))


def remark(run: Run) -> str:
    """What to know of a run that did not end well or can't be read whole: " (killed: steps.parquet is damaged ...)"; else nothing."""
    odd = [note for note in run.notes if any(word in note for word in ("damaged", "missing", "recorded"))]
    if run.state == "finished" and not odd:
        return ""
    return f" ({': '.join(filter(None, [run.state, '; '.join(filter(None, [run.error, *odd]))]))})"


def _run(run: Run | str | Path) -> Run:
    found = run if isinstance(run, Run) else Run.load(run)
    if not found.summary:
        raise UserError(f"{found.folder or found.name} has no figures to compare ({found.state}). Give a run's own folder.")
    return found


def _config(a: Mapping[str, Any], b: Mapping[str, Any]) -> pd.DataFrame:
    flat_a, flat_b = flatten(a), flatten(b)
    pairs = [(key, flat_a.get(key, "-"), flat_b.get(key, "-")) for key in dict.fromkeys([*flat_a, *flat_b])]
    rows = [row for row in pairs if row[1] != row[2]]
    return pd.DataFrame(rows, columns=["key", "a", "b"], dtype=object)


def _samples(a: Run, b: Run) -> tuple[bool, dict[str, tuple[np.ndarray, np.ndarray]]]:
    """(whether the same requests were served, latency -> values of both in ms; of the same requests in the same order then)."""
    columns = ("request_id", "num_prompt_tokens", "finish_reason", *LATENCIES.values())
    frames = [run.requests(columns) for run in (a, b)]
    frames = [frame[frame["finish_reason"].isin(FINISHED)].set_index("request_id") for frame in frames]
    both = frames[0].index.intersection(frames[1].index)
    same = len(both) == len(frames[0]) == len(frames[1]) and all(frame.index.is_unique for frame in frames)
    paired = bool(same and (frames[0].loc[both, "num_prompt_tokens"] == frames[1].loc[both, "num_prompt_tokens"]).all())
    if paired:
        frames = [frame.loc[both] for frame in frames]
    out = {}
    for name, column in LATENCIES.items():
        values = [frame[column].to_numpy(dtype=np.float64) * 1e3 for frame in frames]
        if paired:
            known = ~(np.isnan(values[0]) | np.isnan(values[1]))
            values = [v[known] for v in values]
        out[name] = (values[0][~np.isnan(values[0])], values[1][~np.isnan(values[1])])
    return paired, out


def _figures(
    a: Mapping[str, Any], b: Mapping[str, Any], samples: Mapping[str, tuple[np.ndarray, np.ndarray]], paired: bool, seed: int
) -> pd.DataFrame:
    rows = []
    for figure in FIGURES:
        x, y = a.get(figure.key), b.get(figure.key)
        if x is None or y is None:
            continue
        low, high = _interval(figure.key, samples, paired, seed)
        rounding = abs(y - x) <= ROUNDING * max(abs(x), abs(y))
        beyond = None if math.isnan(low) else not (low <= 0 <= high or rounding)
        rows.append((figure.key, float(x), float(y), float(y - x), low, high, beyond))
    return pd.DataFrame(rows, columns=["figure", "a", "b", "difference", "low", "high", "beyond_noise"])


def _interval(figure: str, samples: Mapping[str, tuple[np.ndarray, np.ndarray]], paired: bool, seed: int) -> tuple[float, float]:
    statistic, _, rest = figure.partition("_")
    values = samples.get(rest.removesuffix("_ms"))
    if values is None or statistic not in ("mean", "median", "p99") or min(map(len, values)) < 2:
        return math.nan, math.nan

    def of(rows: np.ndarray) -> np.ndarray:
        return rows.mean(axis=1) if statistic == "mean" else np.percentile(rows, 50 if statistic == "median" else 99, axis=1)

    drawn = bootstrap(lambda x, y: of(y) - of(x), *values, draws=DRAWS, seed=seed, paired=paired)
    low, high = np.percentile(drawn, (2.5, 97.5))
    return float(low), float(high)


def _figure_cells(row: pd.Series) -> list[str]:
    numbers = [f"{row[name]:,.4g}" for name in ("a", "b", "difference")]
    known = row["beyond_noise"] is not None
    interval = f"{row['low']:,.4g} to {row['high']:,.4g}" if known else ""
    return [str(row["figure"]), *numbers, interval, ("yes" if row["beyond_noise"] else "no") if known else ""]
