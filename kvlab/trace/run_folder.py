"""A run's folder: config, environment, status, summary and log. Files are written atomically: a killed run leaves no halves."""

from __future__ import annotations

import functools
import importlib.metadata
import json
import logging
import os
import platform
import socket
import subprocess
import sys
import traceback
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from kvlab.trace.store import atomic, disk_error, write_json, write_text
from kvlab.types import UserError

PACKAGES = ("kvlab", "torch", "triton", "transformers", "safetensors", "hydra-core", "numpy", "pandas", "pyarrow")
TRACEBACK_LINES = 40
RESERVE = ".reserve"
"""A file of 64 KiB that shows at the start that the folder can be written, and at the end makes room for the status on a full disk."""
MARK = ".kvlab-run"
"""An empty file that says whose a folder is, before anything else is written."""


class RunFolder:
    """Writes the small files of one run.

    `status.json`: state ("running", "finished", "failed", "interrupted", "pruned"), start and end (UTC), process, and on failure the
    error with the end of its traceback. A pruned run was ended early on purpose (`kvlab.pruning`): neither a result nor a failure.
    `config.yaml`, `env.json`, `summary.json`, `run.log` beside it; the recorder adds the tables.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._status: dict[str, Any] = {}

    @classmethod
    def create(cls, path: Path | str) -> RunFolder:
        """Make a new folder at `path`, or beside it with -2, -3, ... if there is a run or anything else in it already.

        An existing folder that is empty, or holds nothing but hidden entries and logs (Hydra makes such), is taken as it is.
        Raises UserError, naming the path, when it can't be made or written.
        """
        wanted = Path(path)
        try:
            for number in range(1, 1_000_000):
                folder = wanted if number == 1 else wanted.with_name(f"{wanted.name}-{number}")
                if _claim(folder):
                    return cls(folder)
        except OSError as error:
            raise disk_error(wanted, error) from error
        raise UserError(f"{wanted} and its numbered neighbours are all taken. Choose another run folder.")

    def start(self, config_yaml: str, device: str = "", backend: str | None = None, **more: Any) -> None:
        """Write config, environment (with the `backend` of a real model's kernels) and a status of "running". `more` goes into
        status.json (e.g. identity="...").

        May be called again when more is known; the time of the start stays.
        """
        write_text(self.path / "config.yaml", config_yaml)
        write_json(self.path / "env.json", environment(device) | {"backend": backend})
        self._status = {
            "state": "running", "started": self._status.get("started", _now()), "finished": None,
            "pid": os.getpid(), "process_start": process_start(os.getpid()), "host": socket.gethostname(), **more,
        }  # fmt: skip
        self._write_status()

    def finish(self, summary: dict[str, Any]) -> None:
        """Write the summary, then the status "finished"."""
        write_json(self.path / "summary.json", summary)
        self._end("finished", None)

    def prune(self, why: BaseException, summary: dict[str, Any] | None = None) -> None:
        """Write the status "pruned" with the reason, and what can be summed up so far; as `fail` does."""
        self._fail("pruned", why, summary, traceback_lines=0)

    def fail(self, error: BaseException, summary: dict[str, Any] | None = None) -> None:
        """Write the status "failed" ("interrupted" for KeyboardInterrupt) with the error, and what can be summed up so far.

        Never raises because of the disk: the error that brought us here matters more.
        """
        if self._says_finished():  # Ctrl-C after the last word: the result stays one
            return
        self._fail("interrupted" if isinstance(error, KeyboardInterrupt) else "failed", error, summary, TRACEBACK_LINES)

    def _fail(self, state: str, error: BaseException, summary: dict[str, Any] | None, traceback_lines: int) -> None:
        lines = "".join(traceback.format_exception(error)).splitlines()[-traceback_lines:] if traceback_lines else []
        message = "; ".join(filter(None, [str(error), *getattr(error, "__notes__", ())]))
        described = {"type": type(error).__name__, "message": message, "traceback": "\n".join(lines)}
        try:
            self._end(state, described)  # first: the disk may be full
            if summary is not None:
                write_json(self.path / "summary.json", summary)
        except UserError as disk:
            logging.getLogger(__name__).error("%s", disk)

    def log_handler(self) -> logging.Handler:
        """A handler that appends to `run.log`; add it to the logger of the run and remove it at its end."""
        handler = logging.FileHandler(self.path / "run.log", encoding="utf-8", errors="backslashreplace")
        handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
        return handler

    def _end(self, state: str, error: dict[str, str] | None) -> None:
        with suppress(OSError):
            (self.path / RESERVE).unlink(missing_ok=True)  # makes room for the last words
        self._status.update(state=state, finished=_now(), error=error)
        self._write_status()

    def _says_finished(self) -> bool:
        """Whether the file says so: an interrupt may come between writing it and noting that it is written."""
        try:
            return bool(read_json(self.path / "status.json")["state"] == "finished")
        except (OSError, ValueError, TypeError, KeyError):
            return False

    def _write_status(self) -> None:
        write_json(self.path / "status.json", self._status)


def _claim(folder: Path) -> bool:
    """Take a folder for a run: True if it is ours now. Two processes never get the same one."""
    folder.mkdir(parents=True, exist_ok=True)
    if any(not (p.name.startswith(".") or p.suffix == ".log") for p in folder.iterdir()):
        return False
    try:
        (folder / MARK).touch(exist_ok=False)
    except FileExistsError:
        return False
    with atomic(folder / RESERVE) as file:
        file.write(bytes(1 << 16))
    return True


def environment(device: str = "") -> dict[str, Any]:
    """What the run ran on: versions, processor, device, git commit of kvlab's checkout (null outside one)."""
    torch = sys.modules.get("torch")  # never imported for this alone
    return {
        "versions": dict(_versions()), "python": platform.python_version(), "platform": platform.platform(), "cpu": cpu_name(),
        "num_cpus": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "num_threads": torch.get_num_threads() if torch is not None else None, "device": device or "cpu", **git_state(),
    }  # fmt: skip


@functools.cache
def _versions() -> dict[str, str | None]:
    """Versions of the packages that matter; None for one that isn't installed."""
    versions: dict[str, str | None] = {}
    for package in PACKAGES:
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            versions[package] = None
    return versions


def cpu_name() -> str:
    """The processor's name as the system tells it."""
    try:
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def git_state() -> dict[str, Any]:
    """Commit of the checkout that holds this module, and whether tracked files differ; nulls where there is none, or no git."""
    root = Path(__file__).resolve().parents[2]
    nothing: dict[str, Any] = {"git_commit": None, "git_dirty": None}
    if not (root / ".git").exists():
        return nothing
    try:
        commit = subprocess.run(["git", "rev-parse", "HEAD"], cwd=root, capture_output=True, timeout=10)
        dirty = subprocess.run(["git", "status", "--porcelain", "-uno"], cwd=root, capture_output=True, timeout=10)
    except (OSError, subprocess.TimeoutExpired):
        return nothing
    if commit.returncode or dirty.returncode:
        return nothing
    return {"git_commit": commit.stdout.decode().strip(), "git_dirty": bool(dirty.stdout.strip())}


def process_start(pid: int) -> str | None:
    """When a process started, in ticks since boot: with its id it names one process. None where that can't be told."""
    fields = _proc_stat(pid)
    return fields[19] if len(fields) > 19 else None


def _proc_stat(pid: int) -> list[str]:
    """What Linux says of a process after its name: state, parent ...; empty where it says nothing."""
    try:
        return Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace").rsplit(")", 1)[1].split()
    except (OSError, IndexError):
        return []


def is_alive(status: dict[str, Any]) -> bool:
    """Whether the process of a "running" status still runs. One on another host is believed; one that has ended and whose parent doesn't
    ask for its exit status (a zombie: killed from a script, or in a container without an init) does not run."""
    pid = status.get("pid")
    if status.get("host") != socket.gethostname() or not isinstance(pid, int):
        return status.get("host") not in (None, socket.gethostname())
    try:
        os.kill(pid, 0)
    except PermissionError:
        pass
    except (OSError, OverflowError):
        return False
    if _proc_stat(pid)[:1] in (["Z"], ["X"]):
        return False
    return status.get("process_start") in (None, process_start(pid))


def read_json(path: Path) -> Any:
    """A JSON file's value. Raises OSError or ValueError."""
    return json.loads(path.read_text(encoding="utf-8"))


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="milliseconds")
