"""A notebook in JupyterLab as a test handles it: open, run, look at plots and cells."""

from __future__ import annotations

import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import nbformat

# The panel appears before its notebook is loaded: a Run All in between runs nothing.
_READY = """async () => {
  const app = window.jupyterapp;
  const opened = async () => {
    await app.restored;
    const panel = app.shell.currentWidget;
    await panel.context.ready;
    await panel.revealed;
    await panel.sessionContext.ready;
    await panel.sessionContext.session.kernel.info;
    return panel.content.model.cells.length;
  };
  const late = new Promise((_, fail) => setTimeout(() => fail(new Error('no kernel after 90 s')), 90000));
  return Promise.race([opened(), late]);
}"""

_FIT = """(place) => {
  const plot = document.querySelectorAll('.js-plotly-plot')[place], drawn = plot?.querySelector('.main-svg');
  return drawn && plot.clientWidth > 0 && Math.abs(drawn.getBoundingClientRect().width - plot.clientWidth) <= 2
    && plot.closest('.jp-OutputArea-output').clientWidth - plot.clientWidth < 40;
}"""

_RUN_CELL = """async ([first, last]) => {
  const app = window.jupyterapp;
  const notebook = app.shell.currentWidget.content;
  notebook.activeCellIndex = first;
  for (let i = first; i <= last; i++) { notebook.activeCellIndex = i; await app.commands.execute('notebook:run-cell'); }
}"""


def write_notebook(path: Path, cells: Iterable[str]) -> None:
    """A notebook of code cells."""
    kernel = {"kernelspec": {"name": "python3", "display_name": "Python 3 (ipykernel)", "language": "python"}}
    nbformat.write(nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell) for cell in cells], metadata=kernel), path)


class NotebookPage:
    """Args: page: playwright's. url: JupyterLab's. name: the notebook's file."""

    def __init__(self, page: Any, url: str, name: str) -> None:
        self.page = page
        page.goto(f"{url}/lab/tree/{name}?reset")
        page.wait_for_selector(".jp-NotebookPanel")
        self.num_cells = page.evaluate(_READY)

    def start_all(self) -> None:
        """Run all cells without waiting for them."""
        self.page.evaluate("() => { window.jupyterapp.commands.execute('runmenu:run-all'); }")

    def is_busy(self) -> bool:
        """A cell runs or waits."""
        return any("[*]" in text for text in self.page.locator(".jp-InputPrompt").all_text_contents())

    def run_all(self, timeout_s: float = 180) -> None:
        """Run all cells and wait until the kernel is idle and none waits any more. Tried twice: an early one may run nothing."""
        for _ in range(2):
            self.start_all()
            self.page.wait_for_timeout(300)
            self.idle(timeout_s)
            if self.page.locator(".jp-CodeCell .jp-OutputArea-output").count():
                return
        raise AssertionError("the notebook ran nothing")

    def run_cells(self, first: int, last: int) -> None:
        """Run cells by place and wait for each."""
        self.page.evaluate(_RUN_CELL, [first, last])

    def idle(self, timeout_s: float = 180) -> None:
        """Until nothing runs or waits."""
        self.page.wait_for_function(
            """() => {
              const panel = window.jupyterapp.shell.currentWidget;
              const busy = [...document.querySelectorAll('.jp-InputPrompt')].some((p) => p.textContent.includes('[*]'));
              return panel.sessionContext.session.kernel.status === 'idle' && !busy;
            }""",
            timeout=timeout_s * 1000,
        )  # fmt: skip

    def tracebacks(self) -> list[str]:
        """What cells raised."""
        return [element.inner_text() for element in self.page.locator('[data-mime-type="application/vnd.jupyter.stderr"]').all()
                if "Traceback" in element.inner_text()]  # fmt: skip

    def plot_data(self, place: int = 0) -> list[dict[str, Any]]:
        """name, visible, and the numbers of each trace of the plot at `place`."""
        return self.page.evaluate(
            """(place) => document.querySelectorAll('.js-plotly-plot')[place].data.map((t) => ({
                 name: t.name, visible: t.visible ?? true, x: t.x ? [...t.x] : [], y: t.y ? [...t.y] : []}))""",
            place,
        )  # fmt: skip

    def step(self, place: int = 0) -> int:
        """The step that the widget at `place` shows."""
        return int(self.page.locator(".kvlab-step").nth(place).text_content().split()[1].replace(",", ""))

    def await_fit(self, place: int = 0) -> None:
        """Until the plot at `place` is as wide as its output."""
        self.page.wait_for_function(_FIT, arg=place)

    def await_change(self, before: Any, place: int = 0, timeout_s: float = 20) -> list[dict[str, Any]]:
        """The plot's data once they differ from `before`."""
        end = time.monotonic() + timeout_s
        while time.monotonic() < end:
            now = self.plot_data(place)
            if now != before:
                return now
            self.page.wait_for_timeout(30)
        raise AssertionError(f"the plot did not change within {timeout_s} s")
