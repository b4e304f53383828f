"""Streams and events of a device, and their stand-ins where there are none. Nothing of CUDA is touched before it is asked for."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol
from weakref import WeakSet

import torch


class Mark(Protocol):
    """A point in a stream of work."""

    def wait(self) -> None:
        """Until the device has passed it."""

    def seconds_since(self, earlier: Any) -> float:
        """Device time between two marks that have been passed."""


class Streams(Protocol):
    """The stream that computes, and one that moves blocks beside it."""

    is_pinned: bool

    def mark(self) -> Mark:
        """A point in the present stream."""

    def moving(self) -> Any:
        """Context: work goes to the stream that moves blocks, behind all that the computing stream was given before."""

    def compute_waits_for(self, mark: Mark) -> None:
        """What is given to the computing stream from now on runs after `mark`."""

    def captured(self, work: Callable[[], torch.Tensor]) -> Captured:
        """Run `work` once to warm up, then record it."""


class Captured(Protocol):
    """Recorded work."""

    output: torch.Tensor

    def replay(self) -> None:
        """Do it again, on what its inputs hold now; `output` is overwritten."""


class _Now:
    """Where everything is done at once."""

    def __init__(self) -> None:
        self._at_s = time.perf_counter()

    def wait(self) -> None:
        """Nothing to wait for."""

    def seconds_since(self, earlier: _Now) -> float:
        """Wall time."""
        return self._at_s - earlier._at_s


class _Again:
    """Work that is simply called again; its output is kept in one place, as a graph's is."""

    def __init__(self, work: Callable[[], torch.Tensor]) -> None:
        self._work = work
        self.output = work().clone()

    def replay(self) -> None:
        """Call it."""
        self.output.copy_(self._work())


class NoStreams:
    """A CPU."""

    is_pinned = False

    def mark(self) -> _Now:
        """Now."""
        return _Now()

    @contextmanager
    def moving(self) -> Iterator[None]:
        """The same stream of work."""
        yield

    def compute_waits_for(self, mark: Mark) -> None:
        """It has been passed."""

    def captured(self, work: Callable[[], torch.Tensor]) -> _Again:
        """Not recorded, called again: padding and buffers are as on a device."""
        return _Again(work)


class _Event:
    def __init__(self) -> None:
        self.event = torch.cuda.Event(enable_timing=True)
        self.event.record()

    def wait(self) -> None:
        """Block the host."""
        self.event.synchronize()

    def seconds_since(self, earlier: _Event) -> float:
        """By the device's clock."""
        return float(earlier.event.elapsed_time(self.event)) * 1e-3


class _CudaGraph:
    """A CUDA graph; all of a runner's share one memory pool, and one stream: cuBLAS keeps a work space (32 MiB) for each it has seen."""

    def __init__(self, work: Callable[[], torch.Tensor], pool: Any, stream: torch.cuda.Stream) -> None:
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):  # kernels are compiled and work spaces allocated outside of the recording
            work()
        torch.cuda.current_stream().wait_stream(stream)
        self._graph = torch.cuda.CUDAGraph()
        # thread_local: what other threads ask of the device meanwhile (NCCL's watchdog looks at its events) spoils no recording.
        with torch.cuda.graph(self._graph, pool=pool, stream=stream, capture_error_mode="thread_local"):
            self.output = work()

    def replay(self) -> None:
        """Launch it."""
        self._graph.replay()


class CudaStreams:
    """The current stream of a CUDA device computes; a second one moves blocks."""

    is_pinned = True

    def __init__(self, device: torch.device) -> None:
        self._compute = torch.cuda.current_stream(device)
        self._move = torch.cuda.Stream(device)
        self._record = torch.cuda.Stream(device)
        self._graphs = WeakSet[_CudaGraph]()
        self._pool: Any = None

    def mark(self) -> _Event:
        """An event in the current stream."""
        return _Event()

    @contextmanager
    def moving(self) -> Iterator[None]:
        """The second stream."""
        self._move.wait_stream(self._compute)
        with torch.cuda.stream(self._move):
            yield

    def compute_waits_for(self, mark: Mark) -> None:
        """The device waits, not the host."""
        assert isinstance(mark, _Event)
        self._compute.wait_event(mark.event)

    def captured(self, work: Callable[[], torch.Tensor]) -> _CudaGraph:
        """Record a graph. Graphs that live at one time share a pool of memory; when all of one are gone the allocator may have given its
        pool up, or be about to, and refuses the old handle."""
        if not self._graphs:
            self._pool = torch.cuda.graph_pool_handle()
        graph = _CudaGraph(work, self._pool, self._record)
        self._graphs.add(graph)
        return graph


def streams_of(device: torch.device) -> Streams:
    """What a device has."""
    return CudaStreams(device) if device.type == "cuda" else NoStreams()
