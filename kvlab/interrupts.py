"""Ctrl-C (SIGINT) and SIGTERM: at any moment of a command one line and exit code 130 (143), and never a library's traceback.

A command (`python -m kvlab.X`, `kvlab`) is left at once while it starts, imports and composes, and when it has done its work: nothing is
under way then. Within `unwinding()` a signal is a KeyboardInterrupt instead, so that a run ends its folder and a sweep its workers.
Interrupts that follow the first are not heard for PATIENCE_S: they would cut off what the first one writes.

Notebooks and scripts keep Python's own handling; there `interrupts_held` lets an engine end its step.
"""

from __future__ import annotations

import atexit
import os
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from types import FrameType

LINE = "kvlab: interrupted."
PATIENCE_S = 10.0
"""How long a command may take to end after the first interrupt; the next one after that ends it by force."""
AGAIN_S = 0.02
"""After so long a KeyboardInterrupt that can't be raised where the signal was heard is tried again."""


class _Heard:
    """What this process has heard."""

    process = 0
    number = 0
    at_s = 0.0
    raised = False
    is_said = False
    depth = 0
    exit_code: int | None = None


def leave_on_interrupt() -> None:
    """From now on SIGINT and SIGTERM end this process as this module says. A signal that is ignored (`nohup`, `&` of a shell without
    job control) or has another handler is left as it is."""
    if signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        return
    _Heard.process = os.getpid()
    atexit.register(_leave_at_the_end)  # the first to be registered is the last to be called
    signal.signal(signal.SIGINT, _hear)
    if signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
        signal.signal(signal.SIGTERM, _hear)
    signal.signal(signal.SIGALRM, _raise)
    sys.unraisablehook = _unraisable


@contextmanager
def unwinding() -> Iterator[None]:
    """Within, an interrupt of a command is a KeyboardInterrupt: there is something to end. Elsewhere than in a command: nothing."""
    _Heard.depth += 1
    try:
        yield
    finally:
        _Heard.depth -= 1


def interrupted_by() -> int:
    """The number of the signal that has ended this command's work; 0: none."""
    return _Heard.number


def exit_code() -> int:
    """130 after Ctrl-C, 143 after SIGTERM, as shells count."""
    return 128 + (_Heard.number or signal.SIGINT)


def say(line: str = LINE) -> None:
    """The one line of an interrupt on stderr, unless it was said."""
    if _Heard.is_said:
        return
    _Heard.is_said = bool(_Heard.number)  # a KeyboardInterrupt of another kind may come again
    with suppress(OSError, ValueError):
        print(line, file=sys.stderr, flush=True)


def over(code: int) -> None:
    """The command has done its work. What is left to do (threads, functions at exit) ends with this code, or at once by Ctrl-C."""
    _Heard.exit_code, _Heard.depth, _Heard.at_s = code, 0, 0.0


def _hear(number: int, frame: FrameType | None) -> None:
    if os.getpid() != _Heard.process:  # forked off to work for the command, which says the line
        os._exit(128 + number)
    if _Heard.number:
        if _Heard.at_s and time.monotonic() - _Heard.at_s < PATIENCE_S:
            return
        _leave()
    _Heard.number = number
    if not _Heard.depth:
        _leave()
    _Heard.at_s = time.monotonic()
    _raise(number, frame)


def _raise(number: int, frame: FrameType | None) -> None:
    """KeyboardInterrupt; a moment later where it would be lost or break what is being imported."""
    if not _Heard.number or _Heard.raised:
        return
    if _is_deaf(frame):
        signal.setitimer(signal.ITIMER_REAL, AGAIN_S)
        return
    _Heard.raised = True
    raise KeyboardInterrupt


def _is_deaf(frame: FrameType | None) -> bool:
    """Whether an exception would get lost here: in a finalizer, or in an import, whose module some libraries leave half made."""
    while frame is not None:
        code = frame.f_code
        if code.co_name == "__del__" or code.co_filename.startswith("<frozen importlib") or code.co_filename == _WEAKREF:
            return True
        frame = frame.f_back
    return False


_WEAKREF = os.path.join(os.path.dirname(os.__file__), "weakref.py")


def _unraisable(lost: sys.UnraisableHookArgs) -> None:
    """An interrupt that was raised where nobody can catch it is raised again."""
    if not (_Heard.number and isinstance(lost.exc_value, KeyboardInterrupt)):
        sys.__unraisablehook__(lost)
    elif _Heard.depth:
        _Heard.raised = False
        signal.setitimer(signal.ITIMER_REAL, AGAIN_S)


def _leave() -> None:
    """End this process now."""
    if not _Heard.is_said:
        with suppress(OSError):
            os.write(2, f"{LINE}\n".encode())  # and not print, which may be under way
    with suppress(BaseException):  # closed, full, in the middle of a write: whatever it is, the process ends
        sys.stdout.flush()
    os._exit(exit_code())


def _leave_at_the_end() -> None:
    """End without the interpreter's own last steps, which no Python handler covers: all that matters is flushed and closed by now."""
    if _Heard.exit_code is None:
        return
    for stream in (sys.stdout, sys.stderr):
        with suppress(Exception):
            stream.flush()
    os._exit(_Heard.exit_code)


@contextmanager
def interrupts_held() -> Iterator[None]:
    """A Ctrl-C (SIGINT) inside becomes a KeyboardInterrupt when the block has ended; a second one does at once.

    Only in the main thread, which alone hears signals, and only where Python's own handler is installed.
    """
    import threading

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
