"""Sweeps at the system's own limits, nothing pretended: an address space that ends, a disk that is full, a file that may not grow.

Each sweep is a forked process's, so that the limits are its own.
"""

from __future__ import annotations

import json
import os
import resource
from pathlib import Path
from typing import Any

import pytest
from sweep_support import in_child, sweep

import kvlab
from kvlab import sweep_folder
from kvlab.policies.eviction.fifo import Fifo
from kvlab.types import UserError

MIB = 1 << 20


@pytest.fixture(autouse=True)
def _in_scratch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    digests = sweep_folder.code_digests()
    monkeypatch.setattr(sweep_folder, "code_digests", lambda: digests)


def limited(limit: int, most: int, target: Any, *args: Any, **more: Any) -> int | None:
    """Exit code of a process that may have no more than `most` of what `limit` counts."""

    def work() -> None:
        resource.setrlimit(limit, (most, most))
        target(*args, **more)

    child = in_child(work)
    child.join(120)
    return child.exitcode


def address_space_bytes() -> int:
    return int(Path("/proc/self/statm").read_text(encoding="utf-8").split()[0]) * resource.getpagesize()


class Hungry(Fifo):
    """Wants a gigabyte that the process may not have."""

    def reset(self) -> None:
        super().reset()
        self.hoard = bytearray(1024 * MIB)


def test_a_point_without_memory_costs_itself_only(tmp_path: Path) -> None:
    """Python's own memory by a policy, torch's by a pool of KV blocks that the process may not have."""
    grid: dict[str, list[Any]] = {"eviction": ["lru", Hungry(), "fifo"]}
    assert limited(resource.RLIMIT_AS, address_space_bytes() + 512 * MIB, sweep, tmp_path / "s", grid) == 0
    runs = kvlab.load_runs(tmp_path / "s")
    assert [run.state for run in runs] == ["finished", "failed", "finished"]
    assert runs[1].status["error"]["type"] == "MemoryError"
    assert str(runs[1].error).startswith("MemoryError: the process got no more memory: give the run a smaller pool or less to record")
    assert "raised in the eviction policy Hungry" in str(runs[1].error)
    assert "self.hoard = bytearray" in runs[1].status["error"]["traceback"]
    real = ["runner=torch", "backend=torch", "device=cpu"]
    grid = {"block_size": [16, 60_000, 8]}  # 1.2 GB: more than the limit leaves, less than any machine has free
    assert limited(resource.RLIMIT_AS, address_space_bytes() + 512 * MIB, sweep, tmp_path / "t", grid, "num_blocks=40", *real) == 0
    runs = kvlab.load_runs(tmp_path / "t")
    assert [run.state for run in runs] == ["finished", "failed", "finished"]
    assert "you tried to allocate" in str(runs[1].error)


def test_a_disk_that_is_full_ends_the_sweep_and_is_named(tmp_path: Path) -> None:
    """The third point's first file is written to /dev/full, which is always full, even for root; what is there stays, resuming goes on."""
    folder, grid = tmp_path / "s", {"num_blocks": [40, 41, 42, 43]}

    def work() -> None:
        (folder / "2").mkdir(parents=True)
        full = folder / "2" / f".reserve.{os.getpid()}.tmp"
        full.symlink_to("/dev/full")
        try:
            sweep(folder, grid)
        except UserError as error:
            (tmp_path / "said").write_text(str(error), encoding="utf-8")

    child = in_child(work)
    child.join(120)
    assert child.exitcode == 0
    assert (tmp_path / "said").read_text(encoding="utf-8") == (
        f"No space left to write {folder}/2/.reserve (No space left on device). Free some, or choose another run folder. "
        "1 points were left; resume=true goes on with them."
    )
    assert [json.loads((folder / str(n) / "status.json").read_text(encoding="utf-8"))["state"] for n in (0, 1)] == ["finished"] * 2
    assert not (folder / "3").exists()
    assert [run.state for run in sweep(folder, grid, resume=True)] == ["finished"] * 4


def test_a_file_that_may_not_grow_costs_its_own_run_and_keeps_it_readable(tmp_path: Path) -> None:
    """Files end at 100 kB: the table of a long run's steps does not fit, those of short ones do."""
    grid = {"workload.output_len": [4, 6000, 5]}
    words = ["workload.num_requests=1", "num_blocks=400"]
    assert limited(resource.RLIMIT_FSIZE, 100_000, sweep, tmp_path / "s", grid, *words) == 0
    runs = kvlab.load_runs(tmp_path / "s")
    assert [run.state for run in runs] == ["finished", "failed", "finished"]
    assert "No space left to write" in str(runs[1].error)
    assert "(File too large). Free some, or choose another run folder." in str(runs[1].error)
