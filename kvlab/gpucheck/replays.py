"""How long the device takes for each replay of a graph, so that a step's rest (what the host does and does not hide) is known beside it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from kvlab.engine.runners.cuda_streams import Captured, Mark, Streams
from kvlab.types import StepStats


class TimedReplays:
    """A device's streams, with a mark before and after each replay. `marks`: of all replays, in order; `forget` them between runs."""

    def __init__(self, streams: Streams) -> None:
        self._streams, self.is_pinned = streams, streams.is_pinned
        self.marks: list[tuple[Mark, Mark]] = []

    def mark(self) -> Mark:
        """See `Streams`."""
        return self._streams.mark()

    def moving(self) -> Any:
        """See `Streams`."""
        return self._streams.moving()

    def compute_waits_for(self, mark: Mark) -> None:
        """See `Streams`."""
        self._streams.compute_waits_for(mark)

    def captured(self, work: Callable[[], torch.Tensor]) -> Captured:
        """Record it as they do."""
        return _Timed(self._streams.captured(work), self)

    def forget(self) -> None:
        """No replay so far."""
        self.marks = []

    def milliseconds(self) -> list[float]:
        """Of each replay, on the device. All of them must be over."""
        return [1e3 * end.seconds_since(begin) for begin, end in self.marks]


class _Timed:
    """Recorded work between two marks."""

    def __init__(self, captured: Captured, owner: TimedReplays) -> None:
        self._captured, self._owner, self.output = captured, owner, captured.output

    def replay(self) -> None:
        """Do it again."""
        begin = self._owner.mark()
        self._captured.replay()
        self._owner.marks.append((begin, self._owner.mark()))


def beside_replays(steps: Sequence[StepStats], replays_ms: Sequence[float], num_seqs: int) -> list[float]:
    """Milliseconds of each step that decodes `num_seqs` sequences and nothing else, from the end of the step before to its own, less its
    replay. Steps of decodes alone are those that replay, one each; empty where that is not so."""
    replayed = [at for at, stats in enumerate(steps) if 0 < stats.num_decode_seqs == stats.num_scheduled_seqs]
    if len(replayed) != len(replays_ms):
        return []
    return [1e3 * (steps[at].end_s - steps[at - 1].end_s) - replay_ms for at, replay_ms in zip(replayed, replays_ms, strict=True)
            if at and steps[at].num_decode_seqs == num_seqs]  # fmt: skip
