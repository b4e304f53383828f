"""Two runs side by side: what they were configured as, how their figures differ and how sure that is, where they decided differently."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from kvlab.confidence import bootstrap, correlation_time, t_quantile_975
from kvlab.decisions import DecisionDifference, first_difference
from kvlab.flat import flatten
from kvlab.reading import runs_inside, what_holds
from kvlab.results import Run
from kvlab.shared import is_url
from kvlab.tables import text_table
from kvlab.trace.summary import FIGURES, FINISHED
from kvlab.types import UserError

LATENCIES = {"ttft": "ttft_s", "tpot": "tpot_s", "e2el": "e2el_s", "queue_time": "queue_time_s"}
LENGTHS = ("num_prompt_tokens", "num_output_tokens")
DRAWS = 1000
SAME_S = 1e-6
"""Arrivals, counted from the first, that differ by no more are the same."""
ROUNDING = 1e-7
"""Relative differences up to this are rounding (of clocks that count from different starts), whatever their interval."""
STRETCHES = 8
"""Independent stretches of requests that a verdict needs at least."""
MEANING = (
    "Intervals: 95 %, bootstrap over requests ({how}), drawn in stretches of {stretch}\n(or an eighth of them all) in order of arrival: "
    "what the difference would be for other requests of the same kind.\nEven where nothing differs, one figure in twenty gets a yes. "
    "unknown: requests wait for each other over so long\na stretch, or are so few, that one run each can't tell: use repeats=5 and "
    "runs.aggregate(), as for figures without an\ninterval."
)


@dataclass(frozen=True)
class Comparison:
    """What `compare` found.

    Attributes:
        names: of the two runs. config: columns key, a, b, a row for each key that differs.
        figures: columns figure, a, b, difference (b - a), low, high (its 95 % interval; NaN: none can be had from one run), beyond_noise
            (the interval leaves out 0; None where there is none, where requests depend on each other over more than an eighth of the
            run, or where fewer than ten lie beyond a p99). paired: both served the same requests (prompt and output
            lengths and arrivals are equal), resampled together. stretch: requests in order of arrival that are resampled as one.
        notes: what is odd about a run (killed, damaged tables): its figures are those of what was recorded.
        decisions: the first different decision; None where plans were not recorded (`decisions_note` says what to do).
    """

    names: tuple[str, str]
    config: pd.DataFrame
    figures: pd.DataFrame
    paired: bool
    stretch: int
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
            "\nFigures", text_table(["figure", "a", "b", "b - a", "95 % of b - a", "beyond noise"], figures),
            MEANING.format(how=how, stretch=self.stretch),
            "\nDecisions", str(self.decisions) if self.decisions is not None else self.decisions_note,
        ])  # fmt: skip


def compare(first: Run | str | Path, second: Run | str | Path, seed: int = 0) -> Comparison:
    """Compare two runs: `print(kvlab.compare("runs/a", "runs/b"))`.

    Args:
        first, second: runs, or their folders. seed: of the bootstrap.

    Raises:
        UserError: no such folder, or one that holds no run, or several (a sweep's), or nothing recorded.
    """
    a, b = _run(first), _run(second)
    names = told_apart(a, b)
    paired, samples = _samples(a, b)
    note = ""
    try:
        decisions = first_difference(a, b, names)
    except UserError as error:
        decisions, note = None, str(error)
    stretch = _stretch(samples, paired)
    figures = _figures(a.summary, b.summary, samples, paired, stretch, seed)
    return Comparison(names, _config(a.config, b.config), figures, paired, stretch, decisions, note, (remark(a), remark(b)))


def told_apart(first: Run, second: Run) -> tuple[str, str]:
    """Names that differ: the runs' own; of namesakes with as many folders in front as it takes, else with their labels, else a and b."""
    if first.name != second.name:
        return first.name, second.name
    places = [run.source or ("" if run.folder is None else run.folder.absolute().as_posix()) for run in (first, second)]
    parts = [place.split("/") for place in places]
    if all(places) and parts[0] != parts[1]:
        number = next(n for n in itertools.count(1) if parts[0][-n:] != parts[1][-n:])
        return "/".join(parts[0][-number:]), "/".join(parts[1][-number:])
    labels = [str(run.status.get("name") or "") for run in (first, second)]
    told = labels if all(labels) and labels[0] != labels[1] else ["a", "b"]
    return f"{first.name} ({told[0]})", f"{second.name} ({told[1]})"


def remark(run: Run) -> str:
    """What to know of a run that did not end well or can't be read whole: " (killed: steps.parquet is damaged ...)"; else nothing."""
    odd = [note for note in run.notes if any(word in note for word in ("damaged", "missing", "recorded"))]
    if run.state == "finished" and not odd:
        return ""
    return f" ({': '.join(filter(None, [run.state, '; '.join(filter(None, [run.error, *odd]))]))})"


def check_no_sweep(folder: str | Path) -> None:
    """UserError if a folder holds runs and is none: names two of them."""
    inner = [] if is_url(folder) else runs_inside(Path(folder))
    if len(inner) > 1:
        a, b = inner[:2]
        both = f" (in short: {a.parent}/{{{a.name},{b.name}}})" if a.parent == b.parent else ""
        raise UserError(f"{what_holds(Path(folder), inner)}: name two of its runs, e.g. python -m kvlab.compare {a} {b}{both}. All of them "
                        f"in one table: kvlab.load_runs({str(folder)!r}).frame.")  # fmt: skip


def _run(run: Run | str | Path) -> Run:
    if not isinstance(run, Run):
        check_no_sweep(run)
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
    """(whether the same requests were served, latency -> values of both in ms, in order of arrival; of the same requests then)."""
    columns = ("request_id", "arrival_s", *LENGTHS, "finish_reason", *LATENCIES.values())
    frames = [run.requests(columns).sort_values("arrival_s", kind="stable") for run in (a, b)]
    frames = [frame[frame["finish_reason"].isin(FINISHED)].set_index("request_id") for frame in frames]
    both = frames[0].index.intersection(frames[1].index, sort=False)
    paired = len(both) == len(frames[0]) == len(frames[1]) and all(frame.index.is_unique for frame in frames)
    if paired and len(both):
        frames = [frame.loc[both] for frame in frames]
        arrivals = [frame["arrival_s"].to_numpy(dtype=np.float64) for frame in frames]
        same = all((frames[0][name] == frames[1][name]).all() for name in LENGTHS)
        paired = bool(same and np.allclose(arrivals[0] - arrivals[0].min(), arrivals[1] - arrivals[1].min(), rtol=ROUNDING, atol=SAME_S))
    out = {}
    for name, column in LATENCIES.items():
        values = [frame[column].to_numpy(dtype=np.float64) * 1e3 for frame in frames]
        if paired:
            known = ~(np.isnan(values[0]) | np.isnan(values[1]))
            values = [v[known] for v in values]
        out[name] = (values[0][~np.isnan(values[0])], values[1][~np.isnan(values[1])])
    return paired, out


def _stretch(samples: Mapping[str, tuple[np.ndarray, np.ndarray]], paired: bool) -> int:
    """Requests to resample as one: sqrt(n), or twice the longest correlation time of any latency (one queue makes them all)."""
    longest = 1
    for x, y in samples.values():
        if min(len(x), len(y)) < 2:
            continue
        series = [y - x] if paired else [x, y]
        longest = max(longest, *(math.ceil(max(math.sqrt(len(v)), 2 * correlation_time(v))) for v in series))
    return longest


def _figures(
    a: Mapping[str, Any], b: Mapping[str, Any], samples: Mapping[str, tuple[np.ndarray, np.ndarray]], paired: bool, stretch: int, seed: int
) -> pd.DataFrame:
    rows = []
    for figure in FIGURES:
        x, y = a.get(figure.key), b.get(figure.key)
        if x is None or y is None:
            continue
        low, high, enough = _interval(figure.key, samples, paired, stretch, seed)
        rounding = abs(y - x) <= ROUNDING * max(abs(x), abs(y))
        beyond = None if math.isnan(low) or not (enough or rounding) else not (low <= 0 <= high or rounding)
        rows.append((figure.key, float(x), float(y), float(y - x), low, high, beyond))
    return pd.DataFrame(rows, columns=["figure", "a", "b", "difference", "low", "high", "beyond_noise"])


def _interval(
    figure: str, samples: Mapping[str, tuple[np.ndarray, np.ndarray]], paired: bool, stretch: int, seed: int
) -> tuple[float, float, bool]:
    """(low, high, whether there are stretches enough, and requests beyond a p99, to trust it)."""
    statistic, _, rest = figure.partition("_")
    values = samples.get(rest.removesuffix("_ms"))
    if values is None or statistic not in ("mean", "median", "p99") or min(map(len, values)) < 2:
        return math.nan, math.nan, False

    def of(rows: np.ndarray) -> np.ndarray:
        return rows.mean(axis=1) if statistic == "mean" else np.percentile(rows, 50 if statistic == "median" else 99, axis=1)

    count = min(map(len, values))
    length = max(1, min(stretch, count // STRETCHES))
    drawn = bootstrap(lambda x, y: of(y) - of(x), *values, draws=DRAWS, seed=seed, paired=paired, stretch=length)
    low, high = np.percentile(drawn, (2.5, 97.5))
    seen = float(of(values[1][None])[0] - of(values[0][None])[0])
    wider = t_quantile_975(max(1, count // length - 1)) / 1.96  # few stretches know little of how much they vary
    enough = stretch * STRETCHES <= count and (statistic != "p99" or count >= 1000)
    return seen - (seen - float(low)) * wider, seen + (float(high) - seen) * wider, enough


def _figure_cells(row: pd.Series) -> list[str]:
    numbers = [f"{row[name]:,.4g}" for name in ("a", "b", "difference")]
    if math.isnan(row["low"]):
        return [str(row["figure"]), *numbers, "", ""]
    verdict = {None: "unknown", True: "yes", False: "no"}[row["beyond_noise"]]
    return [str(row["figure"]), *numbers, f"{row['low']:,.4g} to {row['high']:,.4g}", verdict]
