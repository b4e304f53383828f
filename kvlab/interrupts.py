"""Ctrl-C between the engine's steps, and not within one: an engine that lives on must not lose count of its blocks."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


@contextmanager
def interrupts_held() -> Iterator[None]:
    """A Ctrl-C (SIGINT) inside becomes a KeyboardInterrupt when the block has ended; a second one does at once.

    Only in the main thread, which alone hears signals, and only where Python's own handler is installed.
    """
    if threading.current_thread() is not threading.main_thread() or signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        yield
        return
    num_heard = 0

    def hear(number: int, frame: FrameType | None) -> None:
        nonlocal num_heard
        num_heard += 1
        if num_heard > 1:
            signal.default_int_handler(number, frame)

    signal.signal(signal.SIGINT, hear)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if num_heard:
        raise KeyboardInterrupt
