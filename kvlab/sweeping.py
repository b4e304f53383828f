"""Sweeps in process: `kvlab.sweep({"policy": ["lru", "fifo"], "block_size": [8, 16]})`. The model stays loaded between runs."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

from kvlab.composition import ADDITIVE, compose
from kvlab.config import SEAMS, check_config, to_plain
from kvlab.progress import Progress
from kvlab.results import Runs, load_runs
from kvlab.running import run
from kvlab.types import UserError, unknown_name


def sweep(
    grid: Mapping[str, Sequence[Any]],
    *overrides: str,
    folder: str | Path | None = None,
    progress: bool = True,
    stop_on_error: bool = False,
) -> Runs:
    """Run every point of a grid, one after another, and return all runs (`runs.frame` has one row a run).

    Args:
        grid: key -> values, the last key varying fastest: `{"policy": ["lru", "fifo"], "block_size": [8, 16]}`. Keys are those of
            the command line (`policy` is a preset, `preemption/mode` a group, `eviction.seed` a parameter); the values of a seam
            may also be policy objects or classes of your own.
        overrides: what all points share, as on the command line: `"workload=synthetic"`.
        folder: where the runs' folders go; None: a new one under runs/. progress: a bar over the points, and one in each run.
        stop_on_error: raise the first error instead of going on. Otherwise a failed run is a row with status "failed".

    Raises:
        UserError: a wrong key, name or value anywhere in the grid, before the first run starts.
        KeyboardInterrupt: what was run is in the folder; `kvlab.load_runs(folder)` reads it.
    """
    points = _points(grid, overrides)
    root = Path(folder) if folder is not None else Path("runs") / datetime.now().strftime("%Y-%m-%d/%H-%M-%S-%f-sweep")
    with Progress(len(points), "sweep", "run", progress) as bar:
        for number, (label, config, policies) in enumerate(points):
            try:
                run(config, folder=root / str(number), progress=progress, name=label, **policies)
            except Exception as error:
                if stop_on_error:
                    raise
                logging.getLogger(__name__).warning("run %d (%s) failed: %s: %s", number, label, type(error).__name__, error)
            bar.update(number + 1, label)
    return load_runs(root)


def _points(grid: Mapping[str, Sequence[Any]], overrides: Sequence[str]) -> list[tuple[str, dict[str, Any], dict[str, Any]]]:
    """(label, plain configuration, policies given as objects) of each point, all checked."""
    if not isinstance(grid, Mapping):
        raise UserError(f'grid = {grid!r} is not allowed: a dict of lists, e.g. {{"block_size": [8, 16]}}.')
    for key, values in grid.items():
        if isinstance(values, (str, bytes)) or not isinstance(values, Sequence) or not values:
            raise UserError(f"grid[{key!r}] = {values!r} is not allowed: a list of at least one value, e.g. [{values!r}].")
    points = []
    for combination in itertools.product(*grid.values()):
        chosen = dict(zip(grid, combination, strict=True))
        policies = {k: v for k, v in chosen.items() if not _is_plain(v)}
        for key in policies:
            if key not in SEAMS:
                raise unknown_name("seam for a policy object", key, SEAMS)
        words = [_override(k, v) for k, v in chosen.items() if k not in policies]
        config = to_plain(compose(*overrides, *words))
        check_config(config)
        label = ", ".join([*words, *(f"{k}={_class_name(v)}" for k, v in policies.items())])
        points.append((label, config, policies))
    return points


def _is_plain(value: Any) -> bool:
    return value is None or isinstance(value, (str, bool, int, float, list, tuple, dict))


def _class_name(value: Any) -> str:
    return value.__name__ if isinstance(value, type) else type(value).__name__


def _override(key: str, value: Any) -> str:
    """A key and a Python value in the command line's syntax."""
    return f"{'+' if key in ADDITIVE else ''}{key}={_text(value)}"


def _text(value: Any) -> str:
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        return value if value.replace("_", "a").replace("-", "a").isalnum() else "'" + value.replace("'", "\\'") + "'"
    if isinstance(value, (list, tuple)):
        return "[" + ",".join(map(_text, value)) + "]"
    if isinstance(value, dict):
        return "{" + ",".join(f"{k}:{_text(v)}" for k, v in value.items()) + "}"
    return repr(value)
