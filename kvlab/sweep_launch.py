"""Where a sweep from Python runs: joblib (processes), Ray (a cluster), Slurm through submitit. All run the same packed points.

The command line takes Hydra's launchers instead (`hydra/launcher=joblib`, `ray`, `submitit_slurm`); both write the same folders.
The sweep's folder must be seen by all machines under one path.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from kvlab.sweep_attempt import Attempt, note_death
from kvlab.sweep_loop import Runner
from kvlab.sweep_payload import pack, run_packed
from kvlab.sweep_points import Point
from kvlab.types import UserError, unknown_name

POLL_S = 0.5
CONNECT_S = 20.0
"""A cluster that has not answered by then is said to be unreachable."""


def launcher_of(name: str, jobs: int, options: Mapping[str, Any]) -> Runner:
    """A launcher by name: "joblib", "ray" or "slurm".

    Args:
        jobs: runs at once (joblib: processes; ray: CPUs are shared out by `num_cpus`, this many at most; slurm: array parallelism).
        options: ray: `address` ("auto", "HOST:PORT"; left out: a Ray on this machine), further arguments of `ray.init`, and under
            `remote` those of `ray.remote` (num_cpus, num_gpus ...). slurm: `cluster` ("slurm", "local", "debug") and parameters of
            `submitit.AutoExecutor.update_parameters` (timeout_min, slurm_partition, gpus_per_node ...). joblib: of `joblib.Parallel`.

    Raises:
        UserError: no such launcher, or its package is not installed.
    """
    makers = {"joblib": _joblib, "ray": _ray, "slurm": _slurm}
    if name not in makers:
        raise unknown_name("launcher", name, makers)
    return makers[name](jobs, dict(options))


def _missing(package: str, extra: str) -> UserError:
    return UserError(f"This launcher needs {package}, which is not installed: pip install 'kvlab[{extra}]'.")


def _joblib(jobs: int, options: dict[str, Any]) -> Runner:
    try:
        import joblib
    except ImportError as error:
        raise _missing("joblib", "joblib") from error

    def runner(root: Path, points: Sequence[Point]) -> Iterator[Attempt]:
        work = (joblib.delayed(run_packed)(pack(root, point)) for point in points)
        yield from joblib.Parallel(n_jobs=jobs, return_as="generator_unordered", **options)(work)

    return runner


def _ray(jobs: int, options: dict[str, Any]) -> Runner:
    try:
        import ray
    except ImportError as error:
        raise _missing("ray", "ray") from error
    remote = dict(options.pop("remote", {}))

    def runner(root: Path, points: Sequence[Point]) -> Iterator[Attempt]:
        if not ray.is_initialized():
            _check_reachable(str(options.get("address", "")))
            try:
                ray.init(include_dashboard=False, log_to_driver=False, **options)
            except (ConnectionError, RuntimeError, OSError, ValueError) as error:
                raise UserError(f"No Ray cluster at {options.get('address', 'this machine')}: {str(error).splitlines()[0]} "
                                "Is `ray start` running there, and its port open from here?") from error  # fmt: skip
        # A task is not tried again: its folder says how it ended, and resume=True is the way to another try.
        task = ray.remote(max_retries=0, **{"num_cpus": 1, **remote})(run_packed)
        waiting = list(points)
        running: dict[Any, Point] = {}
        while waiting or running:
            while waiting and len(running) < (jobs if jobs > 1 else len(points)):
                point = waiting.pop(0)
                running[task.remote(pack(root, point))] = point
            ready, _ = ray.wait(list(running), num_returns=1)
            for reference in ready:
                point = running.pop(reference)
                try:
                    yield ray.get(reference)
                except ray.exceptions.RayError as error:
                    yield note_death(root, point, str(error).splitlines()[0])

    return runner


def _check_reachable(address: str) -> None:
    """Ask a port first: Ray itself tries for minutes. UserError: nobody answers."""
    import socket

    host, _, port = address.removeprefix("ray://").rpartition(":")
    if not host or not port.isdecimal():
        return
    try:
        socket.create_connection((host, int(port)), CONNECT_S).close()
    except OSError as error:
        raise UserError(f"No Ray cluster answers at {address} ({error.strerror or error}). Start one there (ray start --head "
                        f"--port={port}), or leave the address out for this machine alone.") from error  # fmt: skip


def _slurm(jobs: int, options: dict[str, Any]) -> Runner:
    try:
        import submitit
    except ImportError as error:
        raise _missing("submitit", "slurm") from error
    cluster = options.pop("cluster", "slurm")

    def runner(root: Path, points: Sequence[Point]) -> Iterator[Attempt]:
        try:
            executor = submitit.AutoExecutor(folder=root / ".sweep" / "submitit", cluster=cluster)
            executor.update_parameters(**{"slurm_array_parallelism": max(jobs, 1), "timeout_min": 24 * 60, **options})
            packed = [pack(root, point) for point in points]
            if cluster in ("slurm", None):
                submitted = executor.map_array(run_packed, packed)
            else:
                submitted = [executor.submit(run_packed, payload) for payload in packed]
        except (RuntimeError, OSError, submitit.core.utils.FailedJobError) as error:
            raise UserError(f"Slurm doesn't take the jobs: {str(error).splitlines()[0]} Is this a login node (sbatch, sinfo)? "
                            'On other machines use jobs=N, or launcher_options={"cluster": "local"}.') from error  # fmt: skip
        open_jobs = dict(zip(submitted, points, strict=True))
        while open_jobs:
            for job in [job for job in open_jobs if job.done()]:
                point = open_jobs.pop(job)
                try:
                    yield job.result()
                except Exception as error:  # submitit's own, or whatever came back with the job
                    yield note_death(root, point, f"Slurm job {job.job_id}: {job.state}; {str(error).splitlines()[0]}")
            time.sleep(POLL_S)

    return runner
