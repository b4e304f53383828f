"""sweep.yaml read: which runs a figure needs.

Three kinds:
- a Hydra experiment (`# @package _global_`, grid under hydra.sweeper.params): `python -m kvlab.experiment -m +experiment=NAME` runs the
  same points. The file is conf/experiment/NAME.yaml; the figure's folder holds a link to it.
- `replay:` {traces, eviction, capacity, ...}: kvlab.replay.sweep over each trace.
- `compute:` {name: values}: no runs; figure.py computes a row from each combination.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from hydra._internal.core_plugins.basic_sweeper import BasicSweeper
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException

from kvlab.config import check_config
from kvlab.figures.spec import Folder, read_text
from kvlab.sweep_points import Composer
from kvlab.types import UserError

KINDS = ("hydra", "replay", "compute")


@dataclass(frozen=True)
class Point:
    """One run: what the command line would say (`shared` by all points of the sweep, `words` of its own), and the swept values as
    columns of the results."""

    shared: tuple[str, ...]
    words: tuple[str, ...]
    values: Mapping[str, Any]

    @property
    def label(self) -> str:
        """The swept values in a line."""
        return ", ".join(f"{key}={value}" for key, value in self.values.items())


def read_sweep(path: Path) -> dict[str, Any]:
    """The file as it stands. UserError for one that is no sweep of a known kind."""
    try:
        if path.is_symlink() and not path.exists():
            raise UserError(f"{path} is a link to a file that isn't there ({path.readlink()}).")
        content = yaml.safe_load(read_text(path))
    except yaml.YAMLError as error:
        raise UserError(f"{path} can't be read: {error}") from error
    if not isinstance(content, dict) or kind_of(content) is None:
        raise UserError(f"{path} is no sweep: it needs hydra.sweeper.params, replay or compute (kvlab.figures.points).")
    return content


def kind_of(content: Mapping[str, Any]) -> str | None:
    """hydra, replay or compute; None: none of them."""
    for kind in ("replay", "compute"):
        if isinstance(content.get(kind), Mapping):
            return kind
    hydra = content.get("hydra")
    sweeper = hydra.get("sweeper") if isinstance(hydra, Mapping) else None
    return "hydra" if isinstance(sweeper, Mapping) and isinstance(sweeper.get("params"), Mapping) else None


def experiment_name(folder: Folder, path: Path) -> str:
    """What the sweep is called as `+experiment=`: the figure's name, with what follows `sweep` in the file's."""
    return folder.name + path.stem.removeprefix("sweep")


def hydra_points(folder: Folder, path: Path, more: Sequence[str] = ()) -> list[Point]:
    """The points of a Hydra experiment, in the order in which `-m` runs them. `more`: further overrides of every point."""
    params = read_sweep(path)["hydra"]["sweeper"]["params"]
    try:
        parsed = OverridesParser.create().parse_overrides([f"{key}={value}" for key, value in params.items()])
        combinations = BasicSweeper.split_arguments(parsed, None)[0]
    except HydraException as error:
        raise UserError(f"{path}: hydra.sweeper.params can't be read: {str(error).splitlines()[0]}") from error
    shared = (f"+experiment={experiment_name(folder, path)}", *more)
    return [Point(shared, tuple(words), dict(_column(word) for word in words)) for words in combinations]


def _column(word: str) -> tuple[str, Any]:
    """`preemption/mode=swap` as a column's name and value."""
    key, _, text = word.partition("=")
    value = yaml.safe_load(text)
    return key.lstrip("+"), text if isinstance(value, (dict, list)) else value


def point_configs(points: Sequence[Point]) -> list[dict[str, Any]]:
    """The resolved configuration of each point, checked. UserError: a wrong one."""
    composers: dict[tuple[str, ...], Composer] = {}
    configs = []
    for point in points:
        composer = composers.setdefault(point.shared, Composer(point.shared))
        configs.append(composer.config(point.values))
        check_config(configs[-1])
    return configs


def compute_points(path: Path) -> Iterator[dict[str, Any]]:
    """Each combination of a `compute:` sweep; the last key varies fastest."""
    grid = read_sweep(path)["compute"]
    for key, values in grid.items():
        if not isinstance(values, list) or not values:
            raise UserError(f"{path}: compute.{key} = {values!r} is not allowed: a list of values.")
    for values in itertools.product(*grid.values()):
        yield dict(zip(grid, values, strict=True))
