"""Summary figures worked out by hand from the small run."""

import numpy as np
import pytest
from trace_examples import OUTCOMES, REQUESTS, STATS, plan, request

from kvlab.trace import Recorder, summarize
from kvlab.trace.frames import empty_frame
from kvlab.trace.summary import FIGURES, Goals, format_summary


@pytest.fixture
def recorder() -> Recorder:
    recorder = Recorder(None)
    for step, row in enumerate(STATS):
        recorder.on_step(plan(step), OUTCOMES[step], row)
    for record in REQUESTS:
        recorder.on_request(record)
    return recorder


def test_figures(recorder):
    """Requests a (3 tokens, length) and b (2 sequences of one token, stop) finished; the run went from 1.0 s to 3.0 s."""
    summary = summarize(recorder.steps(), recorder.requests())
    expected = {
        "num_requests": 4, "num_finished": 2, "num_refused": 1, "num_aborted": 1, "num_other": 0,
        "num_steps": 3, "duration_s": 2.0,
        "num_prompt_tokens": 40, "num_output_tokens": 5, "request_throughput_per_s": 1.0, "request_goodput_per_s": None,
        "output_token_throughput_per_s": 2.5, "total_token_throughput_per_s": 22.5,
        "mean_ttft_ms": 500.0, "median_ttft_ms": 500.0, "p99_ttft_ms": 500.0,
        "mean_tpot_ms": 750.0, "p99_tpot_ms": 750.0,
        "mean_itl_ms": 750.0, "median_itl_ms": 750.0, "p99_itl_ms": pytest.approx(995.0),
        "mean_e2el_ms": 1250.0, "median_e2el_ms": 1250.0, "p99_e2el_ms": pytest.approx(500 + 0.99 * 1500),
        "mean_queue_time_ms": 250.0,
        "prefix_cache_hit_rate_tokens": 0.2, "preempted_hit_rate_tokens": 0.25, "num_preemptions": 1, "recomputed_tokens": 15,
        "num_evicted_blocks": 3, "swapped_out_blocks": 2, "swapped_in_blocks": 0, "cow_copies": 0,
        "mean_kv_cache_usage": pytest.approx((0.4 * 0.5 + 0.8 * 0.5 + 0.2 * 1.0) / 2.0), "peak_kv_cache_usage": 0.8,
        "mean_internal_fragmentation_tokens": pytest.approx((8 * 0.5 + 4 * 0.5) / 2), "peak_internal_fragmentation_tokens": 8,
        "peak_running_reqs": 2, "mean_step_ms": pytest.approx(2000 / 3), "mean_schedule_ms": 0.25,
        "peak_device_memory_allocated_bytes": None, "finish_reasons": {"abort": 1, "length": 1, "refused": 1, "stop": 1},
    }  # fmt: skip
    assert {k: summary[k] for k in expected} == expected
    assert list(summary) == [*(f.key for f in FIGURES), "finish_reasons"]


def test_output_of_a_run_that_was_cut_off_is_what_its_steps_made(recorder):
    """Only b (2 tokens) and c (aborted) had ended when it was killed; the steps of 1.0 s to 3.0 s made 2 + 2 + 1 tokens (a: 3)."""
    steps, requests = recorder.steps(), recorder.requests()
    known = requests[requests["request_id"].isin(["b", "c"])]
    cut = summarize(steps, known, cut_off=True)
    assert (cut["num_finished"], cut["num_output_tokens"], cut["output_token_throughput_per_s"]) == (1, 5, 2.5)
    assert (cut["num_prompt_tokens"], cut["total_token_throughput_per_s"]) == (20, None)
    assert summarize(steps, known)["output_token_throughput_per_s"] == 1.0
    late = summarize(steps, requests[requests["request_id"] == "c"], cut_off=True)  # c came 0.25 s after the first step began
    assert (late["duration_s"], late["output_token_throughput_per_s"]) == (2.0, 2.5)
    assert summarize(steps, None, cut_off=True)["output_token_throughput_per_s"] == 2.5
    assert summarize(None, known, cut_off=True)["output_token_throughput_per_s"] is None
    assert summarize(steps[:0], known, cut_off=True)["num_output_tokens"] == 2  # the table of steps is damaged
    meanings = {f.key: f.meaning for f in FIGURES}
    assert "of a run that was cut off, of all steps" in meanings["num_output_tokens"]
    assert meanings["output_token_throughput_per_s"] == "num_output_tokens / duration"


def test_goodput_counts_finished_requests_that_meet_every_goal(recorder):
    frames = recorder.steps(), recorder.requests()
    for goals, good in ((Goals(ttft_ms=500), 2), (Goals(ttft_ms=499), 0), (Goals(tpot_ms=700), 1), (Goals(500, 750, 1999), 1)):
        summary = summarize(*frames, goals)
        assert summary["request_goodput_per_s"] == good / 2.0
        assert summary["goodput_fraction"] == good / 4


def test_percentiles_are_numpys_linear_ones():
    recorder = Recorder(None)
    latencies = [0.1, 0.2, 0.4, 0.8, 1.6]
    for i, latency in enumerate(latencies):
        recorder.on_request(request(f"r{i}", 0.0, (latency,)))
    summary = summarize(recorder.steps(), recorder.requests())
    assert summary["median_ttft_ms"] == pytest.approx(400.0)
    assert summary["p99_ttft_ms"] == pytest.approx(800 + 0.96 * 800)  # position 0.99 * 4 = 3.96
    assert summary["p99_ttft_ms"] == pytest.approx(np.percentile(latencies, 99) * 1e3)


def test_a_run_with_nothing_in_it_has_no_figures_but_zero_counts():
    summary = summarize(empty_frame("steps"), empty_frame("requests"))
    assert {k: v for k, v in summary.items() if v is not None and v != 0} == {"finish_reasons": {}}
    assert summary["num_requests"] == 0
    assert summary["mean_ttft_ms"] is None
    assert summary["duration_s"] is None


def test_text_shows_the_words_of_the_field(recorder):
    text = format_summary(summarize(recorder.steps(), recorder.requests()))
    assert "Output token throughput (tok/s):" in text
    assert "P99 TTFT (ms):" in text
    assert "goodput" not in text  # no goals, no figure
    assert len({len(line) for line in text.splitlines()}) == 1


def test_figures_of_a_table_that_was_not_recorded_are_unknown_not_zero(recorder: Recorder) -> None:
    both = summarize(recorder.steps(), recorder.requests())
    no_steps, no_requests = summarize(None, recorder.requests()), summarize(recorder.steps(), None)
    assert (no_steps["num_preemptions"], no_steps["num_steps"], no_steps["peak_kv_cache_usage"]) == (None, None, None)
    assert (no_steps["num_requests"], no_steps["mean_ttft_ms"]) == (both["num_requests"], both["mean_ttft_ms"])
    assert (no_requests["num_requests"], no_requests["num_output_tokens"], no_requests["finish_reasons"]) == (None, None, None)
    assert (no_requests["num_steps"], no_requests["num_preemptions"]) == (both["num_steps"], both["num_preemptions"])
    assert list(no_steps) == list(no_requests) == list(both)
    assert set(summarize(None, None).values()) == {None}
