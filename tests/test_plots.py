"""Figures from frames: what is drawn is what was recorded, with units on the axes, from nothing to two hundred requests."""

import re
import subprocess
import sys

import numpy as np
import pandas as pd
import pytest
from trace_examples import OUTCOMES, REQUESTS, STATS, plan, request, stats

from kvlab.analysis import compare, memory_bands, throughput, timeline
from kvlab.analysis.plots import MAX_POINTS, pareto, watermark_curve
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


def small_print(axis) -> list[str]:
    """An axis title and the lines below it, with plain spaces."""
    return [re.sub("<[^>]*>", "", line) for line in axis.title.text.replace("\N{NO-BREAK SPACE}", " ").split("<br>")]


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
    assert small_print(fig.layout.xaxis) == ["block_size (tokens)", "mean; bars: smallest to largest over up to 2 runs"]
    assert list(fig.layout.xaxis.categoryarray) == ["8", "16"]


SWEPT = pd.DataFrame([
    {"run": f"{e}-{b}-{s}", "eviction": e, "eviction._target_": f"kvlab.{e}", "block_size": b, "num_blocks": 4096 // b, "watermark": w,
     "seed": s, "workload.seed": s, "mean_ttft_ms": 100.0 * b + s + w, "num_preemptions": s, "num_steps": 7, "notes": f"{s}"}
    for e in ("lru", "fifo") for b in (8, 16) for w in (0.0, 0.1) for s in (0, 1, 2)
])  # fmt: skip


def test_bars_say_which_settings_they_are_over():
    """Two sizes and three seeds a point: no noise of seeds alone. num_blocks follows from block_size, workload.seed is the seed."""
    fig = compare(SWEPT, "watermark", "mean_ttft_ms", by="eviction")
    assert small_print(fig.layout.xaxis) == [
        "watermark (fraction of the pool)", "mean; bars: smallest to largest over block_size, seed (6 runs)"]  # fmt: skip
    assert fig.data[0].y[0] == pytest.approx(1201)
    assert (fig.data[0].error_y.array[0], fig.data[0].error_y.arrayminus[0]) == pytest.approx((401, 401))
    assert [t.line.dash for t in fig.data] == ["solid", "dash"]
    of_all = compare(SWEPT, "watermark", "mean_ttft_ms")
    assert small_print(of_all.layout.xaxis)[1:] == ["mean; bars: smallest to largest over eviction, block_size, seed", "(12 runs)"]
    assert not of_all.data[0].showlegend
    seeds = compare(SWEPT, "watermark", "mean_ttft_ms", by=["eviction", "block_size"])
    assert small_print(seeds.layout.xaxis)[1] == "mean; bars: smallest to largest over seed (3 runs)"
    assert list(traces(seeds)) == [f"eviction = {e}, block_size = {b}" for e in ("fifo", "lru") for b in (8, 16)]
    assert seeds.data[0].error_y.array[0] == pytest.approx(1)
    once = compare(SWEPT[SWEPT["seed"] == 0], "watermark", "mean_ttft_ms", by=["eviction", "block_size"])
    assert small_print(once.layout.xaxis) == ["watermark (fraction of the pool)"]
    assert once.data[0].error_y.array is None
    assert small_print(watermark_curve(SWEPT, by="eviction").layout.xaxis) == [
        "watermark (% of the pool)", "median; bars: smallest to largest over block_size, seed (6 runs)"]  # fmt: skip


def test_a_column_of_text_is_no_figure_and_those_of_numbers_are_named():
    with pytest.raises(UserError, match=r"'eviction' holds no numbers. Columns of numbers: num_steps, mean_ttft_ms, num_preempt"):
        compare(SWEPT, "block_size", "eviction")
    with pytest.raises(UserError, match="'eviction' holds no numbers"):
        pareto(SWEPT, {"mean_ttft_ms": "min", "eviction": "max"})
    with pytest.raises(UserError, match="'watermark' holds no numbers"):
        watermark_curve(SWEPT.assign(watermark="a tenth"))
    assert len(compare(SWEPT.astype({"mean_ttft_ms": object}), "block_size", "mean_ttft_ms").data) == 1
    for fig in (compare(SWEPT[:0], "block_size", "eviction"), compare(SWEPT.assign(eviction=None), "block_size", "seed", by="eviction")):
        assert fig.layout.annotations[0].text.startswith("no run has block_size and")
        assert not fig.data


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
