"""What a replay found, with every hit rate under its own name: on one replay they differ by up to 20 points."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from kvlab.replay.trace import AccessTrace
from kvlab.types import UserError

if TYPE_CHECKING:
    import pandas as pd

IntArray = npt.NDArray[np.int32]


@dataclass(frozen=True)
class ReplayResult:
    """Hits of one policy at one capacity. The arrays have all requests, the figures those after the first `warmup`.

    Attributes:
        trace, policy, semantics: names. capacity: blocks in the cache.
        num_blocks_per_request: blocks looked for, by request. object_hits_per_request: those found (any block).
        prefix_hits_per_request: those found with every block before them found as well (what attention can reuse).
        hit_tokens_per_request, tokens_per_request: prompt tokens in the prefix hits, and all (None: the trace has no lengths).
        evicted: content of each evicted block, in order, warm-up included. Semantics access: the id as text.
        warmup: requests at the beginning that filled the cache and are in no figure.
        notes: what a reader should know of the trace (rows repaired, nothing can hit ...), a sentence each.
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
    warmup: int = 0
    notes: tuple[str, ...] = field(default=(), repr=False)

    def with_warmup(self, warmup: int | float) -> ReplayResult:
        """The same replay with another warm-up: requests, or a share of them. UserError: nothing would be left."""
        return replace(self, warmup=num_warm(warmup, len(self.num_blocks_per_request)))

    @property
    def requests(self) -> int:
        """Requests in the figures."""
        return len(self.num_blocks_per_request) - self.warmup

    @property
    def accesses(self) -> int:
        """Blocks looked for."""
        return int(self.num_blocks_per_request[self.warmup :].sum())

    @property
    def object_hits(self) -> int:
        """Blocks found."""
        return int(self.object_hits_per_request[self.warmup :].sum())

    @property
    def prefix_hits(self) -> int:
        """Blocks found in an unbroken run from the prompt's start."""
        return int(self.prefix_hits_per_request[self.warmup :].sum())

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
        return float(self.hit_tokens_per_request[self.warmup :].sum() / max(1, self.tokens_per_request[self.warmup :].sum()))

    @property
    def request_hit_rate(self) -> float:
        """Per request, prefix-contiguous: mean over requests of their share of blocks found (one without blocks counts 0)."""
        return self._mean_share(self.prefix_hits_per_request)

    @property
    def request_hit_rate_any(self) -> float:
        """Per request, any block: mean over requests of their share of blocks found."""
        return self._mean_share(self.object_hits_per_request)

    def _mean_share(self, hits: IntArray) -> float:
        return float((hits[self.warmup :] / np.maximum(1, self.num_blocks_per_request[self.warmup :])).mean())

    def row(self) -> dict[str, object]:
        """One flat row for a table: names, counts, and the hit rates: per what, and of which blocks.

        `any`: blocks found wherever they stand; `prefix`: in an unbroken run from the prompt's start.
        """
        return {
            "trace": self.trace, "policy": self.policy, "semantics": self.semantics, "capacity_blocks": self.capacity,
            "warmup_requests": self.warmup, "requests": self.requests, "accesses": self.accesses,
            "object_hits": self.object_hits, "prefix_hits": self.prefix_hits,
            "block_hit_rate_any": self.object_hit_rate, "block_hit_rate_prefix": self.prefix_hit_rate,
            "token_hit_rate_prefix": self.token_hit_rate, "request_hit_rate_any": self.request_hit_rate_any,
            "request_hit_rate_prefix": self.request_hit_rate, "evictions_with_warmup": len(self.evicted),
        }  # fmt: skip

    @property
    def frame(self) -> pd.DataFrame:
        """One row a request, warm-up included (and marked): blocks, hits, and tokens where the trace has lengths."""
        import pandas as pd

        columns: dict[str, npt.NDArray[np.generic]] = {
            "is_warmup": np.arange(len(self.num_blocks_per_request)) < self.warmup, "blocks": self.num_blocks_per_request,
            "object_hits": self.object_hits_per_request, "prefix_hits": self.prefix_hits_per_request,
        }  # fmt: skip
        if self.tokens_per_request is not None and self.hit_tokens_per_request is not None:
            columns |= {"tokens": self.tokens_per_request, "hit_tokens": self.hit_tokens_per_request}
        return pd.DataFrame(columns)


def num_warm(warmup: int | float, num_requests: int) -> int:
    """A warm-up in requests. UserError: neither requests of 0 or more nor a share in (0, 1), or no request would be left."""
    share = isinstance(warmup, float) and math.isfinite(warmup) and 0 < warmup < 1
    if not share and (type(warmup) is not int or warmup < 0):
        raise UserError(f"warmup = {warmup!r} is not allowed: requests (a whole number), or a share of them in (0, 1).")
    count = int(warmup * num_requests) if share else int(warmup)
    if count >= num_requests:
        raise UserError(f"warmup = {warmup!r} leaves none of the {num_requests} requests.")
    return count


def hit_tokens(trace: AccessTrace, prefix_hits: IntArray) -> npt.NDArray[np.int64] | None:
    """Prompt tokens that lie in the prefix hits of each request (the last block may be partial); None without lengths."""
    if trace.input_lengths is None:
        return None
    return np.minimum(prefix_hits.astype(np.int64) * trace.block_tokens, np.asarray(trace.input_lengths, dtype=np.int64))
