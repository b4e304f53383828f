"""Figures of latencies, caches, sweeps, fronts and differences: the numbers drawn are those of the frame, and wrong frames are named."""

from __future__ import annotations

import re

import numpy as np
import pandas as pd
import pytest
from test_plots import frames, small_print, traces
from trace_examples import request, stats

import kvlab.objectives
from kvlab.analysis import plots
from kvlab.analysis.export import find_browser, save_figure
from kvlab.results import Run
from kvlab.trace.frames import empty_frame
from kvlab.trace.summary import Goals
from kvlab.types import UserError

LAYOUTS = pd.DataFrame({
    "layout": ["contiguous_max", "contiguous_max", "paged"], "tokens_percent": [20.0, 21.0, 94.0], "reserved_percent": [79.0, 78.0, 0.0],
    "partly_filled_percent": [0.5, 0.5, 2.0], "kept_percent": 0.0, "fragmented_percent": 0.0, "free_percent": [0.5, 0.5, 4.0],
})  # fmt: skip


def replays(**more) -> pd.DataFrame:
    rows = [("lru", 10, 0.1), ("lru", 100, 0.4), ("fifo", 10, 0.05), ("fifo", 100, 0.45), ("belady", 10, 0.3), ("belady", 100, 0.5)]
    frame = pd.DataFrame(rows, columns=["policy", "capacity_blocks", "block_hit_rate_any"])
    return frame.assign(**{"trace": "t.jsonl.gz", "semantics": "access", **more})


RUNS = pd.DataFrame({
    "run": ["a", "b", "c", "d"], "mean_ttft_ms": [10.0, 20.0, 30.0, 25.0], "output_token_throughput_per_s": [100.0, 300.0, 200.0, 400.0],
    "watermark": [0.0, 0.0, 0.1, 0.1], "num_preemptions": [8, 10, 0, 2], "recomputed_tokens": [80, 100, 0, 20],
    "block_size": [8, 8, 16, 16], "prefix_cache_hit_rate_tokens": [0.5, 0.7, 0.2, 0.2],
    "mean_internal_fragmentation_tokens": [4.0, 6.0, 9.0, 9.0], "mean_step_ms": [5.0, 5.0, 4.0, 4.0],
})  # fmt: skip


def test_latency_is_the_share_of_requests_within_a_time():
    records = [request(f"r{i}", 0.0, (0.1 * i, 0.1 * i + 0.05)) for i in (1, 2, 3, 4)] + [request("x", 0.0, (9.0,), "abort")]
    fig = plots.latency(frames(records=records)[1], kinds=("ttft", "itl"), goals=Goals(ttft_ms=250))
    curve = fig.data[0]
    assert list(curve.x) == pytest.approx([100, 100, 200, 300, 400])  # the aborted request is not there
    assert list(curve.y) == [0, 25, 50, 75, 100]
    assert list(fig.data[1].x) == pytest.approx([250, 370, 397])  # linear percentiles of 100 ... 400
    assert fig.layout.xaxis.title.text == "TTFT (ms)"
    assert fig.layout.yaxis2.title.text == "gaps (%)"
    assert fig.layout.shapes[0].x0 == pytest.approx(250)


def test_latency_by_run_and_its_percentiles():
    slow = frames(records=[request("s", 0.0, (20.0, 20.1))])[1].assign(run="slow")
    fast = frames(records=[request("f", 0.0, (0.5, 0.6))])[1].assign(run="fast")
    fig = plots.latency_percentiles(pd.concat([slow, fast]), kinds=("ttft",), by="run")
    drawn = traces(fig)
    assert list(drawn) == ["run = fast", "run = slow"]
    assert list(drawn["run = slow"].x) == ["P50", "P90", "P95", "P99"]
    assert list(drawn["run = slow"].y) == pytest.approx([20.0] * 4)  # one panel, one unit: seconds, since the slow one takes long
    assert fig.layout.yaxis.title.text == "TTFT (s)"
    with pytest.raises(UserError, match=r"Unknown latency 'tfft'. Did you mean 'ttft'"):
        plots.latency(slow, kinds=("tfft",))


def test_miss_ratios_and_who_is_a_bound():
    fig = plots.miss_ratio_curve(replays())
    drawn = traces(fig)
    assert list(drawn) == ["lru", "fifo", "belady (offline bound)"]
    assert list(drawn["lru"].x) == [10, 100]
    assert list(drawn["lru"].y) == pytest.approx([0.9, 0.6])
    assert drawn["belady (offline bound)"].line.dash == "dash"
    assert fig.layout.title.text == "Miss ratio: t"
    assert "blocks" in fig.layout.xaxis.title.text
    prefix = replays().rename(columns={"block_hit_rate_any": "block_hit_rate_prefix"})
    assert "belady (offline reference)" in traces(plots.miss_ratio_curve(prefix, "block_hit_rate_prefix"))
    with pytest.raises(UserError, match="several values of trace: t, u"):
        plots.miss_ratio_curve(pd.concat([replays(trace="t"), replays(trace="u")]))
    with pytest.raises(UserError, match="Unknown hit rate"):
        plots.miss_ratio_curve(replays(), "hits")


def test_long_curves_are_thinned_in_the_logarithm_with_both_ends():
    capacities = np.arange(1, 50_001)
    frame = pd.DataFrame({"trace": "t", "policy": "lru", "semantics": "access", "capacity_blocks": capacities,
                          "block_hit_rate_any": capacities / 50_000})  # fmt: skip
    line = plots.miss_ratio_curve(frame).data[0]
    assert len(line.x) <= 400
    assert (line.x[0], line.x[-1]) == (1, 50_000)
    assert list(line.y) == pytest.approx([1 - x / 50_000 for x in line.x])


def test_heat_map_shows_hit_rates_and_colours_the_gap_to_belady():
    fig = plots.policy_by_capacity(replays())
    cells = fig.data[0]
    assert fig.layout.yaxis.title.text == "eviction policy"
    assert fig.layout.xaxis.title.text == "capacity (blocks; semantics access)"
    assert fig.layout.title.text == "Block hit rate, any block (%): t"  # which of the hit rates stands in its cells
    assert plots.policy_by_capacity(replays(), title="mine").layout.title.text == "mine"
    assert plots.miss_ratio_curve(replays()).layout.yaxis.title.text == "miss ratio<br>(1 − block hit rate, any block)"
    assert list(cells.y) == ["belady", "lru", "fifo"] or list(cells.y) == ["belady", "fifo", "lru"]
    row = list(cells.y).index("lru")
    assert list(cells.customdata[row]) == pytest.approx([10, 40])
    assert list(cells.z[row]) == pytest.approx([20, 10])
    assert list(cells.z[0]) == [0, 0]
    without = replays().query("policy != 'belady'")
    assert list(plots.policy_by_capacity(without).data[0].z.max(axis=0)) == pytest.approx([10, 45])


def test_watermark_and_block_size_curves_are_medians_with_their_range():
    fig = plots.watermark_curve(RUNS)
    assert list(fig.data[0].x) == [0, 10]  # percent
    assert list(fig.data[0].y) == [9, 1]
    assert list(fig.data[0].error_y.array) == [1, 1]
    assert fig.layout.yaxis.title.text == "preemptions"
    assert small_print(fig.layout.xaxis3) == ["watermark (% of the pool)", "median; bars: smallest to largest over 2 runs"]
    fig = plots.block_size_curve(RUNS)
    assert [list(t.y) for t in fig.data] == [[0.6, 0.2], [5, 9], [5, 4]]
    assert list(fig.layout.xaxis3.ticktext) == ["8", "16"]


def test_pareto_front_by_hand():
    objectives = {"mean_ttft_ms": "min", "output_token_throughput_per_s": "max"}
    assert list(plots.pareto_front(RUNS, objectives)) == [True, True, False, True]
    assert list(plots.pareto_front(RUNS, {"mean_ttft_ms": "max", "output_token_throughput_per_s": "max"})) == [False, False, True, True]
    assert list(plots.pareto_front(RUNS.assign(mean_ttft_ms=[np.nan, 1, 1, 1]), {"mean_ttft_ms": "min"})) == [False, True, True, True]
    drawn = traces(plots.pareto(RUNS, objectives))
    assert list(drawn["Pareto front"].text) == ["a", "b", "d"]
    assert list(drawn["Pareto front"].y) == [100, 300, 400]
    assert list(drawn["dominated"].x) == [30]
    with pytest.raises(UserError, match=r"objectives = .*\"min\" or \"max\""):
        plots.pareto_front(RUNS, {"mean_ttft_ms": "down"})
    with pytest.raises(UserError, match="two objectives, not 1"):
        plots.pareto(RUNS, {"mean_ttft_ms": "min"})


def test_a_run_that_refused_or_did_not_finish_is_on_no_drawn_front_and_beats_nobody():
    """d has the best throughput and refused requests, e is the fastest and failed: the front is that of Runs.pareto."""
    objectives = {"mean_ttft_ms": "min", "output_token_throughput_per_s": "max"}
    more = RUNS[:1].assign(run="e", mean_ttft_ms=1.0, output_token_throughput_per_s=900.0)
    frame = pd.concat([RUNS, more], ignore_index=True).assign(
        status=["finished"] * 4 + ["failed"], num_requests=60, num_refused=[0, 0, 0, 40, 0])  # fmt: skip
    assert list(plots.pareto_front(frame, objectives)) == [True, True, False, False, False]
    assert list(plots.pareto_front(frame, objectives, refusing=True)) == [True, True, False, True, False]
    rows = kvlab.objectives.pareto_front(frame, ["mean_ttft_ms", "output_token_throughput_per_s"])
    assert rows["run"].tolist() == ["a", "b"]
    fig = plots.pareto(frame, objectives)
    drawn = traces(fig)
    assert list(drawn["Pareto front"].text) == ["a", "b"]
    assert list(drawn["dominated"].customdata) == ["c"]
    assert list(drawn["refused requests"].customdata) == ["d: 40 of 60 requests refused"]
    assert drawn["refused requests"].marker.symbol == "x-open"
    assert [a.text for a in fig.layout.annotations] == [
        "Left out of the front, as they refused requests: 1 run<br>Not drawn, as they did not finish: 1 run"]  # fmt: skip
    assert list(traces(plots.pareto(frame, objectives, refusing=True))) == ["dominated", "Pareto front"]
    assert not plots.pareto(RUNS, objectives).layout.annotations
    assert plots.pareto(frame[4:], objectives).layout.annotations[0].text.startswith("no finished run has both")


def test_shares_of_a_pool_add_up_and_are_drawn_as_means():
    rows = [stats(0, 0.0, 1.0, num_waiting_reqs=1, kv_blocks_used=5, kv_blocks_evictable=2, kv_blocks_free=3, kv_blocks_reserved=1,
                  internal_fragmentation_tokens=20, external_fragmentation_blocks=1), stats(1, 1.0, 9.0)]  # fmt: skip
    shares = plots.pool_shares(frames(rows)[0], block_size=16)
    assert shares == pytest.approx({"tokens_percent": 37.5, "reserved_percent": 10, "partly_filled_percent": 2.5, "kept_percent": 20,
                                    "fragmented_percent": 10, "free_percent": 20})  # fmt: skip
    everything = plots.pool_shares(frames(rows)[0], block_size=16, while_waiting=False)
    assert everything["free_percent"] == pytest.approx((20 + 8 * 100) / 9)
    table = pd.DataFrame([{"layout": "x", **shares}, {"layout": "x", **everything}])
    bars = traces(plots.fragmentation(table))
    assert bars["free"].y[0] == pytest.approx((20 + 820 / 9) / 2)
    assert sum(bar.y[0] for bar in bars.values()) == pytest.approx(100)
    bars = traces(plots.fragmentation(LAYOUTS))
    assert list(bars["token states"].x) == ["contiguous_max", "paged"]
    assert list(bars["token states"].y) == [20.5, 94.0]
    with pytest.raises(UserError, match="no pool"):
        plots.pool_shares(empty_frame("steps"), 16)


def test_difference_of_two_summaries():
    before = {"mean_ttft_ms": 100.0, "output_token_throughput_per_s": 50.0, "num_preemptions": 0, "mean_step_ms": None, "mean_tpot_ms": 4.0}
    after = {"mean_ttft_ms": 150.0, "output_token_throughput_per_s": 60.0, "num_preemptions": 3, "mean_step_ms": 2.0, "mean_tpot_ms": 4.0}
    fig = plots.difference(before, after)
    drawn = traces(fig)
    assert list(drawn["better"].y) == ["Output token throughput (tok/s)"]
    assert list(drawn["better"].x) == pytest.approx([20])
    assert list(drawn["worse"].x) == pytest.approx([50])
    assert drawn["worse"].marker.pattern.fillmode == "overlay"  # a white hatch that replaces the fill is a white bar
    assert [a.text for a in fig.layout.annotations] == ["50 → 60", "100 → 150", "4 → 4", "0 → 3"]  # from 0 there is no relative change
    with pytest.raises(UserError, match="Unknown summary figure"):
        plots.difference(before, after, figures=["ttft"])


def test_step_difference_is_aligned_by_step():
    before = pd.DataFrame({"step": [0, 1, 2], "kv_blocks_used": [1, 2, 3], "admission_blocked_by": ""})
    after = pd.DataFrame({"step": [1, 2, 3], "kv_blocks_used": [5, 5, 5], "admission_blocked_by": ""})
    drawn = traces(plots.step_difference(before, after))
    assert list(drawn["before"].x) == [0, 1, 2, 3]
    assert list(drawn["after - before"].y)[1:3] == [3, 2]
    assert np.isnan([drawn["after - before"].y[0], drawn["after - before"].y[3]]).all()
    with pytest.raises(UserError, match="admission_blocked_by is no number"):
        plots.step_difference(before, after, "admission_blocked_by")


def test_queues_and_events_are_the_steps():
    steps, _ = frames()
    drawn = traces(plots.queues(steps))
    assert list(drawn["waiting"].y) == [1, 1, 0, 0, 0, 0]
    assert "swapped out" not in drawn
    drawn = traces(plots.events(steps, num_bins=2))  # 1 to 2 s and 2 to 3 s
    assert list(drawn["preemptions"].y) == [1, 0]
    assert list(drawn["blocks swapped out"].y) == [2, 0]
    assert list(drawn["blocks evicted"].y) == [0, 3]
    assert list(drawn["tokens recomputed"].y) == [0, 15]
    axes = plots.events(steps, num_bins=2).layout
    assert (axes.yaxis.title.text, axes.yaxis.dtick) == ("preemptions", 1)  # no half of one
    assert axes.yaxis4.dtick is None
    assert "nobody was preempted" in plots.events(frames([stats(0, 0.0, 1.0)])[0]).layout.annotations[0].text


def test_service_received_by_each_tenant():
    records = [request("a", 0.0, (1.0, 2.0), tenant="x"), request("b", 0.0, (4.0,))]  # prompts of 20 tokens
    drawn = [t for t in plots.service(frames(records=records)[1], num_bins=4).data if t.showlegend]
    assert [t.name for t in drawn] == ["(none)", "x"]
    assert list(drawn[0].y) == [0, 0, 0, 0, 22]
    assert list(drawn[1].y) == [0, 22, 24, 24, 24]
    with pytest.raises(UserError, match="num_bins = 0"):
        plots.service(frames()[1], num_bins=0)


STEPS, REQUESTS = empty_frame("steps"), empty_frame("requests")
EMPTY = {
    "memory_bands": (STEPS,), "throughput": (STEPS,), "queues": (STEPS,), "events": (STEPS,), "timeline": (REQUESTS,),
    "latency": (REQUESTS,), "latency_percentiles": (REQUESTS,), "service": (REQUESTS,),
    "step_difference": (STEPS, STEPS), "miss_ratio_curve": (replays()[:0],),
    "policy_by_capacity": (replays()[:0],), "watermark_curve": (RUNS[:0],), "block_size_curve": (RUNS[:0],), "difference": ({}, {}),
    "fragmentation": (LAYOUTS[:0],),
    "compare": (RUNS[:0], "watermark", "mean_ttft_ms"),
    "pareto": (RUNS[:0], {"mean_ttft_ms": "min", "output_token_throughput_per_s": "max"}),
}  # fmt: skip


@pytest.mark.parametrize("name", EMPTY)
def test_nothing_to_draw_says_so_and_a_missing_column_is_named(name):
    fig = getattr(plots, name)(*EMPTY[name])
    assert len(fig.layout.annotations) == 1
    assert not fig.data
    if name != "difference":
        with pytest.raises(UserError, match="no column"):
            getattr(plots, name)(*(a[["run"]] if "run" in a else pd.DataFrame() for a in EMPTY[name][:1]), *EMPTY[name][1:])


def test_the_same_frame_gives_the_same_figure_with_fixed_uids():
    steps, _ = frames()
    first, second = plots.events(steps), plots.events(steps)
    assert first.to_json() == second.to_json()
    assert [t.uid for t in first.data] == [f"events-{i}" for i in range(len(first.data))]


def test_html_stands_alone_and_bad_targets_are_named(tmp_path, monkeypatch):
    fig = plots.throughput(frames()[0])
    path = save_figure(fig, tmp_path / "new" / "figure.html")
    text = path.read_text(encoding="utf-8")
    assert "cdn.plot.ly" not in text.split("plotly.js v")[0]
    assert len(text) > 1_000_000  # plotly.js is inside
    assert path.read_bytes() == save_figure(fig, tmp_path / "again.html").read_bytes()
    with pytest.raises(UserError, match=r"\.svg, \.pdf, \.png, \.html"):
        save_figure(fig, tmp_path / "figure.eps")
    with pytest.raises(UserError, match="width = 0"):
        save_figure(fig, tmp_path / "figure.svg", width=0)
    (tmp_path / "file").write_text("", encoding="utf-8")
    with pytest.raises(UserError, match="can't be written"):
        save_figure(fig, tmp_path / "file" / "figure.html")
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("BROWSER_PATH", raising=False)
    with pytest.raises(UserError, match="BROWSER_PATH"):
        find_browser()
    monkeypatch.setenv("BROWSER_PATH", "/nowhere/chrome")
    with pytest.raises(UserError, match="/nowhere/chrome"):
        find_browser()


@pytest.mark.browser
def test_svg_and_pdf_are_the_same_bytes_twice(tmp_path):
    fig = plots.events(frames()[0])
    for ending, begins in ((".svg", b"<svg"), (".pdf", b"%PDF"), (".png", b"\x89PNG")):
        first = save_figure(fig, tmp_path / f"a{ending}").read_bytes()
        assert first.startswith(begins)
        if ending != ".png":
            assert first == save_figure(fig, tmp_path / f"b{ending}").read_bytes()
    assert "blocks evicted" in (tmp_path / "a.svg").read_text(encoding="utf-8")


def texts(fig, axis: str, path) -> list[tuple[str, str]]:
    """(transform, text) of an axis's tick labels, or of its title (`xtitle`), drawn 480 pixels wide."""
    drawn = save_figure(fig, path, width=480).read_text(encoding="utf-8")
    found = re.findall(rf'<text class="{axis}"[^>]*transform="([^"]*)"[^>]*>([^<]*)<', drawn) if axis.endswith("title") else []
    return found or re.findall(rf'<g class="{axis}"><text[^>]*transform="([^"]*)"[^>]*>([^<]*)<', drawn)


@pytest.mark.browser
def test_tick_labels_of_a_front_are_level_and_have_equal_digits(tmp_path):
    for low, high, shown in ((9800, 10200, ["9,700", "9,800", "9,900", "10,000", "10,100", "10,200"]),
                             (1040, 1041, ["1,040.0", "1,040.5", "1,041.0"])):  # fmt: skip
        frame = pd.DataFrame({"run": ["a", "b", "c"], "mean_ttft_ms": np.linspace(low, high, 3), "mean_step_ms": [0.5, 0.6, 0.8]})
        fig = plots.pareto(frame, {"mean_ttft_ms": "min", "mean_step_ms": "max"})
        found = texts(fig, "xtick", tmp_path / "front.svg")
        assert {text for _, text in found} <= set(shown)
        assert len(found) >= 3
        assert not any("rotate(" in transform.replace("rotate(0", "") for transform, _ in found)
        assert {len(text) for _, text in texts(fig, "ytick", tmp_path / "front.svg")} == {4}  # 0.50, 0.55


@pytest.mark.browser
def test_the_titles_of_a_heat_map_with_upright_ticks_do_not_meet(tmp_path):
    """480 pixels wide the capacities stand upright; "eviction policy" (about 105 pixels long) stays below the title and above the edge."""
    capacities = [1000, 2000, 5000, 10_000, 20_000, 50_000, 100_000, 200_000, 500_000, 1_000_000, 20_000_000]
    frame = pd.concat([replays()[:1].assign(policy=p, capacity_blocks=c) for p in ("lru", "belady") for c in capacities])
    fig = plots.policy_by_capacity(frame)
    assert any("rotate(90" in transform for transform, _ in texts(fig, "xtick", tmp_path / "heat.svg"))
    [(transform, text)] = texts(fig, "ytitle", tmp_path / "heat.svg")
    assert text == "eviction policy"
    middle = float(re.findall(r"rotate\(-90,[^,]*,([^)]*)\)", transform)[0])
    assert 40 + 105 / 2 < middle < fig.layout.height - 105 / 2


def test_a_long_title_is_wrapped_and_has_room_above_the_legend():
    rate = "request_hit_rate_prefix"
    fig = plots.policy_by_capacity(replays().rename(columns={"block_hit_rate_any": rate}).assign(trace="mooncake_conversation.jsonl"), rate)
    assert fig.layout.title.text == "Mean request hit rate, unbroken prefix (%):<br>mooncake_conversation"
    assert (fig.layout.margin.t, plots.policy_by_capacity(replays()).layout.margin.t) == (66, 48)
    assert plots.compare(RUNS, "watermark", "mean_ttft_ms", title="a <b>title</b> " * 9).layout.title.text.count("<br>") == 0


def test_a_hundred_lines_in_one_figure():
    runs = pd.concat([RUNS] * 25, ignore_index=True).assign(run=[f"run {i}" for i in range(100)])
    fig = plots.compare(runs, "watermark", "mean_ttft_ms", by="run")
    assert len(fig.data) == 100
    assert fig.layout.height == 380 + 800  # room for their legend


def test_what_is_no_frame_is_said_to_be_none():
    run = Run("made up", env={})
    with pytest.raises(UserError, match=r"was given Run, which is no frame: a run's are run.steps\(\) and run.requests\(\)"):
        plots.memory_bands(run)
    with pytest.raises(UserError, match="was given list, which is no frame"):
        plots.latency([])
