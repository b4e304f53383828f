"""Streams, events and graphs of CUDA, on stand-ins that say what is asked of them: who waits for whom, where graphs keep their memory."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from engine_support import policies, request, serve
from equality_support import tiny, tiny_engine

from kvlab.engine.runners.cuda_runner import CudaRunner
from kvlab.engine.runners.cuda_streams import CudaStreams
from kvlab.engine.runners.torch_runner import TorchRunner

CUDA = torch.device("cuda")


class Card:
    """torch.cuda of a card on which everything is done at once. `log`: what streams were asked; an event is named by its stream and when it
    was recorded."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        card, self.log, self.pools, names = self, list[str](), list[Any](), itertools.chain(["move", "record"], itertools.repeat("more"))
        ticks = itertools.count()

        class Stream:
            def __init__(self, device: Any, name: str = "") -> None:
                self.name = name or next(names)

            def wait_stream(self, other: Stream) -> None:
                card.log.append(f"{self.name} waits for {other.name}")

            def wait_event(self, event: Event) -> None:
                card.log.append(f"{self.name} waits for an event of {event.stream}")

        class Event:
            def __init__(self, enable_timing: bool) -> None:
                assert enable_timing

            def record(self) -> None:
                self.stream, self.at = card.current.name, next(ticks)

            def synchronize(self) -> None:
                card.log.append(f"the host waits for {self.stream}")

            def elapsed_time(self, end: Event) -> float:
                assert self.stream == end.stream == "compute"
                return 1000.0 * (end.at - self.at)

        class Graph:
            def replay(self) -> None:
                card.log.append("replay")

        self.current = self.compute = Stream(CUDA, "compute")

        @contextmanager
        def stream(used: Stream) -> Iterator[None]:
            before, self.current = self.current, used
            yield
            self.current = before

        @contextmanager
        def graph(recorded: Graph, pool: Any, stream: Stream, capture_error_mode: str) -> Iterator[None]:
            card.log.append(f"{stream.name} is recorded, {capture_error_mode}")
            card.pools.append(pool)
            yield

        handles = itertools.count()
        stand_ins = {"Stream": Stream, "Event": Event, "CUDAGraph": Graph, "stream": stream, "graph": graph,
                     "current_stream": lambda device=None: self.current, "graph_pool_handle": lambda: next(handles)}  # fmt: skip
        for name, stand_in in stand_ins.items():
            monkeypatch.setattr(torch.cuda, name, stand_in)


def test_blocks_move_beside_the_computation_and_never_ahead_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tokens are the plain runner's. Out: behind what was computed before, and the computation behind the gathering, not the copy, for
    which the host waits alone. In: likewise."""
    monkeypatch.setattr(CudaStreams, "is_pinned", False)
    outputs = []
    for make in (lambda: TorchRunner(tiny()), lambda: CudaRunner(tiny(), streams=CudaStreams(CUDA), graph_sizes=())):
        card = Card(monkeypatch)
        engine, log = tiny_engine(26, 3, policies(mode="swap", admission="none"), runner=make(), num_cpu_blocks=20, max_num_seqs=16)
        serve(engine, [request(f"r{i}", range(5 + i, 18 + i), 9) for i in range(5)])
        outputs.append(log.outputs)
    assert outputs[0] == outputs[1]
    num_out, num_in = (sum(bool(getattr(plan, which)) for plan in log.plans) for which in ("swap_out", "swap_in"))
    assert num_out > 0
    assert num_in > 0
    assert card.log.count("move waits for compute") == card.log.count("compute waits for an event of move") == num_out + num_in
    assert card.log.count("the host waits for compute") == len(log.plans)  # once a step
    assert card.log.count("the host waits for move") == num_out
    first = card.log.index("move waits for compute")
    assert card.log[first : first + 4] == ["move waits for compute", "compute waits for an event of move", "the host waits for compute",
                                           "the host waits for move"]  # fmt: skip
    assert {outcome.execute_s > 0 for outcome in log.outcomes} == {True}


def test_graphs_of_one_time_share_memory_and_later_ones_do_not(monkeypatch: pytest.MonkeyPatch) -> None:
    """The allocator may have given up a pool whose last graph is gone. Work is done once before it is recorded, on the same stream."""
    card, done = Card(monkeypatch), list[str]()
    streams = CudaStreams(CUDA)

    def work() -> torch.Tensor:
        done.append(card.current.name)
        return torch.ones(1)

    graphs = [streams.captured(work) for _ in range(2)]
    graphs[0].replay()
    del graphs[0]
    graphs.append(streams.captured(work))
    graphs.clear()
    last = streams.captured(work)
    assert card.pools == [0, 0, 0, 1]
    assert last.output.tolist() == [1.0]
    assert done[0] == "record"
    assert card.log[:4] == ["record waits for compute", "compute waits for record", "record is recorded, thread_local",
                            "record waits for compute"]  # fmt: skip
    assert card.log.count("replay") == 1
