"""JupyterLab on a throw-away port and a headless chromium, for tests marked `browser` (`make test-browser`).

Screenshots go to tests/browser/artifacts/, which git ignores: they are there to be looked at.
"""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

ROOT = Path(__file__).parents[2]
ARTIFACTS = Path(__file__).parent / "artifacts"
CHROMIUM_FLAGS = (
    "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking", "--disable-component-update",
    "--disable-sync",
)  # fmt: skip

# None of these is an error of ours: Lab asks for files that only other installations have;
# anywidget complains of a widget whose module came later than 2 s, in a page that was busy for so long. Such a widget hears no more of the
# kernel (test_plot.py): a plot's module is therefore small, and those that only the page moves (Fit, the block map) need not hear.
HARMLESS = (
    "[anywidget] Failed to initialize model", "favicon", "net::ERR_ABORTED", "ResizeObserver loop",
    "Failed to load resource: the server responded with a status of 404",
)  # fmt: skip

LAB_SETTINGS = {
    "@jupyterlab/apputils-extension:notification": {"fetchNews": "false", "checkForUpdates": False, "doNotDisturbMode": True},
    "@jupyterlab/notebook-extension:tracker": {"windowingMode": "defer"},
    "@jupyterlab/docmanager-extension:plugin": {"autosave": False},
}


def chromium() -> str:
    """The browser to use."""
    for name in (os.environ.get("KVLAB_CHROMIUM", ""), "chromium", "chromium-browser", "google-chrome"):
        found = shutil.which(name) if name else None
        if found:
            return found
    raise RuntimeError("no chromium: run make test-browser, which installs it or says how to")


class LabServer(NamedTuple):
    """A running JupyterLab. `folder`: what it serves, a copy of the notebooks."""

    url: str
    folder: Path


@pytest.fixture(scope="session")
def artifacts() -> Path:
    """Where screenshots go."""
    ARTIFACTS.mkdir(exist_ok=True)
    return ARTIFACTS


@pytest.fixture(scope="session")
def lab_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LabServer]:
    """JupyterLab over a copy of notebooks/, with settings and run-time files of its own."""
    home = tmp_path_factory.mktemp("lab")
    work = home / "notebooks"
    shutil.copytree(ROOT / "notebooks", work, ignore=shutil.ignore_patterns("runs", ".ipynb_checkpoints"))
    settings = home / "config" / "labconfig"
    settings.mkdir(parents=True)
    (settings / "default_setting_overrides.json").write_text(json.dumps(LAB_SETTINGS), encoding="utf-8")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    own = {f"JUPYTER_{name}_DIR": str(home / name.lower()) for name in ("CONFIG", "DATA", "RUNTIME")}
    environment = {**os.environ, **own, "JUPYTERLAB_SETTINGS_DIR": str(home / "settings"), "IPYTHONDIR": str(home / "ipython"),
                   "JUPYTERLAB_WORKSPACES_DIR": str(home / "workspaces"), "PYTHONPATH": str(ROOT)}  # fmt: skip
    command = [
        sys.executable, "-m", "jupyterlab", "--no-browser", "--allow-root", "--ip=127.0.0.1", f"--port={port}",
        "--ServerApp.port_retries=0", "--IdentityProvider.token=", "--ServerApp.password=", "--LabApp.news_url=None",
        "--LabApp.check_for_updates_class=jupyterlab.NeverCheckForUpdate", "--ServerApp.terminals_enabled=False",
        "--LabApp.expose_app_in_browser=True", f"--ServerApp.root_dir={work}",
    ]  # fmt: skip
    with (home / "server.log").open("w", encoding="utf-8") as log:
        process = subprocess.Popen(command, cwd=work, env=environment, stdout=log, stderr=subprocess.STDOUT)
        try:
            url = f"http://127.0.0.1:{port}"
            _await_server(url, process, home / "server.log")
            yield LabServer(url, work)
        finally:
            process.terminate()
            try:
                process.wait(20)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def _await_server(url: str, process: subprocess.Popen[bytes], log: Path) -> None:
    for _ in range(600):
        if process.poll() is not None:
            break
        try:
            with urllib.request.urlopen(f"{url}/api", timeout=2):
                return
        except OSError:
            time.sleep(0.2)
    raise RuntimeError(f"JupyterLab did not come up:\n{log.read_text(encoding='utf-8')[-3000:]}")


@pytest.fixture(scope="session")
def browser() -> Iterator[Any]:
    """One chromium for all tests."""
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        chrome = playwright.chromium.launch(executable_path=chromium(), args=list(CHROMIUM_FLAGS))
        yield chrome
        chrome.close()


class Console:
    """What a page complained of: errors on its console and exceptions of its scripts."""

    def __init__(self, page: Any) -> None:
        self.errors: list[str] = []
        page.on("console", lambda message: self._hear(message.text) if message.type == "error" else None)
        page.on("pageerror", lambda error: self._hear(str(error)))

    def _hear(self, text: str) -> None:
        if not any(part in text for part in HARMLESS):
            self.errors.append(text)


@pytest.fixture
def page(browser: Any) -> Iterator[Any]:
    """A fresh page, 1280 x 1000; `page.console.errors` holds what it complained of."""
    context = browser.new_context(viewport={"width": 1280, "height": 1000}, permissions=["clipboard-read", "clipboard-write"])
    fresh = context.new_page()
    fresh.set_default_timeout(60_000)
    fresh.console_log = Console(fresh)
    yield fresh
    context.close()
