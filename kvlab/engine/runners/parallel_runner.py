"""Tensor parallelism: one process decides, as many others as there are ranks carry out the same plans on their parts of the model.

The main process holds no weights. It pickles each plan once and sends it to every rank; the ranks sample alike, as each has all logits, and
rank 0's outcome counts. Plans may be sent ahead (depth 1): ranks work through them in order.
A rank that fails, dies or stays silent ends the run: the others are killed, and the error holds its traceback.
"""

from __future__ import annotations

import os
import pickle
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from multiprocessing import Pipe
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

from kvlab.engine.runners.base import DeviceMemory, RunnerConfig
from kvlab.engine.runners.memory import Limits
from kvlab.engine.runners.parallel_worker import About, Failure, Job
from kvlab.model.loading import ModelSpec
from kvlab.types import Outcome, Plan, UserError

TIMEOUT_S = 600.0
"""How long a rank may take for its start or for a step."""


class ParallelRunner:
    """A runner whose model is shared by `size` processes.

    Args:
        spec: the model; it must be picklable. size: ranks. dtype, device: as on the command line ("cpu", "cuda"); backend likewise.
        num_threads: torch threads of all ranks together, on a CPU. graph_sizes: see `CudaRunner`.
        timeout_s: for a rank's start and for each of its answers.

    Raises:
        UserError: whatever loading raises on a rank.
        RuntimeError: a rank failed, died or stayed silent.
    """

    def __init__(self, spec: ModelSpec, size: int, dtype: str = "auto", device: str = "cpu", backend: str = "auto",
                 num_threads: int | None = None, graph_sizes: Sequence[int] | None = None,
                 timeout_s: float = TIMEOUT_S) -> None:  # fmt: skip
        self.size = size
        self._timeout_s = timeout_s
        self._folder = tempfile.mkdtemp(prefix="kvlab-ranks-")
        self._connections: list[Connection] = []
        self._processes: list[subprocess.Popen[bytes]] = []
        self._kv_bytes, self._memory = 0, None
        self._waiting: list[_Step] = []
        try:
            for rank in range(size):
                self._start(rank)
            threads = None if num_threads is None else max(1, num_threads // size)
            for rank, connection in enumerate(self._connections):
                connection.send(Job(rank, size, spec, dtype, device, backend, threads, str(Path(self._folder) / "meeting"), timeout_s,
                                    None if graph_sizes is None else tuple(graph_sizes)))  # fmt: skip
            self.about: About = self._answers()[0]
        except BaseException:
            self._kill()
            raise

    def _start(self, rank: int) -> None:
        ours, theirs = Pipe()
        paths = os.pathsep.join(path or os.getcwd() for path in sys.path)
        command = [sys.executable, "-m", "kvlab.engine.runners.parallel_worker", str(theirs.fileno())]
        self._processes.append(subprocess.Popen(command, pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL, process_group=0,
                                                env={**os.environ, "PYTHONPATH": paths}))  # fmt: skip
        self._connections.append(ours)
        theirs.close()

    # ----------------------------------------------------------------- messages

    def _send(self, what: str, argument: Any = None) -> None:
        message = pickle.dumps((what, argument), pickle.HIGHEST_PROTOCOL)
        for rank, connection in enumerate(self._connections):
            try:
                connection.send_bytes(message)
            except OSError:
                self._fail(f"rank {rank} is gone ({self._how_it_ended(rank)})")
        if not self._connections:
            raise RuntimeError("The ranks of this runner have been ended.")

    def _answers(self) -> list[Any]:
        """One answer of each rank, in order; whoever fails first is heard first."""
        found: dict[int, Any] = {}
        until = time.monotonic() + self._timeout_s
        while len(found) < len(self._connections):
            missing = {connection: rank for rank, connection in enumerate(self._connections) if rank not in found}
            ready = wait(list(missing), max(0.0, until - time.monotonic()))
            if not ready:
                self._fail(f"rank {min(missing.values())} has not answered for {self._timeout_s:g} s")
            for connection in ready:
                rank = missing[connection]  # type: ignore[index]
                try:
                    answer = self._connections[rank].recv()
                except (EOFError, OSError):
                    self._fail(f"rank {rank} is gone ({self._how_it_ended(rank)})")
                if isinstance(answer, Failure):
                    self._fail(f"rank {rank} failed", answer)
                found[rank] = answer
        return [found[rank] for rank in range(len(found))]

    def _how_it_ended(self, rank: int) -> str:
        try:
            return f"exit code {self._processes[rank].wait(5)}"
        except subprocess.TimeoutExpired:
            return "its connection is closed"

    def _fail(self, what: str, failure: Failure | None = None) -> None:
        self._kill()
        if failure is not None and isinstance(failure.error, UserError):
            raise failure.error
        error = RuntimeError(f"Tensor parallelism: {what}; the other ranks were ended.")
        if failure is not None:
            error.add_note(f"Traceback of the rank:\n{failure.text}")
            raise error from failure.error
        raise error

    def _kill(self) -> None:
        for connection in self._connections:
            connection.close()
        for process in self._processes:
            if process.poll() is None:
                process.kill()
            process.wait()
        self._connections, self._processes = [], []
        shutil.rmtree(self._folder, ignore_errors=True)

    # ------------------------------------------------------------------- a runner

    @property
    def kv_bytes_allocated(self) -> int:
        """Bytes of one rank's KV tensors."""
        return self._kv_bytes

    def kv_budget(self, limits: Limits) -> int:
        """Bytes for each rank's gpu tier: the least over ranks."""
        self._send("kv_budget", limits)
        return int(self._answers()[0])

    def initialize(self, config: RunnerConfig) -> None:
        """Every rank allocates for these sizes."""
        self._land_all()
        self._send("initialize", config)
        self._answers()
        self._send("memory")
        self._kv_bytes, self._memory = self._answers()[0]

    def submit(self, plan: Plan) -> _Step:
        """Send a plan to every rank."""
        self._send("submit", plan)
        step = _Step(self)
        self._waiting.append(step)
        return step

    def land(self, step: _Step) -> None:
        """Wait for the steps up to this one."""
        while step in self._waiting:
            first = self._waiting.pop(0)
            first.outcome = self._answers()[0]

    def _land_all(self) -> None:
        if self._waiting:
            self.land(self._waiting[-1])

    def device_memory(self) -> DeviceMemory | None:
        """Rank 0's, after its tensors were allocated; None on a CPU."""
        return self._memory

    def close(self) -> None:
        """End the ranks. The runner can't be initialised again."""
        self._kill()

    def __del__(self) -> None:
        if getattr(self, "_processes", None):
            self._kill()


class _Step:
    """A step on its way through the ranks."""

    def __init__(self, runner: ParallelRunner) -> None:
        self.outcome: Outcome | None = None
        self._runner = runner

    def result(self) -> Outcome:
        """Wait for it."""
        self._runner.land(self)
        if self.outcome is None:
            raise RuntimeError("This step was given up: a rank failed, or the runner was closed.")
        return self.outcome
