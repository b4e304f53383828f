"""`live()`: a run as it goes, in a widget that listens to the engine: the pool, the queues, tokens a second, and a button that stops it.

Between two updates a step costs a few additions. Updates come at most five times a second, and more seldom where one takes long: their
share of the run's time is bounded. Works in a kernel without a front end too; then nobody looks.
"""

from __future__ import annotations

import threading
import time
from datetime import datetime
from pathlib import Path
from typing import Any, NamedTuple

import anywidget
import numpy as np
import plotly.graph_objects as go
import traitlets

from kvlab.analysis.template import BLUE, LIGHT, SKY, figure, nothing
from kvlab.engine.engine import Engine
from kvlab.notebook.widget import module, style
from kvlab.results import Run
from kvlab.types import BlockEvent, Outcome, Plan, RequestRecord, StepStats, UserError

UPDATE_S = 0.2
LARGEST_SHARE = 0.02
"""Of the run's time that updates may take."""
MOST_POINTS = 600
"""Points drawn; with more steps each point is a stretch of them."""
REST_S = 0.7
"""After so long without an update what has been heard since is shown."""


class RunStopped(KeyboardInterrupt):
    """The stop button was pressed. The run ends as interrupted; what was recorded is in its folder."""

    def _render_traceback_(self) -> list[str]:
        """What IPython prints: no traceback, nothing went wrong."""
        return [str(self)]


class Point(NamedTuple):
    """A stretch of steps: counts summed, states after its last one. `end_s`: the engine's clock; `step_s`: time of its steps together."""

    end_s: float
    step_s: float
    used: int
    evictable: int
    free: int
    watermark: int
    running: int
    waiting: int
    swapped: int
    output_tokens: int
    prompt_tokens: int

    def __add__(self, later: object) -> Point:  # type: ignore[override]
        """This stretch and the one after it as one."""
        assert isinstance(later, Point)
        return later._replace(
            step_s=self.step_s + later.step_s, used=max(self.used, later.used),
            output_tokens=self.output_tokens + later.output_tokens, prompt_tokens=self.prompt_tokens + later.prompt_tokens,
        )  # fmt: skip


class LiveView(anywidget.AnyWidget):
    """See `live`. A listener of the engine (`kvlab.types.Listener`).

    Attributes:
        status: numbers of the moment. data: points, float32, one column after the other. stop: set it (or press the button) to end the run.
    """

    _esm = module("live")
    _css = style()
    status = traitlets.Dict().tag(sync=True)
    data = traitlets.Bytes(b"").tag(sync=True)
    stop = traitlets.Bool(False).tag(sync=True)

    wants_block_events = False

    def __init__(self) -> None:
        self._clear()
        super().__init__(status={"state": "waiting for the first step"})

    def _clear(self) -> None:
        self._points: list[Point] = []
        self._every = 1  # steps a point
        self._num_steps = self._num_ended = self._num_preemptions = self._num_updates = 0
        self._last_end_s = 0.0
        self._told_s = self._wait_s = 0.0
        self._spent_s = 0.0
        self._timer: threading.Timer | None = None
        self._lock = threading.Lock()
        self._state = "running"

    # ------------------------------------------------------------- listening

    def on_step(self, plan: Plan, outcome: Outcome, stats: StepStats) -> None:
        """Take in a step; raises RunStopped once the button was pressed."""
        point = Point(
            stats.end_s, max(0.0, stats.end_s - max(stats.now_s, self._last_end_s)), stats.kv_blocks_used, stats.kv_blocks_evictable,
            stats.kv_blocks_free, stats.watermark_blocks, stats.num_running_reqs, stats.num_waiting_reqs, stats.num_swapped_reqs,
            stats.num_output_tokens, stats.num_prompt_tokens_computed,
        )  # fmt: skip
        self._last_end_s = stats.end_s
        with self._lock:
            self._take(point, stats)
        now = time.perf_counter()
        if now - self._told_s > self._wait_s:
            self._tell(now)
        if self.stop:
            self._tell(now, "stopped")
            raise RunStopped("The run was stopped with the button. What it had recorded is in its folder (kvlab.load_runs).")

    def _take(self, point: Point, stats: StepStats) -> None:
        if self._num_steps % self._every == 0:
            self._points.append(point)
        else:
            self._points[-1] += point
        self._num_steps += 1
        self._num_preemptions += stats.num_preemptions
        if len(self._points) == MOST_POINTS and self._num_steps % self._every == 0:  # all stretches are whole, and even in number
            self._points = [a + b for a, b in zip(self._points[::2], self._points[1::2], strict=True)]
            self._every *= 2

    def on_request(self, record: RequestRecord) -> None:
        """Count it."""
        self._num_ended += 1

    def on_block(self, event: BlockEvent) -> None:
        """Not asked for."""

    # ------------------------------------------------------------- telling

    def _tell(self, now: float, state: str = "running") -> None:
        """Send what there is to the front end, and choose when to do so next."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        with self._lock:
            points = list(self._points)
        last = points[-1]
        recent = points[-max(1, len(points) // 20) :]
        seconds = sum(p.step_s for p in recent)
        total = last.used + last.evictable + last.free
        with self.hold_sync():
            self.data = np.array(points, dtype="<f4").T.tobytes()
            self.status = {
                "state": state, "step": self._num_steps, "num_points": len(points), "end_s": last.end_s, "running": last.running,
                "waiting": last.waiting, "swapped": last.swapped, "ended": self._num_ended, "preemptions": self._num_preemptions,
                "usage": last.used / total if total else 0.0, "total": total,
                "tokens_per_s": sum(p.output_tokens for p in recent) / seconds if seconds > 0 else 0.0,
            }  # fmt: skip
        self._num_updates += 1
        self._told_s = time.perf_counter()
        self._spent_s += self._told_s - now
        self._wait_s = max(UPDATE_S, (self._told_s - now) / LARGEST_SHARE)
        if state == "running":
            self._timer = threading.Timer(self._wait_s + REST_S, self._rest)
            self._timer.daemon = True
            self._timer.start()

    def _rest(self) -> None:
        """No step came for a while: show the last ones."""
        self._timer = None
        self._tell(time.perf_counter(), "no step at the moment")

    def end(self, state: str = "finished") -> None:
        """Show everything that was heard; `state` is what the widget says."""
        if self._points:
            self._tell(time.perf_counter(), state)
        else:
            self.status = {"state": state}

    def run(self, config: Any, *, folder: str | Path | None = None, **more: Any) -> Run:
        """`kvlab.run(config, ...)` watched by this widget, which is displayed first. A run that the button stopped is returned as any
        other: its `state` is "interrupted", its frames hold what was recorded.

        Raises:
            UserError: as `kvlab.run`.
        """
        from IPython import get_ipython
        from IPython.display import display

        from kvlab.running import run

        if get_ipython() is not None:
            display(self)
        self.stop = False
        self._clear()
        wanted = Path(folder) if folder is not None else Path("runs") / datetime.now().strftime("%Y-%m-%d/%H-%M-%S-%f")
        try:
            done = run(config, folder=wanted, listeners=[*more.pop("listeners", ()), self], **more)
        except RunStopped:
            return Run.load(_latest(wanted))
        except BaseException:
            self.end("ended by an error")
            raise
        self.end(done.state)
        return done

    # ------------------------------------------------------------- static

    def figure(self) -> go.Figure:
        """A static figure of what was heard so far: the pool's blocks over time."""
        fig = figure("KV cache, live", 340)
        if not self._points:
            return nothing(fig, "no step was heard")
        time_s = [p.end_s for p in self._points]
        for name, color, values in (("used", BLUE, [p.used for p in self._points]), ("cached (evictable)", SKY, [p.evictable for p in self._points]),
                                    ("free", LIGHT, [p.free for p in self._points])):  # fmt: skip
            fig.add_scatter(x=time_s, y=values, name=name, stackgroup="blocks", mode="lines", fillcolor=color,
                            line={"width": 0.5, "color": color, "shape": "hv"}, hovertemplate="%{y:,} blocks")  # fmt: skip
        fig.update_xaxes(title_text="time (s, engine's clock)")
        return fig.update_yaxes(title_text="KV blocks", rangemode="tozero")


def _latest(wanted: Path) -> Path:
    """The folder that a run wanted, or the numbered one beside it that it got."""
    taken = [p for p in (wanted, *wanted.parent.glob(f"{wanted.name}-*")) if (p / "status.json").exists()]
    return max(taken, key=lambda p: (p / "status.json").stat().st_mtime, default=wanted)


def live(engine: Engine | None = None) -> LiveView:
    """A widget that shows a run as it goes, at most five times a second, and can stop it.

        view = live()
        run = view.run(kvlab.compose("+policy=lru"))            # shows itself, returns the run, also when it was stopped
        kvlab.run(config, listeners=[view])                     # or as a listener; display(view) before
        live(engine)                                            # or of an engine of your own

    The button needs a kernel that hears it while a cell runs (ipykernel 7 with JupyterLab 4.4 or newer); interrupting the kernel always
    works. A stopped run raises `RunStopped`, a KeyboardInterrupt: its folder says "interrupted" and keeps all that was recorded.

    Args:
        engine: an engine to listen to from now on; None: pass the widget as a listener.

    Raises:
        UserError: `engine` is something else.
    """
    view = LiveView()
    if engine is None:
        return view
    if not isinstance(engine, Engine):
        raise UserError(f"live() listens to a kvlab.engine Engine, not to {type(engine).__name__}. For a configuration: live().run(config).")
    engine.listeners = (*engine.listeners, view)
    return view
