"""Sweeps on the command line: what `-m` with `resume`, `on_error`, `repeats` and `jobs` asks for, and how it is run.

With Hydra's own sweeper the points are known before anything runs: they are run here then, in `jobs` processes, or by the launchers of
conf/hydra/launcher. Other sweepers and launchers (Hydra's plugins) are left to Hydra, and have no such settings.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from hydra.core.override_parser.types import Override
from omegaconf import OmegaConf

from kvlab.building import build
from kvlab.composition import compose_hydra, parse_overrides
from kvlab.config import to_plain
from kvlab.shared import local_only
from kvlab.sweep_attempt import Attempt
from kvlab.sweep_folder import open_sweep
from kvlab.sweep_loop import Runner, here, in_processes, run_points
from kvlab.sweep_points import Point, Text, grid_points
from kvlab.sweep_shared import open_shared, settle
from kvlab.sweeping import check_settings, places
from kvlab.types import UserError
from kvlab.words import as_number

WORDS = ("resume", "on_error", "repeats", "jobs")
"""Settings of a sweep: they stand among the overrides and are no part of a run's configuration."""

BASIC = "hydra._internal.core_plugins.basic_"


@dataclass
class SweepCommand:
    """A sweep that was asked for.

    Attributes:
        root: its folder. points: with the numbers they have there. runner: what runs them.
    """

    root: Path
    points: list[Point]
    runner: Runner

    def run(self) -> list[Attempt]:
        """Run all points that are not finished. UserError: the disk is full, or an address can't be written."""
        attempts = run_points(self.root, self.points, self.runner)
        settle(self.root, self.points)
        return attempts


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
    parsed = parse_overrides([*_axes_of_presets(words), *words])
    hydra = compose_hydra([o.input_line or "" for o in parsed if o.key_or_group.startswith("hydra")])
    basic = str(hydra.sweeper._target_).startswith(BASIC) and hydra.sweeper.max_batch_size is None and not hydra.sweeper.params
    own_names = OmegaConf.to_container(hydra.sweep, resolve=False)["subdir"] != "${hydra.job.num}"  # type: ignore[index, call-overload]
    target = str(hydra.launcher._target_)
    ours = target.startswith("kvlab.")
    if not basic or own_names or not (ours or target.startswith(BASIC)) or any(_is_range(o) for o in parsed):
        if settings or ours:
            what = ", ".join([*settings, *(["this launcher"] if ours else [])])
            raise UserError(f"{what}: only with Hydra's basic sweeper, lists of values, and no hydra.sweep.subdir of one's own.")
        local_only(hydra.sweep.dir, "a sweep of Hydra's other sweepers and launchers")
        return None
    jobs = int(settings.get("jobs", 1))
    if ours and jobs > 1:
        raise UserError("jobs and a launcher are two ways to run several at once: leave one out.")
    runner: Runner = partial(here, progress=True) if jobs == 1 else in_processes(jobs)
    if ours:
        runner = build(to_plain(hydra.launcher))
    grid, shared = _grid(parsed)
    root, out = places(str(hydra.sweep.dir))
    root = root.absolute()
    all_points = grid_points(grid, shared, int(settings.get("repeats", 1)))
    resume, stops = settings.get("resume", False), settings.get("on_error") == "stop"
    points = open_shared(root, out, all_points, resume, stops) if out else open_sweep(root, all_points, resume, stops)
    return SweepCommand(root, points, runner)


def _axes_of_presets(words: Sequence[str]) -> list[str]:
    """The axes that `+experiment=NAME` brings along (its hydra.sweeper.params), as overrides; the command line's own words win."""
    presets = [word for word in words if word.startswith("+experiment=")]
    if not presets:
        return []
    for preset in parse_overrides(presets):
        if preset.is_sweep_override():
            raise UserError(f"{preset.input_line!r} names several experiments, and each has a grid of its own: one experiment at a time.")
    params = compose_hydra(presets).sweeper.params or {}
    return [f"{key}={value}" for key, value in params.items()]


def _is_range(item: Override) -> bool:
    """A sweep that only another sweeper can read (an interval)."""
    return bool(item.is_sweep_override() and not item.is_discrete_sweep())


def _grid(parsed: Sequence[Override]) -> tuple[dict[str, list[Any]], list[str]]:
    """(axes of the sweep, what all points share)."""
    last = {item.get_key_element(): item for item in parsed}  # of two with one key the later one counts, as with Hydra
    grid = {key: [_value(text) for text in item.sweep_string_iterator()] for key, item in last.items() if item.is_sweep_override()}
    return grid, [item.input_line or "" for item in last.values() if not item.is_sweep_override()]


def _value(text: str) -> Any:
    """A swept value: numbers as numbers, which are composed faster; everything else as the text it is."""
    number = as_number(text)
    return Text(text) if number is None else number
