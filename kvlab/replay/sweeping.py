"""One trace through many policies and capacities, in parallel: results in the order asked for, an error names its policy."""

from __future__ import annotations

import multiprocessing
import traceback
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from kvlab.policies.base import EvictionPolicy
from kvlab.replay.job import Eviction, Job, policy_name
from kvlab.replay.result import ReplayResult
from kvlab.types import KvlabError, UserError

if TYPE_CHECKING:
    import pandas as pd


@dataclass(frozen=True)
class Failure:
    """A point that went wrong. `is_users`: a UserError, else a fault of the policy or of kvlab (`detail`: its traceback)."""

    policy: str
    capacity: object
    message: str
    is_users: bool
    detail: str = ""

    def error(self) -> KvlabError:
        """What to raise: it names the policy and the capacity."""
        text = f"eviction={self.policy} capacity={self.capacity}: {self.message}"
        return UserError(text) if self.is_users else KvlabError(text + (f"\n{self.detail}" if self.detail else ""))


@dataclass(frozen=True)
class Sweep:
    """Results of `sweep`, by policy and then capacity, in the order asked for; `failures`: points left out of them."""

    results: tuple[ReplayResult, ...]
    failures: tuple[Failure, ...] = ()

    def __iter__(self) -> Iterator[ReplayResult]:
        return iter(self.results)

    def __len__(self) -> int:
        return len(self.results)

    def __getitem__(self, index: int) -> ReplayResult:
        return self.results[index]

    @property
    def frame(self) -> pd.DataFrame:
        """One row a result (`ReplayResult.row`)."""
        import pandas as pd

        return pd.DataFrame([result.row() for result in self.results])


def run_points(job: Job, evictions: Sequence[Eviction], capacities: Sequence[object], jobs: int) -> Iterator[ReplayResult | Failure]:
    """Each point's result or failure, in order, as soon as it and those before it are there.

    With `jobs` > 1 in as many processes; where the system can fork, they share the trace in memory, and policies may be defined
    anywhere (a notebook's cell), elsewhere both must be importable or picklable.
    """
    if type(jobs) is not int or jobs < 1:
        raise UserError(f"jobs = {jobs!r} is not allowed: processes, at least 1.")
    points = [(eviction, capacity) for eviction in evictions for capacity in capacities]
    if jobs == 1 or len(points) < 2:
        for eviction, capacity in points:
            yield _guarded(job, eviction, capacity)
        return
    can_fork = "fork" in multiprocessing.get_all_start_methods()
    context = multiprocessing.get_context("fork" if can_fork else None)
    _SHARED[:] = [job, points]  # before the pool starts its processes, which have it then
    others = set(multiprocessing.active_children())
    pool = ProcessPoolExecutor(min(jobs, len(points)), context, _share, () if can_fork else (job, points))
    try:
        futures: list[Future[ReplayResult | Failure]] = [pool.submit(_point, place) for place in range(len(points))]
        for future in futures:
            yield future.result()
    except BaseException:  # an error, an interrupt, or nobody wants the rest: nothing is waited for
        for process in set(multiprocessing.active_children()) - others:
            process.terminate()
        raise
    finally:
        pool.shutdown(wait=True, cancel_futures=True)
        _SHARED.clear()


_SHARED: list[Any] = []
"""[job, points] in a process of the pool."""


def _share(*shared: Any) -> None:
    if shared:
        _SHARED[:] = shared


def _point(place: int) -> ReplayResult | Failure:
    job, points = _SHARED
    return _guarded(job, *points[place])


def _guarded(job: Job, eviction: str | EvictionPolicy | type[EvictionPolicy], capacity: object) -> ReplayResult | Failure:
    """A result, or what went wrong as plain data: not every exception survives the way between processes."""
    try:
        return job.run(eviction, capacity)
    except Exception as error:
        is_users = isinstance(error, UserError)
        detail = "" if isinstance(error, KvlabError) else traceback.format_exc()
        kind = "" if isinstance(error, KvlabError) else f"{type(error).__name__}: "
        return Failure(policy_name(eviction), capacity, f"{kind}{error}", is_users, detail)
