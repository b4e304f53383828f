"""Sweeps on the command line: what `-m` with `resume`, `on_error`, `repeats` and `jobs` asks for, and how it is run.

With Hydra's own sweeper the points are known before anything runs. They are run here then (or in `jobs` processes), unless another
launcher was chosen (`hydra/launcher=joblib`): Hydra starts the jobs in that case, and each finds its point in the sweep's folder.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from hydra.core.override_parser.types import Override
from omegaconf import DictConfig, OmegaConf

from kvlab.composition import compose_hydra, parse_overrides
from kvlab.config import to_plain
from kvlab.results import Run
from kvlab.sweep_attempt import Attempt
from kvlab.sweep_folder import SweepFolder, open_sweep
from kvlab.sweep_loop import here, in_processes, run_points
from kvlab.sweep_points import Point, Text, grid_points, make_point, seeds
from kvlab.sweeping import check_settings
from kvlab.types import UserError

WORDS = ("resume", "on_error", "repeats", "jobs")
"""Settings of a sweep: they stand among the overrides and are no part of a run's configuration."""

BASIC = "hydra._internal.core_plugins.basic_"


@dataclass
class SweepCommand:
    """A sweep that was asked for.

    Attributes:
        root: its folder. points: with the numbers they have there. launched: Hydra starts the jobs. words: overrides for Hydra.
    """

    root: Path
    points: list[Point]
    launched: bool
    jobs: int
    words: list[str]

    def run(self) -> list[Attempt]:
        """Run all points that are not finished. UserError: the disk is full."""
        return run_points(self.root, self.points, in_processes(self.jobs) if self.jobs > 1 else partial(here, progress=True))

    def run_rest(self) -> list[Attempt]:
        """After Hydra's jobs: wait for, or take over, what other processes had."""
        sweep = SweepFolder(self.root)
        if sweep.stopped() is not None:
            return []
        ended = ("finished", "failed", "interrupted")
        rest = [p for p in self.points if not sweep.folder(p.number).is_dir() or Run.load(sweep.folder(p.number)).state not in ended]
        return run_points(self.root, rest, here) if rest else []


def split_settings(words: Sequence[str]) -> tuple[dict[str, Any], list[str]]:
    """(settings of the sweep, the other overrides). UserError: a setting's value is not allowed."""
    found: dict[str, Any] = {}
    others: list[str] = []
    for word in words:
        key, _, text = word.partition("=")
        if key not in WORDS or "=" not in word:
            others.append(word)
        elif key in ("repeats", "jobs"):
            if not text.isdecimal() or int(text) < 1:
                raise UserError(f"{key} = {text!r} is not allowed: a positive integer.")
            found[key] = int(text)
        else:
            found[key] = {"true": True, "false": False}.get(text.lower(), text)
    check_settings(found.get("resume", False), found.get("on_error", "continue"), found.get("jobs", 1))
    return found, others


def sweep_command(words: Sequence[str], settings: Mapping[str, Any]) -> SweepCommand | None:
    """The sweep that overrides ask for, its folder opened; None where Hydra alone knows the points (another sweeper, another subdir).

    Raises:
        UserError: a wrong value in any point, a folder that holds another sweep, or settings that this sweep can't have.
    """
    parsed = parse_overrides(words)
    hydra = compose_hydra([o.input_line or "" for o in parsed if o.key_or_group.startswith("hydra")])
    basic = str(hydra.sweeper._target_).startswith(BASIC) and hydra.sweeper.max_batch_size is None and not hydra.sweeper.params
    own_names = OmegaConf.to_container(hydra.sweep, resolve=False)["subdir"] != "${hydra.job.num}"  # type: ignore[index, call-overload]
    if not basic or own_names or any(o.is_sweep_override() and not o.is_discrete_sweep() for o in parsed):
        if settings:
            raise UserError(f"{', '.join(settings)} can't be had with another sweeper than Hydra's basic one, or a hydra.sweep.subdir.")
        return None
    launched = not str(hydra.launcher._target_).startswith(BASIC)
    jobs = int(settings.get("jobs", 1))
    if launched and jobs > 1:
        raise UserError("jobs and a launcher are two ways to run several at once: leave one out (hydra.launcher.n_jobs=N for joblib).")
    grid, shared = _grid(parsed)
    repeats = int(settings.get("repeats", 1))
    added = [f"seed={','.join(map(str, values))}" for values in seeds(repeats, "seed" in grid, shared).values()]
    root = Path(str(hydra.sweep.dir)).absolute()
    points = open_sweep(root, grid_points(grid, shared, repeats), settings.get("resume", False), settings.get("on_error") == "stop")
    pinned = [f"hydra.sweep.dir='{root}'", "hydra.output_subdir=null"]
    return SweepCommand(root, points, launched, jobs, [*words, *added, *pinned])


def _grid(parsed: Sequence[Override]) -> tuple[dict[str, list[Any]], list[str]]:
    """(axes of the sweep, what all points share)."""
    last = {item.get_key_element(): item for item in parsed}  # of two with one key the later one counts, as with Hydra
    grid = {key: [_value(text) for text in item.sweep_string_iterator()] for key, item in last.items() if item.is_sweep_override()}
    return grid, [item.input_line or "" for item in last.values() if not item.is_sweep_override()]


def _value(text: str) -> Any:
    """A swept value: numbers as numbers, which are composed faster; everything else as the text it is."""
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return Text(text)


def job_point(config: DictConfig, root: Path) -> Point | None:
    """The point of a job that Hydra started, found by its key; None where the folder's sweep has no such point."""
    point = make_point(0, "", to_plain(config))
    entry = SweepFolder(root).entry_of(point.key) if point.comparable else None
    return None if entry is None else Point(int(entry["number"]), str(entry["label"]), point.config, {}, point.key)
