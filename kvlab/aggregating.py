"""Repeats of a point as one row: `runs.aggregate()`, means over seeds with their 95 % intervals."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd

from kvlab.confidence import mean_interval
from kvlab.flat import flatten
from kvlab.types import unknown_name

if TYPE_CHECKING:
    from kvlab.results import Runs

MEASURED = ("mean_schedule_ms", "peak_process_rss_bytes", "peak_device_memory_allocated_bytes")
"""Figures that differ between two runs of the same decisions on a virtual clock."""


def aggregate(runs: Runs, by: str | Sequence[str] | None, figures: Sequence[str] | None) -> pd.DataFrame:
    """See `Runs.aggregate`."""
    frame = runs.frame
    numbers = numbers_of(runs, frame)
    chosen = numbers if figures is None else list(figures)
    groups = varied_columns(runs, frame) if by is None else [by] if isinstance(by, str) else list(by)
    for kind, names, valid in (("figure", chosen, numbers), ("column", groups, [c for c in frame if c not in numbers])):
        for name in names:
            if name not in valid:
                raise unknown_name(kind, name, map(str, valid))
    rows: list[dict[str, Any]] = []
    parts = _groups(frame, groups)
    _warn_of_repeats_that_are_copies(parts, chosen)
    for group in parts:
        row = {name: group[name].iloc[0] for name in groups} | {"n": len(group)}
        for name in chosen:
            values = pd.to_numeric(group[name], errors="coerce").dropna().to_numpy(dtype=np.float64)
            interval = mean_interval(values)
            row |= {name: interval.value, f"{name}_ci95": interval.high - interval.value}
        rows.append(row)
    columns = [*groups, "n", *(c for name in chosen for c in (name, f"{name}_ci95"))]
    return pd.DataFrame(rows, columns=columns)


def _groups(frame: pd.DataFrame, columns: Sequence[str]) -> list[pd.DataFrame]:
    """Rows that read alike in `columns`, in order of appearance. Runs that lack a value (a parameter of another policy) are alike in it."""
    rows: dict[tuple[str, ...], list[int]] = {}
    for place, values in enumerate(zip(*(frame[column] for column in columns), strict=True) if columns else [()] * len(frame)):
        rows.setdefault(tuple(map(str, values)), []).append(place)
    return [frame.iloc[places] for places in rows.values()]


def _warn_of_repeats_that_are_copies(groups: Sequence[pd.DataFrame], figures: Sequence[str]) -> None:
    """Runs of several seeds that came out alike were no independent draws: an interval of 0 would say that there is no noise."""
    drawn = [name for name in figures if name not in MEASURED]
    repeated = [g for g in groups if "seed" in g and g["seed"].nunique() > 1]
    copies = [g for g in repeated if drawn and (g[drawn].astype(object).nunique(dropna=False) == 1).all()]
    if copies:
        told = f"In {len(copies)} of {len(repeated)} repeated points all seeds gave the same figures"
        why = "nothing there is drawn from the seed, so n counts copies of one run, and an interval of 0 tells nothing of noise"
        warnings.warn(f"{told}: {why}. Take random arrivals or lengths, or other parts of a trace (workload.skip).", stacklevel=4)


def numbers_of(runs: Runs, frame: pd.DataFrame) -> list[str]:
    """Columns of the summary that hold numbers."""
    names = dict.fromkeys(key for run in runs for key in flatten(run.summary))
    return [name for name in names if name in frame and pd.to_numeric(frame[name], errors="coerce").notna().any()]


def varied_columns(runs: Runs, frame: pd.DataFrame) -> list[str]:
    """Configuration columns that differ between runs, without seeds; of columns that vary together the first with the shortest name."""
    from kvlab.results import OWN_COLUMNS

    figures = {key for run in runs for key in flatten(run.summary)} | set(OWN_COLUMNS)
    found: dict[tuple[str, ...], str] = {}
    for column in map(str, frame.columns):
        if column in figures or column.split(".")[-1] == "seed":
            continue
        values = tuple(map(str, frame[column]))
        if len(set(values)) > 1 and (values not in found or column.count(".") < found[values].count(".")):
            found[values] = column
    return list(found.values())
