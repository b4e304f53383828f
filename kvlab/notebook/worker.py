"""A thread that runs one job at a time, of which the newest wins: what a slider under the hand needs.

Widgets hand jobs over from the kernel's thread and stay responsive (a stop button works while a run goes). A job that came while another
one ran replaces any that waited, and the one that runs is asked to stop if it allows it.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from kvlab.types import BlockEvent, Outcome, Plan, RequestRecord, StepStats


class Stopped(KeyboardInterrupt):
    """A run was asked to stop; the run folder says "interrupted", and what was recorded is kept."""


class StopSignal:
    """Whether a job was asked to stop. As a listener of an engine it ends the run after its current step."""

    wants_block_events = False

    def __init__(self) -> None:
        self._event = threading.Event()

    @property
    def is_set(self) -> bool:
        """Someone asked."""
        return self._event.is_set()

    def set(self) -> None:
        """Ask."""
        self._event.set()

    def check(self) -> None:
        """Raise `Stopped` if someone asked."""
        if self._event.is_set():
            raise Stopped("stopped by the user")

    def on_step(self, plan: Plan, outcome: Outcome, stats: StepStats) -> None:
        """After each step: the place where a run can end with everything recorded."""
        self.check()

    def on_request(self, record: RequestRecord) -> None:
        """Nothing to do."""

    def on_block(self, event: BlockEvent) -> None:
        """Never called."""


Job = Callable[[StopSignal], None]


class NewestWins:
    """Runs jobs in a thread of its own (a daemon, started with the first job, gone when idle for `linger_s`).

    Args:
        on_error: hears what a job raised, in the worker's thread; a job that was stopped is no error.
        delay_s: a job waits so long for a newer one, so that a slider that is dragged asks for few runs.
    """

    def __init__(self, on_error: Callable[[BaseException], None], delay_s: float = 0.03, linger_s: float = 10.0) -> None:
        self._on_error = on_error
        self._delay_s = delay_s
        self._linger_s = linger_s
        self._changed = threading.Condition()
        self._next: tuple[Job, bool, float] | None = None
        self._running: tuple[StopSignal, bool] | None = None
        self._thread: threading.Thread | None = None

    def submit(self, job: Job, replaceable: bool = True) -> None:
        """Run `job` next. `replaceable`: a newer job may stop it; otherwise newer ones wait until it has ended or was stopped."""
        with self._changed:
            self._next = (job, replaceable, time.monotonic() + self._delay_s)
            if self._running is not None and self._running[1]:
                self._running[0].set()
            if self._thread is None:
                self._thread = threading.Thread(target=self._work, name="kvlab-notebook", daemon=True)
                self._thread.start()
            self._changed.notify_all()

    def stop(self) -> None:
        """Drop the job that waits and ask the one that runs to stop."""
        with self._changed:
            self._next = None
            if self._running is not None:
                self._running[0].set()
            self._changed.notify_all()

    @property
    def is_busy(self) -> bool:
        """A job runs or waits."""
        with self._changed:
            return self._running is not None or self._next is not None

    def wait(self, timeout_s: float = 60.0) -> bool:
        """Until nothing runs nor waits; False if that took longer than `timeout_s`. (For scripts and tests; not from a job.)"""
        with self._changed:
            return self._changed.wait_for(lambda: self._running is None and self._next is None, timeout_s)

    def _work(self) -> None:
        while True:
            taken = self._take()
            if taken is None:
                return
            job, stop = taken
            try:
                job(stop)
            except Stopped:
                pass
            except BaseException as error:  # a thread that dies silently would leave the widget dead
                self._on_error(error)
            finally:
                with self._changed:
                    self._running = None
                    self._changed.notify_all()

    def _take(self) -> tuple[Job, StopSignal] | None:
        """The next job once nothing newer came for `delay_s`; None after a long time without any."""
        with self._changed:
            if not self._changed.wait_for(lambda: self._next is not None, self._linger_s):
                self._thread = None
                return None
            while self._next is not None and (left := self._next[2] - time.monotonic()) > 0:
                self._changed.wait(left)
            if self._next is None:  # stopped meanwhile
                self._changed.notify_all()
                return (lambda stop: None), StopSignal()
            job, replaceable, _ = self._next
            stop = StopSignal()
            self._next, self._running = None, (stop, replaceable)
            return job, stop
