"""Where a sweep's points run: joblib (processes of this machine), Ray (a cluster), Slurm through submitit.

Chosen with `hydra/launcher=joblib|ray|submitit_slurm|submitit_local` on the command line (conf/hydra/launcher/*.yaml has the parameters)
and with `kvlab.sweep(..., launcher="ray")` in Python. All run the same packed points: classes of notebooks travel by value, each point is
claimed, resumed and noted as on one machine. The sweep's folder must be seen by all machines under one path.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from kvlab.building import build
from kvlab.sweep_attempt import Attempt, note_death
from kvlab.sweep_loop import Attempts, Runner
from kvlab.sweep_payload import pack, run_packed
from kvlab.sweep_points import Point
from kvlab.types import UserError, unknown_name

POLL_S = 0.5
CONNECT_S = 10.0
"""A cluster whose port has not answered by then is said to be unreachable."""


def launcher_of(name: str, options: Mapping[str, Any]) -> Runner:
    """A launcher by name ("joblib", "ray", "slurm") with parameters of the function of that name.

    Raises:
        UserError: no such launcher or parameter, or its package is not installed.
    """
    names = {"joblib": "joblib_processes", "ray": "ray_cluster", "slurm": "slurm"}
    if name not in names:
        raise unknown_name("launcher", name, names)
    runner: Runner = build({"_target_": f"{__name__}.{names[name]}", **options})
    return runner


def _missing(package: str, extra: str) -> UserError:
    return UserError(f"This launcher needs {package}, which is not installed: pip install 'kvlab[{extra}]'.")


def joblib_processes(n_jobs: int = 2, options: Mapping[str, Any] | None = None) -> Runner:
    """Points in joblib's processes. `n_jobs`: at once (-1: one a core). `options`: further ones of `joblib.Parallel`."""
    try:
        import joblib
    except ImportError as error:
        raise _missing("joblib", "joblib") from error

    def runner(root: Path, points: Sequence[Point]) -> Attempts:
        work = [joblib.delayed(run_packed)(pack(root, point)) for point in points]
        yield from joblib.Parallel(n_jobs=n_jobs, return_as="generator_unordered", **dict(options or {}))(work)

    return runner


def ray_cluster(
    address: str | None = None, init: Mapping[str, Any] | None = None, remote: Mapping[str, Any] | None = None, at_once: int | None = None
) -> Runner:
    """Points as tasks of a Ray cluster.

    Args:
        address: HOST:PORT of a running cluster, "auto" for the one this machine belongs to, None: a Ray of its own on this machine.
        init: further arguments of `ray.init` (num_cpus, object_store_memory, runtime_env ...).
        remote: what a point needs, arguments of `ray.remote` (num_cpus: 1 unless given, num_gpus, memory, resources ...).
        at_once: points submitted at once; None: all, Ray runs as many as its machines have room for.
    """
    try:
        import ray
    except ImportError as error:
        raise _missing("ray", "ray") from error

    def runner(root: Path, points: Sequence[Point]) -> Attempts:
        _connect(ray, address, dict(init or {}))
        # A task is not tried again: its folder says how it ended, and resume is the way to another try.
        task = ray.remote(**{"num_cpus": 1, "max_retries": 0, **dict(remote or {})})(run_packed)
        waiting, running = list(points), dict[Any, Point]()
        while waiting or running:
            while waiting and len(running) < (at_once or len(points)):
                point = waiting.pop(0)
                running[task.remote(pack(root, point))] = point
            for reference in ray.wait(list(running), num_returns=1)[0]:
                point = running.pop(reference)
                try:
                    yield ray.get(reference)
                except ray.exceptions.RayError as error:
                    yield note_death(root, point, f"Ray says {type(error).__name__}: {str(error).strip().splitlines()[0]}")

    return runner


def _connect(ray: Any, address: str | None, init: dict[str, Any]) -> None:
    """Connect once a process. UserError: no cluster there; its port is asked first, since Ray itself tries for minutes."""
    if ray.is_initialized():
        return
    host, _, port = (address or "").removeprefix("ray://").rpartition(":")
    if host and port.isdecimal():
        try:
            socket.create_connection((host, int(port)), CONNECT_S).close()
        except OSError as error:
            raise UserError(f"No Ray cluster answers at {address} ({error.strerror or error}). Start one there (ray start --head "
                            f"--port={port}), or leave the address out for a Ray on this machine.") from error  # fmt: skip
    try:
        ray.init(address=address, **{"include_dashboard": False, "log_to_driver": False, **init} if address is None else
                 {"log_to_driver": False, **init})  # fmt: skip
    except (ConnectionError, RuntimeError, OSError, ValueError) as error:
        raise UserError(f"Ray can't be used ({address or 'on this machine'}): {str(error).splitlines()[0]}") from error


def slurm(cluster: str = "slurm", at_once: int = 100, timeout_min: int = 24 * 60, parameters: Mapping[str, Any] | None = None) -> Runner:
    """Points as Slurm jobs (one array), through submitit.

    Args:
        cluster: "slurm", or "local": submitit's processes on this machine, all at once (to try a sweep out).
        at_once: jobs of the array that may run at once. timeout_min: minutes that Slurm gives a point.
        parameters: of `submitit.AutoExecutor.update_parameters` (slurm_partition, cpus_per_task, mem_gb, gpus_per_node ...).
    """
    try:
        import submitit
    except ImportError as error:
        raise _missing("submitit", "slurm") from error
    if cluster not in ("slurm", "local"):
        raise unknown_name("cluster of submitit", cluster, ("slurm", "local"))

    def runner(root: Path, points: Sequence[Point]) -> Attempts:
        packed = [pack(root, point) for point in points]
        try:
            executor = submitit.AutoExecutor(folder=root / ".sweep" / "submitit", cluster=cluster)
            executor.update_parameters(timeout_min=timeout_min, slurm_array_parallelism=at_once, **dict(parameters or {}))
            submitted = executor.map_array(run_packed, packed)
        except (RuntimeError, OSError, NameError, TypeError, ValueError) as error:
            raise UserError(f"submitit can't start the jobs on {cluster!r}: {str(error).splitlines()[0]} Slurm needs a machine that has "
                            "sbatch; elsewhere use hydra/launcher=submitit_local, joblib, or jobs=N.") from error  # fmt: skip
        running = dict(zip(submitted, points, strict=True))
        try:
            while running:
                for job in [job for job in running if job.done()]:
                    yield _came_back(root, running.pop(job), job)
                time.sleep(POLL_S)
        finally:
            for job in running:  # Ctrl-C: what is under way ends too, and its folders say so
                job.cancel(check=False)

    return runner


def _came_back(root: Path, point: Point, job: Any) -> Attempt:
    try:
        done: Attempt = job.result()
        return done
    except Exception as error:  # submitit's own, or whatever the job brought back
        lines = str(error).strip().splitlines() or [type(error).__name__]
        return note_death(root, point, f"job {job.job_id} is {job.state}: {lines[0]}")
