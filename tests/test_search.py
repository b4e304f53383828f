"""Search: objectives, Pareto fronts, bounds of runs under way, and Optuna's ask-and-tell around real runs."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import optuna
import pandas as pd
import pytest
from sweep_support import SIMULATED

import kvlab
import kvlab.pruning
from kvlab.objectives import Objective, SoFar, best_possible, objective, pareto_front
from kvlab.pruning import Hopeless, Pruner
from kvlab.results import Runs
from kvlab.search import main
from kvlab.searching import Found, Range
from kvlab.types import UserError

WORDS = [*SIMULATED, "workload.num_requests=40"]


def test_objectives_have_a_direction_and_a_nearest_name() -> None:
    assert objective("p99_ttft_ms") == Objective("p99_ttft_ms", False)
    assert objective("output_token_throughput_per_s") == Objective("output_token_throughput_per_s", True)
    assert objective("max:kv_pool_tokens") == Objective("kv_pool_tokens", True)
    with pytest.raises(UserError, match="Did you mean 'p99_ttft_ms'"):
        objective("p99_tfft_ms")
    with pytest.raises(UserError, match="Unknown direction of an objective 'maxi'. Did you mean 'max'"):
        objective("maxi:p99_ttft_ms")


def test_the_pareto_front_of_a_frame() -> None:
    frame = pd.DataFrame({
        "run": list("abcdef"), "status": ["finished"] * 5 + ["failed"], "mean_ttft_ms": [10.0, 20.0, 20.0, 30.0, math.nan, 1.0],
        "request_throughput_per_s": [1.0, 2.0, 1.5, 3.0, 9.0, 9.0],
    })  # fmt: skip
    assert pareto_front(frame, ["mean_ttft_ms", "request_throughput_per_s"])["run"].tolist() == ["a", "b", "d"]
    assert pareto_front(frame, ["request_throughput_per_s"])["run"].tolist() == ["e"]
    frame[["num_blocks", "block_size"]] = [[4, 16], [2, 16], [2, 8], [9, 1], [9, 9], [1, 1]]
    assert pareto_front(frame, ["kv_pool_tokens"])["run"].tolist() == ["d"]
    with pytest.raises(UserError, match="Unknown column"):
        pareto_front(frame, ["p99_ttft_ms"])
    with pytest.raises(UserError, match="at least one objective"):
        pareto_front(frame, [])


def test_a_run_that_refused_requests_is_on_no_front_unless_asked_for(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Prompts of 8 to 100 tokens: four blocks of 16 fit some of them, and do those fastest of all, with the least memory."""
    words = [*SIMULATED, "workload.num_requests=20", "workload.prompt_len={kind:uniform,min:8,max:100}"]
    goals = ["kv_pool_tokens", "p99_ttft_ms"]
    study = tmp_path / "s"
    assert main([*words, "num_blocks=4,40", f"study={study}", f"objectives={','.join(goals)}", "trials=6"]) == 0
    told = capsys.readouterr().out
    runs = kvlab.load_runs([p for p in study.iterdir() if p.name.isdecimal()]).finished()
    small = [run for run in runs if run.config["num_blocks"] == 4]
    assert small
    assert len(small) < 6
    assert f"Trials that refused requests are pruned, and not on the front: {len(small)}." in told
    found = kvlab.search({"num_blocks": [4, 40]}, *words, trials=6, objectives=goals, folder=study, progress=False)
    refused = small[0].summary["num_refused"]
    assert 0 < refused < 20
    assert set(found.trials["reason"]) == {"", f"{refused} of 20 requests refused"}
    assert set(found.front["num_blocks"]) == {40}
    with pytest.warns(UserWarning, match=f"{len(small)} of 6 finished runs refused requests"):
        assert set(runs.pareto(*goals)["num_blocks"]) == {40}
    assert 4 in set(runs.pareto(*goals, refusing=True)["num_blocks"])
    with pytest.warns(UserWarning, match=f"{len(small)} of {len(small)} finished runs"):
        assert Runs(small).pareto(*goals).empty


def test_bounds_hold_for_any_way_a_run_can_go_on() -> None:
    """Of 200 requests some have been seen; whatever the others turn out to be, no figure ends up better than its bound."""
    rng = np.random.default_rng(0)
    for share in (0.02, 0.5, 0.99, 1.0):
        latencies = rng.exponential(1.0, 200)
        seen = SoFar(3.0, 200, {"ttft": list(latencies[: int(200 * share)])}, {"num_preemptions": 7.0}, 64)
        final = {"p99_ttft_ms": np.percentile(latencies, 99) * 1e3, "median_ttft_ms": np.median(latencies) * 1e3,
                 "mean_ttft_ms": latencies.mean() * 1e3}  # fmt: skip
        for figure, value in final.items():
            bound = best_possible(objective(figure), seen, 1000)
            assert bound <= value + 1e-9, (figure, share)
            if share == 1.0:
                assert bound == pytest.approx(value, rel=0.2)
    assert best_possible(objective("output_token_throughput_per_s"), seen, 1200) == -400.0
    assert best_possible(objective("num_preemptions"), seen, 0) == 7.0
    assert best_possible(objective("kv_pool_tokens"), seen, 0) == 64.0
    assert best_possible(objective("mean_kv_cache_usage"), seen, 0) == -math.inf


def test_a_run_is_ended_when_nothing_can_save_it_and_never_before() -> None:
    goals = [objective("output_token_throughput_per_s"), objective("kv_pool_tokens")]
    pruner = Pruner(goals, [("7", [-500.0, 64.0])], 10, 1000.0, 64)
    pruner.look(100.0)  # no request has been seen: its time has not begun
    pruner._first_arrival_s = 0.0
    pruner.look(1.9)  # it may still reach 1000 / 1.9 tokens/s
    with pytest.raises(Hopeless, match="can't be better than 476.2.*run 7 is as good in all of them, and better in one"):
        pruner.look(2.1)
    Pruner(goals, [("7", [-500.0, 128.0])], 10, 1000.0, 64).look(2.1)  # it takes less memory


def test_a_search_finds_the_front_and_goes_on_where_it_was(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "study"
    space = {"eviction": ["lru", "sieve"], "num_blocks": (1, 40), "watermark": Range(0.0, 0.2)}
    found = kvlab.search(space, *WORDS, trials=5, folder=folder, progress=False, seed=3)
    assert len(found.trials) == 5
    before = {p: p.read_bytes() for p in folder.glob("*/status.json")}
    again = kvlab.search(space, *WORDS, trials=8, folder=folder, progress=False, seed=3)
    assert len(again.trials) == 8
    assert {p: p.read_bytes() for p in before} == before
    assert [run.name for run in again.runs] == [str(n) for n in range(8)]
    params = again.trials.set_index("trial")
    for run in again.runs:  # a trial's run is what Optuna proposed
        assert run.config["num_blocks"] == params["num_blocks"][int(run.name)]
        assert run.config["watermark"] == params["watermark"][int(run.name)]
        assert run.row()["eviction"] == params["eviction"][int(run.name)]
    front = again.front
    assert front["run"].tolist() == again.runs.pareto(*map(str, again.objectives))["run"].tolist()
    finished = kvlab.load_runs(folder).finished().frame
    best = front.sort_values("output_token_throughput_per_s").iloc[-1]
    assert best["output_token_throughput_per_s"] == finished["output_token_throughput_per_s"].max()
    words = [*WORDS, f"study={folder}", "trials=8", "eviction=lru,sieve", "num_blocks=1..40", "watermark=0.0..0.2"]
    assert main(words) == 0
    assert "finished trials are on the Pareto front" in capsys.readouterr().out
    assert main([*words[:-1], "watermark=0.0..0.5"]) == 2
    assert "holds another study: its space are" in capsys.readouterr().err


def test_what_cant_fit_is_pruned_with_its_reason(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """24 + 4 tokens need two blocks of 16: a pool of one block serves nobody."""
    found = kvlab.search({"num_blocks": [1]}, *SIMULATED, trials=2, folder=tmp_path / "s", progress=False)
    assert found.trials["state"].tolist() == ["pruned", "pruned"]
    assert found.trials["reason"][0].startswith("Every request of the workload was refused")
    assert found.front.empty
    assert main([*SIMULATED, "num_blocks=1,1", "trials=2", f"study={tmp_path / 'c'}"]) == 1
    assert "no trial finished. 2 of 2 trials: Every request of the workload was refused" in capsys.readouterr().err
    layouts = {"layout": ["paged", "contiguous_max"]}
    mixed = kvlab.search(layouts, *SIMULATED, "num_blocks=400", trials=6, folder=tmp_path / "m", progress=False)
    assert set(mixed.trials["state"]) == {"finished", "pruned"}
    assert "prefix_cache=none" in mixed.trials[mixed.trials["state"] == "pruned"]["reason"].iloc[0]


def test_a_hopeless_trial_is_ended_in_the_middle_and_the_study_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One request at a time takes 160 steps where 16 at once take 12. With the second known the first can't catch up once as much time
    has passed as the second took in all, and is ended in the step after, not before."""
    class InTurn(optuna.samplers.RandomSampler):
        """The choices one after the other."""

        def sample_independent(self, study: Any, trial: Any, name: str, axis: Any) -> Any:
            return axis.choices[trial.number % len(axis.choices)]

    monkeypatch.setattr(optuna.samplers, "TPESampler", lambda **_: InTurn())
    monkeypatch.setattr(kvlab.pruning, "LOOK_EVERY_S", 0.0)  # after every step
    goals = ["output_token_throughput_per_s", "kv_pool_tokens"]

    def search(folder: str, trials: int, **more: Any) -> Found:
        folder = str(tmp_path / folder)
        return kvlab.search({"max_num_seqs": [16, 1]}, *WORDS, "num_blocks=200", trials=trials, objectives=goals, folder=folder,
                            progress=False, **more)  # fmt: skip

    whole = search("whole", 2, prune=False)
    assert whole.trials["state"].tolist() == ["finished"] * 2
    assert whole.runs["num_steps"].tolist() == [12, 160]
    seen = search("s", 3)
    before = {path: path.read_bytes() for path in (tmp_path / "s").glob("*/*.*")}
    found = search("s", 6)  # compares with what the earlier call ran
    assert found.trials.head(3).equals(seen.trials)
    assert {path: path.read_bytes() for path in before} == before
    assert found.trials["state"].tolist() == ["finished", "pruned"] * 3
    took_s = found.runs[0].summary["duration_s"]
    for run, reason in list(zip(found.runs, found.trials["reason"], strict=True))[1::2]:
        assert run.state == "pruned"
        assert json.loads((run.folder / "status.json").read_text(encoding="utf-8"))["state"] == "pruned"
        assert run.error == reason
        assert "run 0 is as good in all of them, and better in one" in reason
        elapsed_s = run.steps()["end_s"] - run.requests()["arrival_s"].min()
        assert elapsed_s.iloc[-2] <= took_s < elapsed_s.iloc[-1]
    assert found.front["run"].tolist() == ["0", "2", "4"]


def test_a_trial_that_was_cut_off_is_told_as_failed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import kvlab.searching as searching

    real, calls = searching.run, []

    def run(*args: Any, **kwargs: Any) -> Any:
        calls.append(1)
        if len(calls) == 3:
            raise KeyboardInterrupt
        return real(*args, **kwargs)

    monkeypatch.setattr(searching, "run", run)
    space = {"num_blocks": (10, 40)}
    with pytest.raises(KeyboardInterrupt):
        kvlab.search(space, *SIMULATED, trials=4, folder=tmp_path / "s", progress=False)
    found = kvlab.search(space, *SIMULATED, trials=4, folder=tmp_path / "s", progress=False)
    assert found.trials["state"].tolist() == ["finished", "finished", "failed", "finished", "finished"]


def test_bad_input_is_named_before_anything_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = f"study={tmp_path / 's'}"
    for words, say in (
        (["num_blocks=1..40", "objectives=p99_tfft_ms"], "Did you mean 'p99_ttft_ms'"),
        (["blok_size=1..40"], "Did you mean 'block_size'"),
        (["eviction=lru,lrru"], "Did you mean 'lru'"),
        (["num_blocks=40..1"], "LOW below HIGH"),
        (["watermark=log:0..0.5"], "above 0 on a logarithmic scale"),
        (["watermark=0..x"], "is no range"),
        (["watermark=0..2"], "[0, 1)"),
        (["num_blocks=64"], "The space is empty"),
        (["num_blocks=1..9", "trials=0"], "trials = 0"),
        (["num_blocks=1..9", "prune=perhaps"], "prune = 'perhaps'"),
        (["num_blocks"], "is no KEY=VALUE"),
        (["num_blocks=1..9", "workload.arrivals.kind=immediate"], "Unknown workload.arrivals.kind 'immediate'"),
        (["workload.prompt_len=8,abc"], "workload.prompt_len"),
    ):
        assert main([*SIMULATED, folder, *words]) == 2, words
        assert say in capsys.readouterr().err, words
    assert not (tmp_path / "s").exists()
    (tmp_path / "s").mkdir()
    (tmp_path / "s" / "thesis.tex").write_text("years", encoding="utf-8")
    assert main([*SIMULATED, folder, "num_blocks=1..9"]) == 2
    assert "holds something else than a study" in capsys.readouterr().err
    assert json.dumps([p.name for p in (tmp_path / "s").iterdir() if not p.name.startswith(".")]) == '["thesis.tex"]'


def test_a_front_without_a_finished_run_is_empty_and_a_study_is_local(tmp_path: Path) -> None:
    empty = Runs([]).pareto("kv_pool_tokens", "p99_ttft_ms")
    assert len(empty) == 0
    assert {"kv_pool_tokens", "p99_ttft_ms"} <= set(empty)
    with pytest.raises(UserError, match="s3://bucket/x is an address, and a study is written to a folder of this machine"):
        kvlab.search({"num_blocks": (40, 50)}, folder="s3://bucket/x", trials=1, progress=False)
