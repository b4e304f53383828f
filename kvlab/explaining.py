"""What happened in a run, in words: `kvlab.explain(run)` says what limited it, what was lost, and which knob to turn (`kvlab.advising`).

Every statement follows from recorded columns, and a gain is an upper bound: what would be saved if nothing else changed. What a run did
not record is said to be unknown.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeGuard

import numpy as np
import pandas as pd

from kvlab import advising
from kvlab.advising import ARRIVALS, BATCH, BLOCKS, KNOBS, OTHER, QUEUES, TOKENS, WORTH, percent, seconds
from kvlab.advising import Advice as Advice
from kvlab.endings import nothing_served, unserved
from kvlab.explanation import Explanation as Explanation
from kvlab.results import Run
from kvlab.sharing import Bound, evicted_too_early, unlimited
from kvlab.types import UserError

LIMITS = {
    BLOCKS: "the KV blocks were short", BATCH: "the batch was full", TOKENS: "the token budget of a step was spent",
    ARRIVALS: "nobody was kept waiting", QUEUES: "the batching policy did not serve the queue",
    OTHER: "the admission policy kept requests out",
}  # fmt: skip
"""What the time of a run is divided into."""

_BY = {
    "max_num_seqs": BATCH, "tokens": TOKENS, "batching": QUEUES, "": ARRIVALS,
    **dict.fromkeys(("watermark", "blocks", "fragmentation", "slots", "full_sequence", "expected_output", "reserve_all", "past_future",
                     "swapped", "preemption"), BLOCKS),
}  # fmt: skip
"""`admission_blocked_by` -> limit. Words of other admission policies are the limit "admission"."""

PAGED = "kvlab.policies.layout.paged.Paged"
"""The layout without regions."""

OFF = "kvlab.policies.prefix_cache.none.NoCache"
"""The policy of a run without a prefix cache."""


def explain(run: Run | str | Path) -> Explanation:
    """What limited a run, what it lost to preemption, fragmentation and missed sharing, and which knobs could help, by how much at most.

    Args:
        run: a `Run` or its folder, whatever its state: of a run that was killed, what it had recorded is explained.

    Raises:
        UserError: no such folder, or something that is neither.
    """
    if isinstance(run, (str, Path)):
        run = Run.load(run)
    if not isinstance(run, Run):
        raise UserError(f"explain takes a Run or a run's folder, not {type(run).__name__}. "
                        "Of several runs: [kvlab.explain(run) for run in runs].")  # fmt: skip
    return _Reader(run).explanation()


class _Reader:
    """Collects sentences, table rows and advice from one run's frames."""

    def __init__(self, run: Run) -> None:
        self.run, self.steps, self.requests = run, run.steps(), run.requests()
        self.config = run.config
        self.unserved = unserved(self.requests)
        self.no_requests = self._why_no_requests()
        self.sentences: list[str] = []
        self.rows: list[tuple[str, float, str, str]] = []
        self.advice: list[Advice] = []
        self.shares: dict[str, float] = {}
        self.seconds = self.steps["step_ms"].to_numpy(dtype=np.float64) / 1e3
        self.total_s = float(self.steps["end_s"].max() - (self.steps["end_s"] - self.seconds).min()) if len(self.steps) else 0.0

    def _why_no_requests(self) -> str:
        """Why requests are unknown; "" where they were recorded, also where none had ended."""
        if len(self.requests):
            return ""
        damaged = next((note for note in self.run.notes if note.startswith(("requests.", "requests-"))), "")
        record = self.config.get("record")
        known = isinstance(record, Mapping) and record.get("requests") is True
        return damaged or ("" if known else "record.requests=true records it")

    def explanation(self) -> Explanation:
        """Everything, in reading order."""
        self._how_it_ended()
        limit = None
        if self.total_s > 0:
            limit = self._what_limited()
            self._preemption()
            self._fragmentation()
        else:
            nothing = nothing_served(self.requests)
            self.sentences.append(nothing or "No step that took time was recorded, so what limited it is unknown.")
        self._sharing()
        self.advice.sort(key=lambda advice: -advice.share)
        table = pd.DataFrame(self.rows, columns=["subject", "value", "unit", "from"])
        return Explanation(self.run.name, limit, self.shares, tuple(self.sentences), tuple(self.advice), table)

    def _row(self, subject: str, value: float, unit: str, source: str) -> None:
        self.rows.append((subject, round(float(value), 4), unit, source))

    def _how_it_ended(self) -> None:
        if self.run.state != "finished":
            error = f" ({self.run.error})" if self.run.error else ""
            self.sentences.append(f"The run is {self.run.state}{error}; this is what it had recorded.")
        damaged = [note for note in self.run.notes if "damaged" in note or "missing" in note]
        if damaged:
            self.sentences.append(f"Not everything could be read: {'; '.join(damaged)}.")
        if len(self.steps) and self.total_s > 0:
            took = f"{seconds(self.total_s)} and {len(self.steps):,} steps; {self._throughput()}"
            self.sentences.append(f"{took}; how many requests ended, and how many were refused, is unknown ({self.no_requests})."
                                  if self.no_requests else f"{len(self.requests):,} requests ended in {took}.")  # fmt: skip
        if not nothing_served(self.requests):
            self.sentences += [f"{text}." for text in self.unserved]
        self._refused()
        self._cut_short()

    def _throughput(self) -> str:
        """The summary's figure; where that counts fewer tokens than the steps made (of requests that did not finish), both."""
        made = int(self.steps["num_output_tokens"].sum())
        known, counted = self.run.summary.get("output_token_throughput_per_s"), self.run.summary.get("num_output_tokens")
        if not _is_number(known) or not _is_number(counted):
            return f"{made / self.total_s:,.1f} output tokens/s"
        if counted >= made:
            return f"{known:,.1f} output tokens/s" + (" (of all requests, ended or not)" if self.run.state != "finished" else "")
        return f"{known:,.1f} output tokens/s of finished requests ({counted:,} of {made:,} output tokens)"

    def _refused(self) -> None:
        """Those that a larger pool would have served."""
        refused = self.requests[self.requests["finish_reason"] == "refused"]
        if refused.empty:
            return
        self._row("refused", len(refused), "requests", "finish_reason")
        num = int(refused["detail"].fillna("").astype(str).str.contains("num_blocks").sum())
        self.advice += advising.for_refused(num, len(self.requests))

    def _cut_short(self) -> None:
        """Those that had the whole pool to themselves and outgrew it: one block more is the least, room for max_model_len always does."""
        cut = self.requests[self.requests["finish_reason"] == "kv_capacity"]
        if cut.empty:
            return
        self._row("ended out of KV space", len(cut), "requests", "finish_reason")
        self._row("longest of them", (cut["num_prompt_tokens"] + cut["num_output_tokens"]).max(), "tokens, all its sequences",
                  "num_prompt_tokens, num_output_tokens")  # fmt: skip
        size, longest = self.config.get("block_size"), self.config.get("max_model_len")
        pool = int(self.steps["kv_blocks_total"].max()) if len(self.steps) else 0
        if pool:
            self._row("blocks that the next token of any takes at least", pool + 1, "blocks", "kv_blocks_total")
        num_seqs = int(cut["output_finish_reasons"].map(len).max())
        enough = num_seqs * -(-longest // size) if _is_whole(size) and _is_whole(longest) else 0
        layout = self.config.get("layout")
        if enough <= pool or (isinstance(layout, Mapping) and layout.get("_target_") != PAGED):
            enough = 0
        else:
            self._row("blocks in which all of them can end", enough, "blocks", "max_model_len, block_size, output_finish_reasons")
        each = f"{num_seqs} sequences of {longest:,}" if num_seqs > 1 and enough else f"{longest:,}" if enough else ""
        self.advice += advising.for_outgrown(len(cut), len(self.requests), pool, enough, each)

    # ------------------------------------------------------------------- time

    def _what_limited(self) -> str:
        """Shares of the run's time by what kept requests out; the time between steps is nobody's."""
        limits = self._limit_of_each_step()
        time = {limit: float(self.seconds[limits == limit].sum()) for limit in LIMITS}
        idle_s = max(0.0, self.total_s - float(self.seconds.sum()))
        time[ARRIVALS] += idle_s
        self.shares = {limit: value / self.total_s for limit, value in time.items()}
        limit = max(LIMITS, key=lambda name: self.shares[name])
        self.sentences.append(f"For {percent(self.shares[limit])} of the time {LIMITS[limit]}{self._more(limit)}.")
        others = sorted(((s, name) for name, s in self.shares.items() if name != limit and s >= 0.05), reverse=True)
        if others:
            self.sentences.append("Otherwise " + ", ".join(f"{LIMITS[name]} ({percent(share)})" for share, name in others) + ".")
        for name, share in self.shares.items():
            if share > 0:
                self._row(f"time while {LIMITS[name]}", 100 * share, "% of the run", "admission_blocked_by, step_ms, tokens a step")
        if idle_s > 0:
            self._row("of it without any step (idle)", 100 * idle_s / self.total_s, "% of the run", "step_ms, end_s")
        self._turn_for_limits(limits)
        return limit

    def _limit_of_each_step(self) -> np.ndarray:
        """A key of LIMITS for each step: who was kept out and why; a step that spent the token budget with nobody out is "tokens"."""
        limits = self.steps["admission_blocked_by"].map(lambda word: _BY.get(word, OTHER)).to_numpy(dtype=object)
        budget = self.config.get("max_num_batched_tokens")
        if _is_whole(budget):
            tokens = (self.steps["num_prompt_tokens_computed"] + self.steps["num_generation_tokens"]).to_numpy()
            limits = np.where((limits == ARRIVALS) & (tokens >= budget), TOKENS, limits)
        return limits

    def _more(self, limit: str) -> str:
        """The number behind a limit."""
        steps, used = self.steps, percent(self._mean("kv_cache_usage"))
        if limit == BLOCKS:
            word = steps.loc[steps["admission_blocked_by"] != "", "admission_blocked_by"].mode()
            return (f": of {int(steps['kv_blocks_total'].max()):,} blocks {used} were in use; the reason was mostly {str(word.iloc[0])!r}")
        if limit == BATCH:
            return f", with max_num_seqs = {self.config.get('max_num_seqs', 'unknown')}, while {used} of the blocks were in use"
        if limit == TOKENS:
            return f" (max_num_batched_tokens = {self.config.get('max_num_batched_tokens', 'unknown')})"
        if limit == ARRIVALS:
            idle = max(0.0, 1 - float(self.seconds.sum()) / self.total_s)
            who = "those that were" if self.unserved else "requests"
            so = "" if self.unserved or self.no_requests else ", so more load could be taken"
            return f": {who} came no faster than they were served (idle {percent(idle)} of the run){so}"
        return ""

    def _turn_for_limits(self, limits: np.ndarray) -> None:
        """Request-seconds spent waiting, by what kept the queue out: what a knob can save at most, if steps take no longer."""
        waiting = (self.steps["num_waiting_reqs"] + self.steps["num_swapped_reqs"]).to_numpy(dtype=np.float64)
        num_requests = 1 if self.no_requests else max(1, len(self.requests), int((waiting + self.steps["num_running_reqs"]).max()))
        each, mean = ("s, all requests", "of all requests together") if self.no_requests else ("s a request", "a request (mean)")
        for limit in KNOBS:
            saved = float((waiting * self.seconds)[limits == limit].sum()) / num_requests
            if saved > 0:
                self._row(f"waiting while {LIMITS[limit]}", saved, each, "num_waiting_reqs, num_swapped_reqs, step_ms")
            self.advice += advising.for_waiting(limit, self.shares[limit], saved, mean)
        held = self.steps["admission_blocked_by"].to_numpy() == "watermark"
        share = float(self.seconds[held].sum()) / self.total_s
        if held.any():
            self.advice += advising.for_watermark(share, int(self.steps["watermark_blocks"].max()))

    # ------------------------------------------------------------------ losses

    def _preemption(self) -> None:
        steps = self.steps
        num = int(steps["num_preemptions"].sum())
        if not num:
            self.sentences.append("Nobody was preempted.")
            return
        computed = (steps["num_prompt_tokens_computed"] + steps["num_generation_tokens"]).to_numpy(dtype=np.float64)
        again = steps["recomputed_tokens"].to_numpy(dtype=np.float64)
        share = float(again.sum() / computed.sum()) if computed.sum() else 0.0
        part = np.divide(again, computed, out=np.zeros_like(again), where=computed > 0)
        time_share = float((part * self.seconds).sum()) / self.total_s
        moved = int(steps["swapped_in_blocks"].sum() + steps["swapped_out_blocks"].sum())
        self._row("preemptions", num, "requests", "num_preemptions")
        self._row("computed again", 100 * share, "% of computed tokens", "recomputed_tokens")
        self._row("time for it, by tokens of each step", 100 * time_share, "% of the run", "recomputed_tokens, step_ms")
        self._row("swap traffic", moved, "blocks", "swapped_in_blocks, swapped_out_blocks")
        away = self._away()
        if away is not None:
            self._row("life spent preempted or swapped out", 100 * away, "% of requests' time", "span_states")
        spent = f"; requests spent {percent(away)} of their life preempted or swapped out" if away is not None else (
            f"; how much of their life requests spent so is unknown ({self.no_requests})" if self.no_requests else "")  # fmt: skip
        self.sentences.append(f"{num:,} preemptions: {int(again.sum()):,} tokens ({percent(share)} of all computed) were computed again, "
                              f"about {percent(time_share)} of the run's time, and {moved:,} blocks swapped{spent}.")  # fmt: skip
        self.advice += advising.for_recomputing(share, time_share)

    def _away(self) -> float | None:
        """Share of requests' time; None where no spans were recorded."""
        lost = whole = 0.0
        for states, starts, ends in zip(*(self.requests[c] for c in ("span_states", "span_starts_s", "span_ends_s")), strict=True):
            for state, start, end in zip(states, starts, ends, strict=False):
                whole += end - start
                lost += (end - start) * (state in ("preempted", "swapped"))
        return lost / whole if whole > 0 else None

    def _fragmentation(self) -> None:
        size = self.config.get("block_size")
        empty = self._mean("internal_fragmentation_tokens")
        if not _is_whole(size) or not (self.steps["kv_blocks_total"] > 0).any():
            self.sentences.append(f"On average {empty:,.0f} slots in used blocks were empty; of how many is unknown (no block_size).")
            return
        of_pool = empty / (size * float(self.steps["kv_blocks_total"].max()))
        reserved = size * self._mean("kv_blocks_reserved") / (size * float(self.steps["kv_blocks_total"].max()))
        self._row("empty slots in used blocks", 100 * of_pool, "% of the pool", "internal_fragmentation_tokens, block_size")
        self.sentences.append(f"Empty slots in used blocks were {percent(of_pool)} of the pool.")
        if reserved >= WORTH:
            self._row("of them in blocks reserved by the layout", 100 * reserved, "% of the pool", "kv_blocks_reserved")
            self.advice += advising.for_reserved(reserved, self.shares[BLOCKS])
        else:
            self.advice += advising.for_partly_filled(of_pool, self.shares[BLOCKS], size)

    def _sharing(self) -> None:
        queries, hits = int(self.steps["prefix_cache_queries"].sum()), int(self.steps["prefix_cache_hits"].sum())
        if not queries:
            return
        self._row("prefix cache hit rate", 100 * hits / queries, "% of prompt tokens", "prefix_cache_hits, prefix_cache_queries")
        if not hits and self._without_cache():
            return
        bound, why = self._unlimited()
        lost = self._not_in_full_blocks(queries)
        found, source = (np.nan, why) if bound is None else (bound.possible / bound.asked, "block events: publish")
        self._row("an unlimited cache would have found", 100 * found, "% of prompt tokens", source)
        of = "" if bound is None else f" (an unlimited one would have found {percent(found)})"
        self.sentences.append(f"{percent(hits / queries)} of the prompt tokens came from the prefix cache{of}; {lost}; "
                              f"{self._missed(bound, why, queries)}.")  # fmt: skip

    def _without_cache(self) -> bool:
        """Says so where the run had no prefix cache, or published nothing in it."""
        policy, blocks = self.config.get("prefix_cache"), self.run.blocks()
        if isinstance(policy, Mapping) and policy.get("_target_") == OFF:
            what = "There was no prefix cache (prefix_cache=none)"
        elif len(blocks) and not (blocks["kind"] == "publish").any():
            what = "No block was published in the prefix cache (none there, or no prompt filled a block)"
        else:
            return False
        self.sentences.append(f"{what}; what one would have found is unknown.")
        self.advice += advising.for_no_cache()
        return True

    def _not_in_full_blocks(self, queries: int) -> str:
        """What was cached but in blocks that did not match as a whole."""
        lost = np.nan if self.no_requests else float(self.requests["num_shareable_tokens_lost"].sum()) / queries
        source = self.no_requests or "num_shareable_tokens_lost"
        self._row("shared, but not in full blocks", 100 * lost, "% of prompt tokens", source)
        if self.no_requests:
            return f"how many more were there, but not in full blocks, is unknown ({self.no_requests})"
        self.advice += advising.for_partial_blocks(lost)
        return f"{percent(lost)} more were there, but not in full blocks"

    def _unlimited(self) -> tuple[Bound | None, str]:
        """What a cache without a limit would have found, or why that is unknown."""
        size, policy = self.config.get("block_size"), self.config.get("prefix_cache")
        if not _is_whole(size):
            return None, "no block_size"
        if isinstance(policy, Mapping) and policy.get("partial_block_copy"):
            return None, "parts of blocks were found too"
        least = policy.get("min_match_tokens", 0) if isinstance(policy, Mapping) else 0
        bound, why = unlimited(self.requests, self.run.blocks(), size, least if _is_whole(least) else 0)
        return bound, next((note for note in self.run.notes if note.startswith("blocks.")), why)

    def _missed(self, bound: Bound | None, why: str, queries: int) -> str:
        """What was lost to eviction, and to requests that ran side by side."""
        size, blocks = self.config.get("block_size"), self.run.blocks()
        if blocks.empty or not _is_whole(size):
            return f"what eviction lost, and what an unlimited cache would have found, is unknown ({why})"
        again = evicted_too_early(blocks)
        share = min(again * size / queries, 1.0 if bound is None else max(0.0, bound.missed))
        self._row("evicted, then computed again", again, "blocks", "block events: evict, publish")
        words = f"{again:,} blocks were computed again after their eviction, at most {percent(share)} more of the prompt tokens"
        self.advice += advising.for_evicted(share)
        if bound is None:
            return f"{words}; what an unlimited cache would have found is unknown ({why})"
        return words + self._side_by_side(bound, share) + self._too_short(bound)

    def _side_by_side(self, bound: Bound, evicted: float) -> str:
        """What is left of the missed once the evicted ones are off: at most what requests missed that began while another ran."""
        rest = bound.missed - evicted
        early = min(rest, bound.alongside / bound.asked)
        said = ""
        self.advice += advising.for_side_by_side(early)
        if early >= WORTH:
            said = f"; {percent(early)} were asked for before they had been computed, by requests side by side"
        return said + (f"; why {percent(rest - early)} were missed is unknown" if rest - early >= WORTH else "")

    def _too_short(self, bound: Bound) -> str:
        """What the policy's shortest match keeps out."""
        share = bound.too_short / bound.asked
        if share < WORTH:
            return ""
        self.advice += advising.for_short_beginnings(share)
        return f"; {percent(share)} more would have been in an unlimited cache, in beginnings shorter than min_match_tokens"

    def _mean(self, column: str) -> float:
        """Mean over the time in steps."""
        weights = self.seconds if self.seconds.sum() > 0 else None
        return float(np.average(self.steps[column].to_numpy(dtype=np.float64), weights=weights))


def _is_number(value: Any) -> TypeGuard[float]:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _is_whole(value: Any) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0
