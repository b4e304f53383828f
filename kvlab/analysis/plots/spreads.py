"""Runs that share a place in a figure: the line they belong to, and what the bar from the smallest to the largest of them is over."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence

import pandas as pd

from kvlab.config import PARTS, SEAMS, VALUES

By = str | Sequence[str] | None
"""A column that tells lines apart, several (a line for each combination), or none."""

SETTINGS = (*VALUES, *SEAMS, *PARTS, "goals")
"""First words of columns that were configured; all other columns of runs are measured, or notes."""

NO_BREAK = "\N{NO-BREAK SPACE}"

_WIDTH = 66
"""Characters of small print that a figure of 480 pixels has room for."""


def columns_of(by: By) -> list[str]:
    """The columns of `by`."""
    return [] if by is None else [by] if isinstance(by, str) else list(by)


def lines_of(runs: pd.DataFrame, by: By) -> list[tuple[str, pd.DataFrame]]:
    """(name, its runs) for each value, or combination of values, of `by`; rows without one belong to no line."""
    columns = columns_of(by)
    if not columns:
        return [("", runs)] if len(runs) else []
    groups = runs.groupby(columns, sort=True)
    return [(", ".join(f"{c} = {v!s}" for c, v in zip(columns, values, strict=True)), group) for values, group in groups]


def bars_are_over(lines: Sequence[tuple[str, pd.DataFrame]], x: str, y: Sequence[str], middle: str) -> str:
    """Small print for below the x axis: what differs between the runs whose values a point and its bar sum up; "" where no point has two.

    Settings that change together (a block size and the blocks that fit) are named once, by the first and shortest of their names.
    """
    places = [place for _, line in lines for _, place in line.dropna(subset=list(y), how="all").groupby(x)]
    most = max((len(place) for place in places), default=0)
    if most < 2:
        return ""
    varied: dict[tuple[tuple[int, ...], ...], str] = {}
    for column in sorted(_settings(places[0]), key=lambda name: name.count(".")):
        parts = tuple(tuple(pd.factorize(place[column].astype(str))[0].tolist()) for place in places)
        if any(any(codes) for codes in parts):
            varied.setdefault(parts, column)
    seeds = [name for name in varied.values() if _is_seed(name)]
    names = [name for name in varied.values() if not _is_seed(name)] + seeds[:1]
    all_alike = all(len(place) == most for place in places)
    number = f"{'' if all_alike else 'up to '}{most} runs".replace(" ", NO_BREAK)
    over = f"{', '.join(names)} ({number})" if names else number
    text = textwrap.wrap(f"{middle}; bars: smallest to largest over {over}", _WIDTH)
    return "".join(f"<br><span style='font-size:11px'>{row}</span>" for row in text)


def _settings(frame: pd.DataFrame) -> list[str]:
    names = [str(column) for column in frame.columns if column != "run"]  # which is a run's name; the setting is config.run
    return [name for name in names if name.removeprefix("config.").split(".")[0] in SETTINGS]


def _is_seed(name: str) -> bool:
    return name.split(".")[-1] == "seed"
