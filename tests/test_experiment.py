"""The command line and its twins in Python: single runs, sweeps, wrong input, interruption, what is left on disk."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import yaml

import kvlab
from kvlab.engine.engine import Engine
from kvlab.experiment import FAILED, INTERRUPTED, OK, USER_ERROR, main
from kvlab.policies.base import KeyEviction
from kvlab.policies.eviction.fifo import Fifo
from kvlab.policies.eviction.lru import Lru
from kvlab.policies.preemption.mode.swap import Swap
from kvlab.policies.preemption.priority import Priority
from kvlab.trace.plans import read_plans
from kvlab.types import UserError

ROOT = Path(__file__).resolve().parents[1]
SMALL = [
    "model=tiny", "threads=1", "workload=synthetic", "workload.num_requests=4", "workload.arrivals.kind=all_at_once",
    "workload.prompt_len=24", "workload.output_len=4",
]  # fmt: skip
PROMPTS = ["workload=prompts", "model=tiny"]


@pytest.fixture(autouse=True)
def _in_scratch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def folders(root: Path) -> list[Path]:
    return sorted(p.parent for p in root.rglob("status.json"))


def status(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / "status.json").read_text(encoding="utf-8"))
    return found


# ------------------------------------------------------------------------ one run


def test_a_run_writes_its_folder_and_prints_a_table(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*SMALL, "+policy=lru", "block_size=7"]) == OK
    (folder,) = folders(tmp_path)
    assert folder.parent.parent == tmp_path / "runs"
    names = {p.name for p in folder.iterdir() if not p.name.startswith(".")}
    assert names == {"config.yaml", "env.json", "status.json", "summary.json", "steps.parquet", "requests.parquet", "run.log"}
    config = yaml.safe_load((folder / "config.yaml").read_text(encoding="utf-8"))
    assert (config["block_size"], config["num_blocks"], config["max_model_len"], config["dtype"]) == (7, 585, 4096, "float32")
    assert "hydra" not in config
    assert status(folder)["state"] == "finished"
    assert len(status(folder)["identity"]) == 16
    out = capsys.readouterr().out
    assert f"Folder: {folder.relative_to(tmp_path)}" in out
    assert "eviction=lru" in out
    assert "output token throughput" in out
    loaded = kvlab.load_runs(tmp_path / "runs")
    assert len(loaded) == 1
    row = loaded.frame.iloc[0]
    assert (row["status"], row["eviction"], row["runner"], row["num_finished"]) == ("finished", "lru", "torch", 4)
    assert loaded[0].requests()["num_output_tokens"].tolist() == [4, 4, 4, 4]
    assert len(loaded[0].steps()) == json.loads((folder / "summary.json").read_text(encoding="utf-8"))["num_steps"]


@pytest.mark.parametrize(("off", "said"), [
    (["record.steps=false"], "finished: 3 requests"), (["record.requests=false"], r"finished: \d+ steps"),
    (["record.steps=false", "record.requests=false"], "finished: nothing counted"),
])  # fmt: skip
def test_what_is_not_recorded_is_not_counted(tmp_path: Path, off: list[str], said: str) -> None:
    words = ["runner=simulated", "model=tiny", "workload=synthetic", "workload.num_requests=3", "workload.output_len=4"]
    run = kvlab.run(kvlab.compose(*words, *off), folder=tmp_path / "run", progress=False)
    assert run.state == "finished"
    assert re.search(said, (tmp_path / "run" / "run.log").read_text(encoding="utf-8"))



def test_the_same_command_twice_gives_two_folders_and_one_identity(tmp_path: Path) -> None:
    for _ in range(2):
        assert main([*SMALL, "runner=simulated"]) == OK
    first, second = folders(tmp_path)
    assert first != second
    assert status(first)["identity"] == status(second)["identity"]
    assert main([*SMALL, "runner=simulated", "block_size=8"]) == OK
    assert len({status(f)["identity"] for f in folders(tmp_path)}) == 2


def test_nothing_but_a_message_for_wrong_input(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for words, say in (
        (["evction=lru"], "Did you mean 'eviction'?"),
        (["watermark.fraction=0.1"], "watermark is a value, not a group. Write watermark=VALUE"),
        (["workload=chat", "workload.sampling.top_k=5"], "Valid under workload.sampling: temperature"),
        (["eviction=lrru"], "Did you mean 'lru'?"),
        (["blok_size=3"], "Did you mean 'block_size'?"),
        (["block_size=0"], "a positive integer"),
        (["watermark=1"], "[0, 1)"),
        (["num_blocks=-4"], "a positive integer"),
        (["policy=lru"], "+policy=NAME"),
        (["block_size=8,16"], "-m"),
        (["layout=contiguous_max"], "prefix_cache=none"),
        (["workload.num_requests=few"], "num_requests"),
        (["model=hf"], "model.id"),
        (["model=hf", "model.path=/no/such/folder"], "/no/such/folder"),
        (["runner=recorded"], "run=FOLDER"),
        (["runner=recorded", "run=nowhere"], "nowhere is not a folder"),
        (["+eviction.foo=1"], "takes no parameters"),
        (["eviction._target_=kvlab.policies.eviction.lru.Lruu"], "Did you mean 'Lru'?"),
        ([*PROMPTS, "workload.path=none.jsonl"], "none.jsonl"),
        (PROMPTS, "workload.path"),
        (["workload=chat", "workload.limit=few"], "limit"),
    ):
        assert main(words if words[0].startswith("workload=") else [*SMALL, *words]) == USER_ERROR, words
        printed = capsys.readouterr()
        assert say in printed.err, (words, printed.err)
        assert "Traceback" not in printed.err
        assert printed.err.startswith("kvlab: ")
        assert len(printed.err.strip().splitlines()) <= 2, printed.err


def test_a_run_folder_that_cant_be_made_is_one_message(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").write_text("", encoding="utf-8")
    for words in (["hydra.run.dir=file/run"], ["hydra.run.dir=file"], ["hydra.sweep.dir=file/sweep", "-m"]):
        assert main([*SMALL, "runner=simulated", *words]) == USER_ERROR
        printed = capsys.readouterr()
        assert printed.err.startswith("kvlab: Can't write ")
        assert "Choose another run folder." in printed.err
        assert "Traceback" not in printed.err


def test_broken_jsonl_names_the_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "prompts.jsonl").write_text('{"prompt": "one"}\n{"prompt": "two"\n', encoding="utf-8")
    assert main([*PROMPTS, "workload.path=prompts.jsonl"]) == USER_ERROR
    assert "line 2" in capsys.readouterr().err
    (folder,) = folders(tmp_path)
    assert status(folder)["state"] == "failed"


def test_a_prompt_that_never_fits_is_refused_and_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lines = [json.dumps({"prompt_token_ids": [1] * n, "max_tokens": 2}) for n in (20, 700)]
    (tmp_path / "p.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")
    words = ["model=tiny", "threads=1", "workload=prompts", "workload.path=p.jsonl", "num_blocks=40"]
    assert main(words) == FAILED
    printed = capsys.readouterr()
    assert "1 of 2 requests were refused" in printed.err
    assert "44 blocks" in printed.err
    assert "640 tokens" in printed.err
    (folder,) = folders(tmp_path)
    assert kvlab.load_runs(folder)[0].requests()["finish_reason"].tolist() == ["refused", "length"]
    assert main([*words, "num_blocks=1"]) == USER_ERROR
    assert "Every request of the workload was refused" in capsys.readouterr().err


def test_a_failing_run_leaves_what_it_had(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    steps = []
    real = Engine.step

    def step(self: Engine, now_s: float | None = None) -> Any:
        if len(steps) == 3:
            raise RuntimeError("the device is on fire")
        steps.append(1)
        return real(self, now_s)

    monkeypatch.setattr(Engine, "step", step)
    assert main(SMALL) == FAILED
    (folder,) = folders(tmp_path)
    assert "the device is on fire" in capsys.readouterr().err
    assert status(folder)["state"] == "failed"
    assert "the device is on fire" in status(folder)["error"]["traceback"]
    assert "the device is on fire" in (folder / "run.log").read_text(encoding="utf-8")
    assert len(kvlab.load_runs(folder)[0].steps()) == 3


def test_an_interrupted_run_is_readable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    steps = []
    real = Engine.step

    def step(self: Engine, now_s: float | None = None) -> Any:
        if len(steps) == 2:
            raise KeyboardInterrupt
        steps.append(1)
        return real(self, now_s)

    monkeypatch.setattr(Engine, "step", step)
    assert main(SMALL) == INTERRUPTED
    (folder,) = folders(tmp_path)
    assert status(folder)["state"] == "interrupted"
    run = kvlab.load_runs(folder)[0]
    assert (run.state, len(run.steps())) == ("interrupted", 2)
    assert run.summary["num_steps"] == 2


@pytest.mark.slow
@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_signals_end_a_process_cleanly(tmp_path: Path, number: int, code: int) -> None:
    words = [*SMALL, "workload.num_requests=4000", "workload.output_len=200"]
    process = subprocess.Popen(
        [sys.executable, "-m", "kvlab.experiment", *words], cwd=tmp_path, stderr=subprocess.PIPE, stdout=subprocess.PIPE,
        encoding="utf-8", env={**os.environ, "PYTHONPATH": str(ROOT)},
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),  # a shell's background jobs inherit that it is ignored
    )  # fmt: skip
    try:
        deadline = time.monotonic() + 90
        while time.monotonic() < deadline and not list(tmp_path.rglob(".parts/steps-*")):
            time.sleep(0.2)
        process.send_signal(number)
        _, err = process.communicate(timeout=60)
    finally:
        process.kill()
    assert process.returncode == code, err
    assert "interrupted" in err
    assert "Traceback" not in err
    (folder,) = folders(tmp_path)
    run = kvlab.load_runs(folder)[0]
    assert run.state == "interrupted"
    assert len(run.steps()) > 0


def test_a_folder_that_cannot_be_written_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").write_text("not a folder", encoding="utf-8")
    with pytest.raises(UserError, match="file"):
        kvlab.run(kvlab.compose(*SMALL), folder=tmp_path / "file" / "run", progress=False)


# ------------------------------------------------------------------------- sweeps


def test_eighteen_runs_end_with_their_table(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    import kvlab.assembly

    loads = []
    real = kvlab.assembly.load_model
    monkeypatch.setattr(kvlab.assembly, "load_model", lambda *args: loads.append(args) or real(*args))
    kvlab.assembly._models.clear()
    grid = ["+policy=lru,fifo", "block_size=8,16,32", "watermark=0,0.01,0.1"]
    assert main(["-m", *SMALL, *grid]) == OK
    lines = capsys.readouterr().out.splitlines()
    header = next(i for i, line in enumerate(lines) if line.startswith("run "))
    assert lines[header].split()[:5] == ["run", "block_size", "num_blocks", "watermark", "eviction"]
    rows = [line.split() for line in lines[header + 2 : header + 20]]
    assert [row[0] for row in rows] == [str(i) for i in range(18)]
    assert [(row[1], row[3], row[4]) for row in rows[:4]] == [
        ("8", "0", "lru"), ("8", "0.01", "lru"), ("8", "0.1", "lru"), ("16", "0", "lru")]  # fmt: skip
    assert {row[5] for row in rows} == {"finished"}
    assert lines[header + 20] == "18 of 18 runs finished."
    assert len(loads) == 1
    (root,) = {f.parent for f in folders(tmp_path)}
    assert len(kvlab.load_runs(root)) == 18


def test_one_failing_point_does_not_stop_the_others(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["-m", *SMALL, "layout=paged,contiguous_max", "num_blocks=64"]) == USER_ERROR
    printed = capsys.readouterr()
    assert "1 of 2 runs finished." in printed.out
    assert "1: failed: UserError" in printed.out
    assert "prefix_cache=none" in printed.out
    assert sorted(status(f)["state"] for f in folders(tmp_path)) == ["failed", "finished"]


def test_a_sweep_ends_with_the_code_that_its_runs_would_have(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Prompts of 24 tokens: no block of 16 holds one. Prompts of 20 and 700: 40 blocks refuse one of them, 100 none."""
    assert main(["-m", *SMALL, "runner=simulated", "num_blocks=64,1"]) == USER_ERROR
    lines = [json.dumps({"prompt_token_ids": [1] * n, "max_tokens": 2}) for n in (20, 700)]
    (tmp_path / "p.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")
    words = ["-m", *PROMPTS, "runner=simulated", "workload.path=p.jsonl"]
    assert main([*words, "num_blocks=100,101"]) == OK
    assert main([*words, "num_blocks=100,40"]) == FAILED
    assert main([*words, "num_blocks=1,40"]) == FAILED


def test_options_stand_anywhere_among_overrides(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*SMALL, "runner=simulated", "-m", "eviction=lru,fifo", "block_size=8"]) == OK
    assert "2 of 2 runs finished." in capsys.readouterr().out
    assert [status(f)["state"] for f in folders(tmp_path)] == ["finished", "finished"]
    assert main(["block_size=8", "--cfg", "job", "eviction=fifo"]) == OK
    printed = capsys.readouterr().out
    assert "block_size: 8" in printed
    assert "kvlab.policies.eviction.fifo.Fifo" in printed
    assert main(["block_size=8", "-m", "--cgf", "eviction=fifo"]) == USER_ERROR
    assert "--cgf" in capsys.readouterr().err


def test_swapping_without_swap_space_is_noted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for mode, num_cpu_blocks, num_notes in (("swap", 0, 1), ("cheaper_of_both", 0, 1), ("swap", 8, 0), ("recompute", 0, 0)):
        words = [*SMALL, "runner=simulated", f"preemption/mode={mode}", f"num_cpu_blocks={num_cpu_blocks}", "num_blocks=64"]
        assert main([*words, f"hydra.run.dir=run-{mode}-{num_cpu_blocks}"]) == OK
        note = (f"preemption.mode={mode} has no swap space (num_cpu_blocks=0): every preemption is a recompute. "
                "Set num_cpu_blocks=64, for example.")  # fmt: skip
        assert capsys.readouterr().out.count(note) == num_notes
        assert status(tmp_path / f"run-{mode}-{num_cpu_blocks}")["notes"].count(note) == num_notes


def test_an_interrupted_sweep_ends_with_its_table(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    steps = []
    real = Engine.step

    def step(self: Engine, now_s: float | None = None) -> Any:
        steps.append(1)
        if len(steps) == 6:  # the first run takes four steps
            raise KeyboardInterrupt
        return real(self, now_s)

    monkeypatch.setattr(Engine, "step", step)
    assert main(["-m", *SMALL, "block_size=4,8,16"]) == INTERRUPTED
    assert "1 of 2 runs finished." in capsys.readouterr().out
    assert [status(f)["state"] for f in folders(tmp_path)] == ["finished", "interrupted"]


def test_a_wrong_name_in_a_sweep_runs_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["-m", *SMALL, "eviction=lru,lrru"]) == USER_ERROR
    assert "Did you mean 'lru'?" in capsys.readouterr().err
    assert folders(tmp_path) == []


def test_sweep_in_process_with_names_values_and_objects(tmp_path: Path) -> None:
    class Mine(Lru):
        """A policy of a notebook cell."""

    runs = kvlab.sweep({"policy": ["lru", "vllm"], "block_size": [8, 16]}, *SMALL, progress=False)
    assert runs.frame[["block_size", "watermark"]].values.tolist() == [[8, 0.01], [16, 0.01], [8, 0.0], [16, 0.0]]
    runs = kvlab.sweep({"eviction": [Fifo(), Mine, "lfu"]}, *SMALL, folder=tmp_path / "mine", progress=False)
    assert [run.state for run in runs] == ["finished"] * 3
    assert [run.name for run in runs] == ["0", "1", "2"]


def test_sweep_checks_the_whole_grid_first(tmp_path: Path) -> None:
    for grid, say in (
        ({"block_size": [8, 0]}, "block_size = 0"),
        ({"eviction": ["lru", "lrru"]}, "lrru"),
        ({"block_size": 8}, "a list"),
        ({"blok_size": [8]}, "block_size"),
        (["block_size"], "a dict of lists"),
        ({"workload": [Lru()]}, "seam"),
    ):
        with pytest.raises(UserError, match=say):
            kvlab.sweep(grid, *SMALL, progress=False)
    assert folders(tmp_path) == []


# ------------------------------------------------------------------ policies as objects


def test_run_takes_objects_classes_and_names(tmp_path: Path) -> None:
    seen: list[int] = []

    class Watching(Lru):
        """Notes what it evicts."""

        def evict(self, block: Any, now: Any) -> None:
            seen.append(block.block_id)
            super().evict(block, now)

    words = ["workload=shared_prefix", "workload.num_requests=24", "workload.arrivals.kind=all_at_once", "kv_cache_tokens=1024"]
    config = kvlab.compose("model=tiny", "threads=1", *words)
    by_name = kvlab.run(config, eviction="lru", progress=False)
    by_class = kvlab.run(config, eviction=Watching, progress=False)
    assert by_name.summary["num_evicted_blocks"] > 0
    assert len(seen) == by_class.summary["num_evicted_blocks"] > 0
    with pytest.raises(UserError, match="is not a policy of this seam"):
        kvlab.run(config, eviction=kvlab.SamplingParams(), progress=False)
    with pytest.raises(UserError, match="no seam"):
        kvlab.run(config, evction="lru", progress=False)
    with pytest.raises(UserError, match=r'kvlab.compose\("block_size=VALUE"\)'):
        kvlab.run(config, block_size=8, progress=False)


def test_a_class_that_cant_be_made_is_a_users_error(tmp_path: Path) -> None:
    class Needy(KeyEviction):
        """Wants a number."""

        def __init__(self, number: int) -> None:
            super().__init__()

        def key(self, block: Any) -> tuple[float, ...]:
            return (0,)

    config = kvlab.compose(*SMALL, "runner=simulated")
    (tmp_path / "ids.txt").write_text("1\n2\n", encoding="utf-8")
    for cls, say in ((Needy, r"argument: 'number'. Give an object, Needy\(...\)"), (KeyEviction, "KeyEviction lacks key")):
        with pytest.raises(UserError, match=say):
            kvlab.run(config, eviction=cls, progress=False)
        with pytest.raises(UserError, match=say):
            kvlab.replay(tmp_path / "ids.txt", eviction=cls, capacity=1)


def test_an_exception_inside_a_policy_names_the_policy(tmp_path: Path) -> None:
    class Careless(KeyEviction):
        """Divides by the number of hits."""

        def key(self, block: Any) -> tuple[float, ...]:
            return (1 / block.num_hits,)

    config = kvlab.compose(*SMALL, "runner=simulated")
    with pytest.raises(ZeroDivisionError) as found:
        kvlab.run(config, folder=tmp_path / "run", eviction=Careless(), progress=False)
    [note] = found.value.__notes__
    assert re.fullmatch(r"raised in the eviction policy Careless \(.*test_experiment.py, line \d+\)", note)
    assert status(tmp_path / "run")["error"]["message"] == f"division by zero; {note}"


def test_what_is_recorded_names_the_policy_that_ran(tmp_path: Path) -> None:
    class Mine(Lru):
        """Not what the configuration says."""

    config = kvlab.compose(*SMALL, "runner=simulated")
    run = kvlab.run(config, eviction=Mine(), preemption=Priority(Swap(), protect_oldest=False), progress=False)
    assert run.config["eviction"] == {"_target_": f"{__name__}.{Mine.__qualname__}"}
    assert run.config["preemption"] == {
        "_target_": "kvlab.policies.preemption.priority.Priority", "protect_oldest": False,
        "mode": {"_target_": "kvlab.policies.preemption.mode.swap.Swap"},
    }  # fmt: skip
    runs = kvlab.sweep({"eviction": [Fifo(), "lru", Mine()]}, *SMALL, "runner=simulated", progress=False)
    assert runs.frame["eviction"].tolist() == ["fifo", "lru", "Mine"]


def test_a_run_folders_config_runs_again(tmp_path: Path) -> None:
    first = kvlab.run(kvlab.compose(*SMALL, "runner=simulated"), progress=False)
    assert first.folder is not None
    again = kvlab.run(yaml.safe_load((first.folder / "config.yaml").read_text(encoding="utf-8")), progress=False)
    assert again.summary["num_steps"] == first.summary["num_steps"]
    assert again.status["identity"] == first.status["identity"]
    assert again.config == first.config


def test_a_recorded_run_replays_to_the_same_plans(tmp_path: Path) -> None:
    words = ["model=tiny", "threads=1", "workload=multi_turn", "workload.num_sessions=4", "workload.turns=2", "workload.think_s=0.01",
             "workload.arrivals.rate=50", "num_blocks=24", "record.outcomes=true", "record.plans=true"]  # fmt: skip
    real = kvlab.run(kvlab.compose(*words), progress=False)
    assert real.folder is not None
    replay = kvlab.run(kvlab.compose(*words, "runner=recorded", f"run={real.folder}"), progress=False)
    assert replay.folder is not None
    plans = list(read_plans(real.folder))
    assert len(plans) == real.summary["num_steps"] > 10
    assert list(read_plans(replay.folder)) == plans


def test_presets_run(tmp_path: Path) -> None:
    for preset in ("fifo", "lfu", "lru", "transformers", "vllm", "vllm_v0", "walkthrough"):
        assert main([*SMALL, f"+policy={preset}", "runner=simulated"]) == OK, preset
    assert {run.state for run in kvlab.load_runs(tmp_path / "runs")} == {"finished"}


def test_simulated_run_needs_no_weights(tmp_path: Path) -> None:
    run = kvlab.run(kvlab.compose("model=dummy_llama3_8b", "runner=simulated", "workload=synthetic", "num_blocks=400"), progress=False)
    assert run.summary["num_finished"] == run.summary["num_requests"] > 0
    assert run.summary["peak_process_rss_bytes"] < 3e9


def test_help_exits_well(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--help"]) == OK
    out = capsys.readouterr().out
    assert "python -m kvlab.experiment +policy=lru" in out
    assert "eviction: arc, belady, clock" in out
    assert main(["--cfg", "job", "eviction=fifo"]) == OK
    assert "kvlab.policies.eviction.fifo.Fifo" in capsys.readouterr().out


def test_the_pool_is_sized_from_free_memory_where_nothing_else_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tiny's K and V take 2 * 2 layers * 4 heads * 8 * 4 bytes = 512 bytes a token, 8,192 a block of 16: 500,000 bytes hold 61."""
    import types

    import psutil

    monkeypatch.setattr(psutil, "virtual_memory", lambda: types.SimpleNamespace(available=1_000_000, total=1_000_000))
    run = kvlab.run(kvlab.compose(*SMALL, "kv_cache_tokens=null", "memory_fraction=0.5"), progress=False)
    assert run.config["num_blocks"] == 61
    assert run.steps()["kv_blocks_total"].unique().tolist() == [61]
    with pytest.raises(UserError, match="set num_blocks or kv_cache_tokens"):
        kvlab.run(kvlab.compose(*SMALL, "kv_cache_tokens=null", "runner=simulated"), progress=False)
