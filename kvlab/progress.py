"""How far something is and how long it still takes: a bar in notebooks and on terminals, now and then a line of text elsewhere.

With tqdm: as a widget in notebooks, in characters where ipywidgets is missing. Where tqdm is missing too there are lines of text.
"""

from __future__ import annotations

import sys
import time
from importlib.util import find_spec
from typing import Any

LINE_EVERY_S = 30.0
"""Where no bar can be drawn (a log file, a batch system) a line is written so often: short runs stay silent."""


class Progress:
    """A bar over `total` things (None: unknown). Use as a context manager; `update` takes the number done so far."""

    def __init__(self, total: int | None, label: str, unit: str, enabled: bool = True) -> None:
        self._total, self._label, self._unit = total, label, unit
        self._enabled = enabled
        self._started = self._last_line = time.monotonic()
        self._bar = _bar(total, label, unit) if enabled else None

    def update(self, done: int, note: str = "", total: int | None = None) -> None:
        """`done` of `total` (when it has become known); `note` stands behind the bar."""
        if not self._enabled:
            return
        if total is not None:
            self._total = total
        if self._bar is None:
            self._line(done, note)
            return
        if total is not None:
            self._bar.total = total
        if note:
            self._bar.set_postfix_str(note, refresh=False)
        self._bar.update(done - self._bar.n)

    def _line(self, done: int, note: str) -> None:
        now = time.monotonic()
        if now - self._last_line < LINE_EVERY_S:
            return
        self._last_line = now
        print(progress_line(self._label, done, self._total, self._unit, now - self._started, note), file=sys.stderr, flush=True)

    def __enter__(self) -> Progress:
        return self

    def __exit__(self, *exc: object) -> None:
        if self._bar is not None:
            self._bar.close()


def progress_line(label: str, done: int, total: int | None, unit: str, elapsed_s: float, note: str = "") -> str:
    """One line: what is done, of how much, the time taken and, once something is done, the time left at the same pace.

    >>> progress_line("sweep", 3, 12, "run", 60.0)
    'sweep: 3 of 12 run, 1:00 taken, about 3:00 left'
    """
    parts = [f"{done} of {total} {unit}" if total else f"{done} {unit}", f"{clock(elapsed_s)} taken"]
    if total and 0 < done < total:
        parts.append(f"about {clock(elapsed_s / done * (total - done))} left")
    return f"{label}: " + ", ".join([*parts, *([note] if note else [])])


def clock(seconds: float) -> str:
    """Minutes and seconds, with hours in front where there are any.

    >>> clock(59.6), clock(3723)
    ('1:00', '1:02:03')
    """
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def in_notebook() -> bool:
    """This process is a notebook's kernel."""
    ipython = sys.modules.get("IPython")
    shell = None if ipython is None else ipython.get_ipython()
    return shell is not None and hasattr(shell, "kernel")


def _bar(total: int | None, label: str, unit: str) -> Any:
    """tqdm's bar for this place; None where none can be drawn."""
    notebook = in_notebook()
    if not notebook and not sys.stderr.isatty():
        return None
    try:
        from tqdm import tqdm as bar
    except ImportError:
        return None
    kind: Any = bar
    if notebook and find_spec("ipywidgets") is not None:  # tqdm.notebook imports without it and fails later
        from tqdm.notebook import tqdm as widget

        kind = widget
    return kind(total=total, desc=label, unit=unit, dynamic_ncols=True, leave=False)
