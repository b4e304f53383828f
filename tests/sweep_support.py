"""Small simulated sweeps for tests, and processes that are forked from the test so that they start at once."""

from __future__ import annotations

import multiprocessing
import os
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
