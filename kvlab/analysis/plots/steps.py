"""What figures over time share: a state held through each step, thinning that keeps peaks, counts and rates in equal stretches."""

from __future__ import annotations

import numpy as np
import pandas as pd

MAX_POINTS = 4000
"""More steps than this are thinned: no screen shows more, and a notebook stays small."""

TIME = "time (s, engine's clock)"

OF_STEPS, OF_REQUESTS, OF_RUNS = (
    "a frame of steps (run.steps())", "a frame of requests (run.requests())", "a frame with one row a run (runs.frame)",
)  # fmt: skip


def thinned(steps: pd.DataFrame, peak: str) -> pd.DataFrame:
    """At most MAX_POINTS rows: of each stretch of steps the one with the largest `peak`."""
    if len(steps) <= MAX_POINTS:
        return steps
    stretch = np.arange(len(steps)) * MAX_POINTS // len(steps)
    return steps.loc[steps.groupby(stretch)[peak].idxmax()]


def held(steps: pd.DataFrame) -> tuple[np.ndarray, pd.DataFrame]:
    """(times, rows): start and end of each step, and its row twice. The state after a step's commit is drawn over the whole step."""
    time = np.stack([steps["end_s"] - steps["step_ms"] / 1e3, steps["end_s"]], axis=1).ravel()
    return time, steps.loc[steps.index.repeat(2)]


def spans(steps: pd.DataFrame) -> tuple[np.ndarray, np.ndarray]:
    """Start and end (s) of each step."""
    end = steps["end_s"].to_numpy(dtype=np.float64)
    return end - steps["step_ms"].to_numpy(dtype=np.float64) / 1e3, end


def stretches(start: np.ndarray, end: np.ndarray, num_bins: int | None) -> np.ndarray:
    """Edges of `num_bins` equal stretches of time over all steps; None: half the steps, at most 80."""
    return np.linspace(start[0], end[-1], (num_bins or int(np.clip(len(start) // 2, 1, 80))) + 1)


def rate(start: np.ndarray, end: np.ndarray, amount: np.ndarray, edges: np.ndarray) -> np.ndarray:
    """Amount a second between successive edges; step i makes its amount evenly between start[i] and end[i]."""
    done = np.cumsum(amount, dtype=np.float64)
    knots = np.stack([start, end], axis=1).ravel()
    made = np.stack([done - amount, done], axis=1).ravel()
    return np.diff(np.interp(edges, knots, made)) / np.diff(edges)


def counts(end: np.ndarray, amount: np.ndarray, edges: np.ndarray) -> np.ndarray:
    """Sum of the amounts of the steps that ended between successive edges; nothing is lost at the ends."""
    place = np.clip(np.searchsorted(edges, end, side="left") - 1, 0, len(edges) - 2)
    return np.bincount(place, weights=amount, minlength=len(edges) - 1)
