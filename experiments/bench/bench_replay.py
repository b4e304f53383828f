"""Speed of kvlab.replay (semantics access) against a bare OrderedDict LRU loop, in one process.

    python experiments/bench/bench_replay.py TRACE [capacity]

TRACE: a Mooncake JSONL file (.gz or plain). Prints seconds (best of three) and nanoseconds a block reference.
"""

from __future__ import annotations

import sys
import time
from collections import OrderedDict
from collections.abc import Callable

from kvlab.policies.registry import list_policies
from kvlab.replay import AccessTrace, as_trace, lru_curve, replay


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


def best_of_three(work: Callable[[], int]) -> tuple[float, int]:
    """Shortest wall time (s), and what the work returned."""
    times = []
    for _ in range(3):
        start = time.perf_counter()
        result = work()
        times.append(time.perf_counter() - start)
    return min(times), result


def main() -> None:
    trace = as_trace(sys.argv[1])
    capacity = int(sys.argv[2]) if len(sys.argv) > 2 else 5000
    accesses = trace.num_accesses
    print(f"{trace.name}: {accesses} references, capacity {capacity} blocks")
    base_s, base_hits = best_of_three(lambda: bare_lru(trace, capacity))
    print(f"{'bare OrderedDict':>18}  {base_s:6.3f} s  {base_s / accesses * 1e9:6.0f} ns/reference  hits {base_hits}")
    curve_s, curve_hits = best_of_three(lambda: lru_curve(trace).at(capacity)[0])
    print(f"{'lru, all sizes':>18}  {curve_s:6.3f} s  {curve_s / accesses * 1e9:6.0f} ns/reference  hits {curve_hits}")
    for row in list_policies("eviction"):
        seconds, hits = best_of_three(lambda name=row.name: replay(trace, name, capacity).object_hits)
        cost = f"{seconds:6.3f} s  {seconds / accesses * 1e9:6.0f} ns/reference"
        print(f"{row.name:>18}  {cost}  hits {hits}  {seconds / base_s:.1f}x the bare loop")


if __name__ == "__main__":
    main()
