"""A worker process of a sweep: reads packed points from stdin, answers on what was stdout.

Each message is a length (8 bytes, big-endian) and as many bytes. It ends when stdin does: no worker outlives its sweep's process by
more than a point.
"""

from __future__ import annotations

import os
import pickle
import signal
import struct
import subprocess
import sys
from typing import IO

from kvlab.sweep_attempt import Attempt
from kvlab.types import UserError

INTERRUPTED = ("exit code 130", "signal 2, SIGINT")
"""How a worker ends that heard Ctrl-C: in a run, or while it was starting."""
START = """
import signal
signal.signal(signal.SIGINT, signal.SIG_DFL)  # until everything is imported: no traceback of that
from kvlab.sweep_worker import main
signal.signal(signal.SIGINT, signal.default_int_handler)
raise SystemExit(main())
"""
_LENGTH = struct.Struct(">Q")


def send(pipe: IO[bytes], message: bytes) -> None:
    """Write one message."""
    pipe.write(_LENGTH.pack(len(message)) + message)
    pipe.flush()


def receive(pipe: IO[bytes]) -> bytes | None:
    """Read one message; None at the end."""
    head = pipe.read(_LENGTH.size)
    if len(head) < _LENGTH.size:
        return None
    body = pipe.read(_LENGTH.unpack(head)[0])
    return body if len(body) == _LENGTH.unpack(head)[0] else None


class Worker:
    """A worker process, seen from the sweep's; started at the first point, and again after it has died."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None

    def run(self, payload: bytes) -> Attempt | str:
        """Run a packed point; returns how the process ended ("signal 9, SIGKILL", "exit code 1") where it died of it."""
        process = self._process or self._start()
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            send(process.stdin, payload)
            answer = receive(process.stdout)
        except BrokenPipeError:
            answer = None
        if answer is not None:
            done: Attempt = pickle.loads(answer)
            return done
        self._process = None
        return _how_it_ended(process.wait())

    def _start(self) -> subprocess.Popen[bytes]:
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path or os.getcwd() for path in sys.path)}
        try:
            # In a group of its own: a terminal's Ctrl-C is the sweep's to pass on, once. A second one would cut off what the first writes.
            self._process = subprocess.Popen(
                [sys.executable, "-c", START], stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment, process_group=0
            )
        except OSError as error:
            raise UserError(f"No process for a run could be started: {error}. Run fewer at once (jobs).") from error
        return self._process

    def interrupt(self) -> None:
        """Let a run end as by Ctrl-C, which leaves its folder readable; `end` waits for it."""
        if (process := self._process) is not None:
            process.send_signal(signal.SIGINT)

    def end(self, patience_s: float = 20) -> None:
        """Wait for a process that was interrupted; at last end it by force."""
        process, self._process = self._process, None
        if process is None:
            return
        try:
            process.wait(patience_s)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()

    def close(self) -> None:
        """End the process after its point."""
        process, self._process = self._process, None
        if process is not None and process.stdin is not None:
            process.stdin.close()
            process.wait()
            if process.stdout is not None:
                process.stdout.close()


def _how_it_ended(code: int) -> str:
    if code >= 0:
        return f"exit code {code}"
    try:
        return f"signal {-code}, {signal.Signals(-code).name}"
    except ValueError:
        return f"signal {-code}"


def main() -> int:
    """Serve until stdin ends."""
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "wb")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # what policies print must not get among the answers
    try:
        from kvlab.sweep_payload import run_packed

        while (payload := receive(sys.stdin.buffer)) is not None:
            send(answers, pickle.dumps(run_packed(payload)))
    except (KeyboardInterrupt, BrokenPipeError):
        return 130
    return 0
