"""`sweep_explorer()`: sliders and menus for a run's settings, and its memory, throughput and latency as soon as they move.

Simulated runs answer at once, in a thread of their own in which the newest setting wins; a real run on the loaded model is started with a
button, draws itself as it goes and can be stopped. Whatever goes wrong is said in words, and the last good picture stays.
"""

from __future__ import annotations

import tempfile
import threading
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

import ipywidgets as w
import plotly.graph_objects as go

from kvlab.endings import unserved
from kvlab.notebook.explorer_controls import REAL_WORKLOADS, SIMULATED_WORKLOADS, Controls, Setting
from kvlab.notebook.explorer_live import Live
from kvlab.notebook.explorer_plot import MAX_PINS, NOTHING, Curves, Drawing, curves, empty_figure
from kvlab.notebook.explorer_plot import save_figure as save_figure
from kvlab.notebook.parts import STYLE, CopyButton, Fit, Message, figure_widget, in_words, runs_table
from kvlab.notebook.worker import NewestWins, Stopped, StopSignal
from kvlab.results import Run, Runs
from kvlab.running import run as run_config
from kvlab.types import UserError


def sweep_explorer(
    *overrides: str,
    workloads: Mapping[str, Sequence[str]] | None = None,
    real_workloads: Mapping[str, Sequence[str]] | None = None,
    **start: Any,
) -> SweepExplorer:
    """An explorer of block_size, watermark, num_blocks and policies; show it by ending a cell with it.

    Args:
        overrides: what all runs share, as on the command line: `"+policy=sglang"`, `"cost_model=a100"`. Menus start at what they say.
        workloads, real_workloads: menu entry -> overrides, in place of those offered, for simulated and for real runs.
        start: where controls start: `sweep_explorer(block_size=8, watermark=0.1, eviction="sieve")`.

    Raises:
        UserError: an unknown control, key or name, or a value that is not allowed.
    """
    return SweepExplorer(Controls(overrides, SIMULATED_WORKLOADS if workloads is None else workloads,
                                  REAL_WORKLOADS if real_workloads is None else real_workloads, start))  # fmt: skip


class SweepExplorer(w.VBox):  # type: ignore[misc] # ipywidgets has no types
    """See `sweep_explorer`.

    Attributes:
        controls: the sliders and menus by name in `controls.all`; setting a `value` in Python is a move of the hand.
        fig: the plotly FigureWidget. run: the run that is drawn (None before the first). pins: (label, run) of those that stay.
    """

    def __init__(self, controls: Controls) -> None:
        self.controls = controls
        self.run: Run | None = None
        self.setting = controls.setting()
        self.pins: list[tuple[str, Run]] = []
        self.num_drawn = 0
        self._data = NOTHING
        self._lock = threading.RLock()  # the figure and the texts are written by one thread at a time
        self._folder = tempfile.TemporaryDirectory(prefix="kvlab-explorer-", ignore_cleanup_errors=True)
        self._num_runs = 0
        self._worker = NewestWins(self._fail)
        self._make_parts()
        fit = Fit()
        self.fig = figure_widget(empty_figure())  # last: the page answers none of the others while it loads plotly
        self._drawing = Drawing(self.fig)
        parts = [self._controls(), self._buttons(), self.message, self.fig, self.table, self.frame_view, self.command, fit]
        super().__init__(parts, layout={"width": "100%"})
        for control in controls.all.values():
            control.observe(self._changed, "value")
        self._changed(None, wait=True)

    # ------------------------------------------------------------------ parts

    def _make_parts(self) -> None:
        self.message = Message()
        self.table = w.HTML(layout={"margin": "0 0 0 56px", "overflow": "auto"})
        self.frame_view = w.HTML(layout={"display": "none", "max_height": "320px", "overflow": "auto", "margin": "8px 0 0 56px"})
        self.command = w.HTML(layout={"margin": "8px 0 0 0"})
        self.progress = w.HTML()
        self.copy_command = CopyButton(label="copy as command")
        self.copy_python = CopyButton(label="copy as Python")
        self.start_button = _button("Run", self._start_real, "decode with the real model", "play", "primary")
        self.stop_button = _button("Stop", self.stop, "end the run after its current step", "stop", "danger")
        self.pin_button = _button("pin", self.pin, f"keep this run for comparison (up to {MAX_PINS})", "thumb-tack")
        self.unpin_button = _button("clear pins", self.clear_pins, "forget the pinned runs", "times")
        self.frame_button = _button("show frame", self.toggle_frame, "all figures and settings of these runs", "table")
        self.save_button = _button("save figure", self._save_clicked, "as HTML, and as SVG where kaleido works", "download")
        self.stop_button.disabled = True

    def _buttons(self) -> w.Widget:
        buttons = [self.pin_button, self.unpin_button, self.copy_command, self.copy_python, self.frame_button, self.save_button]
        for button, width in zip(buttons, (90, 112, 148, 136, 124, 124), strict=True):
            button.layout = {"width": f"{width}px", "margin": "2px"}
        return w.HBox(buttons, layout={"flex_flow": "row wrap", "margin": "4px 0 0 0"})

    def _controls(self) -> w.Widget:
        """Three columns above the figure, which has the page's whole width."""
        controls = self.controls
        self._real_box = w.VBox([w.HBox([self.start_button, self.stop_button]), self.progress])
        columns = (
            [_row("runner", controls.runner), _row("workload", controls.workload), self._real_box],
            [_row(name, getattr(controls, name)) for name in ("block_size", "num_blocks", "equal_memory", "watermark")],
            [_row(name, getattr(controls, name)) for name in ("eviction", "scheduling", "preemption", "mode")],
        )
        boxes = [w.VBox(rows, layout={"width": "262px", "margin": "0 12px 0 0"}) for rows in columns]
        return w.HBox(boxes, layout={"flex_flow": "row wrap"})

    # ------------------------------------------------------------------ runs

    def _changed(self, change: Any, wait: bool = False) -> None:
        """A control moved: the texts follow at once, a simulated run as soon as the hand rests."""
        setting = self.controls.setting()
        self.copy_command.text, self.copy_python.text = setting.command, setting.python
        self.command.value = f'{STYLE}<p class="kvlab-code">{_escaped(setting.command)}</p>'
        self._real_box.layout.display = "" if self.controls.is_real else "none"
        if self.controls.is_real:
            self.message.say("Press Run: the model decodes, and the figure follows." if not self._worker.is_busy else "")
        elif wait:
            try:
                self._simulate(setting, StopSignal())
            except Exception as error:
                self._fail(error)
        else:
            self._worker.submit(lambda stop: self._simulate(setting, stop))

    def _simulate(self, setting: Setting, stop: StopSignal) -> None:
        run = self._run(setting, Path(self._folder.name) / str(self._next()), [stop])
        data = curves(run.steps(), run.requests())
        stop.check()  # a newer setting is on its way
        self._show(setting, run, data)

    def _run(self, setting: Setting, folder: Path | None, listeners: list[Any]) -> Run:
        return run_config(setting.config(), folder=folder, name=setting.label, listeners=listeners, progress=False)

    def _next(self) -> int:
        self._num_runs += 1
        return self._num_runs

    def _start_real(self) -> None:
        """The Run button."""
        setting = self.controls.setting()
        if self._worker.is_busy:
            self.message.say("A run goes on already: stop it first.")
            return
        self.start_button.disabled, self.stop_button.disabled = True, False
        self.message.say("")
        self._worker.submit(lambda stop: self._decode(setting, stop), replaceable=False)

    def _decode(self, setting: Setting, stop: StopSignal) -> None:
        folder = Path("runs") / datetime.now().strftime("%Y-%m-%d/%H-%M-%S-%f")
        live = Live(lambda data, told: self._show_live(setting, data, told))
        try:
            self._tell("the model is being loaded ...")
            try:
                run = self._run(setting, folder, [live, stop])
                self._tell(f"done: {live.told()}")
                note = ""
            except Stopped:
                run = Run.load(folder, f"{setting.label}, stopped")
                self._tell(f"stopped: {live.told()}")
                note = "Stopped. What was recorded until then is shown; its folder says \"interrupted\"."
            self._show(setting, run, curves(run.steps(), run.requests()), note)
        except BaseException:
            self._tell("")
            raise
        finally:
            self.start_button.disabled, self.stop_button.disabled = False, True

    def _tell(self, text: str) -> None:
        self.progress.value = f'{STYLE}<p class="kvlab-code">{_escaped(text)}</p>'

    def _show_live(self, setting: Setting, data: Curves, told: str) -> None:
        with self._lock:
            self._drawing.show(data, setting.label)
        self._tell(told)

    def _show(self, setting: Setting, run: Run, data: Curves, note: str = "") -> None:
        if run.summary.get("num_refused"):
            note = unserved(run.requests(("finish_reason", "detail")))[0] + "."
        with self._lock:
            self.setting, self.run, self._data = setting, run, data
            self._drawing.show(data, setting.label)
            self.message.say(" ".join([note, *run.notes]).strip())
            self._tables()
            self.num_drawn += 1

    def _fail(self, error: BaseException) -> None:
        """An error in words; the picture and the table stay those of the last good run."""
        with self._lock:
            self.message.say(in_words(error) + ("" if self.run is None else f"\nStill shown: {self.setting.label}."), "error")

    def stop(self) -> None:
        """Stop the run that goes."""
        self._worker.stop()

    def wait(self, timeout_s: float = 60.0) -> bool:
        """Until the run that goes or waits is drawn (for scripts and tests); False if that took longer."""
        return self._worker.wait(timeout_s)

    def close(self) -> None:
        """Stop what runs, take the widget off the page and forget simulated runs' folders."""
        self._worker.stop()
        self._worker.wait(10)
        self._folder.cleanup()
        super().close()

    # ------------------------------------------------------------------ results

    @property
    def frame(self) -> Any:
        """One row a run: the one that is drawn, then the pinned ones (`Runs.frame`)."""
        return Runs(self.runs).frame

    @property
    def runs(self) -> list[Run]:
        """The run that is drawn, then the pinned ones."""
        return ([] if self.run is None else [self.run]) + [run for _, run in self.pins]

    def pin(self) -> None:
        """Keep the run that is drawn for comparison; of more than MAX_PINS the oldest goes."""
        with self._lock:
            if self.run is None:
                self.message.say("There is no run to pin yet.")
                return
            if any(run is self.run for _, run in self.pins):
                self.message.say("This run is pinned already.")
                return
            self.pins = [*self.pins, (self.setting.label, self.run)][-MAX_PINS:]
            self._drawing.pin([(label, curves(run.steps(), run.requests())) for label, run in self.pins])
            self._tables()

    def clear_pins(self) -> None:
        """Forget the pinned runs."""
        with self._lock:
            self.pins = []
            self._drawing.pin([])
            self._tables()

    def toggle_frame(self) -> None:
        """Show or hide everything that is known of these runs."""
        with self._lock:
            shown = self.frame_view.layout.display != "none"
            self.frame_view.layout.display = "none" if shown else ""
            self.frame_button.description = "show frame" if shown else "hide frame"
            self._tables()

    def figure(self) -> go.Figure:
        """What is drawn now as a plain figure, with everything in it: for a page without a kernel, or for saving."""
        with self._lock:
            fig = go.Figure(self.fig)
        fig.data = [trace for trace in fig.data if trace.visible is not False]
        return fig.update_layout(title={"text": self.setting.label}, margin_t=110)

    def save(self, path: str | Path | None = None) -> Path:
        """Write `figure()`; the kind follows the name's ending (.html, .json; .svg, .pdf, .png through kaleido).

        Raises:
            UserError: an unknown ending, kaleido or its browser is missing, or a folder that can't be written.
        """
        target = Path(path) if path is not None else Path(datetime.now().strftime("explorer-%Y-%m-%d-%H-%M-%S.html"))
        return save_figure(self.figure(), target)

    def _save_clicked(self) -> None:
        try:
            html = self.save()
        except UserError as error:
            self.message.say(str(error), "error")
            return
        said = [str(html)]
        try:
            said.append(str(self.save(html.with_suffix(".svg"))))
        except UserError as error:
            self.message.say(f"Saved {html}. No SVG: {error}")
            return
        self.message.say(f"Saved {' and '.join(said)}.", "good")

    def _tables(self) -> None:
        if self.run is None:
            return
        self.table.value = runs_table(self.runs, [self.setting.label, *(label for label, _ in self.pins)])
        if self.frame_view.layout.display != "none":
            known = self.frame.dropna(axis=1, how="all").set_index("run")
            self.frame_view.value = STYLE + known.T.to_html(classes="kvlab-table", border=0)


def _button(text: str, action: Callable[[], Any], tooltip: str, icon: str = "", style: str = "") -> w.Button:
    button = w.Button(description=text, tooltip=tooltip, icon=icon, button_style=style, layout={"width": "120px"})
    button.on_click(lambda _: action())
    return button


def _row(name: str, control: w.Widget) -> w.Widget:
    """A control under its name, which is the command line's."""
    control.layout.width = "auto"
    control.layout.flex = "1 1 auto"
    label = w.Label("" if name == "equal_memory" else name, layout={"width": "76px", "min_width": "76px"})
    return w.HBox([label, control])


def _escaped(text: str) -> str:
    return text.replace("&", "&amp;").replace("<", "&lt;")
