"""Rules for all tests: a skipped test in CI is a failure, because nobody reads a skip; an engine gives back all its blocks."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

# Kernels run in Triton's interpreter on a CPU. It must be chosen before anything imports triton, and a process has one mode: tests that
# compile do it in a subprocess without this variable. KVLAB_TEST_DEVICE=cuda runs the kernels' tests compiled, on a GPU.
if os.environ.get("KVLAB_TEST_DEVICE", "cpu") == "cpu":
    os.environ["TRITON_INTERPRET"] = "1"


from drain_support import Drains  # it imports the engine: the mode of the kernels is chosen by now

DRAINS = Drains()
DRAINS.watch()


@pytest.fixture(autouse=True)
def _engines_drain() -> Iterator[None]:
    """After every test: no engine that it stepped holds a block for a request that has gone."""
    yield
    DRAINS.finish()


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    """With CI=true, turn a session with skipped tests into a failed one (on the xdist controller, which sees all reports)."""
    reporter = session.config.pluginmanager.get_plugin("terminalreporter")
    if reporter is None or os.environ.get("CI", "").lower() not in ("true", "1"):
        return
    skipped = reporter.stats.get("skipped", [])
    if skipped and exitstatus in (pytest.ExitCode.OK, pytest.ExitCode.NO_TESTS_COLLECTED):
        reporter.write_line(f"{len(skipped)} skipped test(s) fail this session, because CI=true.", red=True)
        session.exitstatus = pytest.ExitCode.TESTS_FAILED
