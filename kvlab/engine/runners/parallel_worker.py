"""One tensor-parallel rank: a process that owns its part of the weights and of the KV pool and carries out the plans it is sent.

Started by `kvlab.engine.runners.parallel_runner`; it ends when its connection does.
"""

from __future__ import annotations

import os
import sys
import traceback
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

import torch

from kvlab.engine.runners.backends import make_backend
from kvlab.engine.runners.communicator import TorchCommunicator
from kvlab.engine.runners.cuda_runner import real_runner
from kvlab.engine.runners.memory import Limits
from kvlab.model.loading import ModelSpec, load_model
from kvlab.model.parallel import Shard
from kvlab.types import Plan


@dataclass(frozen=True)
class Job:
    """What a worker must know at its start. `device`: "cpu", or "cuda": then rank r has device r."""

    rank: int
    size: int
    spec: ModelSpec
    dtype: str
    device: str
    backend: str
    num_threads: int | None
    meeting_point: str
    timeout_s: float
    graph_sizes: tuple[int, ...] | None = None


@dataclass(frozen=True)
class About:
    """What the main process wants to know of a loaded model."""

    dtype: str
    device: str
    checksum: str


@dataclass(frozen=True)
class Failure:
    """A worker's exception: as it was, where it can be pickled, and its traceback in words."""

    error: BaseException | None
    text: str


class Worker:
    """A rank's model and runner. Each public method answers a message of its name."""

    def __init__(self, job: Job) -> None:
        if job.num_threads is not None:
            torch.set_num_threads(job.num_threads)
        self._device = torch.device("cuda", job.rank) if job.device == "cuda" else torch.device("cpu")
        if self._device.type == "cuda":
            torch.cuda.set_device(self._device)
        backend = make_backend(job.backend, self._device)
        self.comm = TorchCommunicator(job.rank, job.size, self._device, job.meeting_point, job.timeout_s)
        loaded = load_model(job.spec, job.dtype, self._device, Shard(job.rank, job.size, self.comm))
        self.runner = real_runner(loaded, backend, job.graph_sizes)
        name = torch.cuda.get_device_name(self._device) if self._device.type == "cuda" else "cpu"
        self.about = About(str(loaded.model.dtype).removeprefix("torch."), f"{job.size} x {name}", loaded.checksum)

    def kv_budget(self, limits: Limits) -> int:
        """The least of all ranks. Processes on one CPU share its memory."""
        budget = self.runner.kv_budget(limits)
        return self.comm.least(budget if self._device.type == "cuda" else budget // self._size(), self._device)

    def _size(self) -> int:
        return torch.distributed.get_world_size()

    def answer(self, what: str, argument: Any) -> Any:
        """What the main process asked for."""
        if what == "submit":
            plan: Plan = argument
            return self.runner.submit(plan).result()
        if what == "initialize":
            return self.runner.initialize(argument)
        if what == "kv_budget":
            return self.kv_budget(argument)
        if what == "memory":
            return self.runner.kv_bytes_allocated, self.runner.device_memory()
        assert what == "release"
        return self.runner.close()


def serve(connection: Connection) -> None:
    """Answer until the other side goes away; every message is (what, argument), every answer a value or a Failure."""
    try:
        worker = Worker(connection.recv())
        connection.send(worker.about)
        while True:
            what, argument = connection.recv()
            connection.send(worker.answer(what, argument))
    except EOFError:
        return
    except BaseException as error:  # said to the main process, which ends the run
        text = traceback.format_exc()
        try:
            connection.send(Failure(error, text))
        except Exception:  # whatever pickle says
            connection.send(Failure(None, text))


def main() -> None:
    """`python -m kvlab.engine.runners.parallel_worker FD`."""
    serve(Connection(int(sys.argv[1])))
    sys.stdout.flush()
    os._exit(0)  # the others may be gone: nothing is waited for


if __name__ == "__main__":
    # Messages are pickled under the names of the imported module, not of __main__.
    from kvlab.engine.runners.parallel_worker import main as imported_main

    imported_main()
