"""What kvlab's step widgets have in common: module and style from `static/`, a step shared by all widgets of a run, messages in words."""

from __future__ import annotations

import hashlib
import uuid
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary, WeakValueDictionary

import anywidget
import pandas as pd
import plotly.graph_objects as go
import traitlets

from kvlab.analysis.template import figure, nothing
from kvlab.endings import nothing_served
from kvlab.notebook.export import save_page
from kvlab.results import Run
from kvlab.types import UserError

STATIC = Path(__file__).parent / "static"


MOST = 10_000_000
"""Steps and blocks that a picture can have; a number beyond is a damaged file's."""


@cache
def module(name: str) -> str:
    """The ES module of a widget: `shared.js` followed by its own file. Nothing in it is loaded from anywhere."""
    return "\n".join((STATIC / part).read_text(encoding="utf-8") for part in ("shared.js", f"{name}.js"))


@cache
def style() -> str:
    """The style sheet of all widgets."""
    return (STATIC / "widget.css").read_text(encoding="utf-8")


class Cursor(traitlets.HasTraits):
    """The step that the widgets of one run agree on."""

    step = traitlets.Int(0)


_cursors: WeakValueDictionary[str, Cursor] = WeakValueDictionary()
_in_memory: WeakKeyDictionary[Run, str] = WeakKeyDictionary()


def channel_of(run: Run) -> str:
    """A name for a run that widgets on one page share: of its folder, without telling it; of its own for a run in memory."""
    if run.folder is not None:
        return hashlib.sha256(str(run.folder.resolve()).encode()).hexdigest()[:16]
    return _in_memory.setdefault(run, uuid.uuid4().hex[:16])


class StepWidget(anywidget.AnyWidget):
    """A widget over the steps of a run. All of its interaction is in its JavaScript, so that it works without a kernel.

    Attributes:
        step: the step shown, 0-based; widgets of the same run move together. num_steps: S. message: in words, why there is nothing to show
            ("" if there is). meta, data: what the JavaScript draws.
    """

    _css = style()
    step = traitlets.Int(0).tag(sync=True)
    channel = traitlets.Unicode("").tag(sync=True)
    meta = traitlets.Dict().tag(sync=True)
    data = traitlets.Bytes(b"").tag(sync=True)

    def __init__(self, channel: str = "", **traits: Any) -> None:
        super().__init__(channel=channel, **traits)
        if channel:
            self._cursor = _cursors.setdefault(channel, Cursor())
            if self.step:  # asked for; else the widget joins the others
                self._cursor.step = self.step
            traitlets.link((self._cursor, "step"), (self, "step"))

    @property
    def message(self) -> str:
        """Why nothing is shown, in words; "" if something is."""
        return str(self.meta.get("message", ""))

    @property
    def num_steps(self) -> int:
        """Steps there are."""
        return int(self.meta.get("num_steps", 0))

    @traitlets.validate("step")
    def _within(self, proposal: Any) -> int:
        """Steps past the end are the last one."""
        return max(0, min(int(proposal["value"]), max(0, self.num_steps - 1)))

    def save_html(self, path: Path | str, title: str = "") -> Path:
        """Write a page that shows this widget, and works, without a kernel and without network. Returns its path.

        Raises:
            UserError: the page can't be written.
        """
        return save_page([self], path, title or str(self.meta.get("title", "kvlab")))

    def _nothing(self, title: str) -> go.Figure:
        """A figure that says in words why there is none."""
        return nothing(figure(title, 240), self.message.replace("\n", "<br>"))


def run_of(run: Run | Path | str) -> tuple[Run | None, str]:
    """(the run, "") or (None, in words why it can't be read).

    Raises:
        UserError: not a run at all.
    """
    if isinstance(run, Run):
        return run, ""
    if not isinstance(run, (str, Path)):
        raise UserError(f"This widget shows a run: what kvlab.run(...) returned, or a run's folder; not {type(run).__name__}.")
    try:
        loaded = Run.load(run)
    except UserError as error:
        return None, str(error)
    if loaded.state in ("empty", "foreign"):
        return None, f"{run} is not a run's folder ({loaded.state}). Give a folder that kvlab.run or a sweep has written."
    return loaded, ""


def is_recorded(run: Run, table: str) -> bool:
    """Whether the run's configuration says that it records this table."""
    record = run.config.get("record")
    return isinstance(record, Mapping) and record.get(table) is True


def why_empty(run: Run, table: str, otherwise: str) -> str:
    """Why a table that can be read has no rows: nobody was served, though it was recorded; `otherwise` where it was not."""
    nothing = nothing_served(frame_of(run, "requests")[0])
    if nothing or not is_recorded(run, table):
        return nothing or otherwise
    so_far = "" if run.state == "finished" else " as far as it was recorded"
    return f"Nothing was served in this run{so_far}: it records {table}, and there were none."


def frame_of(run: Run, table: str) -> tuple[pd.DataFrame, str]:
    """(what can be read of a table of a run, in words what can't; "" if all can). Columns an older version did not write are null."""
    from kvlab.trace.frames import empty_frame

    try:
        frame = getattr(run, table)()
    except Exception as error:  # a damaged file must not end a kernel's cell
        why = str(error).splitlines()[0] if str(error) else type(error).__name__
        return empty_frame(table), f"{table} of this run can't be read: {why}"
    for column in sorted(set(frame) & {"step", "block_id", "kv_blocks_total", "cpu_blocks_total"}):
        odd = frame[column][~frame[column].between(0, MOST)]
        if len(odd):
            return empty_frame(table), f"{table} of this run can't be shown: it names {column} {odd.iloc[0]:,}."
    return frame, "; ".join(note for note in run.notes if note.startswith((f"{table}.", f"{table}-")))
