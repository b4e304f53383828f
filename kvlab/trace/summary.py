"""A run in figures, with the words and definitions of serving benchmarks (vLLM's `bench serve`).

Latencies are those of finished requests (reasons stop and length); refused, aborted and cut-off ones are counted apart.
Percentiles interpolate linearly. Throughput is what finished requests got, over the time from first arrival to last commit; of a run that
was cut off (killed, failed, interrupted, pruned, still running) it is all output that its steps made: most of it is of requests that
had not ended and are in no row.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import pandas as pd

from kvlab.trace.frames import empty_frame

FINISHED = ("stop", "length")


class Goals(NamedTuple):
    """What a request must meet to count as good: milliseconds, None is no goal."""

    ttft_ms: float | None = None
    tpot_ms: float | None = None
    e2el_ms: float | None = None


class Figure(NamedTuple):
    """A summary figure: its key, the words it is known by, its unit and what it is."""

    key: str
    title: str
    unit: str
    meaning: str


_LATENCIES = (
    ("ttft", "TTFT", "time to first token, from arrival"),
    ("tpot", "TPOT", "time per output token after the first, one value a request"),
    ("itl", "ITL", "gaps between successive tokens, pooled over requests"),
    ("e2el", "E2EL", "end-to-end latency, from arrival to finish"),
    ("queue_time", "queue time", "from arrival to first scheduled"),
)

FIGURES = (
    Figure("num_requests", "Requests", "", "ended, for whatever reason"),
    Figure("num_finished", "Finished requests", "", "ended by stop or length"),
    Figure("num_refused", "Refused requests", "", "could never have fitted"),
    Figure("num_aborted", "Aborted requests", "", "the client left"),
    Figure("num_other", "Otherwise ended requests", "", "e.g. kv_capacity: see finish_reasons"),
    Figure("num_steps", "Steps", "", "steps committed"),
    Figure("duration_s", "Duration", "s", "first arrival to last commit, on the engine's clock"),
    Figure("num_prompt_tokens", "Total input tokens", "tokens", "prompts of finished requests, also of a run that was cut off"),
    Figure("num_output_tokens", "Total generated tokens", "tokens", "output of finished requests, all their sequences; "
           "of a run that was cut off, of all steps (requests that had not ended included)"),
    Figure("request_throughput_per_s", "Request throughput", "req/s", "finished requests / duration"),
    Figure("request_goodput_per_s", "Request goodput", "req/s", "those that met every goal / duration; null without goals"),
    Figure("goodput_fraction", "Requests that met the goals", "fraction", "of all ended requests; null without goals"),
    Figure("output_token_throughput_per_s", "Output token throughput", "tok/s", "num_output_tokens / duration"),
    Figure("total_token_throughput_per_s", "Total token throughput", "tok/s",
           "input and generated tokens of finished requests / duration; null for a run that was cut off"),
    *(
        Figure(f"{statistic}_{key}_ms", f"{statistic.capitalize()} {title}", "ms", meaning)
        for key, title, meaning in _LATENCIES
        for statistic in ("mean", "median", "p99")
    ),
    Figure("prefix_cache_hit_rate_tokens", "Prefix cache hit rate", "fraction", "hits / queries in tokens, first admissions"),
    Figure("preempted_hit_rate_tokens", "Hit rate of readmissions", "fraction",
           "the same for readmissions after a preemption; tokens brought back from swap count as found"),
    Figure("num_preemptions", "Preemptions", "", "times a request gave way"),
    Figure("recomputed_tokens", "Recomputed tokens", "tokens", "computed again after a preemption"),
    Figure("num_evicted_blocks", "Evicted blocks", "blocks", "cached blocks evicted"),
    Figure("swapped_out_blocks", "Blocks swapped out", "blocks", "gpu to cpu"),
    Figure("swapped_in_blocks", "Blocks swapped in", "blocks", "cpu to gpu"),
    Figure("cow_copies", "Copy-on-write copies", "blocks", "blocks copied before a write"),
    Figure("mean_kv_cache_usage", "Mean KV cache usage", "fraction", "used / total blocks, weighted by step length"),
    Figure("peak_kv_cache_usage", "Peak KV cache usage", "fraction", "largest after a commit"),
    Figure("mean_internal_fragmentation_tokens", "Mean internal fragmentation", "tokens", "empty slots in used blocks, weighted"),
    Figure("peak_internal_fragmentation_tokens", "Peak internal fragmentation", "tokens", "largest after a commit"),
    Figure("peak_running_reqs", "Peak running requests", "requests", "largest after a commit"),
    Figure("mean_running_reqs", "Mean running requests", "requests", "weighted by step length"),
    Figure("mean_step_ms", "Mean step", "ms", "mean step length on the engine's clock"),
    Figure("mean_schedule_ms", "Mean schedule time", "ms", "host time of schedule() a step"),
    Figure("peak_process_rss_bytes", "Peak resident memory", "bytes", "of the whole process, measured"),
    Figure("peak_device_memory_allocated_bytes", "Peak device memory", "bytes", "held by tensors, sampled; null without one"),
)  # fmt: skip


_OF_BOTH = ("duration_s",)
_OUTPUT = ("num_output_tokens", "output_token_throughput_per_s")

STEP_COLUMNS = (
    "now_s", "end_s", "step_ms", "schedule_ms", "num_output_tokens", "num_running_reqs", "kv_cache_usage", "internal_fragmentation_tokens",
    "prefix_cache_hits", "prefix_cache_queries", "preempted_hits", "preempted_queries", "num_preemptions", "recomputed_tokens",
    "num_evicted_blocks", "swapped_out_blocks", "swapped_in_blocks", "cow_copies", "process_rss_bytes", "device_memory_allocated_bytes",
)  # fmt: skip
REQUEST_COLUMNS = (
    "arrival_s", "finish_s", "num_prompt_tokens", "num_output_tokens", "finish_reason", "token_times_s", "queue_time_s", "ttft_s",
    "tpot_s", "e2el_s",
)  # fmt: skip
"""What `summarize` looks at: of a long run nothing else need be in memory."""


def summarize(
    steps: pd.DataFrame | None, requests: pd.DataFrame | None, goals: Goals | None = None, cut_off: bool = False
) -> dict[str, Any]:
    """The figures of `FIGURES` and `finish_reasons` (reason: count); undefined ones (no such request, no step) are None.

    A frame that was not recorded is given as None: its figures are None, not 0 (with one of the two the duration is that frame's).
    `cut_off`: the run ended before its requests did, so that its output is what its steps made.
    """
    if steps is not None and requests is not None:
        return _summarize(steps, requests, goals, cut_off)
    empty_steps, empty_requests = empty_frame("steps"), empty_frame("requests")
    out = _summarize(empty_steps if steps is None else steps, empty_requests if requests is None else requests, goals, cut_off)
    of_steps = {"num_steps", *_step_figures(empty_steps), *(_OUTPUT if cut_off else ())}
    for key in out:
        unknown = steps is None if key in of_steps else requests is None and key not in _OF_BOTH
        if unknown or (steps is None and requests is None):
            out[key] = None
    return out


def _summarize(steps: pd.DataFrame, requests: pd.DataFrame, goals: Goals | None, cut_off: bool) -> dict[str, Any]:
    done = requests[requests["finish_reason"].isin(FINISHED)]
    duration = _duration(steps, requests, cut_off)
    num_prompt, num_output = int(done["num_prompt_tokens"].sum()), int(done["num_output_tokens"].sum())
    if cut_off:  # of steps that are lost (damaged), the requests that ended know at least their own
        num_output = max(num_output, int(steps["num_output_tokens"].sum()))
    reasons = {str(k): int(v) for k, v in sorted(requests["finish_reason"].value_counts().items())}
    num_refused, num_aborted = reasons.get("refused", 0), reasons.get("abort", 0)
    good = _num_good(done, goals)
    out: dict[str, Any] = {
        "num_requests": len(requests), "num_finished": len(done), "num_refused": num_refused, "num_aborted": num_aborted,
        "num_other": len(requests) - len(done) - num_refused - num_aborted, "num_steps": len(steps), "duration_s": duration,
        "num_prompt_tokens": num_prompt, "num_output_tokens": num_output,
        "request_throughput_per_s": _over(len(done), duration),
        "request_goodput_per_s": None if good is None else _over(good, duration),
        "goodput_fraction": None if good is None else _over(good, len(requests)),
        "output_token_throughput_per_s": _over(num_output, duration),
        "total_token_throughput_per_s": None if cut_off else _over(num_prompt + num_output, duration),
    }  # fmt: skip
    for key, _, _ in _LATENCIES:
        values = _gaps(done) if key == "itl" else done[f"{key}_s"].to_numpy(dtype=np.float64)
        out.update(_statistics(key, values[~np.isnan(values)]))
    out.update(_step_figures(steps))
    assert list(out) == [f.key for f in FIGURES]
    return {**out, "finish_reasons": reasons}


def _duration(steps: pd.DataFrame, requests: pd.DataFrame, cut_off: bool) -> float | None:
    """Seconds from the first arrival (first step, without requests) to the last commit or finish. Where a run was cut off, the first to
    arrive may not have ended: its first step counts too."""
    ends = [*steps["end_s"].tail(1), *requests["finish_s"].nlargest(1)]
    starts = [*requests["arrival_s"].nsmallest(1)]
    if cut_off or not starts:
        starts += [*steps["now_s"].head(1)]
    return float(max(ends) - min(starts)) if ends and starts else None


def _over(numerator: float, denominator: float | None) -> float | None:
    return float(numerator / denominator) if denominator else None


def _gaps(requests: pd.DataFrame) -> np.ndarray:
    gaps = [np.diff(times) for times in requests["token_times_s"]]
    return np.concatenate(gaps) if gaps else np.empty(0)


def _statistics(key: str, seconds: np.ndarray) -> dict[str, float | None]:
    if not len(seconds):
        return {f"{s}_{key}_ms": None for s in ("mean", "median", "p99")}
    median, p99 = np.percentile(seconds, (50, 99)) * 1e3
    return {f"mean_{key}_ms": float(seconds.mean() * 1e3), f"median_{key}_ms": float(median), f"p99_{key}_ms": float(p99)}


def _num_good(done: pd.DataFrame, goals: Goals | None) -> int | None:
    """Finished requests that meet every goal. One without a TPOT (a single token) meets any TPOT goal."""
    if goals is None or not any(g is not None for g in goals):
        return None
    good = np.ones(len(done), dtype=bool)
    for name, goal in zip(("ttft_s", "tpot_s", "e2el_s"), goals, strict=True):
        if goal is not None:
            good &= ~(done[name].to_numpy() * 1e3 > goal)
    return int(good.sum())


def _step_figures(steps: pd.DataFrame) -> dict[str, Any]:
    def rate(hits: str, queries: str) -> float | None:
        return _over(int(steps[hits].sum()), int(steps[queries].sum()))

    def peak(name: str) -> int | float | None:
        values = steps[name].dropna()
        return values.max().item() if len(values) else None

    def mean(name: str) -> float | None:
        if not len(steps):
            return None
        weights = steps["step_ms"].to_numpy()
        return float(np.average(steps[name].to_numpy(), weights=weights if weights.sum() > 0 else None))

    sums = ("num_preemptions", "recomputed_tokens", "num_evicted_blocks", "swapped_out_blocks", "swapped_in_blocks", "cow_copies")
    return {
        "prefix_cache_hit_rate_tokens": rate("prefix_cache_hits", "prefix_cache_queries"),
        "preempted_hit_rate_tokens": rate("preempted_hits", "preempted_queries"),
        **{name: int(steps[name].sum()) for name in sums},
        "mean_kv_cache_usage": mean("kv_cache_usage"), "peak_kv_cache_usage": peak("kv_cache_usage"),
        "mean_internal_fragmentation_tokens": mean("internal_fragmentation_tokens"),
        "peak_internal_fragmentation_tokens": peak("internal_fragmentation_tokens"),
        "peak_running_reqs": peak("num_running_reqs"), "mean_running_reqs": mean("num_running_reqs"),
        "mean_step_ms": float(steps["step_ms"].mean()) if len(steps) else None,
        "mean_schedule_ms": float(steps["schedule_ms"].mean()) if len(steps) else None,
        "peak_process_rss_bytes": peak("process_rss_bytes"),
        "peak_device_memory_allocated_bytes": peak("device_memory_allocated_bytes"),
    }  # fmt: skip


def markdown_figures() -> str:
    """The figures as a Markdown table, for the docs."""
    lines = ["| key | figure | unit | meaning |", "|---|---|---|---|"]
    return "\n".join([*lines, *(f"| `{f.key}` | {f.title} | {f.unit or '-'} | {f.meaning} |" for f in FIGURES)]) + "\n"


def format_summary(summary: dict[str, Any]) -> str:
    """The figures that are defined as aligned lines of text, for a terminal."""
    lines = []
    for figure in FIGURES:
        value = summary.get(figure.key)
        if value is not None:
            shown = f"{value:,.3f}" if isinstance(value, float) else f"{value:,}"
            lines.append(f"{figure.title + (f' ({figure.unit})' if figure.unit else '') + ':':<44}{shown:>18}")
    return "\n".join(lines)
