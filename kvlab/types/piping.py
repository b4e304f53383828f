"""The end of a command line whose reader may have gone away."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable

BROKEN_PIPE = 141
"""What a shell reports for a program that SIGPIPE ended."""


def exit_code(main: Callable[[], int | None]) -> int:
    """Run `main` and write out what it printed. A reader that has seen enough (`| head`) ends it without a word."""
    try:
        code = main() or 0
        sys.stdout.flush()
        return code
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # what is still in the buffer goes nowhere
        return BROKEN_PIPE
