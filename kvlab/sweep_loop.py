"""Points run one after another here, or several at once in processes of their own; what others work on is waited for."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import closing
from pathlib import Path

from kvlab.progress import Progress
from kvlab.sweep_attempt import HELD, NO_SPACE, STOPPED, Attempt, attempt, note_death
from kvlab.sweep_folder import SweepFolder
from kvlab.sweep_payload import pack
from kvlab.sweep_points import Point
from kvlab.sweep_worker import INTERRUPTED, Worker
from kvlab.types import UserError

POLL_S = 0.2
"""How often a point is looked at that another process has."""

Attempts = Generator[Attempt, None, None]
Runner = Callable[[Path, Sequence[Point]], Attempts]
"""Runs points, in any order, and yields what came of each; what is under way ends when it is closed."""


def run_points(root: Path, points: Sequence[Point], runner: Runner, progress: bool = True) -> list[Attempt]:
    """Run all points to an end; those of another process are waited for, and taken over if it dies.

    Returns what came of each, in the points' order; where a failure stops the sweep, those after it are "stopped".

    Raises:
        UserError: the disk is full. Results until then are kept.
    """
    sweep = SweepFolder(root)
    done: dict[int, Attempt] = {}
    with Progress(len(points), "sweep", "run", progress) as bar:
        pending = list(points)
        while pending:
            held: list[Point] = []
            by_number = {point.number: point for point in pending}
            with closing(runner(root, pending)) as results:  # Ctrl-C: what is under way has ended before anybody looks
                for result in results:
                    point = by_number[result.number]
                    if result.state == HELD:
                        held.append(point)
                        bar.update(len(done), f"waiting for {result.error}")
                        continue
                    done[result.number] = result
                    bar.update(len(done), f"{point.label}: {result.state}")
                    if result.state == NO_SPACE:
                        raise UserError(f"{result.error} {len(points) - len(done)} points were left; resume=true goes on with them.")
            pending = _still_open(sweep, held, done)
    return [done[point.number] for point in points]


def _still_open(sweep: SweepFolder, held: Sequence[Point], done: dict[int, Attempt]) -> list[Point]:
    """Those of `held` that are not finished yet, after a moment's wait."""
    if held:
        time.sleep(POLL_S)
    still = []
    for point in held:
        if sweep.is_finished(point.number):
            done[point.number] = Attempt(point.number, "kept")
        elif sweep.stopped() is not None:
            done[point.number] = Attempt(point.number, STOPPED, error=sweep.stopped() or "")
        else:
            still.append(point)
    return still


def here(root: Path, points: Sequence[Point], progress: bool = False) -> Attempts:
    """One after another in this process: models stay loaded between them."""
    for point in points:
        yield attempt(root, point, progress=progress)


def in_processes(jobs: int) -> Runner:
    """`jobs` at once in worker processes. One that dies (out of memory, a crash) costs its point; a new one takes the next."""

    def runner(root: Path, points: Sequence[Point]) -> Attempts:
        packed = [(point, pack(root, point)) for point in points]
        workers: list[Worker] = []
        local, ended = threading.local(), threading.Event()

        def one(point: Point, payload: bytes) -> Attempt:
            if ended.is_set():
                raise KeyboardInterrupt
            if not hasattr(local, "worker"):
                local.worker = Worker()
                workers.append(local.worker)
            result = local.worker.run(payload)
            if result in INTERRUPTED:  # no failure, and the folder says so already
                ended.set()
                raise KeyboardInterrupt
            return note_death(root, point, result) if isinstance(result, str) else result

        pool = ThreadPoolExecutor(min(jobs, len(points)), thread_name_prefix="kvlab-sweep")
        futures: set[Future[Attempt]] = {pool.submit(one, point, payload) for point, payload in packed}
        try:
            while futures:
                ready, futures = wait(futures, return_when=FIRST_COMPLETED)
                for future in ready:
                    yield future.result()
            for worker in workers:
                worker.close()
        finally:
            ended.set()
            for future in futures:
                future.cancel()
            for worker in workers:
                worker.interrupt()
            for worker in workers:
                worker.end()
            pool.shutdown(wait=True, cancel_futures=True)

    return runner
