"""Results from runs: every point of a figure's sweeps, one after another in this process, reduced to the rows that the figure needs."""

from __future__ import annotations

import shutil
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd

import kvlab
from kvlab.figures.points import Point, compute_points, hydra_points, kind_of, point_configs, read_sweep
from kvlab.figures.spec import FigureSpec, Folder, own_code
from kvlab.progress import Progress
from kvlab.results import Run
from kvlab.types import UserError, unknown_name

REPLAY_KEYS = ("traces", "eviction", "capacity", "semantics", "limit", "warmup", "model", "columns")


@dataclass
class Produced:
    """New results, and what the manifest says of how they came about."""

    frame: pd.DataFrame
    num_points: int
    seeds: list[Any]
    device: str
    seconds: float


def produce(
    folder: Folder, spec: FigureSpec, *, more: Sequence[str] = (), only: Callable[[Mapping[str, Any]], bool] | None = None,
    progress: bool = True,
) -> Produced:  # fmt: skip
    """Run everything that the figure's sweeps name.

    Args:
        more: further overrides of every run (a smaller workload, for tests). only: which points, by their swept values; None: all.

    Raises:
        UserError: a wrong sweep, before anything runs; a run that failed, named by its point.
    """
    started = time.monotonic()
    sweeps = [(path, kind_of(content), content) for path in folder.sweeps() for content in [read_sweep(path)]]
    served = {}
    for path, kind, _ in sweeps:  # all are composed and checked before the first run
        if kind == "hydra":
            points = [p for p in hydra_points(folder, path, more) if only is None or only(p.values)]
            served[path] = (points, point_configs(points))
    frames: list[pd.DataFrame] = []
    devices: list[str] = []
    for path, kind, content in sweeps:
        if kind == "hydra":
            frames.append(_served(folder, spec, *served[path], devices, progress))
        elif kind == "replay":
            frames.append(_replayed(path, content["replay"], only))
            devices.append("replay")
        else:
            frames.append(_computed(path, spec, only))
            devices.append("none: computed")
    seeds = list(dict.fromkeys(config["seed"] for _, configs in served.values() for config in configs))
    num_points = sum(len(points) for points, _ in served.values()) or sum(map(len, frames))
    frame = pd.concat([f for f in frames if len(f)], ignore_index=True)
    return Produced(frame, num_points, seeds, ", ".join(dict.fromkeys(devices)), time.monotonic() - started)


def _served(folder: Folder, spec: FigureSpec, points: Sequence[Point], configs: Sequence[dict[str, Any]], devices: list[str],
            progress: bool) -> pd.DataFrame:  # fmt: skip
    """The rows of a Hydra sweep. Run folders are temporary; with `spec.collect` they live until all have run."""
    frames, runs = [], []
    with tempfile.TemporaryDirectory(prefix="kvlab-figure-") as scratch, Progress(len(points), folder.name, "run", progress) as bar:
        for number, (point, config) in enumerate(zip(points, configs, strict=True)):
            run = _run(config, Path(scratch) / str(number), point)
            devices.append(str(run.env.get("device", "cpu")))
            if spec.collect is not None:
                runs.append(run)
            else:
                frames.append(_rows(spec, point, run))
                shutil.rmtree(Path(scratch) / str(number))
            bar.update(number + 1, point.label)
        if spec.collect is not None:
            with own_code("collect"):
                frames = [spec.collect(runs)]
    return pd.concat(frames, ignore_index=True) if frames else pd.DataFrame()


def _run(config: dict[str, Any], folder: Path, point: Point) -> Run:
    try:
        run = kvlab.run(config, folder=folder, name=point.label, progress=False)
    except UserError as error:
        raise UserError(f"The run {point.label} failed: {error}") from error
    lost = run.summary["num_requests"] - run.summary["num_finished"]
    if lost:
        reasons = run.summary["finish_reasons"]
        raise UserError(f"The run {point.label} did not finish {lost} of its requests ({reasons}): no result for a figure.")
    return run


def _rows(spec: FigureSpec, point: Point, run: Run) -> pd.DataFrame:
    """A run's row (its swept values, then what is kept and measured), or its rows."""
    with own_code(f"measure, of the run {point.label}"):
        measured = spec.measure(run) if spec.measure is not None else {}
    if isinstance(measured, pd.DataFrame):
        for key, value in reversed(list(point.values.items())):
            measured.insert(0, key, value)
        return measured
    for key in spec.keep:
        if key not in run.summary:
            raise unknown_name("figure of a run's summary", key, run.summary)
    return pd.DataFrame([{**point.values, **{key: run.summary[key] for key in spec.keep}, **measured}])


def _replayed(path: Path, options: Mapping[str, Any], only: Callable[[Mapping[str, Any]], bool] | None) -> pd.DataFrame:
    """kvlab.replay.sweep over each trace; `columns`: those of a result's row that are kept (a trace by its name, whatever its file's)."""
    for key in options:
        if key not in REPLAY_KEYS:
            raise unknown_name(f"key of replay in {path.name}", str(key), REPLAY_KEYS)
    passed = {key: value for key, value in options.items() if key not in ("traces", "columns", "eviction", "capacity")}
    frames = []
    for trace in options["traces"]:
        pairs = [(e, c) for e in options["eviction"] for c in options["capacity"]]
        wanted = [(e, c) for e, c in pairs if only is None or only({"trace": trace, "eviction": e, "capacity": c})]
        for eviction in dict.fromkeys(e for e, _ in wanted):
            sizes = [c for e, c in wanted if e == eviction]
            found = kvlab.replay.sweep(trace, [eviction], sizes, **passed).frame.assign(trace=Path(trace).name.split(".")[0])
            frames.append(found[list(options["columns"])])
    return pd.concat(frames, ignore_index=True) if frames else pd.DataFrame(columns=list(options["columns"]))


def _computed(path: Path, spec: FigureSpec, only: Callable[[Mapping[str, Any]], bool] | None) -> pd.DataFrame:
    if spec.compute is None:
        raise UserError(f"{path} is a compute sweep, but figure.py gives FigureSpec no compute=.")
    with own_code("compute"):
        return pd.DataFrame([{**values, **spec.compute(values)} for values in compute_points(path) if only is None or only(values)])
