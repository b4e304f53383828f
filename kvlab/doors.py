"""Commands: what every door (`python -m kvlab.X`, the script `kvlab`) does before its own work and after it.

Ctrl-C is one line and exit code 130 (kvlab.interrupts). What is printed can be printed: characters that a stream's encoding lacks are
written as escapes, and so are control characters, which would drive the terminal. A stream that is closed takes what it is given; one that
can't be written (a full disk) is said in a sentence, exit code 2; a reader that has seen enough (`| head`) ends the command, code 141.
"""

from __future__ import annotations

import io
import os
import sys
from collections.abc import Callable

from kvlab import interrupts

BROKEN_PIPE = 141
"""What a shell reports for a program that SIGPIPE ended."""
USER_ERROR = 2

_HIDDEN = (*range(0x20), *range(0x7F, 0xA0), 0x61C, 0x200E, 0x200F, *range(0x2028, 0x202F), *range(0x2066, 0x206A))
_ESCAPES = {code: f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}" for code in _HIDDEN}
_KEPT = {ord(character): character for character in "\n\t"}
_KEPT_BY_BARS = _KEPT | {ord("\r"): "\r"}
"""What a progress bar draws itself with."""


def printable(text: str) -> str:
    """Text for one line of a terminal: control characters and those that turn the direction of writing as escapes, line ends too."""
    return text.translate(_ESCAPES)


class _Stream(io.TextIOWrapper):
    """stdout or stderr of a command; writes go to the descriptor of the stream it stands for."""

    def __init__(self, stream: io.TextIOWrapper, kept: dict[int, str]) -> None:
        super().__init__(stream.buffer, stream.encoding, "backslashreplace", line_buffering=stream.line_buffering)
        self._escapes = _ESCAPES | kept
        self._original = stream  # closes the buffer when it is collected

    def write(self, text: str) -> int:
        """As any stream."""
        try:
            super().write(text.translate(self._escapes))
        except OSError as error:
            self._give_up(error)
        return len(text)

    def flush(self) -> None:
        """As any stream."""
        try:
            super().flush()
        except OSError as error:
            self._give_up(error)

    def _give_up(self, error: OSError) -> None:
        """What is left in the buffer, and what is to come, goes nowhere. Of stdout that is said; of stderr there is no way to say it."""
        os.dup2(os.open(os.devnull, os.O_WRONLY), self.fileno())
        if self.fileno() != 1:
            return
        if isinstance(error, BrokenPipeError):
            raise error
        from kvlab.types import UserError

        raise UserError(f"What is printed can't be written to standard output: {error.strerror or error}.") from error


def enter() -> None:
    """The first thing a command does, before it imports what takes time."""
    interrupts.leave_on_interrupt()
    for descriptor, flags in ((0, os.O_RDONLY), (1, os.O_WRONLY), (2, os.O_WRONLY)):
        try:
            os.fstat(descriptor)
        except OSError:  # closed: the next file to be opened would be taken for the terminal
            os.open(os.devnull, flags)


def exit_code(main: Callable[[], int | None]) -> int:
    """Run a door's `main`; returns what the process is to end with, when everything that was printed is written."""
    enter()
    streams = sys.stdout, sys.stderr
    sys.stdout, sys.stderr = _stream(sys.stdout, 1, _KEPT), _stream(sys.stderr, 2, _KEPT_BY_BARS)
    try:
        code = _code_of(main)
    except BaseException:
        if not interrupts.interrupted_by():
            sys.stdout, sys.stderr = streams  # for the traceback of a fault of kvlab
            raise
        code = interrupts.exit_code()
    if interrupts.interrupted_by():
        interrupts.say()
        code = interrupts.exit_code()
    interrupts.over(code)
    return code


def _code_of(main: Callable[[], int | None]) -> int:
    from kvlab.types import KvlabError

    try:
        code = main() or 0
        sys.stdout.flush()
    except BrokenPipeError:
        return BROKEN_PIPE
    except KvlabError as error:
        print(f"kvlab: {error}", file=sys.stderr)
        return USER_ERROR
    except SystemExit as end:  # of an argument parser
        if isinstance(end.code, str):
            print(end.code, file=sys.stderr)
        code = end.code if isinstance(end.code, int) else 0 if end.code is None else 1
        sys.stdout.flush()
    return code


def _stream(stream: object, descriptor: int, kept: dict[int, str]) -> io.TextIOWrapper:
    """The stream that a command prints to; nowhere if Python has found it closed."""
    if isinstance(stream, io.TextIOWrapper):
        return _Stream(stream, kept)
    return open(descriptor, "w", encoding="utf-8", errors="backslashreplace", closefd=False)
