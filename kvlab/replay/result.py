"""What a replay found, with every hit rate under its own name: on one replay they differ by up to 20 points."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from kvlab.replay.trace import AccessTrace

IntArray = npt.NDArray[np.int32]


@dataclass(frozen=True)
class ReplayResult:
    """Hits of one policy at one capacity. No warm-up is left out of any figure.

    Attributes:
        trace, policy, semantics: names. capacity: blocks in the cache.
        num_blocks_per_request: blocks looked for, by request. object_hits_per_request: those found (any block).
        prefix_hits_per_request: those found with every block before them found as well (what attention can reuse).
        hit_tokens_per_request, tokens_per_request: prompt tokens in the prefix hits, and all (None: the trace has no lengths).
        evicted: content of each evicted block, in order. Semantics access: the id as text.
    """

    trace: str
    policy: str
    semantics: str
    capacity: int
    num_blocks_per_request: IntArray = field(repr=False)
    object_hits_per_request: IntArray = field(repr=False)
    prefix_hits_per_request: IntArray = field(repr=False)
    hit_tokens_per_request: npt.NDArray[np.int64] | None = field(repr=False)
    tokens_per_request: npt.NDArray[np.int64] | None = field(repr=False)
    evicted: tuple[bytes, ...] = field(repr=False)

    @property
    def requests(self) -> int:
        """Requests replayed."""
        return len(self.num_blocks_per_request)

    @property
    def accesses(self) -> int:
        """Blocks looked for."""
        return int(self.num_blocks_per_request.sum())

    @property
    def object_hits(self) -> int:
        """Blocks found."""
        return int(self.object_hits_per_request.sum())

    @property
    def prefix_hits(self) -> int:
        """Blocks found in an unbroken run from the prompt's start."""
        return int(self.prefix_hits_per_request.sum())

    @property
    def object_hit_rate(self) -> float:
        """Per block, any block: object_hits / accesses."""
        return self.object_hits / max(1, self.accesses)

    @property
    def prefix_hit_rate(self) -> float:
        """Per block, prefix-contiguous: prefix_hits / accesses."""
        return self.prefix_hits / max(1, self.accesses)

    @property
    def token_hit_rate(self) -> float | None:
        """Per token, prefix-contiguous: prompt tokens in prefix hits / prompt tokens. None where the trace has no lengths."""
        if self.hit_tokens_per_request is None or self.tokens_per_request is None:
            return None
        return float(self.hit_tokens_per_request.sum() / max(1, self.tokens_per_request.sum()))

    @property
    def request_hit_rate(self) -> float:
        """Per request, prefix-contiguous: mean over requests of their share of blocks found (one without blocks counts 0)."""
        return float((self.prefix_hits_per_request / np.maximum(1, self.num_blocks_per_request)).mean())

    def row(self) -> dict[str, object]:
        """One flat row for a table: names, counts and the four hit rates."""
        return {
            "policy": self.policy, "semantics": self.semantics, "capacity_blocks": self.capacity, "requests": self.requests,
            "accesses": self.accesses, "object_hits": self.object_hits, "prefix_hits": self.prefix_hits,
            "object_hit_rate": self.object_hit_rate, "prefix_hit_rate": self.prefix_hit_rate,
            "token_hit_rate": self.token_hit_rate, "request_hit_rate": self.request_hit_rate, "evictions": len(self.evicted),
        }  # fmt: skip


def hit_tokens(trace: AccessTrace, prefix_hits: IntArray) -> npt.NDArray[np.int64] | None:
    """Prompt tokens that lie in the prefix hits of each request (the last block may be partial); None without lengths."""
    if trace.input_lengths is None:
        return None
    return np.minimum(prefix_hits.astype(np.int64) * trace.block_tokens, np.asarray(trace.input_lengths, dtype=np.int64))
