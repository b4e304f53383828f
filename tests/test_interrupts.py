"""Ctrl-C and SIGTERM at chosen moments of real commands: one line, exit code 130 or 143, no traceback, and folders that can be read."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

import kvlab

ROOT = Path(__file__).resolve().parents[1]

AT = '''
import os, signal, sys, threading, time
number, times, event, word = {number}, {times}, {event!r}, {word!r}
begun = []

def send():
    for _ in range(times):
        os.kill(os.getpid(), number)
        time.sleep(0.03)

def look(what, arguments):
    if begun or what != event or (arguments[0] != word if what == "import" else word not in str(arguments[0])):
        return
    begun.append(True)
    if {late}:
        import atexit
        atexit.register(lambda: (send(), time.sleep(5)))
    else:
        threading.Thread(target=send, daemon=True).start()
        time.sleep(0.2 if times > 1 else 0)

if "-m" in sys.orig_argv:  # and not in a sweep's worker
    sys.addaudithook(look)
'''
"""A sitecustomize that sends this process signals when it imports a module or opens a path with a word; late: when it ends after that."""

SIMULATED = ["runner=simulated", "workload=synthetic", "workload.num_requests=40"]
RUN = ["kvlab.experiment", *SIMULATED, "hydra.run.dir=out"]
SWEEP = ["kvlab.experiment", "-m", *SIMULATED, "block_size=8,16", "hydra.sweep.dir=out"]


def ended(
    tmp_path: Path, words: list[str], event: str, word: str, times: int = 1, number: int = signal.SIGINT, late: bool = False
) -> tuple[int, list[str]]:
    """(exit code, lines of stderr) of `python -m WORDS` in tmp_path that hears a signal at a moment."""
    hook = tmp_path / "hook"
    hook.mkdir()
    (hook / "sitecustomize.py").write_text(AT.format(number=int(number), times=times, event=event, word=word, late=late), encoding="utf-8")
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(hook), str(ROOT / ".package")])}
    done = subprocess.run(
        [sys.executable, "-m", *words], cwd=tmp_path, env=env, capture_output=True, encoding="utf-8", timeout=120,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),  # a shell's background jobs inherit that it is ignored
    )  # fmt: skip
    return done.returncode, [line for line in done.stderr.splitlines() if line.strip()]


@pytest.mark.parametrize("times", [1, 3])
@pytest.mark.parametrize(("words", "module"), [
    (["kvlab.policies"], "kvlab.doors"), (["kvlab.policies"], "typing"), (["kvlab.policies"], "kvlab.policies.registry"),
    (["kvlab.trace"], "kvlab.trace.schema"), (["kvlab", *RUN[1:]], "hydra"), (["kvlab.replay", "--list"], "numpy"),
])  # fmt: skip
def test_while_a_command_starts(tmp_path: Path, words: list[str], module: str, times: int) -> None:
    assert ended(tmp_path, words, "import", module, times) == (130, ["kvlab: interrupted."])


def test_when_a_command_has_done_its_work(tmp_path: Path) -> None:
    assert ended(tmp_path, ["kvlab.policies"], "import", "kvlab.policies.registry", late=True) == (130, ["kvlab: interrupted."])


@pytest.mark.parametrize("module", ["hydra._internal.config_loader_impl", "kvlab.running"])
def test_before_a_run_begins(tmp_path: Path, module: str) -> None:
    assert ended(tmp_path, RUN, "import", module, times=3) == (130, ["kvlab: interrupted."])
    assert not list(tmp_path.glob("out/status.json"))


KEPT = "kvlab: interrupted. What was recorded until now is in the run's folder."
RESUME = "kvlab: interrupted. To go on: the same command with resume=true, and this folder as hydra.sweep.dir."


@pytest.mark.parametrize(("opened", "number", "code"), [
    ("out/env.json.", signal.SIGINT, 130), ("out/steps.parquet.", signal.SIGINT, 130), ("out/steps.parquet.", signal.SIGTERM, 143),
])  # fmt: skip
def test_while_a_run_is_under_way(tmp_path: Path, opened: str, number: int, code: int) -> None:
    """The second and the third come while the first one's work is done: the folder's tables and its last word are whole."""
    assert ended(tmp_path, RUN, "open", opened, 3, number) == (code, [KEPT])
    (run,) = kvlab.load_runs(tmp_path / "out")
    recorded = opened == "out/steps.parquet."
    assert (run.state, run.notes) == ("interrupted", [] if recorded else ["nothing was recorded"])
    assert (len(run.steps()) > 0) == recorded


@pytest.mark.slow
@pytest.mark.parametrize(("more", "event", "word"), [([], "open", "out/1/env.json."), (["jobs=2"], "subprocess.Popen", "python")])
def test_while_a_sweep_is_under_way(tmp_path: Path, more: list[str], event: str, word: str) -> None:
    assert ended(tmp_path, [*SWEEP, *more], event, word, 3) == (130, [RESUME])
    assert {run.state for run in kvlab.load_runs(tmp_path / "out")} <= {"finished", "interrupted", "empty"}
