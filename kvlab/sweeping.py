"""Sweeps from Python: `kvlab.sweep({"policy": ["lru", "fifo"], "block_size": [8, 16]})`. They survive failures, and can be resumed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import Any

from kvlab.results import Run, Runs
from kvlab.shared import is_url, local_only, mirror_of
from kvlab.sweep_attempt import FAILED, STOPPED
from kvlab.sweep_folder import SweepFolder, open_sweep
from kvlab.sweep_launch import launcher_of
from kvlab.sweep_loop import here, in_processes, run_points
from kvlab.sweep_points import grid_points
from kvlab.sweep_shared import open_shared, settle
from kvlab.types import KvlabError, UserError, unknown_name

RESUME = (False, True, "accept")
ON_ERROR = ("continue", "stop")


class SweepStopped(KvlabError, RuntimeError):
    """A point failed and the sweep was to stop then. Its folder has the traceback; other results are kept."""


def sweep(
    grid: Mapping[str, Sequence[Any]],
    *overrides: str,
    folder: str | Path | None = None,
    out: str | None = None,
    progress: bool = True,
    resume: bool | str = False,
    on_error: str = "continue",
    repeats: int = 1,
    jobs: int = 1,
    launcher: str | None = None,
    launcher_options: Mapping[str, Any] | None = None,
) -> Runs:
    """Run every point of a grid and return all runs (`runs.frame` has one row a run, `runs.aggregate()` one a point).

    Each run has its folder, `FOLDER/0`, `FOLDER/1` ..., and says there how it ended; `FOLDER/sweep.json` says which point is which.
    Several processes may work on one folder (`resume=True` in each): they share the points, and one that dies frees its own.

    Args:
        grid: key -> values, the last key varying fastest: `{"policy": ["lru", "fifo"], "block_size": [8, 16]}`. Keys are those of
            the command line (`policy` is a preset, `preemption/mode` a group, `eviction.seed` a parameter); the values of a seam
            may also be policy objects or classes of your own.
        overrides: what all points share, as on the command line: `"workload=synthetic"`.
        folder: where the runs' folders go; None: a new one under runs/. An address is `out`, with a folder under runs/shared/.
        out: an address ("s3://bucket/sweep") that each run is uploaded to when it ends, whole; `kvlab.load_runs(out)` reads it.
        progress: a bar over the points, with the time left.
        resume: True: keep what is finished in `folder`, run what is missing, failed or was cut off; refused where code or configuration
            is not as it was. "accept": go on all the same; points whose own configuration or classes changed are run anew.
        on_error: "continue": a failed run is a row with status "failed". "stop": start nothing more, and raise SweepStopped.
        repeats: runs of each point, with seeds counted on from the configured one.
        jobs: runs at once, in processes of their own, each with its own model. One that is killed costs its own point only.
        launcher: "joblib", "ray" or "slurm" to run elsewhere (`kvlab.sweep_launch`), `launcher_options` for it; None: on this machine.

    Raises:
        UserError: a wrong key, name or value anywhere in the grid, or a folder that holds another sweep, before the first run starts;
            a full disk, later.
        SweepStopped: a run failed, with on_error="stop".
        KeyboardInterrupt: what was run is in the folder; `kvlab.load_runs(folder)` reads it, `resume=True` goes on.
    """
    check_settings(resume, on_error, jobs)
    runner = in_processes(jobs) if jobs > 1 else partial(here, progress=progress)
    if launcher is not None:
        if jobs > 1:
            raise UserError("jobs and a launcher are two ways to run several at once: leave one out.")
        runner = launcher_of(launcher, dict(launcher_options or {}))
    elif launcher_options:
        raise UserError("launcher_options were given without a launcher: joblib, ray or slurm.")
    root, out = places(folder, out)
    points = grid_points(grid, overrides, repeats)
    stops = on_error == "stop"
    points = open_shared(root, out, points, resume, stops) if out else open_sweep(root, points, resume, stops)
    attempts = run_points(root, points, runner, progress)
    settle(root, points)
    if on_error == "stop" and any(a.state in (FAILED, STOPPED) for a in attempts):
        labels = {point.number: point.label for point in points}
        first = next((a for a in attempts if a.state == FAILED), None)
        what = f"Point {first.number} ({labels[first.number]}) failed: {first.error}" if first else SweepFolder(root).stopped()
        raise SweepStopped(f"{what}. Folder: {root}; resume=True goes on.")
    sweep_folder = SweepFolder(root)
    return Runs(Run.load(sweep_folder.folder(p.number), str(p.number)) for p in points if sweep_folder.folder(p.number).is_dir())


def places(folder: str | Path | None, out: str | None = None) -> tuple[Path, str | None]:
    """(local folder of a sweep, address that it is uploaded to or None). UserError: two addresses, or an `out` that is none."""
    if is_url(folder):
        if out is not None:
            raise UserError(f"folder = {folder!r} and out = {out!r} are two addresses: leave one out.")
        return mirror_of(str(folder)), str(folder)
    if out is not None and not is_url(out):
        raise UserError(f"out = {out!r} is not allowed: an address, e.g. s3://bucket/sweep. A folder of this machine is folder=...")
    if folder is None:
        return mirror_of(out) if out else Path("runs") / datetime.now().strftime("%Y-%m-%d/%H-%M-%S-%f-sweep"), out
    local_only(folder, "the folder of a sweep")  # Path("s3://x"), which has lost a slash
    return Path(folder), out


def check_settings(resume: object, on_error: object, jobs: object = 1) -> None:
    """UserError if a setting of a sweep is not allowed."""
    if resume not in RESUME or (resume in (0, 1) and not isinstance(resume, bool)):
        raise UserError(f"resume = {resume!r} is not allowed: true (refuse where code or configuration changed), accept (go on) or false.")
    if on_error not in ON_ERROR:
        raise unknown_name("value of on_error", str(on_error), ON_ERROR)
    if isinstance(jobs, bool) or not isinstance(jobs, int) or jobs < 1:
        raise UserError(f"jobs = {jobs!r} is not allowed: a positive integer (runs at once).")
