"""Reading runs back: whatever lies in a folder becomes a row that says what it is, and never an exception."""

import json
import math
import os
import pickle
import warnings

import pandas as pd
import pytest
from trace_examples import OUTCOMES, REQUESTS, STATS, plan

import kvlab
from kvlab.experiment import FAILED, OK, _code_of
from kvlab.explaining import explain
from kvlab.objectives import kept_off
from kvlab.results import Run, Runs, load_runs
from kvlab.tables import sweep_table
from kvlab.trace import Recorder, RunFolder, summarize
from kvlab.types import UserError

CONFIG = """
block_size: {block_size}
seed: 0
eviction: {{_target_: kvlab.policies.eviction.{eviction}.{eviction}}}
preemption: {{_target_: kvlab.policies.preemption.lifo.Lifo, mode: {{_target_: my.module.Swap, ratio: 0.5}}}}
workload: {{lengths: [1, 2]}}
num_steps: 7
"""


def make(path, block_size=8, eviction="lru", until="finished") -> RunFolder:
    """A run's folder, left behind in some state."""
    folder = RunFolder.create(path)
    folder.start(CONFIG.format(block_size=block_size, eviction=eviction))
    recorder = Recorder(folder.path, buffer_rows=1)
    for step, row in enumerate(STATS):
        recorder.on_step(plan(step), OUTCOMES[step], row)
    for record in REQUESTS:
        recorder.on_request(record)
    recorder.flush()
    if until == "killed":  # the last thing it did was to write parts, and its process is gone
        status = json.loads((folder.path / "status.json").read_text(encoding="utf-8"))
        (folder.path / "status.json").write_text(json.dumps({**status, "process_start": "1"}), encoding="utf-8")
        return folder
    recorder.close()
    if until == "failed":
        try:
            raise RuntimeError("the pool is gone")
        except RuntimeError as error:
            folder.fail(error)
    elif until == "pruned":
        folder.prune(RuntimeError("run 3 is better"), summarize(recorder.steps(), recorder.requests(), cut_off=True))
    elif until == "finished":
        folder.finish(summarize(recorder.steps(), recorder.requests()))
    return folder


def repeat(eviction: dict[str, object], seed: int, **figures: float) -> Run:
    config = {"eviction": {"_target_": "kvlab.policies.eviction." + eviction["name"], **{k: v for k, v in eviction.items() if k != "name"}}}
    return Run(f"{eviction}{seed}", config={**config, "num_blocks": 64, "seed": seed}, summary=figures)


def test_policies_with_and_without_parameters_are_points_of_one_table():
    """A parameter that only one policy has: the others' rows lack it, and are alike in that."""
    lru, lfu = {"name": "lru.Lru"}, {"name": "lfu.Lfu", "half_life": 200.0}
    runs = Runs([repeat(lru, 0, num_steps=1.0), repeat(lfu, 0, num_steps=5.0), repeat(lru, 1, num_steps=3.0), repeat(lfu, 1, num_steps=7.0),
                 repeat({"name": "lfu.Lfu", "half_life": 50.0}, 0, num_steps=9.0)])  # fmt: skip
    frame = runs.aggregate()
    assert list(frame.columns) == ["eviction", "eviction.half_life", "n", "num_steps", "num_steps_ci95"]
    assert frame["eviction"].tolist() == ["lru", "lfu", "lfu"]
    assert frame["eviction.half_life"].fillna(-1).tolist() == [-1, 200.0, 50.0]
    assert frame["n"].tolist() == [2, 2, 1]
    assert frame["num_steps"].tolist() == [2.0, 6.0, 9.0]
    assert runs.aggregate(by=[])[["n", "num_steps"]].to_numpy().tolist() == [[5, 5.0]]
    assert Runs([]).aggregate().empty


def test_repeats_that_are_copies_of_one_run_are_told_of():
    """The seed moves nothing on a trace with greedy decoding; host times and memory move by themselves."""
    lru, lfu = {"name": "lru.Lru"}, {"name": "lfu.Lfu"}
    runs = [repeat(lru, seed, duration_s=2.0, mean_schedule_ms=0.1 + seed) for seed in range(3)]
    random = [repeat(lfu, seed, duration_s=2.0 + seed, mean_schedule_ms=0.1) for seed in range(3)]
    with pytest.warns(UserWarning, match="In 1 of 2 repeated points all seeds gave the same figures") as told:
        frame = Runs(runs + random).aggregate()
    assert told[0].filename == __file__
    assert frame["duration_s"].tolist() == [2.0, 3.0]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        Runs(random).aggregate()
        Runs(runs + random).aggregate(by="eviction", figures=["mean_schedule_ms"])
        Runs(runs[:1] + random[:1]).aggregate()


def test_one_row_a_run_with_flat_config_and_figures(tmp_path):
    for i, (eviction, block_size) in enumerate([("lru", 8), ("lru", 16), ("fifo", 8)]):
        make(tmp_path / str(i), block_size, eviction)
    runs = load_runs(tmp_path)
    frame = runs.frame
    assert list(frame["run"]) == ["0", "1", "2"]
    assert list(frame["block_size"]) == [8, 16, 8]
    assert list(frame["eviction"]) == ["lru", "lru", "fifo"]
    assert list(frame["preemption.mode"]) == ["Swap"] * 3
    assert list(frame["preemption.mode.ratio"]) == [0.5] * 3
    assert list(frame["workload.lengths"]) == ["[1, 2]"] * 3
    assert list(frame["config.num_steps"]) == [7] * 3  # also a figure's name
    assert list(frame["num_steps"]) == [3] * 3
    assert list(frame["output_token_throughput_per_s"]) == [2.5] * 3
    assert list(frame["finish_reasons.abort"]) == [1] * 3
    assert list(frame["status"]) == ["finished"] * 3
    assert list(frame["notes"]) == [""] * 3
    assert list(frame.columns[:4]) == ["run", "status", "notes", "folder"]
    assert runs["block_size"].tolist() == [8, 16, 8]
    assert runs.groupby("eviction")["block_size"].max().to_dict() == {"fifo": 8, "lru": 16}
    assert "fifo" in runs._repr_html_()


def test_long_frames_know_their_run_and_bring_config_along(tmp_path):
    make(tmp_path / "0", 8)
    make(tmp_path / "1", 16)
    runs = load_runs([tmp_path / "0", tmp_path / "1"])
    steps = runs.steps("block_size")
    assert list(steps.columns[:3]) == ["run", "block_size", "step"]
    assert list(steps["run"]) == ["0"] * 3 + ["1"] * 3
    assert list(steps["block_size"]) == [8] * 3 + [16] * 3
    assert runs.requests().groupby("run").size().to_dict() == {"0": 4, "1": 4}
    assert list(runs.blocks().columns[:2]) == ["run", "step"]
    assert len(runs.blocks()) == 0
    assert str(steps["process_rss_bytes"].dtype) == "Int64"


def test_every_kind_of_folder_is_a_row_and_none_an_error(tmp_path):
    make(tmp_path / "0-finished")
    make(tmp_path / "1-failed", until="failed")
    make(tmp_path / "2-killed", until="killed")
    make(tmp_path / "3-running", until="running")
    partial = make(tmp_path / "4-partial", until="killed").path
    (partial / "status.json").unlink()
    (partial / "config.yaml").unlink()
    (tmp_path / "5-empty").mkdir()
    (tmp_path / "6-foreign").mkdir()
    (tmp_path / "6-foreign" / "config.yaml").write_text("not: ours", encoding="utf-8")
    broken = make(tmp_path / "7-broken").path
    (broken / "status.json").write_text("{", encoding="utf-8")
    (broken / "summary.json").write_text("[]", encoding="utf-8")
    (broken / "config.yaml").write_text("a: [", encoding="utf-8")
    (broken / "steps.parquet").write_bytes(b"PAR1")
    started = RunFolder.create(tmp_path / "8-only-made").path
    (tmp_path / ".hidden").mkdir()
    (tmp_path / "multirun.yaml").write_text("", encoding="utf-8")
    runs = load_runs(tmp_path)
    frame = runs.frame.set_index("run")
    assert frame["status"].to_dict() == {
        "0-finished": "finished", "1-failed": "failed", "2-killed": "killed", "3-running": "running", "4-partial": "partial",
        "5-empty": "empty", "6-foreign": "foreign", "7-broken": "partial", "8-only-made": "partial",
    }  # fmt: skip
    assert frame["notes"]["1-failed"].startswith("RuntimeError: the pool is gone")
    assert "summary made from 3 recorded steps and 4 requests" in frame["notes"]["2-killed"]
    assert frame["output_token_throughput_per_s"]["2-killed"] == 2.5
    for name in ("status.json", "summary.json", "config.yaml", "steps.parquet"):
        assert f"{name} is damaged" in frame["notes"]["7-broken"]
    assert frame["num_finished"]["7-broken"] == 2  # its requests are readable
    assert frame["notes"]["8-only-made"] == "nothing was recorded"
    assert started.exists()
    assert len(runs.steps()) == 3 * 5  # finished, failed, killed, running, partial
    assert math.isnan(frame["block_size"]["5-empty"])
    assert [r.name for r in runs.finished()] == ["0-finished"]


def test_a_killed_run_and_its_explanation_tell_the_same_throughput_of_all_tokens(tmp_path):
    """Killed before a ended: steps of 1 s to 3 s made 5 tokens, the only finished request had 2. A finished run counts that one's."""
    runs = {}
    for until in ("killed", "finished"):
        folder = RunFolder.create(tmp_path / until)
        folder.start(CONFIG.format(block_size=8, eviction="lru"))
        recorder = Recorder(folder.path, buffer_rows=1)
        for step, row in enumerate(STATS):
            recorder.on_step(plan(step), OUTCOMES[step], row)
        for record in REQUESTS[1:3]:  # b has finished, c was aborted
            recorder.on_request(record)
        recorder.flush()
        if until == "killed":
            status = json.loads((folder.path / "status.json").read_text(encoding="utf-8"))
            (folder.path / "status.json").write_text(json.dumps({**status, "process_start": "1"}), encoding="utf-8")
        else:
            recorder.close()
            folder.finish(summarize(recorder.steps(), recorder.requests()))
        runs[until] = Run.load(folder.path)
    assert (runs["killed"].state, runs["killed"].summary["output_token_throughput_per_s"]) == ("killed", 2.5)
    assert "2.5 output tokens/s (of all requests, ended or not)" in str(kvlab.explain(runs["killed"]))
    assert runs["finished"].summary["output_token_throughput_per_s"] == 1.0
    assert "1.0 output tokens/s of finished requests (2 of 5 output tokens)" in str(kvlab.explain(runs["finished"]))


def test_a_pruned_run_is_neither_finished_nor_failed(tmp_path):
    make(tmp_path / "0")
    make(tmp_path / "1", until="pruned")
    make(tmp_path / "2", until="failed")
    runs = load_runs(tmp_path)
    assert list(runs.frame["status"]) == ["finished", "pruned", "failed"]
    assert runs.frame["notes"][1] == "run 3 is better"
    assert (runs[1].error, runs[2].error) == ("run 3 is better", "RuntimeError: the pool is gone")
    assert [run.name for run in runs.finished()] == ["0"]
    assert list(runs.pareto("num_steps", refusing=True)["run"]) == ["0"]
    assert runs.aggregate(by="block_size")["n"].tolist() == [1]
    assert list(kept_off(runs.frame, refusing=True)) == ["", "pruned", "failed"]
    text, num_failed = sweep_table(runs)
    assert num_failed == 1
    assert "1 of 3 runs finished, 1 pruned.\n1: pruned: run 3 is better\n2: failed: RuntimeError: the pool is gone" in text
    assert _code_of(Runs([Run("0"), runs[1]])) == OK
    assert _code_of(Runs([Run("0"), runs[2]])) == FAILED
    assert "The run is pruned (run 3 is better); this is what it had recorded." in explain(runs[1]).text


def test_sweeps_in_folders_of_folders_and_natural_order(tmp_path):
    for i in (10, 9, 0):
        make(tmp_path / "day" / "sweep" / str(i))
    assert [r.name for r in load_runs(tmp_path)] == ["day/sweep/0", "day/sweep/9", "day/sweep/10"]
    assert [r.name for r in load_runs(tmp_path / "day" / "sweep")] == ["0", "9", "10"]
    assert [r.name for r in load_runs(tmp_path / "day" / "sweep" / "9")] == ["9"]
    both = load_runs([tmp_path / "day", tmp_path / "day" / "sweep"])
    assert len(both) == 3  # each once


def test_runs_of_one_name_in_two_places_are_told_apart(tmp_path):
    make(tmp_path / "a" / "0")
    make(tmp_path / "b" / "0")
    names = [r.name for r in load_runs([tmp_path / "a", tmp_path / "b"])]
    assert names == [str(tmp_path / "a" / "0"), str(tmp_path / "b" / "0")]


def test_a_path_that_does_not_exist_is_a_users_error(tmp_path):
    for wrong in (tmp_path / "nowhere", [tmp_path, tmp_path / "nowhere"]):
        with pytest.raises(UserError, match="nowhere is not a folder"):
            load_runs(wrong)


def test_a_run_kept_in_memory_is_the_same_thing():
    recorder = Recorder(None)
    for step, row in enumerate(STATS):
        recorder.on_step(plan(step), OUTCOMES[step], row)
    for record in REQUESTS:
        recorder.on_request(record)
    run = Run("mine", config={"block_size": 8}, summary=summarize(recorder.steps(), recorder.requests()), recorder=recorder)
    assert (run.state, run.folder, run.error) == ("finished", None, None)
    assert len(run.steps()) == 3
    assert len(run.blocks()) == 0
    steps = run.steps()
    steps["step"] = 0  # a caller's change stays its own
    assert list(run.steps()["step"]) == [0, 1, 2]
    runs = Runs([run])
    assert runs["block_size"].tolist() == [8]
    assert runs[0] is run
    assert "Output token throughput (tok/s):" in repr(run)


def test_loading_reads_no_tables_of_finished_runs(tmp_path):
    """A thousand runs are loaded by their small files; tables are read when asked for."""
    folder = make(tmp_path / "0").path
    os.truncate(folder / "steps.parquet", 10)
    runs = load_runs(tmp_path)
    assert runs.frame["notes"][0] == ""
    assert len(runs.steps()) == 0
    assert "steps.parquet is damaged" in runs.frame["notes"][0]


def test_runs_can_be_pickled_and_empty_frames_have_columns(tmp_path):
    make(tmp_path / "0")
    again = pickle.loads(pickle.dumps(load_runs(tmp_path)))
    assert again["block_size"].tolist() == [8]
    (tmp_path / "none").mkdir()
    nothing = load_runs(tmp_path / "none")
    assert nothing["status"].tolist() == ["empty"]
    assert list(nothing.steps("block_size").columns[:3]) == ["run", "block_size", "step"]
    assert list(Runs([]).frame.columns) == ["run", "status", "notes", "folder"]
    pd.testing.assert_frame_equal(Runs([]).finished().frame, Runs([]).frame)
