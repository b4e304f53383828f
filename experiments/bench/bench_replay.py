"""Speed of kvlab.replay (semantics access) beside a bare OrderedDict loop, libCacheSim and kvcache-simulator, in one process.

    python experiments/bench/bench_replay.py TRACE [capacity] [rounds]

TRACE: a Mooncake JSONL file (.gz or plain), or its name in the folder KVLAB_TRACES. Each round runs all of them one after the other, so
that what else the machine does falls on all alike; printed are medians of seconds, and medians of the rounds' ratios to the bare loop
and to kvlab's lru. The other two are left out where they are not installed:

    pip install --target SOMEWHERE --no-deps libcachesim kvcache-simulator     # then PYTHONPATH=SOMEWHERE
"""

from __future__ import annotations

import importlib.util
import sys
import time
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

from kvlab.policies.registry import list_policies
from kvlab.replay import AccessTrace, as_trace, replay
from kvlab.workload.traces import find_trace


def bare_lru(trace: AccessTrace, capacity: int) -> int:
    """Hits of the shortest LRU there is: no policy, no events, no ticks, no records."""
    cache: OrderedDict[object, None] = OrderedDict()
    hits = 0
    for request in trace.blocks:
        for block in request:
            if block in cache:
                hits += 1
                cache.move_to_end(block)
            else:
                if len(cache) >= capacity:
                    cache.popitem(last=False)
                cache[block] = None
    return hits


def libcachesim_lru(trace: AccessTrace, capacity: int, **options: int) -> int:
    """Hits of libCacheSim, asked for one access after the other, with one request object that is used again."""
    import libcachesim

    cache = libcachesim.LRU(capacity, **options)
    access = libcachesim.Request()
    access.obj_size = 1
    get, hits = cache.get, 0
    for request in trace.blocks:
        for block in request:
            access.obj_id = block
            if get(access):
                hits += 1
    return hits


def kvcache_simulator(path: Path) -> Callable[[AccessTrace, int], int]:
    """Its Python backend for lru: plan and simulation, without reading the file. Its hits are tokens of the second half."""
    from kvcache_sim.plan import build_execution_plan
    from kvcache_sim.policies import simulate_policy
    from kvcache_sim.trace import parse_trace_file

    loaded: Any = parse_trace_file(str(path), block_size=512)
    return lambda trace, capacity: simulate_policy(build_execution_plan(loaded), "lru", capacity).hitTokens


def contestants(path: Path) -> dict[str, Callable[[AccessTrace, int], int]]:
    """Name -> run, which returns hits. kvlab's lru stands beside those that it is compared with."""
    found: dict[str, Callable[[AccessTrace, int], int]] = {"bare OrderedDict": bare_lru}
    if importlib.util.find_spec("libcachesim"):
        found["libCacheSim"] = libcachesim_lru  # its table of 2^24 places takes time to make and to free
        found["libCacheSim, small"] = lambda trace, capacity: libcachesim_lru(trace, capacity, hashpower=capacity.bit_length() + 1)
    if importlib.util.find_spec("kvcache_sim"):
        found["kvcache-simulator"] = kvcache_simulator(path)
    names = sorted((row.name for row in list_policies("eviction")), key=lambda name: name != "lru")
    return found | {name: lambda trace, capacity, name=name: replay(trace, name, capacity).object_hits for name in names}


def main() -> None:
    path = find_trace(sys.argv[1])
    capacity = int(sys.argv[2]) if len(sys.argv) > 2 else 5000
    rounds = int(sys.argv[3]) if len(sys.argv) > 3 else 5
    trace = as_trace(path)
    accesses = trace.num_accesses
    print(f"{trace.name}: {accesses} references, capacity {capacity} blocks, {rounds} rounds")
    runs = contestants(path)
    seconds: dict[str, list[float]] = {name: [] for name in runs}
    hits: dict[str, int] = {}
    for _ in range(rounds):
        for name, run in runs.items():
            start = time.perf_counter()
            hits[name] = run(trace, capacity)
            seconds[name].append(time.perf_counter() - start)
    for name, times in seconds.items():
        to_bare, to_lru = (
            median(one / other for one, other in zip(times, seconds[base], strict=True)) for base in ("bare OrderedDict", "lru")
        )
        cost = f"{median(times):6.3f} s (best {min(times):.3f})  {median(times) / accesses * 1e9:6.0f} ns/reference"
        print(f"{name:>18}  {cost}  {to_bare:5.1f}x the bare loop  {to_lru:5.2f}x lru  hits {hits[name]}")


if __name__ == "__main__":
    main()
