"""The garbage collector while a run goes: an engine's steps leave no cycles, and each walk through its growing lists finds nothing."""

from __future__ import annotations

import gc
import threading
from collections.abc import Iterator
from contextlib import contextmanager

YOUNG = 20_000
"""New objects between two collections; Python's own 700 cost 8 % of a simulated run."""

_lock = threading.Lock()
_num_runs = 0
_before = gc.get_threshold()


@contextmanager
def collecting_seldom() -> Iterator[None]:
    """Inside, the collector looks for cycles seldom; after the last of several runs in threads it does so as before. A collector that
    somebody has turned off, or made as seldom, stays as it is."""
    global _num_runs, _before
    with _lock:
        if not _num_runs:
            _before = gc.get_threshold()
            if 0 < _before[0] < YOUNG:
                gc.set_threshold(YOUNG, *_before[1:])
        _num_runs += 1
    try:
        yield
    finally:
        with _lock:
            _num_runs -= 1
            if not _num_runs:
                gc.set_threshold(*_before)
