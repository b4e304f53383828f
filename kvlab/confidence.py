"""How sure a figure is: intervals of a mean over repeats (Student's t, exact), and of a statistic over requests (bootstrap)."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import numpy as np


class Interval(NamedTuple):
    """An estimate and its 95 % interval; `low` and `high` are NaN where too little was seen."""

    value: float
    low: float
    high: float


def t_quantile_975(degrees: int) -> float:
    """The 97.5 % quantile of Student's t distribution: 12.706 for 1 degree of freedom, 1.960 in the limit.

    The distribution function is Abramowitz & Stegun's finite series for whole degrees (26.7.3, 26.7.4), inverted by bisection.
    """
    if degrees < 1:
        return math.nan
    low, high = 1.0, 13.0
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if _within(middle, degrees) < 0.95 else (low, middle)
    return (low + high) / 2


def _within(t: float, degrees: int) -> float:
    """P(|T| <= t)."""
    theta = math.atan(t / math.sqrt(degrees))
    sine, cosine = math.sin(theta), math.cos(theta)
    odd = degrees % 2
    term, total = (cosine, cosine) if odd else (1.0, 1.0)
    if odd and degrees == 1:
        return 2 * theta / math.pi
    for k in range(2 + odd, degrees - 1, 2):
        term *= (k - 1) / k * cosine * cosine
        total += term
    return 2 / math.pi * (theta + sine * total) if odd else sine * total


def mean_interval(values: np.ndarray) -> Interval:
    """Mean and its 95 % interval, taking the values for independent draws of a normal distribution; NaN with fewer than two."""
    mean = float(values.mean()) if len(values) else math.nan
    if len(values) < 2:
        return Interval(mean, math.nan, math.nan)
    half = t_quantile_975(len(values) - 1) * float(values.std(ddof=1)) / math.sqrt(len(values))
    return Interval(mean, mean - half, mean + half)


def bootstrap(
    statistic: Callable[..., np.ndarray], *samples: np.ndarray, draws: int = 2000, seed: int = 0, paired: bool = False
) -> np.ndarray:
    """Values of a statistic over resampled data, shape (draws,): percentiles of them are an interval (Efron's percentile bootstrap).

    Args:
        statistic: of one array a sample, each of shape (draws, size of the sample); returns (draws,).
        samples: each resampled with replacement to its own size; `paired`: all by the same choice (rows that belong together).
    """
    rng = np.random.default_rng(seed)
    out = np.empty(draws)
    block = max(1, 4_000_000 // max(1, *(len(s) for s in samples)))  # 32 MB at a time
    for start in range(0, draws, block):
        size = min(block, draws - start)
        shared = rng.integers(0, len(samples[0]), (size, len(samples[0]))) if paired else None
        chosen = [s[shared if shared is not None else rng.integers(0, len(s), (size, len(s)))] for s in samples]
        out[start : start + size] = statistic(*chosen)
    return out
