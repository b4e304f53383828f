"""Coefficients of a linear cost model from measured steps, and how far off it is on steps that the fit did not see."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from itertools import combinations
from typing import Any

import numpy as np
import numpy.typing as npt

from kvlab.engine.cost.linear import SCALES, Linear
from kvlab.types import UserError

Array = npt.NDArray[np.float64]

MIN_STEPS = 40
"""Fewer steps can't be divided into a part to learn from and a part to be judged by."""

MIN_OF_A_KIND = 5
"""Steps with a chunk, and steps of decodes alone, that a fit needs of each: one kind says nothing about the other."""

STRETCHES, HELD_OUT = (10, 5), 4
"""Of every `HELD_OUT` stretches of ten steps the last is held out: neighbours are alike, so single steps would flatter. Where that leaves
one part without steps of a kind (a short run, whose prompts came all at once) it is another of the four, or stretches are of five."""


@dataclass(frozen=True, slots=True)
class Errors:
    """Relative errors of predicted step times: mean (MAPE), median and 90th percentile of the absolute ones, in fractions; and by how
    much the sum of all predictions is off (signed: above 0, too slow)."""

    num_steps: int
    mape: float
    median: float
    p90: float
    total: float

    @classmethod
    def of(cls, predicted: Array, measured: Array) -> Errors:
        """Of a set of steps."""
        relative = np.abs(predicted - measured) / measured
        return cls(len(measured), float(relative.mean()), float(np.median(relative)), float(np.quantile(relative, 0.9)),
                   float(predicted.sum() / measured.sum() - 1))  # fmt: skip


@dataclass(frozen=True, slots=True)
class Fit:
    """A fitted cost model's provenance.

    Attributes:
        source: where the steps come from. coefficients: by the names of `Linear`. not_seen: those whose work never occurred: it costs
            nothing here, whatever it may cost in truth.
        seen, held_out: errors on the steps of the fit, and on the others.
        ranges: largest value of each kind of work in the steps of the fit; beyond them a prediction is an extrapolation.
    """

    source: str
    coefficients: dict[str, float]
    not_seen: tuple[str, ...]
    seen: Errors
    held_out: Errors
    ranges: dict[str, float]

    def sentence(self) -> str:
        """What a figure that uses it should say."""
        e = self.held_out
        return (f"step times fitted from {self.source}; on {e.num_steps} held-out steps off by {e.mape:.1%} in the mean, {e.median:.1%} "
                f"in the median, {e.p90:.1%} at the 90th percentile, {e.total:+.1%} in total")  # fmt: skip


class Fitted(Linear):
    """A `Linear` whose coefficients come from a recorded run. Made by `kvlab.calibration.fitted`."""

    def __init__(self, fit: Fit) -> None:
        super().__init__(**fit.coefficients)
        self.fit = fit

    def describe(self) -> dict[str, Any]:
        """Coefficients and errors, for the summary of a simulated run."""
        fit = self.fit
        return {"name": "Fitted", "source": fit.source, "coefficients": fit.coefficients, "not_seen": ", ".join(fit.not_seen),
                "seen": asdict(fit.seen), "held_out": asdict(fit.held_out)}  # fmt: skip


def held_out_steps(has_chunk: npt.NDArray[np.bool_]) -> npt.NDArray[np.bool_] | None:
    """Which steps are held out: steps 30-39, 70-79, ... if both parts then have steps with a chunk and steps without, (steps,), else the
    first division that gives them. What a step took has no say in it. None: there is none."""
    for stretch in STRETCHES:
        for place in (HELD_OUT - 1, *range(HELD_OUT - 1)):
            held_out: npt.NDArray[np.bool_] = np.arange(len(has_chunk)) // stretch % HELD_OUT == place
            if all(0 < has_chunk[part].sum() < part.sum() for part in (held_out, ~held_out)):
                return held_out
    return None


def fit_steps(work: Array, seconds: Array, source: str) -> Fit:
    """Non-negative least squares of the relative errors, reweighted twice.

    Args:
        work: (steps, features), columns as `linear.features`. seconds: (steps,), measured. source: for messages.
    Raises:
        UserError: a time that is not a positive number, too few steps, or steps of one kind only.
    """
    _check(work, seconds, source)
    held_out = held_out_steps(work[:, 1] > 0)
    if held_out is None:
        raise UserError(f"{source}: steps to learn from or to be judged by are of one kind only (prompts, or decodes alone), however the "
                        "run is divided. Fit on a longer run.")  # fmt: skip
    coefficients = _relative_least_squares(work[~held_out], seconds[~held_out])
    if not coefficients[:5].any():
        raise UserError(f"{source}: the step times have nothing to do with the work of the steps. Is it a run's folder?")
    predicted = work @ coefficients
    names = dict(zip(SCALES, coefficients, strict=True))
    return Fit(
        source, {name: float(value / SCALES[name]) for name, value in names.items()},
        tuple(name for name, column in zip(SCALES, work[~held_out].T, strict=True) if not column.any()),
        Errors.of(predicted[~held_out], seconds[~held_out]), Errors.of(predicted[held_out], seconds[held_out]),
        {name: float(column.max()) for name, column in zip(SCALES, work[~held_out].T, strict=True)},
    )  # fmt: skip


def _relative_least_squares(work: Array, seconds: Array) -> Array:
    """Timings scatter in proportion to their size: each step counts relative to its time, or a few long prompts would decide about
    every decode. Relative to the predicted time, that is: the measured one would favour steps that chance made short."""
    expected = seconds
    for _ in range(3):
        weights = 1 / expected
        coefficients = nonnegative_least_squares(work * weights[:, None], seconds * weights)
        expected = np.maximum(work @ coefficients, seconds / 1e3)
    return coefficients


def _check(work: Array, seconds: Array, source: str) -> None:
    num_steps = len(seconds)
    bad = np.flatnonzero(~(np.isfinite(seconds) & (seconds > 0)) | ~np.isfinite(work).all(axis=1) | (work < 0).any(axis=1))
    if len(bad):
        raise UserError(f"{source}: {len(bad)} of {num_steps} steps have a time or count that is not a number above 0 (the first in row "
                        f"{bad[0]}: {seconds[bad[0]]!r} s). Record the run again.")  # fmt: skip
    if num_steps < MIN_STEPS:
        raise UserError(f"{source}: {num_steps} steps are too few to fit a cost model on: at least {MIN_STEPS}. Record a longer run.")
    with_chunks = int((work[:, 1] > 0).sum())
    for kind, number, more in (("with prompt tokens in them", with_chunks, "more requests"),
                               ("of decodes alone", num_steps - with_chunks, "longer outputs")):  # fmt: skip
        if number < MIN_OF_A_KIND:
            raise UserError(f"{source}: only {number} of {num_steps} steps are {kind}, at least {MIN_OF_A_KIND} are needed: one kind of "
                            f"step says nothing about the other. Record a run with {more}.")  # fmt: skip


def nonnegative_least_squares(a: Array, b: Array) -> Array:
    """The x >= 0 that minimises |a x - b|, for few columns: (rows, n), (rows,) -> (n,).

    The optimum is the unconstrained solution on the columns where it is positive, so trying every set of columns on the triangular
    factor finds it exactly (128 sets for 7 columns); of equally good sets the smallest wins.
    """
    scale = np.abs(a).max(axis=0)
    used = np.flatnonzero(scale)
    triangle: Array = np.asarray(np.linalg.qr(np.column_stack([a[:, used] / scale[used], b]), mode="r"))
    columns, target = triangle[:, :-1], triangle[:, -1]
    best, best_error = np.zeros(len(used)), float(np.linalg.norm(target))
    for size in range(1, len(used) + 1):
        for chosen in map(list, combinations(range(len(used)), size)):
            x, _, rank, _ = np.linalg.lstsq(columns[:, chosen], target, rcond=None)
            if rank < size or (x < 0).any():
                continue
            error = float(np.linalg.norm(columns[:, chosen] @ x - target))
            if error < best_error - 1e-13 * len(b) ** 0.5:
                best, best_error = np.zeros(len(used)), error
                best[chosen] = x
    out = np.zeros(a.shape[1])
    out[used] = best / scale[used]
    return out
