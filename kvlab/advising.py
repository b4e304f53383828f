"""Which knob to turn after a run, and what that could give at most: advice from the numbers that `kvlab.explaining` has found.

Each function takes what was lost in one way and returns the advice against it, none where it is not worth it.
"""

from __future__ import annotations

from dataclasses import dataclass

BLOCKS, BATCH, TOKENS, ARRIVALS, QUEUES, OTHER = "blocks", "batch", "tokens", "arrivals", "batching", "admission"
"""What limits a run."""

KNOBS = {
    BLOCKS: "more KV blocks (num_blocks or kv_cache_tokens)", BATCH: "raise max_num_seqs", TOKENS: "raise max_num_batched_tokens",
    QUEUES: "another batching policy (chunked serves both queues in a step)", OTHER: "a less strict admission policy",
}  # fmt: skip
"""What to turn where a limit holds."""

WORTH = 0.01
"""Advice whose gain is below this share is not given."""


@dataclass(frozen=True)
class Advice:
    """A knob to turn. `gain`: at most so much, in words; `share`: the same as a share of the run, for ranking."""

    knob: str
    gain: str
    share: float

    def __str__(self) -> str:
        return f"{self.knob}: {self.gain}"


def percent(share: float) -> str:
    """0.012 is "1.2 %", 0.12 is "12 %"."""
    return f"{100 * share:.1f} %" if share < 0.1 else f"{100 * share:.0f} %"


def seconds(value: float) -> str:
    """"12.3 ms", "1.23 s"."""
    return f"{value * 1e3:,.3g} ms" if value < 1 else f"{value:,.2f} s"


# ------------------------------------------------------------------- requests


def for_refused(num: int, num_requests: int) -> list[Advice]:
    """`num` of the refused can never fit."""
    return [Advice(KNOBS[BLOCKS], f"{num:,} requests that were refused can never fit without", num / num_requests)] if num else []


def for_outgrown(num: int, num_requests: int, pool: int, enough: int, longest: str) -> list[Advice]:
    """`num` requests had the whole pool and outgrew it.

    Args:
        pool: its blocks, 0: unknown. enough: blocks in which each of them can end, 0: unknown. longest: what they may become, in words.
    """
    said = [f"{num:,} request{'s' if num > 1 else ''} that ended early would have gone on"]
    if pool:
        said.append(f"at least {pool + 1:,} blocks (the pool has {pool:,})")
    if enough:
        said.append(f"{enough:,} hold whatever they may become (max_model_len: {longest} tokens)")
    return [Advice(f"{KNOBS[BLOCKS]}, or a limit on the output", "; ".join(said), num / num_requests)]


# ----------------------------------------------------------------------- time


def for_waiting(limit: str, share: float, saved_s: float, of_whom: str) -> list[Advice]:
    """Requests waited `saved_s` while `limit` held, which was for `share` of the run."""
    if share < WORTH or saved_s <= 0:
        return []
    return [Advice(KNOBS[limit], f"at most {seconds(saved_s)} less waiting {of_whom}, if steps take no longer", share)]


def for_watermark(share: float, reserve: int) -> list[Advice]:
    """The watermark of `reserve` blocks kept requests out for `share` of the run."""
    if share < WORTH:
        return []
    gain = f"at most {reserve:,} blocks more for admission, which waited for them {percent(share)} of the time; expect more preemptions"
    return [Advice("lower the watermark", gain, share)]


def for_recomputing(share: float, time_share: float) -> list[Advice]:
    """`share` of the computed tokens had been computed before, in `time_share` of the run."""
    if max(share, time_share) < WORTH:
        return []
    gain = f"at most {percent(share)} fewer tokens to compute, about {percent(time_share)} of the time; fewer run at once"
    return [Advice("a higher watermark, or an admission that looks ahead (expected_output, full_sequence)", gain, time_share)]


# ---------------------------------------------------------------------- space


def for_reserved(of_pool: float, short: float) -> list[Advice]:
    """The layout has set `of_pool` of the blocks aside; blocks were short for `short` of the run."""
    return [Advice("layout=paged", f"at most {percent(of_pool)} of the pool more for tokens: the layout reserves it", of_pool * short)]


def for_partly_filled(of_pool: float, short: float, block_size: int) -> list[Advice]:
    """`of_pool` of the slots were empty in used blocks."""
    if of_pool < WORTH or short < WORTH or block_size <= 1:
        return []
    return [Advice("a smaller block_size", f"at most {percent(of_pool)} of the pool more for tokens", of_pool * short)]


# -------------------------------------------------------------------- sharing


def for_no_cache() -> list[Advice]:
    """The run had no prefix cache."""
    gain = "prompt tokens that requests share need not be computed again; how many they share is unknown without one"
    return [Advice("a prefix cache (prefix_cache=hash)", gain, 0.0)]


def for_partial_blocks(share: float) -> list[Advice]:
    """`share` of the prompt tokens were cached, but not in full blocks. NaN (unknown) gets none, here and below."""
    return _from_cache("a smaller block_size (or prefix_cache=radix prefix_cache.partial_block_copy=true)", share)


def for_evicted(share: float) -> list[Advice]:
    """`share` of the prompt tokens were in blocks that were evicted, and computed again."""
    return _from_cache("more KV blocks, or another eviction policy", share, ": blocks that had been evicted")


def for_side_by_side(share: float) -> list[Advice]:
    """`share` of the prompt tokens were asked for before another request had computed them."""
    return _from_cache("requests that begin alike one after the other (a lower max_num_seqs)", share, "; fewer run at once")


def for_short_beginnings(share: float) -> list[Advice]:
    """`share` of the prompt tokens were in beginnings that the policy passes over."""
    return _from_cache("a lower prefix_cache.min_match_tokens", share)


def _from_cache(knob: str, share: float, more: str = "") -> list[Advice]:
    return [Advice(knob, f"at most {percent(share)} more of the prompt tokens from the cache{more}", share)] if share >= WORTH else []
