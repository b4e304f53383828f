"""The exact hit curve of LRU over all capacities, in one pass over the references.

LRU keeps the most recent blocks, so that a cache of c blocks holds what any smaller one holds (Mattson et al., "Evaluation techniques
for storage hierarchies", 1970). A reference hits at capacity c when its stack distance, the number of distinct blocks from the last
reference to its block until now, is at most c. A block is a prefix hit when all blocks before it in its request are hits as well:
when the largest distance of the request so far is at most c.

With p the place of the last reference of the block at place t, the distance is t - p minus the references between them whose block
comes again before t, and those are the places j < t with p(j) > p(t): the inversions of the sequence p, counted by numpy in
log2(n) passes.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from kvlab.replay.result import num_warm
from kvlab.replay.trace import AccessTrace, BlockRows, ReadOptions, Trace, as_trace
from kvlab.types import UserError
from kvlab.workload.traces import Floats, Ints

if TYPE_CHECKING:
    import pandas as pd


@dataclass(frozen=True)
class LruCurve:
    """Hits of LRU (semantics access) at each capacity from 1 block to all distinct ones; more room changes nothing.

    Attributes:
        trace: name. capacities: 1, 2 ... distinct blocks. object_hits, prefix_hits: blocks found (any; all before it found too).
        hit_tokens: prompt tokens in prefix hits; None where the trace has no lengths.
        request_hit_rate: mean over requests of the share of their blocks in prefix hits (one without blocks counts 0).
        requests, accesses, tokens: what was asked for. warmup: requests at the beginning that are in no figure. notes: on the trace.
    """

    trace: str
    capacities: Ints = field(repr=False)
    object_hits: Ints = field(repr=False)
    prefix_hits: Ints = field(repr=False)
    hit_tokens: Ints | None = field(repr=False)
    request_hit_rate: Floats = field(repr=False)
    requests: int
    accesses: int
    tokens: int | None
    warmup: int
    notes: tuple[str, ...] = field(default=(), repr=False)

    @property
    def object_hit_rate(self) -> Floats:
        """Per block, any block."""
        return self.object_hits / max(1, self.accesses)

    @property
    def prefix_hit_rate(self) -> Floats:
        """Per block, prefix-contiguous."""
        return self.prefix_hits / max(1, self.accesses)

    @property
    def token_hit_rate(self) -> Floats | None:
        """Per token, prefix-contiguous; None where the trace has no lengths."""
        return None if self.hit_tokens is None or self.tokens is None else self.hit_tokens / max(1, self.tokens)

    def at(self, capacity: int) -> tuple[int, int]:
        """(object hits, prefix hits) at a capacity in blocks. UserError: below 1."""
        if type(capacity) is not int or capacity < 1:
            raise UserError(f"capacity = {capacity!r} is not allowed: blocks, at least 1.")
        if not len(self.capacities):
            return 0, 0  # requests without blocks
        place = min(capacity, len(self.capacities)) - 1
        return int(self.object_hits[place]), int(self.prefix_hits[place])

    @property
    def frame(self) -> pd.DataFrame:
        """One row a capacity, under the names that `ReplayResult.row` has."""
        import pandas as pd

        columns = {
            "trace": self.trace, "policy": "lru", "semantics": "access", "warmup_requests": self.warmup, "capacity_blocks": self.capacities,
            "object_hits": self.object_hits, "prefix_hits": self.prefix_hits, "block_hit_rate_any": self.object_hit_rate,
            "block_hit_rate_prefix": self.prefix_hit_rate, "request_hit_rate_prefix": self.request_hit_rate,
        }  # fmt: skip
        if self.token_hit_rate is not None:
            columns["token_hit_rate_prefix"] = self.token_hit_rate
        return pd.DataFrame(columns)


def lru_curve(trace: Trace, warmup: int | float = 0, limit: int | None = None, reading: ReadOptions | None = None) -> LruCurve:
    """Hits of LRU at all capacities at once; exactly those of `replay(trace, "lru", capacity)` at each.

    Args:
        trace, limit, reading: see `replay`. warmup: requests (or a share of them) that fill the cache and are in no figure.

    Raises:
        UserError: an unreadable or malformed trace, one with blocks that are kept out of the cache, a warm-up that leaves nothing.
    """
    accesses = as_trace(trace, limit, reading)
    if accesses.cache_until is not None:
        raise UserError(f"The trace {accesses.name} keeps blocks out of the cache (cache, cache_until): what such a request uses then "
                        "depends on the capacity, and one pass can't tell. Take kvlab.replay.sweep over capacities.")  # fmt: skip
    ids, starts = _dense(accesses)
    num_requests, num_left_out = len(starts) - 1, num_warm(warmup, len(starts) - 1)
    num_unique = int(ids.max(initial=-1)) + 1
    distances = stack_distances(ids)
    lengths = np.diff(starts)
    request = np.repeat(np.arange(num_requests), lengths)
    never = num_unique + 1
    distances[distances == 0] = never
    # Running maximum within each request: later requests are lifted above all earlier ones, and lowered again.
    running = np.maximum.accumulate(distances + request * (never + 1)) - request * (never + 1)
    counted = request >= num_left_out

    def curve(values: Ints, weights: npt.NDArray[np.generic] | None = None) -> npt.NDArray[np.float64]:
        weight = None if weights is None else weights[counted]
        return np.cumsum(np.bincount(values[counted], weights=weight, minlength=never + 1)[1:never])

    per_request = 1.0 / np.maximum(1, lengths)
    hit_tokens, tokens = None, None
    if accesses.input_lengths is not None:
        inputs = np.asarray(accesses.input_lengths, dtype=np.int64)
        depth = np.arange(len(ids)) - np.repeat(starts[:-1], lengths)
        in_block = np.minimum(accesses.block_tokens, np.repeat(inputs, lengths) - depth * accesses.block_tokens)
        hit_tokens, tokens = curve(running, in_block).astype(np.int64), int(inputs[num_left_out:].sum())
    num_counted = num_requests - num_left_out
    object_hits, prefix_hits = curve(distances).astype(np.int64), curve(running).astype(np.int64)
    shares = curve(running, np.repeat(per_request, lengths)) / num_counted
    return LruCurve(accesses.name, np.arange(1, never), object_hits, prefix_hits, hit_tokens, shares, num_counted, int(counted.sum()),
                    tokens, num_left_out, accesses.notes)  # fmt: skip


def _dense(trace: AccessTrace) -> tuple[Ints, Ints]:
    """All references as numbers below the number of distinct blocks, and where each request begins."""
    if isinstance(trace.blocks, BlockRows):
        starts = trace.blocks.starts - trace.blocks.starts[0]
        if trace.blocks.ids is None:
            return np.arange(int(starts[-1])), starts
        ids = trace.blocks.ids[trace.blocks.starts[0] : trace.blocks.starts[-1]]
        return np.unique(ids, return_inverse=True)[1].astype(np.int64), starts
    numbers: dict[object, int] = {}
    dense = [numbers.setdefault(block, len(numbers)) for request in trace.blocks for block in request]
    lengths = np.fromiter(map(len, trace.blocks), dtype=np.int64, count=len(trace.blocks))
    return np.array(dense, dtype=np.int64), np.concatenate([np.zeros(1, dtype=np.int64), np.cumsum(lengths)])


def stack_distances(ids: Ints) -> Ints:
    """For each reference the number of distinct ids since the last one to its id, itself counted; 0 for the first."""
    order = np.argsort(ids, kind="stable")
    again = np.flatnonzero(ids[order][1:] == ids[order][:-1]) + 1
    last = np.full(len(ids), -1, dtype=np.int64)
    last[order[again]] = order[again - 1]
    places = np.flatnonzero(last >= 0)
    distances = np.zeros(len(ids), dtype=np.int64)
    distances[places] = places - last[places] - greater_before(np.argsort(np.argsort(last[places], kind="stable"), kind="stable"))
    return distances


def greater_before(permutation: Ints) -> Ints:
    """For each item of a permutation of 0 ... n - 1 the number of greater items before it.

    Two items fall into one group as long as their bits above `bit` are equal, and part at the highest bit in which they differ: there
    the one with a 0 counts those with a 1 that stand before it in the group. Groups are kept in order of their bits, and in the order
    of the permutation within: a group begins where the smallest number it may hold would stand.
    """
    values, counts = permutation.astype(np.int64), np.zeros(len(permutation), dtype=np.int64)
    places = np.arange(len(values))
    for bit in range(max(0, len(values) - 1).bit_length() - 1, -1, -1):
        is_one = (values >> bit) & 1
        ones_before = np.concatenate([np.zeros(1, dtype=np.int64), np.cumsum(is_one)])
        group = (values >> (bit + 1)) << (bit + 1)
        ones_before = ones_before[:-1] - ones_before[group]
        zero = is_one == 0
        counts[values[zero]] += ones_before[zero]
        target = np.where(zero, places - ones_before, group + (1 << bit) + ones_before)
        following = np.empty_like(values)
        following[target] = values
        values = following
    found: Ints = counts[permutation]
    return found
