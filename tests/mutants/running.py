"""Runs mutants: each in a copy of the tree, so that nothing is written into the tree itself."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue
from tempfile import TemporaryDirectory

from mutants.mutant import Mutant, StaleMutant

KILLED, TIMED_OUT, SURVIVED, EQUIVALENT = "killed", "timed out", "SURVIVED", "equivalent"
NOT_EQUIVALENT, STALE, BROKEN = "NOT EQUIVALENT", "STALE", "BROKEN TESTS"
GOOD = (KILLED, TIMED_OUT, EQUIVALENT)
"""Verdicts that are as they should be. A hang is noticed by whoever runs the tests, so it counts as killed."""

NOT_COPIED = shutil.ignore_patterns(
    ".venv", ".git", "__pycache__", "*.egg-info", ".*_cache", ".hypothesis", "runs", "multirun", "outputs", "build", "dist")


@dataclass(frozen=True)
class Result:
    """What became of one mutant; ``note`` names the test that failed, or says what is wrong; ``seconds`` is the time of its tests."""

    mutant: Mutant
    verdict: str
    note: str = ""
    seconds: float = 0.0


@dataclass(frozen=True)
class _TestRun:
    passed: bool
    timed_out: bool
    seconds: float
    output: str

    @property
    def first_failure(self) -> str:
        found = re.search(r"^(?:FAILED|ERROR) (\S+)", self.output, re.MULTILINE)
        return found[1] if found else (self.output.strip().splitlines() or [""])[-1]


def run_mutants(
    root: Path, mutants: Sequence[Mutant], *, jobs: int, report: Callable[[Result], None], least_limit_s: float = 60.0
) -> list[Result]:
    """Run each mutant's tests with it in place, ``jobs`` at a time, after one run of each test (file or node id) without any.

    A run that takes five times as long as without the mutant, and ``least_limit_s`` at least, is stopped and counts as timed out.
    ``report`` hears each result as it comes. Returned in the order of ``mutants``.
    """
    with TemporaryDirectory(prefix="kvlab-mutants-") as folder, ThreadPoolExecutor(jobs) as pool:
        copies: SimpleQueue[Path] = SimpleQueue()
        for i in range(jobs):
            copies.put(Path(shutil.copytree(root, Path(folder, str(i)), symlinks=True, ignore=NOT_COPIED)))

        @contextmanager
        def a_copy() -> Iterator[Path]:
            copy = copies.get()
            try:
                yield copy
            finally:
                copies.put(copy)

        def without(test: str) -> _TestRun:
            with a_copy() as copy:
                return _run_tests(copy, (test,), limit_s=None)

        def one(mutant: Mutant) -> Result:
            with a_copy() as copy:
                result = _judge(copy, mutant, [plain[test] for test in mutant.tests], least_limit_s)
            report(result)
            return result

        distinct = list(dict.fromkeys(test for mutant in mutants for test in mutant.tests))
        plain = dict(zip(distinct, pool.map(without, distinct), strict=True))
        return list(pool.map(one, mutants))


def _judge(copy: Path, mutant: Mutant, plain: Sequence[_TestRun], least_limit_s: float) -> Result:
    for run in plain:
        if not run.passed:
            return Result(mutant, BROKEN, f"fails without the mutant: {run.first_failure}", run.seconds)
    try:
        text = mutant.applied_to(copy)
    except StaleMutant as error:
        return Result(mutant, STALE, str(error))
    with _written(copy / mutant.file, text):
        run = _run_tests(copy, mutant.tests, limit_s=max(least_limit_s, 5 * sum(run.seconds for run in plain)))
    noticed = run.timed_out or not run.passed
    if mutant.equivalent:
        verdict, note = (NOT_EQUIVALENT, run.first_failure) if noticed else (EQUIVALENT, mutant.equivalent)
    elif run.timed_out:
        verdict, note = TIMED_OUT, ""
    else:
        verdict, note = (KILLED, run.first_failure) if noticed else (SURVIVED, f"{mutant.file}: {' '.join(mutant.tests)}")
    return Result(mutant, verdict, note, run.seconds)


@contextmanager
def _written(path: Path, text: str) -> Iterator[None]:
    """``text`` in the file for as long as the block lasts. The time stamp differs too: byte code is looked up by it and the size."""
    before, times = path.read_bytes(), path.stat()
    path.write_text(text, encoding="utf-8")
    os.utime(path, (times.st_atime, times.st_mtime + 10))
    try:
        yield
    finally:
        path.write_bytes(before)
        os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))


def _run_tests(copy: Path, tests: Sequence[str], limit_s: float | None) -> _TestRun:
    """pytest -x in the copy, without plugins. Only runs without a limit (those of the unchanged tree) leave byte code behind."""
    shutil.rmtree(copy / ".hypothesis", ignore_errors=True)  # examples that failed with another mutant
    environment = {
        **os.environ, "PYTHONPATH": str(copy / ".package"), "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1",
        "TOKENIZERS_PARALLELISM": "false", "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",
        "PYTHONDONTWRITEBYTECODE": "" if limit_s is None else "1"}
    command = [sys.executable, "-m", "pytest", "-x", "-q", "--tb=no", "--no-header", "-p", "no:cacheprovider", *tests]
    start = time.perf_counter()
    process = subprocess.Popen(
        command, cwd=copy, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, encoding="utf-8", errors="replace",
        start_new_session=True)  # a group of its own, so that its children end with it
    timed_out = False
    try:
        output, _ = process.communicate(timeout=limit_s)
    except subprocess.TimeoutExpired:
        timed_out, output = True, ""
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.communicate()
    return _TestRun(process.returncode == 0, timed_out, time.perf_counter() - start, output)
