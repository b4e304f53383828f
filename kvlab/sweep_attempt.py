"""One attempt at one point of a sweep, in whatever process it runs: claimed, looked at, run, noted. Its folder says how it went."""

from __future__ import annotations

import errno
import gc
import logging
import sys
import time
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from kvlab.running import run
from kvlab.sweep_folder import SweepFolder
from kvlab.sweep_points import Point
from kvlab.sweep_shared import bring_back, share
from kvlab.trace.run_folder import read_json
from kvlab.trace.store import write_json
from kvlab.types import Listener, UserError

FINISHED, FAILED, KEPT, HELD, STOPPED, NO_SPACE = "finished", "failed", "kept", "held", "stopped", "no space"

_log = logging.getLogger(__name__)


class Attempt(NamedTuple):
    """What came of it: "finished"; "failed" (`error` says why, the folder has the traceback); "kept" (an earlier run had finished);
    "held" (another process works on it); "stopped" (the sweep was stopped before); "no space" (the disk is full)."""

    number: int
    state: str
    seconds: float = 0.0
    error: str = ""


def attempt(root: Path, point: Point, *, progress: bool = False, listeners: Sequence[Listener] = ()) -> Attempt:
    """Run a point unless it is finished, another process has it, or the sweep has been stopped.

    Raises only what ends a process (KeyboardInterrupt, SystemExit); the point's folder is readable then too.
    """
    sweep = SweepFolder(root)
    if sweep.stopped() is not None:
        return Attempt(point.number, STOPPED, error=sweep.stopped() or "")
    try:
        with sweep.claim(str(point.number)) as ours:
            if not ours:
                return Attempt(point.number, HELD, error=sweep.holder(str(point.number)))
            if point.comparable and (sweep.is_finished(point.number) or bring_back(sweep, point)):
                share(sweep, point)  # one that was cut off before it was uploaded
                return Attempt(point.number, KEPT)
            done = _run(sweep, point, progress, listeners)
            share(sweep, point)
    except UserError as error:  # the folder itself: full, foreign, not writable
        done = Attempt(point.number, NO_SPACE if is_full_disk(error) else FAILED, error=str(error))
    return _noted(sweep, point, done)


def _noted(sweep: SweepFolder, point: Point, done: Attempt) -> Attempt:
    """An attempt in the journal; one that failed ends a sweep with on_error=stop, a full disk any."""
    sweep.note({"label": point.label, **done._asdict()})
    if done.state == NO_SPACE:
        sweep.stop(done.error)
    if done.state == FAILED and sweep.stops_on_error:
        sweep.stop(f"point {point.number} ({point.label}) failed, and on_error=stop")
    return done


def _run(sweep: SweepFolder, point: Point, progress: bool, listeners: Sequence[Listener]) -> Attempt:
    start = time.perf_counter()
    sweep.set_aside(point.number)
    state, message = FINISHED, ""
    try:
        folder = sweep.folder(point.number)
        run(dict(point.config), folder=folder, name=point.label, progress=progress, listeners=listeners, **point.policies)
    except Exception as error:
        state = NO_SPACE if is_full_disk(error) else FAILED
        message = str(error) if state == NO_SPACE else f"{type(error).__name__}: {error}".removesuffix(": ")
        traceback.clear_frames(error.__traceback__)  # a failed engine's tensors hang on them
        _log.info("point %d (%s): %s", point.number, point.label, message)
    finally:
        if state != FINISHED or "simulated" not in str(point.config["runner"]):  # which holds no tensors; a collection takes as long
            give_back_memory()
    return Attempt(point.number, state, time.perf_counter() - start, message)


def give_back_memory() -> None:
    """What a run's engine held goes back to the system (pools are large); loaded models stay."""
    gc.collect()
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_available() and torch.cuda.is_initialized():
        torch.cuda.empty_cache()


def is_full_disk(error: BaseException | None) -> bool:
    """Whether an error came of a disk (or quota) that is full: the next point would meet it too."""
    while error is not None:
        if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
            return True
        error = error.__cause__
    return False


def note_death(root: Path, point: Point, how: str) -> Attempt:
    """A point whose process was ended from outside: its folder gets the status that the process could not write."""
    sweep = SweepFolder(root)
    folder = sweep.folder(point.number)
    message = f"Its process ended without a word ({how})."
    if how.endswith("SIGKILL"):
        message += " Often that is the system's out-of-memory killer: give the point less to hold, or run fewer jobs at once."
    error = {"type": "ProcessDied", "message": message, "traceback": ""}
    status: dict[str, Any] = {}
    try:
        status = dict(read_json(folder / "status.json"))
    except (OSError, ValueError, TypeError):
        folder.mkdir(parents=True, exist_ok=True)
    if status.get("state") == "finished":  # it died after its run, before it could say so
        return Attempt(point.number, KEPT)
    write_json(folder / "status.json", {**status, "state": "failed", "error": error})
    return _noted(sweep, point, Attempt(point.number, FAILED, error=f"ProcessDied: {message}"))
