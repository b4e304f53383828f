"""Small simulated sweeps for tests, and processes that are forked from the test so that they start at once."""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import kvlab
from kvlab.results import Runs

SIMULATED = [
    "model=tiny", "threads=1", "runner=simulated", "workload=synthetic", "workload.num_requests=4", "workload.arrivals.kind=all_at_once",
    "workload.prompt_len=24", "workload.output_len=4",
]  # fmt: skip
FORTY = {"num_blocks": list(range(40, 48)), "watermark": [0, 0.01, 0.02, 0.05, 0.1]}


def sweep(folder: Path, grid: dict[str, list[Any]] | None = None, *words: str, **more: Any) -> Runs:
    """A sweep of simulated points."""
    return kvlab.sweep(grid or FORTY, *SIMULATED, *words, folder=folder, progress=False, **more)


def in_child(target: Any, *args: Any, **kwargs: Any) -> multiprocessing.process.BaseProcess:
    """A forked process: it has everything imported already, and is in no pytest."""
    process = multiprocessing.get_context("fork").Process(target=_quietly, args=(target, args, kwargs))
    process.start()
    return process


def _quietly(target: Any, args: Any, kwargs: Any) -> None:
    code = 1
    try:
        target(*args, **kwargs)
        code = 0
    finally:
        os._exit(code)


def interrupted(folder: Path, words: list[str], whole_group: bool, after: int = 1) -> tuple[int, str]:
    """(exit code, stderr) of `python -m kvlab.experiment WORDS` that hears SIGINT while a point runs, when `after` points have finished.

    whole_group: as a terminal's Ctrl-C, which all processes of the group hear; else the first process alone.
    """
    process = subprocess.Popen(
        [sys.executable, "-m", "kvlab.experiment", *words], start_new_session=True, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}, encoding="utf-8",
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),  # a shell's background jobs inherit that it is ignored
    )  # fmt: skip
    deadline = time.monotonic() + 300
    while process.poll() is None and time.monotonic() < deadline:
        found = states(folder)
        if found.count("finished") >= after and "running" in found:
            break
        time.sleep(0.005)
    (os.killpg if whole_group else os.kill)(process.pid, signal.SIGINT)
    try:
        _, err = process.communicate(timeout=120)
    finally:
        process.kill()
    return process.returncode, err


def states(folder: Path) -> list[str]:
    """What the status.json of each of a sweep's points says."""
    return [json.loads(path.read_text(encoding="utf-8"))["state"] for path in folder.glob("*/status.json")]
