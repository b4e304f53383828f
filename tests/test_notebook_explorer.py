"""sweep_explorer, driven without a front end: data after a move, the newest wins, errors in words, commands that do the same run."""

from __future__ import annotations

import re
import shlex
import shutil
import threading
import time
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

import kvlab
from kvlab.notebook.explorer import SweepExplorer, save_figure, sweep_explorer
from kvlab.notebook.explorer_controls import REAL, REAL_WORKLOADS, SIMULATED, SIMULATED_WORKLOADS, fast_config
from kvlab.notebook.explorer_plot import NOTHING, STEP_COLUMNS, curves, curves_of, empty_figure, log_ticks, redraw
from kvlab.notebook.parts import difference
from kvlab.notebook.worker import NewestWins, Stopped, StopSignal
from kvlab.types import UserError

SMALL = {"small": ("workload=synthetic", "workload.num_requests=12", "workload.arrivals.kind=all_at_once", "workload.arrivals.rate=null",
                   "workload.prompt_len=40", "workload.output_len=20")}  # fmt: skip


@pytest.fixture
def explorer():
    made = sweep_explorer(workloads=SMALL, num_blocks=32)
    yield made
    made.close()


def names(explorer: SweepExplorer) -> list[str]:
    return [trace.name for trace in explorer.fig.data if trace.visible is not False]


def test_a_move_changes_the_drawn_data_in_place(explorer):
    """12 requests of 40 + 20 tokens need 4 blocks of 16 each; a watermark of a half leaves 16 of 32 blocks to admission."""
    traces = explorer.fig.data
    limit = np.asarray(explorer.fig.data[2].y).copy()
    assert set(limit) == {100.0}  # int(0.01 * 32) = 0 blocks are kept free
    ttft = np.asarray(explorer.fig.data[4].x).copy()
    explorer.controls.watermark.value = 0.5
    assert explorer.wait()
    assert set(np.asarray(explorer.fig.data[2].y)) == {50.0}
    assert max(explorer.fig.data[0].y) < 100
    assert max(explorer.fig.data[4].x) > max(ttft)  # fewer run at a time: the last waits longer
    assert explorer.fig.data is traces or [a.uid for a in explorer.fig.data] == [a.uid for a in traces]  # mutated, not replaced
    assert explorer.fig.layout.height == 560
    assert names(explorer)[:3] == ["used", "cached (evictable)", "watermark"]
    assert names(explorer)[3:] == ["B=16 N=32 wm=50%"] * 3
    assert explorer.message.text == ""


def test_the_pool_keeps_its_tokens_when_blocks_change(explorer):
    explorer.controls.block_size.value = 4
    assert explorer.controls.num_blocks.value == 128
    explorer.controls.equal_memory.value = False
    explorer.controls.block_size.value = 8
    assert explorer.controls.num_blocks.value == 128
    assert explorer.wait()
    assert explorer.run.config["num_blocks"] == 128
    assert explorer.run.config["block_size"] == 8


def test_the_newest_of_many_moves_wins(explorer):
    before = explorer.num_drawn
    for value in (0.02, 0.05, 0.1, 0.2, 0.3, 0.4):
        explorer.controls.watermark.value = value
    assert explorer.wait()
    assert explorer.run.config["watermark"] == 0.4
    assert explorer.num_drawn - before < 6


def test_command_and_python_do_the_same_run(explorer, tmp_path, monkeypatch):
    explorer.controls.eviction.value = "sieve"
    explorer.controls.mode.value = "swap"
    assert explorer.wait()
    shown = explorer.run.summary
    words = shlex.split(explorer.copy_command.text)
    assert words[:3] == ["python", "-m", "kvlab.experiment"]
    again = kvlab.run(kvlab.compose(*words[3:]), folder=tmp_path / "again", progress=False).summary
    monkeypatch.chdir(tmp_path)
    scope: dict[str, object] = {}
    exec(explorer.copy_python.text, scope)
    python = scope["run"].summary  # type: ignore[attr-defined]
    for key in ("num_steps", "mean_ttft_ms", "p99_itl_ms", "num_preemptions", "swapped_out_blocks", "num_evicted_blocks"):
        assert shown[key] == again[key] == python[key]
    assert shown["num_steps"] > 20


def test_pins_stay_for_comparison(explorer):
    pinned = explorer.run
    drawn = np.asarray(explorer.fig.data[3].y).copy()
    explorer.pin()
    explorer.pin()  # the same run a second time
    assert "already" in explorer.message.text
    explorer.controls.watermark.value = 0.5
    assert explorer.wait()
    assert names(explorer).count("B=16 N=32 wm=1%") == 4
    assert np.array_equal(np.asarray(explorer.fig.data[7].y), drawn)
    assert list(explorer.frame["watermark"]) == [0.5, 0.01]
    assert explorer.runs[1] is pinned
    assert "(" in explorer.table.value
    explorer.clear_pins()
    assert "B=16 N=32 wm=1%" not in names(explorer)
    assert len(explorer.frame) == 1


def test_what_fits_no_request_is_said_and_the_last_picture_stays(explorer):
    drawn = np.asarray(explorer.fig.data[3].y).copy()
    explorer.controls.num_blocks.min = 1
    explorer.controls.num_blocks.value = 2
    assert explorer.wait()
    assert explorer.message.kind == "error"
    assert "can never fit: 40 prompt tokens need 3 blocks of 16, there are 2" in explorer.message.text
    assert np.array_equal(np.asarray(explorer.fig.data[3].y), drawn)
    explorer.controls.num_blocks.value = 32
    assert explorer.wait()
    assert explorer.message.text == ""


def test_show_frame_and_figure_and_save(explorer, tmp_path):
    assert explorer.frame_view.layout.display == "none"
    explorer.toggle_frame()
    assert explorer.frame_view.layout.display == ""
    assert "output_token_throughput_per_s" in explorer.frame_view.value
    fig = explorer.figure()
    assert [trace.name for trace in fig.data] == names(explorer)
    assert fig.layout.title.text == "B=16 N=32 wm=1%"
    page = explorer.save(tmp_path / "figure.html")
    assert page.stat().st_size > 1_000_000  # plotly.js is inside: it opens without network
    with pytest.raises(UserError, match=r"saved as \.html"):
        save_figure(fig, tmp_path / "figure.bmp")


@pytest.mark.parametrize("ending", ["html", "json"])
def test_a_figure_that_cannot_be_written_is_said_in_words(tmp_path, ending):
    (tmp_path / "file").write_text("", encoding="utf-8")
    with pytest.raises(UserError, match=rf"file/figure\.{ending} can't be written: .*Give another path"):
        save_figure(empty_figure(), tmp_path / "file" / f"figure.{ending}")


def test_the_save_button_says_why_nothing_was_saved(explorer, tmp_path, monkeypatch):
    gone = tmp_path / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()
    explorer.save_button.click()
    assert explorer.message.kind == "error"
    assert re.search(r"explorer-.*\.html can't be written: No such file or directory", explorer.message.text)


def test_a_real_run_shows_progress_and_can_be_stopped(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    real = {"tiny": ("workload=synthetic", "workload.num_requests=4", "workload.arrivals.kind=all_at_once", "workload.arrivals.rate=null",
                     "workload.prompt_len=20", "workload.output_len=200")}  # fmt: skip
    explorer = sweep_explorer("model=tiny", "max_model_len=256", workloads=SMALL, real_workloads=real, num_blocks=64)
    try:
        explorer.controls.runner.value = "real"
        assert list(explorer.controls.workload.options) == ["tiny"]
        assert explorer.wait()
        explorer.start_button.click()
        end = time.monotonic() + 60
        while "tokens/s" not in explorer.progress.value and time.monotonic() < end:
            time.sleep(0.01)
        assert "running" in explorer.progress.value
        assert explorer.start_button.disabled
        explorer.stop_button.click()
        assert explorer.wait()
        assert not explorer.start_button.disabled
        assert explorer.run.state in ("interrupted", "finished")
        assert 0 < len(explorer.run.steps()) <= 220
        assert len(explorer.fig.data[0].x) == 2 * min(400, len(explorer.run.steps()))
        assert list(Path("runs").rglob("status.json"))
        label = explorer.setting.label
        drawn = np.asarray(explorer.fig.data[3].y).copy()
        explorer.pin()
        shutil.rmtree("runs")
        explorer.controls.runner.value = "simulated"
        assert explorer.wait()
        pinned = [np.asarray(trace.y) for trace in explorer.fig.data if trace.name == label and trace.visible is not False]
        assert len(pinned) == 4  # the stopped run stays, though its folder is gone
        assert np.array_equal(pinned[1], drawn)
        assert list(explorer.frame["status"]) == ["finished", explorer.runs[1].state]
        assert "output_token_throughput_per_s" in explorer.frame
    finally:
        explorer.close()


@pytest.mark.parametrize(
    ("arguments", "start", "message"),
    [
        ((), {"block_siz": 8}, "Did you mean 'block_size'"),
        ((), {"block_size": 0}, "positive integer"),
        ((), {"watermark": 1.5}, "watermark = 1.5 is not allowed"),
        ((), {"eviction": "lruu"}, "Did you mean 'lru'"),
        (("block_size=8",), {}, "is what a control of sweep_explorer sets"),
        (("cost_model=h10",), {}, "Did you mean 'h100'"),
    ],
)
def test_wrong_arguments_are_named_before_anything_is_shown(arguments, start, message):
    with pytest.raises(UserError, match=message):
        sweep_explorer(*arguments, workloads=SMALL, **start)


def test_controls_start_at_what_a_preset_says():
    explorer = sweep_explorer("+policy=fifo", workloads=SMALL, block_size=12, num_blocks=40)
    try:
        assert explorer.controls.eviction.value == "fifo"
        assert explorer.run.config["eviction"]["_target_"].endswith("Fifo")
        assert explorer.run.config["block_size"] == 12
        assert explorer.run.config["num_blocks"] == 40
    finally:
        explorer.close()


@pytest.mark.parametrize(
    "overrides",
    [*((*SIMULATED, *words) for words in SIMULATED_WORKLOADS.values()), *((*REAL, *words) for words in REAL_WORKLOADS.values())],
    ids=lambda words: words[-1][:30],
)
def test_offered_workloads_compose_and_numbers_set_afterwards_are_the_same(overrides):
    words = (*overrides, "block_size=8", "num_blocks=77", "watermark=0.05")
    assert fast_config(words) == {k: v for k, v in fast_config_reference(words).items() if k != "hydra"}


def fast_config_reference(words: tuple[str, ...]) -> dict[str, object]:
    from kvlab.config import to_plain

    return to_plain(kvlab.compose(*words))


def test_curves_by_hand():
    """Two steps of a second: 4 of 8 blocks, then 8; 2 tokens, then 6. Two requests, one of two tokens."""
    rows = np.array([[10.0, 11.0, 8, 4, 2, 1, 2], [11.0, 12.0, 8, 8, 0, 1, 6]])
    assert STEP_COLUMNS == ("now_s", "end_s", "kv_blocks_total", "kv_blocks_used", "kv_blocks_evictable", "watermark_blocks",
                            "num_output_tokens")  # fmt: skip
    got = curves_of(rows, [10.0, 10.5], [(11.0, 12.0), (12.0,)])
    assert got.time.tolist() == [0, 1, 1, 2]
    assert got.used.tolist() == [50, 50, 100, 100]
    assert got.cached.tolist() == [25, 25, 0, 0]
    assert got.limit.tolist() == [87.5] * 4
    assert got.rate.tolist() == [2, 6, 6]
    assert (got.ttft[0], got.ttft[-1]) == (1000, 1500)
    assert set(got.itl) == {1000}
    assert curves_of(rows[:0], [], []) is NOTHING


@pytest.mark.parametrize(
    ("values", "texts"),
    [([8.0, 40.0], ["1", "2", "5", "10", "20", "50", "100", "200", "500"]),
     ([0.5, 900.0], ["0.1", "0.3", "1", "3", "10", "30", "100", "300", "1,000", "3,000"]),
     ([1.0, 1e4], ["1", "10", "100", "1,000", "10,000"]), ([], ["1", "10", "100", "1000"])],
)  # fmt: skip
def test_labels_of_a_logarithmic_axis_are_round_and_few(values, texts):
    assert log_ticks(np.array(values))["ticktext"] == texts


def test_a_frame_without_a_column_is_named():
    steps = pd.DataFrame({name: [0.0] for name in STEP_COLUMNS if name != "watermark_blocks"})
    with pytest.raises(UserError, match="no column watermark_blocks"):
        curves(steps, pd.DataFrame({"arrival_s": [], "token_times_s": []}))


def test_differences_between_runs_are_rounded_to_no_signed_zero():
    assert difference(0.345, 0.346) == " (less than 1 %)"
    assert difference(867, 743) == " (+17 %)"
    assert difference(743, 743) == difference(3, 0) == ""


def test_every_trace_of_a_change_is_told_the_same_properties():
    with pytest.raises(ValueError, match="every trace"):
        redraw(empty_figure(), {0: {"x": [1], "y": [2]}, 1: {"x": [1]}})


def test_worker_runs_the_newest_and_asks_the_running_one_to_stop():
    errors: list[BaseException] = []
    done: list[str] = []
    started = threading.Event()
    worker = NewestWins(errors.append, delay_s=0.0)

    def long(stop: StopSignal) -> None:
        started.set()
        while True:
            stop.check()
            time.sleep(0.001)

    worker.submit(long)
    assert started.wait(10)
    worker.submit(lambda stop: done.append("never" if stop.is_set else "b"))
    assert worker.wait(10)
    assert done == ["b"]
    worker.submit(lambda stop: 1 / 0)  # type: ignore[arg-type, return-value]
    assert worker.wait(10)
    assert [type(error) for error in errors] == [ZeroDivisionError]
    started.clear()
    worker.submit(long, replaceable=False)
    assert started.wait(10)
    worker.submit(lambda stop: done.append("c"))
    assert not worker.wait(0.05)  # it goes on until it is stopped
    worker.stop()
    assert worker.wait(10)
    assert not worker.is_busy
    signal = StopSignal()
    signal.check()  # nobody asked
    signal.set()
    with pytest.raises(Stopped):
        signal.check()
