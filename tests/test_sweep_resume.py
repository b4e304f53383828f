"""Sweeps that survive: kill -9 at any moment, two processes on one folder, drift, failures, full disks."""

from __future__ import annotations

import errno
import json
import os
import random
import shutil
import signal
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from sweep_support import FORTY, SIMULATED, in_child, interrupted, states, sweep

import kvlab
import kvlab.sweep_attempt
from kvlab import sweep_folder
from kvlab.engine.engine import Engine
from kvlab.experiment import FAILED, INTERRUPTED, OK, USER_ERROR, main
from kvlab.policies.eviction.fifo import Fifo
from kvlab.policies.eviction.lru import Lru
from kvlab.sweep_command import SweepCommand
from kvlab.sweep_folder import SweepFolder
from kvlab.sweeping import SweepStopped
from kvlab.types import UserError


@pytest.fixture(autouse=True)
def _in_scratch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    digests = sweep_folder.code_digests()  # the files may be edited while the tests run
    monkeypatch.setattr(sweep_folder, "code_digests", lambda: digests)


def journal(folder: Path, state: str) -> list[int]:
    """Numbers of the points with an attempt that ended so."""
    path = folder / ".sweep" / "journal.jsonl"
    lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    return [entry["number"] for entry in map(json.loads, lines) if entry["state"] == state]


def finished_points(folder: Path) -> list[int]:
    states = {int(p.parent.name): json.loads(p.read_text(encoding="utf-8"))["state"] for p in folder.glob("*/status.json")}
    return sorted(number for number, state in states.items() if state == "finished")


# ------------------------------------------------------------------ cut off and resumed


@pytest.mark.slow
@pytest.mark.parametrize("kills", [2, pytest.param(7, marks=pytest.mark.full)])
def test_kill_9_at_random_moments_then_resume_gives_every_point_once(tmp_path: Path, kills: int) -> None:
    """A sweep of 40 points is killed a few times, after about a second of points each, and resumed to its end."""
    folder = tmp_path / "s"
    rng = random.Random(20261130 + kills)
    cut_short = 0
    for _ in range(kills):
        before = len(finished_points(folder))
        child = in_child(sweep, folder, resume=True)
        deadline = time.monotonic() + 60
        while child.is_alive() and len(finished_points(folder)) < min(before + rng.randint(2, 5), 39) and time.monotonic() < deadline:
            time.sleep(0.01)
        time.sleep(rng.random() * 0.1)
        os.kill(child.pid or 0, signal.SIGKILL)
        child.join()
        cut_short += child.exitcode == -signal.SIGKILL
        assert len(finished_points(folder)) > before
    assert cut_short == kills
    kept = {n: (folder / str(n) / "status.json").read_bytes() for n in finished_points(folder)}
    assert 0 < len(kept) < 40
    runs = sweep(folder, resume=True)
    assert [run.name for run in runs] == [str(n) for n in range(40)]
    assert {run.state for run in runs} == {"finished"}
    expected = [(n, w) for n in FORTY["num_blocks"] for w in FORTY["watermark"]]
    assert list(zip(runs["num_blocks"], runs["watermark"], strict=True)) == expected
    for number, status in kept.items():  # what was finished has not been touched
        assert (folder / str(number) / "status.json").read_bytes() == status
    loaded = kvlab.load_runs(folder)
    assert [run.name for run in loaded] == [str(n) for n in range(40)]
    ended = journal(folder, "finished")  # one that was killed after its run and before its note is in no line
    assert len(set(ended)) == len(ended) >= 40 - kills
    for attempt in (folder / ".attempts").iterdir():  # what was cut off had not finished
        status = attempt / "status.json"
        assert not status.exists() or json.loads(status.read_text(encoding="utf-8"))["state"] == "running"


@pytest.mark.slow
def test_two_processes_share_a_sweep(tmp_path: Path) -> None:
    folder = tmp_path / "s"
    children = [in_child(sweep, folder, resume=True) for _ in range(2)]
    for child in children:
        child.join(120)
        assert child.exitcode == 0
    loaded = kvlab.load_runs(folder)
    assert [run.name for run in loaded] == [str(n) for n in range(40)]
    assert {run.state for run in loaded} == {"finished"}
    assert sorted(journal(folder, "finished")) == list(range(40))
    assert len({json.loads(p.read_text(encoding="utf-8"))["pid"] for p in folder.glob("*/status.json")}) == 2
    assert not (folder / ".attempts").exists()


def test_a_claim_dies_with_its_process_and_is_waited_for_until_then(tmp_path: Path) -> None:
    """A process takes point 0 and hangs; another runs the others, waits, and takes over when the first is killed."""
    folder = tmp_path / "s"
    grid = {"num_blocks": [40, 41, 42]}
    sweep(folder, grid)
    shutil.rmtree(folder / "0")

    def hold() -> None:
        with SweepFolder(folder).claim("0") as ours:
            assert ours
            (folder / "held").touch()
            time.sleep(120)

    holder = in_child(hold)
    while not (folder / "held").exists():
        time.sleep(0.01)
    (folder / "held").unlink()
    waiter = in_child(sweep, folder, grid, resume=True)
    waiter.join(3)
    assert waiter.is_alive()
    assert finished_points(folder) == [1, 2]
    assert SweepFolder(folder).holder("0").startswith(f"process {holder.pid} on ")
    os.kill(holder.pid or 0, signal.SIGKILL)
    waiter.join(60)
    assert waiter.exitcode == 0
    assert finished_points(folder) == [0, 1, 2]
    holder.join()


@pytest.mark.slow
@pytest.mark.parametrize("whole_group", [True, pytest.param(False, marks=pytest.mark.full)])
def test_ctrl_c_in_a_sweep_of_two_processes_leaves_everything_readable(tmp_path: Path, whole_group: bool) -> None:
    """What ran was interrupted, which is no failure and nobody's fault; resuming gives every point once."""
    folder, numbers = tmp_path / "s", range(40, 46)
    words = ["-m", *SIMULATED, "workload.num_requests=600", "num_blocks=" + ",".join(map(str, numbers)), f"hydra.sweep.dir={folder}"]
    code, err = interrupted(folder, [*words, "jobs=2"], whole_group)
    assert code == INTERRUPTED, err
    assert "kvlab: interrupted." in err
    assert "Traceback" not in err
    assert 1 <= states(folder).count("finished") < 6
    assert set(states(folder)) <= {"finished", "interrupted"}
    for run in kvlab.load_runs(folder):  # a run that had no time to say anything is partial
        assert run.state in ("finished", "interrupted", "partial")
        assert run.error is None or str(run.error) == "KeyboardInterrupt"
        assert len(run.steps()) >= (run.state == "finished")
    assert journal(folder, "failed") == []
    kept = {n: (folder / str(n) / "status.json").read_bytes() for n in finished_points(folder)}
    assert main([*words, "resume=true"]) == OK
    loaded = kvlab.load_runs(folder)
    assert loaded["num_blocks"].tolist() == list(numbers)
    assert set(loaded["status"]) == {"finished"}
    assert {n: (folder / str(n) / "status.json").read_bytes() for n in kept} == kept
    ended = journal(folder, "finished")
    assert len(set(ended)) == len(ended)
    assert set(range(6)) - set(ended) <= set(kept)  # interrupted after its run and before its note
    for attempt in (folder / ".attempts").glob("*/status.json"):
        assert json.loads(attempt.read_text(encoding="utf-8"))["state"] == "interrupted"


def test_a_worker_that_dies_after_its_run_costs_no_result(tmp_path: Path) -> None:
    folder = tmp_path / "s"
    sweep(folder, {"num_blocks": [40]}, on_error="stop")
    point, before = SimpleNamespace(number=0, label="num_blocks=40"), (folder / "0" / "status.json").read_bytes()
    assert kvlab.sweep_attempt.note_death(folder, cast("Any", point), "signal 9, SIGKILL").state == "kept"
    assert (folder / "0" / "status.json").read_bytes() == before
    assert journal(folder, "failed") == []
    assert SweepFolder(folder).stopped() is None


def test_what_failed_is_run_again_and_what_it_left_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "s"
    real = Engine.step

    def step(self: Engine, now_s: float | None = None) -> Any:
        if self.config.num_blocks == 41:
            raise RuntimeError("the device is on fire")
        return real(self, now_s)

    monkeypatch.setattr(Engine, "step", step)
    runs = sweep(folder, {"num_blocks": [40, 41, 42]})
    assert [run.state for run in runs] == ["finished", "failed", "finished"]
    with pytest.raises(UserError, match=r"holds a sweep of 3 points already. Go on with it \(resume=true\)"):
        sweep(folder, {"num_blocks": [40, 41, 42]})
    monkeypatch.setattr(Engine, "step", real)
    runs = sweep(folder, {"num_blocks": [40, 41, 42]}, resume=True)
    assert [run.state for run in runs] == ["finished"] * 3
    assert journal(folder, "finished") == [0, 2, 1]
    left = json.loads((folder / ".attempts" / "1-1" / "status.json").read_text(encoding="utf-8"))
    assert "the device is on fire" in left["error"]["traceback"]
    assert len(kvlab.load_runs(folder)) == 3


def test_a_grid_may_grow(tmp_path: Path) -> None:
    folder = tmp_path / "s"
    sweep(folder, {"num_blocks": [40, 42], "watermark": [0, 0.01]})
    runs = sweep(folder, {"watermark": [0.01, 0], "num_blocks": [40, 41, 42]}, resume=True)
    assert [run.name for run in runs] == ["1", "4", "3", "0", "5", "2"]
    assert runs["num_blocks"].tolist() == [40, 41, 42, 40, 41, 42]
    assert runs["watermark"].tolist() == [0.01] * 3 + [0] * 3
    assert sorted(journal(folder, "finished")) == list(range(6))


# ------------------------------------------------------------------------------- drift


def test_drift_is_named_and_can_be_accepted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, grid = tmp_path / "s", {"num_blocks": [40, 41]}
    sweep(folder, grid)
    with pytest.raises(UserError, match=r"made otherwise: admission.fraction was 0.01, is 0.05"):
        sweep(folder, grid, "watermark=0.05", resume=True)
    with pytest.raises(UserError, match="it holds another sweep, of num_blocks=40"):
        sweep(folder, {"block_size": [8]}, resume=True)
    assert sorted(journal(folder, "finished")) == [0, 1]
    runs = sweep(folder, grid, "watermark=0.05", resume="accept")
    assert runs["watermark"].tolist() == [0.05, 0.05]
    assert sorted(p.name for p in (folder / ".attempts").iterdir()) == ["0-1", "1-1"]
    code = sweep_folder.code_digests()
    monkeypatch.setattr(sweep_folder, "code_digests", lambda: {**code, "engine/commit.py": "0" * 12})
    with pytest.raises(UserError, match="kvlab/engine/commit.py has changed.*resume=accept"):
        sweep(folder, grid, "watermark=0.05", resume=True)
    (folder / "1" / "status.json").unlink()
    assert [run.state for run in sweep(folder, grid, "watermark=0.05", resume="accept")] == ["finished"] * 2
    assert journal(folder, "finished").count(0) == 2  # accepted: its result is kept though the code has changed
    sweep(folder, grid, "watermark=0.05", resume=True)  # and from now on that is the sweep's code


def test_every_source_file_that_results_depend_on_counts() -> None:
    names = set(sweep_folder.code_digests())
    assert {"engine/scheduler.py", "policies/eviction/lru.py", "kernels/attention.py", "cache/pool.py", "running.py"} <= names
    assert not any(name.startswith(("sweep", "tables", "notebook")) for name in names)


def test_a_class_that_changed_is_drift_and_one_without_source_is_run_again(tmp_path: Path) -> None:
    def made(text: str) -> type:
        path = tmp_path / "mine.py"
        path.write_text(text, encoding="utf-8")
        import importlib
        import sys

        sys.path.insert(0, str(tmp_path))
        sys.modules.pop("mine", None)
        try:
            importlib.invalidate_caches()
            found: type = importlib.import_module("mine").Mine
            return found
        finally:
            sys.path.remove(str(tmp_path))

    text = 'from kvlab.policies.eviction.lru import Lru\n\nclass Mine(Lru):\n    """Mine."""\n    bias = 1\n'
    folder = tmp_path / "s"
    sweep(folder, {"eviction": [made(text)]})
    sweep(folder, {"eviction": [made(text)]}, resume=True)
    assert journal(folder, "finished") == [0]
    import linecache

    linecache.clearcache()
    changed = made(text.replace("bias = 1", "bias = 22"))
    linecache.clearcache()
    with pytest.raises(UserError, match="the source of eviction has changed"):
        sweep(folder, {"eviction": [changed]}, resume=True)
    namespace: dict[str, Any] = {"Lru": Lru, "__name__": "nowhere"}
    exec("class Hidden(Lru):\n    pass\n", namespace)
    hidden = tmp_path / "hidden"
    for _ in range(2):
        assert sweep(hidden, {"eviction": [namespace["Hidden"]]}, resume=True)["status"].tolist() == ["finished"]
    assert journal(hidden, "finished") == [0, 0]


def test_other_contents_of_an_input_are_drift(tmp_path: Path) -> None:
    prompts = tmp_path / "p.jsonl"
    prompts.write_text(json.dumps({"prompt_token_ids": [1, 2, 3], "max_tokens": 2}) + "\n", encoding="utf-8")
    words = ["model=tiny", "runner=simulated", "workload=prompts", f"workload.path={prompts}"]
    kvlab.sweep({"num_blocks": [40]}, *words, folder=tmp_path / "s", progress=False)
    prompts.write_text(json.dumps({"prompt_token_ids": [1, 2, 3, 4], "max_tokens": 2}) + "\n", encoding="utf-8")
    with pytest.raises(UserError, match=r"the contents of workload.path has changed"):
        kvlab.sweep({"num_blocks": [40]}, *words, folder=tmp_path / "s", progress=False, resume=True)


def test_a_folder_with_something_else_in_it_is_left_alone(tmp_path: Path) -> None:
    folder = tmp_path / "s"
    (folder / "1").mkdir(parents=True)
    (folder / "1" / "thesis.tex").write_text("years of work", encoding="utf-8")
    runs = sweep(folder, {"num_blocks": [40, 41]})
    assert [run.state for run in runs] == ["finished", "foreign"]
    assert (folder / "1" / "thesis.tex").read_text(encoding="utf-8") == "years of work"
    (folder / "sweep.json").write_text('{"format": 1, "points": [{}]}', encoding="utf-8")
    with pytest.raises(UserError, match=r"sweep.json is damaged"):
        sweep(folder, {"num_blocks": [40, 41]}, resume=True)


# ------------------------------------------------------------- failures, memory, disks


def fail_at(monkeypatch: pytest.MonkeyPatch, errors: dict[int, Exception]) -> None:
    real = Engine.step

    def step(self: Engine, now_s: float | None = None) -> Any:
        if self.config.num_blocks in errors:
            raise errors[self.config.num_blocks]
        return real(self, now_s)

    monkeypatch.setattr(Engine, "step", step)


def test_points_that_raise_run_out_of_memory_or_cant_fit_leave_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    fail_at(monkeypatch, {41: RuntimeError("the device is on fire"), 42: MemoryError("3 GiB")})
    assert main(["-m", *SIMULATED, "num_blocks=40,41,42,1,43", "hydra.sweep.dir=s"]) == FAILED
    out = capsys.readouterr().out
    assert "2 of 5 runs finished." in out
    assert "1: failed: RuntimeError: the device is on fire [num_blocks=41]" in out
    assert "raise errors[self.config.num_blocks]" in out  # the end of the traceback
    assert "2: failed: MemoryError: 3 GiB [num_blocks=42]" in out
    assert "3: failed: UserError: Every request of the workload was refused" in out
    assert [run.state for run in kvlab.load_runs("s")] == ["finished", "failed", "failed", "failed", "finished"]
    assert main(["-m", *SIMULATED, "num_blocks=40,1", "hydra.sweep.dir=t"]) == USER_ERROR
    assert main(["-m", *SIMULATED, "num_blocks=40,43", "hydra.sweep.dir=u"]) == OK


def test_on_error_stop_and_resume(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    real = Engine.step
    fail_at(monkeypatch, {41: RuntimeError("the device is on fire")})
    words = ["-m", *SIMULATED, "num_blocks=40,41,42", "hydra.sweep.dir=s"]
    assert main([*words, "on_error=stop"]) == FAILED
    assert "1 of 2 runs finished." in capsys.readouterr().out
    assert not (tmp_path / "s" / "2").exists()
    with pytest.raises(SweepStopped, match=r"Point 1 \(num_blocks=41\) failed: RuntimeError: the device is on fire. Folder: .*resume=True"):
        sweep(tmp_path / "t", {"num_blocks": [40, 41, 42]}, on_error="stop")
    monkeypatch.setattr(Engine, "step", real)
    assert main([*words, "resume=true"]) == OK
    assert "3 of 3 runs finished." in capsys.readouterr().out
    assert journal(tmp_path / "s", "finished") == [0, 1, 2]


def test_a_full_disk_is_named_and_ends_the_sweep(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The third point meets a full disk: nothing after it is tried, what is there stays, and resuming goes on."""
    from kvlab.trace import store

    folder, grid = tmp_path / "s", {"num_blocks": [40, 41, 42, 43]}
    real = store.os.replace

    def replace(source: Any, target: Any) -> None:
        if f"{os.sep}2{os.sep}" in str(target):
            raise OSError(errno.ENOSPC, "No space left on device")
        real(source, target)

    monkeypatch.setattr(store.os, "replace", replace)
    with pytest.raises(UserError, match=r"No space left to write .*/s/2/.*1 points were left; resume=true goes on"):
        sweep(folder, grid)
    monkeypatch.setattr(store.os, "replace", real)
    assert finished_points(folder) == [0, 1]
    assert not (folder / "3").exists()
    assert [run.state for run in sweep(folder, grid, resume=True)] == ["finished"] * 4
    assert journal(folder, "finished") == [0, 1, 2, 3]


@pytest.mark.slow
def test_a_killed_worker_costs_its_own_point_only(tmp_path: Path) -> None:
    """Two worker processes; a policy by value (from no module that they could import) ends one of them as the OOM killer would."""

    class Deadly(Fifo):
        """Ends its process when it is made ready for a run."""

        def __init__(self, deadly: bool = True) -> None:
            self.deadly = deadly
            super().__init__()

        def reset(self) -> None:
            super().reset()
            if self.deadly and os.environ.get("KVLAB_TEST_PARENT") != str(os.getpid()):
                os.kill(os.getpid(), signal.SIGKILL)

    os.environ["KVLAB_TEST_PARENT"] = str(os.getpid())
    try:
        runs = sweep(tmp_path / "s", {"eviction": ["lru", Deadly(), Deadly(False), "fifo"]}, jobs=2)
    finally:
        del os.environ["KVLAB_TEST_PARENT"]
    assert [run.state for run in runs] == ["finished", "failed", "finished", "finished"]
    assert "Its process ended without a word (signal 9, SIGKILL). Often that is the system's out-of-memory killer" in str(runs[1].error)
    assert os.getpid() not in {run.status["pid"] for run in runs}  # (one quick worker may have done all the others)


def test_a_wrong_value_of_a_workload_anywhere_in_the_grid_is_refused_before_the_first_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rate = [*SIMULATED, "workload.arrivals.kind=poisson"]
    turns = [*SIMULATED[:3], "workload=multi_turn"]
    for words, axis, say in (
        (SIMULATED, "workload.arrivals.kind=all_at_once,immediate", "Unknown workload.arrivals.kind 'immediate'"),
        (rate, "workload.arrivals.rate=4,-1", "workload.arrivals"),
        (SIMULATED, "workload.prompt_len=64,abc", "workload.prompt_len"),
        (turns, "workload.think_s=0,soon", "workload.think_s"),
    ):
        axes = [*words, axis]
        assert main(["-m", *axes, f"hydra.sweep.dir={tmp_path / 's'}"]) == USER_ERROR, axis
        assert say in capsys.readouterr().err
        assert not (tmp_path / "s").exists()


def test_experiments_are_swept_one_at_a_time(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["-m", "+experiment=fairness,layouts", f"hydra.sweep.dir={tmp_path / 's'}"]) == USER_ERROR
    told = capsys.readouterr().err
    assert "one experiment at a time" in told
    assert "multirun" not in told
    assert not (tmp_path / "s").exists()


def test_a_point_whose_folder_holds_something_else_says_so_in_the_table(capsys: pytest.CaptureFixture[str]) -> None:
    Path("s/1").mkdir(parents=True)
    Path("s/1/mine.txt").write_text("years", encoding="utf-8")
    assert main(["-m", *SIMULATED, "num_blocks=40,41", "hydra.sweep.dir=s"]) != OK
    assert "holds 'mine.txt', which is no run's: move it away, or choose another folder for the sweep." in capsys.readouterr().out
    assert Path("s/1/mine.txt").read_text(encoding="utf-8") == "years"


def test_settings_that_make_no_sense_are_refused_before_anything_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for words, say in (
        (["resume=true"], "settings of a sweep, which this is not. Add -m"),
        (["-m", "resume=maybe"], "resume = 'maybe' is not allowed"),
        (["-m", "on_error=stopp"], "Did you mean 'stop'?"),
        (["-m", "repeats=0"], "repeats = '0' is not allowed: a positive integer."),
        (["-m", "jobs=two"], "jobs = 'two' is not allowed"),
        (["-m", "repeats=2", "seed=1,2"], "two ways to say the same"),
        (["-m", "resume=true", "hydra.sweep.subdir=x-${hydra.job.num}"], "hydra.sweep.subdir"),
    ):
        assert main([*SIMULATED, "num_blocks=40", *words]) == USER_ERROR, words
        assert say in capsys.readouterr().err, words
    for more, say in (({"jobs": 0}, "jobs = 0"), ({"repeats": -1}, "repeats = -1"), ({"launcher": "rai"}, "Did you mean 'ray'"), (
        {"launcher_options": {"address": "x"}}, "without a launcher")):  # fmt: skip
        with pytest.raises(UserError, match=say):
            sweep(tmp_path / "s", {"num_blocks": [40]}, **more)
    assert not (tmp_path / "s").exists()
    assert not (tmp_path / "runs").exists()


def test_a_sweep_that_is_interrupted_before_its_first_run_says_how_to_go_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its folder holds the list of points by then, which is nothing foreign."""

    def stopped(command: SweepCommand) -> None:
        raise KeyboardInterrupt

    monkeypatch.chdir(tmp_path)
    words = ["-m", *SIMULATED, "num_blocks=40,41", "hydra.sweep.dir=t"]
    with monkeypatch.context() as patch:
        patch.setattr(SweepCommand, "run", stopped)
        assert main(words) == INTERRUPTED
    told = capsys.readouterr()
    assert told.out == "No run had begun.\n\nFolder: t\n"
    assert told.err.endswith("kvlab: interrupted. To go on: the same command with resume=true, and this folder as hydra.sweep.dir.\n")
    assert main([*words, "resume=true"]) == OK
    assert "2 of 2 runs finished." in capsys.readouterr().out


# ----------------------------------------------------------------------------- repeats


def test_repeats_are_seeds_and_aggregate_gives_their_interval(tmp_path: Path) -> None:
    """Two seeds: the half interval is t(0.975, 1 degree) = 12.7062 times half the difference."""
    words = ["workload.arrivals.kind=poisson", "workload.arrivals.rate=100"]
    runs = sweep(tmp_path / "s", {"num_blocks": [40, 41]}, *words, repeats=2)
    assert runs["seed"].tolist() == [0, 1, 0, 1]
    frame = runs.aggregate()
    assert list(frame.columns[:2]) == ["num_blocks", "n"]
    assert frame["n"].tolist() == [2, 2]
    first, second = runs["duration_s"][:2]
    assert first != second
    assert frame["duration_s"][0] == pytest.approx((first + second) / 2)
    assert frame["duration_s_ci95"][0] == pytest.approx(12.7062047 * abs(first - second) / 2)
    one = runs.aggregate(by="seed", figures=["num_steps"])
    assert list(one.columns) == ["seed", "n", "num_steps", "num_steps_ci95"]
    with pytest.raises(UserError, match="Did you mean 'mean_ttft_ms'"):
        runs.aggregate(figures=["mean_tft_ms"])
    assert main(["-m", *SIMULATED, *words, "num_blocks=40,41", "repeats=2", "seed=5", "hydra.sweep.dir=t"]) == OK
    assert kvlab.load_runs("t")["seed"].tolist() == [5, 6, 5, 6]
