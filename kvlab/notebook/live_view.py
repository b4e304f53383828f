"""`live()`: a run as it goes, in a widget that listens to the engine: the pool, the queues, tokens a second, and a button that stops it.

Between two updates a step costs a few additions. Updates come at most five times a second, and more seldom where one takes long: their
share of the run's time is bounded. Works in a kernel without a front end too; then nobody looks.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from datetime import datetime
from operator import itemgetter
from pathlib import Path
from typing import Any

import anywidget
import numpy as np
import numpy.typing as npt
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


COLUMNS = ("end_s", "step_s", "used", "evictable", "free", "watermark", "running", "waiting", "swapped", "output", "prompt")
"""Of a point: the engine's clock at its end, the time of its steps together, states after its last step, tokens of all of them."""
_END, _STEP, _USED, _EVICTABLE, _FREE, _, _RUNNING, _WAITING, _SWAPPED, _OUTPUT, _PROMPT = range(len(COLUMNS))
_HEARD = (
    "end_s", "now_s", "kv_blocks_used", "kv_blocks_evictable", "kv_blocks_free", "watermark_blocks", "num_running_reqs", "num_waiting_reqs",
    "num_swapped_reqs", "num_output_tokens", "num_prompt_tokens_computed", "num_preemptions",
)  # fmt: skip
_pick = itemgetter(*map(StepStats._fields.index, _HEARD))
Floats = npt.NDArray[np.float64]


class Series:
    """Steps as at most about MOST_POINTS points, however many come: with more steps a point is a stretch of them, twice as long each time.

    In a stretch the number of used blocks is the largest, other states are those after its last step, tokens and seconds add up.
    """

    def __init__(self) -> None:
        self.num_steps = self.num_preemptions = 0
        self.every = 1
        self._whole: Floats = np.zeros((0, len(COLUMNS)))
        self._rest: Floats = np.zeros((0, len(COLUMNS)))  # steps: fewer than a stretch has
        self._last_end_s = -np.inf

    def extend(self, heard: Sequence[StepStats]) -> None:
        """More steps."""
        if not heard:
            return
        raw: Floats = np.array([_pick(stats) for stats in heard], dtype=np.float64)
        self.num_steps += len(raw)
        self.num_preemptions += int(raw[:, -1].sum())
        steps, begun = raw[:, :-1], np.append(self._last_end_s, raw[:-1, _END])
        steps[:, _STEP] = np.maximum(0.0, raw[:, _END] - np.maximum(raw[:, _STEP], begun))  # now_s stood there
        self._last_end_s = float(raw[-1, _END])
        rest = np.concatenate((self._rest, steps))
        cut = len(rest) // self.every * self.every
        self._whole = np.concatenate((self._whole, _stretches(rest[:cut], self.every)))
        self._rest = rest[cut:]
        while len(self._whole) > MOST_POINTS:
            even = len(self._whole) // 2 * 2  # where the number is odd one stretch stays half as long as the others
            self._whole = np.concatenate((_stretches(self._whole[:even], 2), self._whole[even:]))
            self.every *= 2

    def points(self) -> Floats:
        """[points, columns], in order."""
        return np.concatenate((self._whole, _stretches(self._rest, max(1, len(self._rest)))))


def _stretches(rows: Floats, every: int) -> Floats:
    """Each `every` rows as one."""
    parts = rows.reshape(-1, every, rows.shape[1])
    out = parts[:, -1].copy()
    out[:, _USED] = parts[:, :, _USED].max(axis=1)
    for column in (_STEP, _OUTPUT, _PROMPT):
        out[:, column] = parts[:, :, column].sum(axis=1)
    return out


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
        self._series = Series()
        self._heard: list[StepStats] = []
        self._num_ended = self.num_updates = 0
        self._told_s = self._wait_s = 0.0
        self._timer: threading.Timer | None = None
        self._lock = threading.Lock()

    # ------------------------------------------------------------- listening

    def on_step(self, plan: Plan, outcome: Outcome, stats: StepStats) -> None:
        """Take in a step; raises RunStopped once the button was pressed."""
        self._heard.append(stats)
        if self.stop:
            self._tell("stopped")
            raise RunStopped("The run was stopped with the button. What it had recorded is in its folder (kvlab.load_runs).")
        if time.perf_counter() - self._told_s > self._wait_s:
            self._tell()

    def on_request(self, record: RequestRecord) -> None:
        """Count it."""
        self._num_ended += 1

    def on_block(self, event: BlockEvent) -> None:
        """Not asked for."""

    # ------------------------------------------------------------- telling

    def open(self) -> None:
        """Open the way to the page."""
        super().open()
        self._hear_in_subshell()

    def send_state(self, key: Any = None) -> None:
        """Send traits to the page."""
        super().send_state(key)
        self._hear_in_subshell()

    def _hear_in_subshell(self) -> None:
        """ipykernel 7.4 hands what a page says of a widget to the shell that wrote to the widget last: here that of the running cell, which
        is busy until the run is over. Without its note of that shell it goes to the subshell that JupyterLab has made for widgets."""
        if hasattr(self.comm, "_reply_subshell_id"):
            del self.comm._reply_subshell_id

    def _tell(self, state: str = "running") -> None:
        """Send what there is to the front end, and choose when to do so next."""
        start = time.perf_counter()
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        with self._lock:  # the timer has a thread of its own
            heard, self._heard = self._heard, []
            self._series.extend(heard)
            points = self._series.points()
        with self.hold_sync():
            self.data = np.ascontiguousarray(points.T).astype("<f4").tobytes()
            self.status = self._numbers(points, state)
        self.num_updates += 1
        self._told_s = time.perf_counter()
        self._wait_s = max(UPDATE_S, (self._told_s - start) / LARGEST_SHARE)
        if state == "running":
            self._timer = threading.Timer(self._wait_s + REST_S, self._tell, ["no step at the moment"])
            self._timer.daemon = True
            self._timer.start()

    def _numbers(self, points: Floats, state: str) -> dict[str, Any]:
        """What the widget shows as numbers; rates are of the last twentieth of the points."""
        last, recent = points[-1], points[-max(1, len(points) // 20) :]
        seconds, total = float(recent[:, _STEP].sum()), float(last[[_USED, _EVICTABLE, _FREE]].sum())
        return {
            "state": state, "step": self._series.num_steps, "num_points": len(points), "end_s": float(last[_END]),
            "running": int(last[_RUNNING]), "waiting": int(last[_WAITING]), "swapped": int(last[_SWAPPED]), "ended": self._num_ended,
            "preemptions": self._series.num_preemptions, "usage": float(last[_USED]) / total if total else 0.0, "total": int(total),
            "tokens_per_s": float(recent[:, _OUTPUT].sum()) / seconds if seconds > 0 else 0.0,
        }  # fmt: skip

    def end(self, state: str = "finished") -> None:
        """Show everything that was heard; `state` is what the widget says."""
        if self._heard or self._series.num_steps:
            self._tell(state)
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
        with self._lock:
            heard, self._heard = self._heard, []
            self._series.extend(heard)
            points = self._series.points()
        if not len(points):
            return nothing(fig, "no step was heard")
        for name, color, column in (("used", BLUE, _USED), ("cached (evictable)", SKY, _EVICTABLE), ("free", LIGHT, _FREE)):
            fig.add_scatter(x=points[:, _END], y=points[:, column], name=name, stackgroup="blocks", mode="lines", fillcolor=color,
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

    The button needs a kernel that hears it while a cell runs (ipykernel 7 with JupyterLab 4.4 or newer; tested with 7.4 and 4.6); elsewhere
    the widget says after a moment that it was not heard, and interrupting the kernel always works. A stopped run raises
    `RunStopped`, a KeyboardInterrupt: its folder says "interrupted" and keeps all that was recorded.

    Args:
        engine: an engine to listen to from now on; None: pass the widget as a listener.

    Raises:
        UserError: `engine` is something else.
    """
    view = LiveView()
    if engine is None:
        return view
    if not isinstance(engine, Engine):
        raise UserError(f"live() listens to an Engine, not to {type(engine).__name__}. For a configuration: live().run(config).")
    engine.listeners = (*engine.listeners, view)
    return view
