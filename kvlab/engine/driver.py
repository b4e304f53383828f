"""Runs a workload to its end: requests to the engine when they are due, what has ended back to the workload."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, Protocol

from kvlab.engine.collecting import collecting_seldom
from kvlab.engine.engine import Engine
from kvlab.types import MissingOracle, Request, RequestRecord, UserError


class RequestSource(Protocol):
    """Where requests come from; `kvlab.workload.base.Workload` is one, after `start`."""

    def due(self, now_s: float) -> list[Request]:
        """Requests with arrival_s <= now_s, each once, in order."""

    def next_arrival_s(self) -> float | None:
        """When the next known request is due; None: nothing known until something ends, or the end."""

    def on_finish(self, record: RequestRecord) -> None:
        """A request has ended; it may bring another one."""

    @property
    def exhausted(self) -> bool:
        """No request will ever come again."""

    @property
    def num_requests(self) -> int | None:
        """Requests of the whole run, where known."""


class Progress(NamedTuple):
    """How far a run is. `num_requests`: None where it is not known beforehand."""

    num_steps: int
    num_finished: int
    num_requests: int | None
    num_output_tokens: int
    now_s: float


@collecting_seldom()
def drive(engine: Engine, workload: RequestSource, on_progress: Callable[[Progress], None] | None = None,
          on_refused: str = "record") -> None:  # fmt: skip
    """Serve a started workload until it is exhausted.

    Args:
        engine: idle. workload: after `start`. on_progress: called after every step.
        on_refused: what happens to a request that can never be served: "record" it and go on with the others, or "raise".
    Raises:
        UserError: a refused request, with on_refused="raise".
        MissingOracle: the policies need what the workload does not know.
        IllegalDecision: a policy erred.
    """
    clock = engine.clock
    aborts: list[tuple[float, str]] = []
    num_steps = num_finished = num_output = 0
    last_end_s = 0.0  # what ends outside a step ends at a time that a replay knows too: not when the clock happened to be read

    def ended(record: RequestRecord) -> None:
        nonlocal num_finished
        num_finished += 1
        workload.on_finish(record)

    while True:
        now_s = clock.now()
        for request in workload.due(now_s):
            try:
                engine.add_request(request)
            except UserError as error:
                if on_refused == "raise" or isinstance(error, MissingOracle):
                    raise
                ended(engine.refuse(request, error, max(request.arrival_s, last_end_s)))
                continue
            if request.abort_at_s is not None:
                aborts.append((request.abort_at_s, request.request_id))
        for due in [entry for entry in aborts if entry[0] <= now_s] if aborts else ():
            aborts.remove(due)
            engine.abort(due[1], max(due[0], last_end_s))
        if engine.has_work or engine.has_ended:
            result = engine.step(now_s) if engine.has_work else None
            for record in engine.take_ended() if result is None else result.finished:
                ended(record)
            if result is None:
                continue
            num_steps += 1
            last_end_s = result.stats.end_s
            num_output += result.stats.num_output_tokens
            if on_progress is not None:
                on_progress(Progress(num_steps, num_finished, workload.num_requests, num_output, result.stats.end_s))
            continue
        upcoming = workload.next_arrival_s()
        if upcoming is None:
            if not workload.exhausted:
                raise RuntimeError("The workload is not exhausted, but names no next arrival although nothing is in flight.")
            return
        clock.wait_until(upcoming)
