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
    statistic: Callable[..., np.ndarray], *samples: np.ndarray, draws: int = 2000, seed: int = 0, paired: bool = False, stretch: int = 1
) -> np.ndarray:
    """Values of a statistic over resampled data, shape (draws,): percentiles of them are an interval (Efron's percentile bootstrap).

    Args:
        statistic: of one array a sample, each of shape (draws, size of the sample); returns (draws,).
        samples: each resampled with replacement to its own size; `paired`: all by the same choice (rows that belong together).
        stretch: neighbours drawn together (Kuensch's moving blocks), for samples in an order in which neighbours resemble each other.
    """
    rng = np.random.default_rng(seed)

    def choice(size: int, n: int) -> np.ndarray:
        length = min(stretch, n)
        if length == 1:
            return rng.integers(0, n, (size, n))
        starts = rng.integers(0, n - length + 1, (size, -(-n // length)))
        return (starts[:, :, None] + np.arange(length)).reshape(size, -1)[:, :n]

    out = np.empty(draws)
    block = max(1, 4_000_000 // max(1, *(len(s) for s in samples)))  # 32 MB at a time
    for start in range(0, draws, block):
        size = min(block, draws - start)
        shared = choice(size, len(samples[0])) if paired else None
        chosen = [s[shared if shared is not None else choice(size, len(s))] for s in samples]
        out[start : start + size] = statistic(*chosen)
    return out


def correlation_time(series: np.ndarray) -> float:
    """1 + 2 x the sum of autocorrelations, up to the first below 0.05: so many neighbours tell as much as one independent value."""
    deviations = series - series.mean()
    n = len(deviations)
    spectrum = np.fft.rfft(deviations, 2 * n)
    lags = np.fft.irfft(spectrum * spectrum.conj())[: n // 2 + 1]
    if lags[0] <= 1e-24 * n * max(1.0, float(np.abs(series).max())) ** 2:  # all alike
        return 1.0
    correlations = lags[1:] / lags[0]
    below = np.flatnonzero(correlations < 0.05)
    return 1.0 + 2.0 * float(correlations[: below[0] if len(below) else None].sum())
