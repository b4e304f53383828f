"""Figures from frames: what is drawn is what was recorded, with units on the axes, from nothing to two hundred requests."""

import subprocess
import sys

import numpy as np
import pandas as pd
import pytest
from trace_examples import OUTCOMES, REQUESTS, STATS, plan, request, stats

from kvlab.analysis import compare, memory_bands, throughput, timeline
from kvlab.analysis.plots import MAX_POINTS
from kvlab.trace import Recorder
from kvlab.trace.frames import empty_frame
from kvlab.types import UserError


def frames(step_stats=STATS, records=REQUESTS):
    recorder = Recorder(None)
    for row in step_stats:
        recorder.on_step(plan(0), OUTCOMES[0], row)
    for record in records:
        recorder.on_request(record)
    return recorder.steps(), recorder.requests()


def traces(fig) -> dict:
    return {t.name: t for t in fig.data}


def test_memory_bands_add_up_to_the_pool():
    steps, _ = frames([s._replace(watermark_blocks=2) for s in STATS])
    fig = memory_bands(steps)
    drawn = traces(fig)
    assert list(drawn) == ["used", "cached (evictable)", "free", "watermark"]
    assert list(drawn["used"].x) == [1.0, 1.5, 1.5, 2.0, 2.0, 3.0]  # start and end of each step
    assert list(drawn["used"].y) == [4, 4, 8, 8, 2, 2]
    assert list(drawn["cached (evictable)"].y) == [0, 0, 1, 1, 5, 5]
    assert list(drawn["free"].y) == [6, 6, 1, 1, 3, 3]
    assert list(drawn["watermark"].y) == [8] * 6
    assert {t.stackgroup for t in fig.data[:3]} == {"blocks"}
    assert fig.layout.yaxis.title.text == "KV blocks"
    assert "(s" in fig.layout.xaxis.title.text


def test_no_watermark_no_line():
    assert "watermark" not in traces(memory_bands(frames()[0]))


def test_long_runs_are_thinned_and_keep_their_peaks():
    rows = [stats(i, i, i + 1, kv_blocks_used=9 if i == 12_345 else 1, kv_blocks_free=1 if i == 12_345 else 9) for i in range(20_000)]
    used = traces(memory_bands(frames(rows)[0]))["used"]
    assert len(used.x) <= 2 * MAX_POINTS
    assert max(used.y) == 9
    assert used.x[list(used.y).index(9)] == 12_345


def test_throughput_is_tokens_over_time_and_its_area_is_the_tokens():
    steps, _ = frames()
    fig = throughput(steps, num_bins=4)  # 1.0 to 3.0 s in stretches of 0.5 s
    drawn = traces(fig)
    assert list(drawn["output"].y) == pytest.approx([4, 4, 1, 1, 1])  # 2 tokens, 2, and 1 over a whole second
    assert list(drawn["prompt"].y) == pytest.approx([80, 0, 0, 0, 0])
    assert fig.layout.yaxis.title.text == "output tokens/s"
    assert fig.layout.yaxis2.title.text == "prompt tokens/s"
    for bins in (1, 3, 7):
        drawn = traces(throughput(steps, num_bins=bins))["output"]
        assert sum(np.diff(drawn.x) * np.asarray(drawn.y)[:-1]) == pytest.approx(5)


def test_throughput_is_zero_while_nothing_runs():
    steps, _ = frames([stats(0, 0.0, 1.0, num_output_tokens=4), stats(1, 9.0, 10.0, num_output_tokens=4)])
    assert list(traces(throughput(steps, num_bins=10))["output"].y[:-1]) == pytest.approx([4, 0, 0, 0, 0, 0, 0, 0, 0, 4])


def test_timeline_has_a_row_a_request_in_order_of_arrival_and_a_bar_a_span():
    spans = (("queue", 0.0, 1.0), ("prefill", 1.0, 2.0), ("decode", 2.0, 3.0), ("preempted", 3.0, 5.0), ("decode", 5.0, 6.0))
    late = request("late", 2.0, (), "refused")
    fig = timeline(frames(records=(late, request("early", 0.0, (2.0, 6.0), spans=spans)))[1])
    drawn = traces(fig)
    assert list(drawn) == ["queue", "prefill", "decode", "preempted", "refused"]
    assert list(drawn["decode"].base) == [2.0, 5.0]
    assert list(drawn["decode"].x) == [1.0, 1.0]
    assert list(drawn["preempted"].x) == [2.0]
    assert list(drawn["decode"].y) == [0, 0]
    assert list(drawn["refused"].y) == [1]
    assert list(fig.layout.yaxis.ticktext) == ["early", "late"]
    assert fig.layout.yaxis.range[0] > fig.layout.yaxis.range[1]  # the first on top


def test_timeline_of_many_requests_stays_readable():
    spans = [(("queue", i, i + 1.0), ("prefill", i + 1.0, i + 2.0)) for i in range(200)]
    records = [request(f"request-{i}", 0.0, (i + 2.0,), spans=spans[i]) for i in reversed(range(200))]
    fig = timeline(frames(records=records)[1])
    assert fig.layout.height <= 900
    assert len(fig.layout.yaxis.tickvals) < 12
    assert fig.layout.yaxis.ticktext[-1] == "request-199"
    assert len(fig.data) == 2
    assert len(fig.data[0].x) == 200
    assert fig.data[0].width == 1.0
    assert "200 requests" in fig.layout.yaxis.title.text


def test_compare_runs():
    frame = pd.DataFrame({
        "block_size": [8, 16, 8, 16, 16, 8], "eviction": ["lru", "lru", "fifo", "fifo", "fifo", None],
        "output_token_throughput_per_s": [10.0, 20.0, 30.0, 40.0, 60.0, 1.0],
    })  # fmt: skip
    fig = compare(frame, "block_size", "output_token_throughput_per_s", by="eviction")
    drawn = traces(fig)
    assert list(drawn) == ["eviction = fifo", "eviction = lru"]
    assert list(drawn["eviction = fifo"].y) == [30.0, 50.0]
    assert list(drawn["eviction = fifo"].error_y.array) == [0.0, 10.0]
    assert list(drawn["eviction = lru"].x) == ["8", "16"]
    assert fig.layout.yaxis.title.text == "Output token throughput (tok/s)"
    assert fig.layout.xaxis.title.text == "block_size (tokens)"
    assert list(fig.layout.xaxis.categoryarray) == ["8", "16"]


def test_frames_without_rows_say_so_and_wrong_frames_are_named():
    for fig in (memory_bands(empty_frame("steps")), throughput(empty_frame("steps")), timeline(empty_frame("requests"))):
        assert "recorded" in fig.layout.annotations[0].text
    _, requests = frames()
    with pytest.raises(UserError, match=r"run\.steps\(\).*no column end_s"):
        memory_bands(requests)
    with pytest.raises(UserError, match="no column evicton"):
        compare(pd.DataFrame({"a": [1], "b": [2]}), "a", "b", by="evicton")


def test_every_figure_has_the_one_look():
    steps, requests = frames()
    for fig in (memory_bands(steps), throughput(steps), timeline(requests)):
        assert fig.layout.template.layout.colorway[0] == "#0072B2"
        assert fig.layout.title.text


def test_plotly_is_not_needed_to_run():
    code = "import sys, kvlab, kvlab.results, kvlab.trace; assert not any(m.startswith('plotly') for m in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)
