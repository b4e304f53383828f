"""Every engine that a test steps is emptied again, and then no pool holds a block: checked after every test, whatever the test is about.

An engine that has nothing left to do is checked at once; one that a test leaves in mid-run has its requests aborted at the test's end
and is stepped until nothing is in flight. A step that raised leaves no state to speak of: that engine is let be.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from weakref import WeakSet

from kvlab.engine.engine import Engine
from kvlab.testing.invariants import check_drained

MAX_STEPS = 64
"""An engine whose requests are all aborted has at most the steps in flight left."""


class Drains:
    """Watches the engines of a session.

    Attributes:
        num_checked: how often an engine was found empty and checked.
    """

    def __init__(self) -> None:
        self.num_checked = 0
        self._open: dict[int, Engine] = {}
        self._failed: WeakSet[Engine] = WeakSet()
        self._faults: list[str] = []
        self._step: Callable[..., Any] = Engine.step

    def watch(self) -> None:
        """From now on, every engine."""
        step = self._step

        def watched(engine: Engine, now_s: float | None = None) -> Any:
            with engine.turn.lock:
                self._open[id(engine)] = engine
                try:
                    result = step(engine, now_s)
                except BaseException:
                    self._failed.add(engine)
                    raise
                if not engine.has_work:
                    self._check(engine)
                return result

        Engine.step = watched  # type: ignore[method-assign, assignment]

    def finish(self) -> None:
        """At a test's end. AssertionError: what its engines still hold, each once."""
        for engine in list(self._open.values()):
            if engine not in self._failed:
                self._empty(engine)
        self._open.clear()
        faults, self._faults = self._faults, []
        assert not faults, "\n".join(dict.fromkeys(faults))

    def _empty(self, engine: Engine) -> None:
        try:
            for request_id in list(engine.groups):
                engine.abort(request_id)
            for _ in range(MAX_STEPS):
                if not engine.has_work:
                    break
                self._step(engine)
        except Exception as error:
            self._faults.append(f"aborting what a test left: {error!r}")
            return
        self._check(engine)

    def _check(self, engine: Engine) -> None:
        self._open.pop(id(engine), None)
        if engine in self._failed:
            return
        self.num_checked += 1
        try:
            check_drained(engine)
        except AssertionError as error:
            config, layout = engine.config, type(engine.policies.layout).__name__
            self._faults.append(f"layout {layout}, depth {config.depth}: {error}")
