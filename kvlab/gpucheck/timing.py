"""Times of device work: CUDA events around each call, medians, several sets of buffers in turn so that the L2 cache does not flatter, a
device whose clocks are up."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch

WARM_S = 0.2
"""Work before anything is measured: an idle card's clocks are a fifth of what they are under load."""
AHEAD_CYCLES = 40_000_000
"""Of the device, about 20 ms, in which the host queues what is measured."""


class Timing(NamedTuple):
    """Milliseconds: the median, and the tenth and ninetieth of a hundred (of the calls, sorted)."""

    median_ms: float
    p10_ms: float
    p90_ms: float

    @property
    def seconds(self) -> float:
        """The median in seconds."""
        return self.median_ms / 1e3


def timed(calls: Sequence[Callable[[], object]], device: torch.device, num_repeats: int, num_warmup: int = 3) -> Timing:
    """Time of one call. `calls` do the same on different buffers and are taken in turn; the first `num_warmup` rounds don't count, nor on
    CUDA what follows them for WARM_S.

    On CUDA all repeats are queued while the device is kept waiting: what the host takes to launch them does not enter.
    """
    for index in range(num_warmup * len(calls)):
        calls[index % len(calls)]()
    if device.type != "cuda":
        return summary([_host_ms(calls[index % len(calls)]) for index in range(num_repeats)])
    torch.cuda.synchronize(device)
    until = time.perf_counter() + WARM_S
    while time.perf_counter() < until:
        for call in calls:
            call()
        torch.cuda.synchronize(device)
    torch.cuda._sleep(AHEAD_CYCLES)
    events = [(torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(num_repeats)]
    for index, (start, end) in enumerate(events):
        start.record()
        calls[index % len(calls)]()
        end.record()
    torch.cuda.synchronize(device)
    return summary([start.elapsed_time(end) for start, end in events])


def _host_ms(call: Callable[[], object]) -> float:
    start = time.perf_counter()
    call()
    return 1e3 * (time.perf_counter() - start)


def summary(times_ms: Sequence[float]) -> Timing:
    """Median and spread of single times."""
    ordered = sorted(times_ms)
    last = len(ordered) - 1
    return Timing(statistics.median(ordered), ordered[round(0.1 * last)], ordered[round(0.9 * last)])
