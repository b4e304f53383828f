"""Races of `policy_lab`: one policy against others, by replay of a trace (eviction) or in simulated runs (every seam)."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

import numpy as np
import pandas as pd

from kvlab import replay
from kvlab.composition import compose
from kvlab.notebook.explorer_controls import SIMULATED, SIMULATED_WORKLOADS
from kvlab.notebook.explorer_plot import SHARES, curves
from kvlab.policies.preemption.lifo import Lifo
from kvlab.policies.registry import by_name, made
from kvlab.results import Run
from kvlab.running import run

CAPACITIES = (0.02, 0.05, 0.1, 0.2)
BOUND = "belady"


class Entrant(NamedTuple):
    """Who takes part: the name it is drawn under, and a policy's name, or a class."""

    name: str
    policy: Any


class Finish(NamedTuple):
    """How an entrant did. `x`, `y`: its line. `row`: all its figures. `run`: of a simulated race."""

    name: str
    x: np.ndarray
    y: np.ndarray
    row: dict[str, Any]
    run: Run | None


class Arena(NamedTuple):
    """Where a race is run: titles of the axes, and who finishes, one after the other."""

    title: str
    x_title: str
    y_title: str
    compete: Callable[[Sequence[Entrant]], Iterator[Finish]]


def conversations(num_sessions: int = 120, seed: int = 7) -> list[list[int]]:
    """A trace made here: requests as lists of block ids. Chats of 1 to 6 turns begin with one of 8 system prompts (the first is the
    most popular), grow by a turn at a time, and go on after others had theirs; every sixth request is a document read once."""
    draw = Random(seed)
    fresh = iter(range(10**9))
    systems = [[next(fresh) for _ in range(draw.randint(2, 10))] for _ in range(8)]
    live: list[tuple[list[int], int]] = []
    requests: list[list[int]] = []
    started = 0
    while started < num_sessions or live:
        if draw.random() < 1 / 6:
            requests.append([next(fresh) for _ in range(draw.randint(8, 40))])
            continue
        if started < num_sessions and (len(live) < 40):
            prefix = systems[min(int(draw.expovariate(0.7)), 7)]
            live.append(([*prefix, *(next(fresh) for _ in range(draw.randint(1, 6)))], draw.randint(1, 6)))
            started += 1
        place = min(int(draw.expovariate(0.08)), len(live) - 1)  # mostly one of the older chats
        blocks, turns = live.pop(place)
        requests.append(list(blocks))
        if turns > 1:
            live.append(([*blocks, *(next(fresh) for _ in range(draw.randint(1, 4)))], turns - 1))
    return requests


def replay_arena(name: str, trace: str | Path | Sequence[Sequence[Hashable]], capacities: Sequence[Any] = CAPACITIES) -> Arena:
    """Semantics access: hits at each capacity, given as shares of the trace's distinct blocks. Belady is the bound of what is drawn:
    the share of blocks found, wherever they stand in their prompt."""

    def compete(entrants: Sequence[Entrant]) -> Iterator[Finish]:
        for entrant in entrants:
            by_size = {result.capacity: result for result in (replay.replay(trace, entrant.policy, size) for size in capacities)}
            results = list(by_size.values())  # shares of a small trace may come to the same number of blocks
            sizes = np.array([result.capacity for result in results], dtype=np.float64)
            rates = np.array([100 * result.object_hit_rate for result in results])
            row: dict[str, Any] = {"policy": entrant.name}
            for result in results:
                row[f"{result.capacity:,} blocks, any"] = result.object_hit_rate
                row[f"{result.capacity:,} blocks, prefix"] = result.prefix_hit_rate
            yield Finish(entrant.name, sizes, rates, row, None)

    return Arena(f"Replay of {name} (semantics access)", "capacity (blocks)", "blocks found (%)", compete)


def run_arena(name: str, workload: Sequence[str], seam: str) -> Arena:
    """Simulated runs of a workload under a policy of `seam` each, with a pool that is too small for it: time to the first token."""
    overrides = (*SIMULATED, *workload, "num_blocks=256", *(("num_cpu_blocks=256",) if seam.startswith("preemption") else ()))

    def compete(entrants: Sequence[Entrant]) -> Iterator[Finish]:
        config = compose(*overrides)
        for entrant in entrants:
            with tempfile.TemporaryDirectory(prefix="kvlab-lab-", ignore_cleanup_errors=True) as folder:
                done = run(config, folder=Path(folder) / "run", name=entrant.name, progress=False, **_given(seam, entrant.policy))
                ttft = curves(done.steps(), done.requests()).ttft
                yield Finish(entrant.name, ttft, SHARES[: len(ttft)], {"policy": entrant.name, **done.summary}, done)

    return Arena(f"Simulated run of {name}", "time to first token (ms)", "requests (%)", compete)


def _given(seam: str, policy: Any) -> dict[str, Any]:
    """A policy as `kvlab.run` takes it; a mode comes with who gives way."""
    if seam == "preemption/mode":
        return {"preemption": Lifo(by_name(seam, policy) if isinstance(policy, str) else made(policy))}
    if seam == "preemption" and isinstance(policy, type):
        return {seam: policy(by_name("preemption/mode", "recompute"))}
    return {seam: policy}


def arenas(seam: str, traces: Mapping[str, Any], workloads: Mapping[str, Sequence[str]] | None = None) -> dict[str, Arena]:
    """The races that a seam's policies can be in, by the name they have in the menu."""
    found = {f"replay: {name}": replay_arena(name, trace) for name, trace in traces.items()} if seam == "eviction" else {}
    chosen = SIMULATED_WORKLOADS if workloads is None else workloads
    return {**found, **{f"simulated: {name}": run_arena(name, words, seam) for name, words in chosen.items()}}


def results_frame(finishes: Sequence[Finish]) -> pd.DataFrame:
    """One row an entrant, all figures."""
    return pd.DataFrame([finish.row for finish in finishes])
