"""Run folders: never shared, always readable, honest about how a run ended."""

import json
import logging
import os
import subprocess
import sys

import pytest

from kvlab.trace import RunFolder, run_folder
from kvlab.trace.run_folder import is_alive
from kvlab.types import UserError


def read(folder: RunFolder, name: str):
    return json.loads((folder.path / name).read_text(encoding="utf-8"))


def test_folders_never_collide(tmp_path):
    names = [RunFolder.create(tmp_path / "run").path.name for _ in range(3)]
    assert names == ["run", "run-2", "run-3"]
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "thesis.tex").write_text("mine", encoding="utf-8")
    assert RunFolder.create(tmp_path / "other").path.name == "other-2"
    assert (tmp_path / "other" / "thesis.tex").read_text(encoding="utf-8") == "mine"


def test_a_folder_that_hydra_made_is_taken(tmp_path):
    (tmp_path / "0" / ".hydra").mkdir(parents=True)
    (tmp_path / "0" / "run.log").write_text("", encoding="utf-8")
    assert RunFolder.create(tmp_path / "0").path == tmp_path / "0"


def test_processes_at_once_get_different_folders(tmp_path):
    code = "import sys; from kvlab.trace import RunFolder\nfor _ in range(20): print(RunFolder.create(sys.argv[1]).path)"
    command = [sys.executable, "-c", code, str(tmp_path / "r")]
    running = [subprocess.Popen(command, stdout=subprocess.PIPE, encoding="utf-8") for _ in range(2)]
    paths = [line for p in running for line in p.communicate(timeout=120)[0].splitlines()]
    assert len(paths) == 40
    assert len(set(paths)) == 40


def test_life_of_a_finished_run(tmp_path):
    folder = RunFolder.create(tmp_path / "run")
    folder.start("block_size: 8\n", device="cpu", identity="abc")
    status = read(folder, "status.json")
    assert (status["state"], status["pid"], status["identity"], status["finished"]) == ("running", os.getpid(), "abc", None)
    assert is_alive(status)
    folder.finish({"num_requests": 2, "mean_ttft_ms": float("nan")})
    assert read(folder, "status.json")["state"] == "finished"
    assert read(folder, "summary.json") == {"num_requests": 2, "mean_ttft_ms": None}  # JSON has no NaN
    assert (folder.path / "config.yaml").read_text(encoding="utf-8") == "block_size: 8\n"
    env = read(folder, "env.json")
    assert env["versions"]["pandas"]
    assert env["device"] == "cpu"
    assert env["cpu"]
    assert len(env["git_commit"] or "0" * 40) == 40


@pytest.mark.parametrize(("error", "state"), [(ValueError("bad block"), "failed"), (KeyboardInterrupt(), "interrupted")])
def test_life_of_a_run_that_ends_badly(tmp_path, error, state):
    folder = RunFolder.create(tmp_path / "run")
    folder.start("{}")
    try:
        raise error
    except BaseException as caught:
        folder.fail(caught, {"num_steps": 3})
    status = read(folder, "status.json")
    assert status["state"] == state
    assert status["error"]["type"] == type(error).__name__
    assert "test_trace_run_folder.py" in status["error"]["traceback"]
    assert read(folder, "summary.json") == {"num_steps": 3}


def test_a_run_that_was_ended_early_on_purpose_is_pruned(tmp_path):
    folder = RunFolder.create(tmp_path / "run")
    folder.start("{}")
    folder.prune(ValueError("run 3 is better"), {"num_steps": 3})
    status = read(folder, "status.json")
    assert status["state"] == "pruned"
    assert status["error"] == {"type": "ValueError", "message": "run 3 is better", "traceback": ""}
    assert read(folder, "summary.json") == {"num_steps": 3}


def test_an_interrupt_after_the_end_leaves_the_result(tmp_path):
    out = RunFolder.create(tmp_path / "run")
    out.start("a: 1\n")
    out.finish({"num_steps": 7})
    before = {name: (out.path / name).read_bytes() for name in ("status.json", "summary.json")}
    out.fail(KeyboardInterrupt(), {"num_steps": 0})
    assert {name: (out.path / name).read_bytes() for name in before} == before


@pytest.mark.parametrize(("written", "state"), [(False, "interrupted"), (True, "finished")])
def test_an_interrupt_while_the_last_word_is_written(tmp_path, monkeypatch, written, state):
    """Before the file is there the run was interrupted; once it is, the run has finished, whoever knows of it."""
    out = RunFolder.create(tmp_path / "run")
    out.start("a: 1\n")
    write = run_folder.write_json

    def interrupted(path, value):
        if written or value.get("state") != "finished":
            write(path, value)
        if value.get("state") == "finished":
            raise KeyboardInterrupt

    monkeypatch.setattr(run_folder, "write_json", interrupted)
    with pytest.raises(KeyboardInterrupt):
        out.finish({"num_steps": 7})
    out.fail(KeyboardInterrupt())
    assert json.loads((out.path / "status.json").read_text(encoding="utf-8"))["state"] == state


def test_a_full_disk_still_says_why_the_run_ended(tmp_path, monkeypatch):
    """Nothing can be written any more until the reserve is given up; then there is room for the status."""
    folder = RunFolder.create(tmp_path / "run")
    folder.start("{}")
    assert (folder.path / run_folder.RESERVE).stat().st_size == 1 << 16
    written = run_folder.write_json

    def full(path, value):
        if (folder.path / run_folder.RESERVE).exists() or path.name == "summary.json":
            raise UserError("No space left on device")
        written(path, value)

    monkeypatch.setattr(run_folder, "write_json", full)
    folder.fail(OSError(28, "No space left on device"), {"num_steps": 3})
    assert read(folder, "status.json")["state"] == "failed"
    assert "No space left" in read(folder, "status.json")["error"]["message"]
    assert not (folder.path / run_folder.RESERVE).exists()


@pytest.mark.skipif(not os.path.isdir("/proc/self"), reason="only /proc tells a zombie from a process")
def test_a_killed_process_that_nobody_has_waited_for_is_not_alive():
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    status = {"host": os.uname().nodename, "pid": child.pid, "process_start": run_folder.process_start(child.pid)}
    assert is_alive(status)
    child.kill()
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)  # it has ended, and stays a zombie
    assert not is_alive(status)
    child.wait(timeout=60)


def test_a_dead_process_is_not_alive():
    child = subprocess.Popen([sys.executable, "-c", ""])
    child.wait(timeout=60)
    here = {"host": os.uname().nodename, "pid": child.pid, "process_start": None}
    assert not is_alive(here)
    assert is_alive({**here, "pid": os.getpid()})
    assert not is_alive({**here, "pid": os.getpid(), "process_start": "1"})  # the number was given to another process
    assert is_alive({**here, "host": "elsewhere"})
    assert not is_alive({})


def test_a_folder_that_cant_be_made_is_one_clear_error(tmp_path):
    (tmp_path / "file").write_text("", encoding="utf-8")
    with pytest.raises(UserError, match=r"file/run.*another run folder"):
        RunFolder.create(tmp_path / "file" / "run")


def test_log(tmp_path):
    folder = RunFolder.create(tmp_path / "run")
    logger = logging.getLogger("kvlab.test")
    handler = folder.log_handler()
    logger.addHandler(handler)
    logger.warning("watermark rounds to 0 blocks")
    logger.removeHandler(handler)
    handler.close()
    assert "WARNING kvlab.test: watermark rounds to 0 blocks" in (folder.path / "run.log").read_text(encoding="utf-8")
