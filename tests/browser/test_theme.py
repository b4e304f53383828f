"""Widgets and plots follow the theme of the page, at once and when it changes; what is saved stays as for print."""

from __future__ import annotations

from typing import Any

import pytest

from .notebook_page import NotebookPage, write_notebook

pytestmark = pytest.mark.browser

CELLS = (
    """import kvlab
from kvlab.analysis import plots
from kvlab.notebook import block_map
from kvlab.notebook.parts import figure_widget
run = kvlab.run(kvlab.compose("runner=simulated", "model=tiny", "cost_model=cpu", "workload=synthetic", "workload.num_requests=8",
                              "num_blocks=64", "record.blocks=true"), progress=False)
plot = figure_widget(plots.throughput(run.steps()))
display(block_map(run), plot)""",
    "print(plot.layout.template.layout.paper_bgcolor)",
)

_THEME = "(name) => window.jupyterapp.commands.execute('apputils:change-theme', { theme: name })"
_INK = "() => getComputedStyle(document.querySelector('.kvlab-widget')).color"
_FILTER = "() => getComputedStyle(document.querySelector('.kvlab-plot.js-plotly-plot')).filter"


def turn(page: Any, theme: str, light: str) -> None:
    page.evaluate(_THEME, theme)
    page.wait_for_function(f"() => document.body.dataset.jpThemeLight === '{light}'")


def test_widgets_and_plots_follow_the_theme(page, lab_server, artifacts):
    write_notebook(lab_server.folder / "theme.ipynb", CELLS)
    lab = NotebookPage(page, lab_server.url, "theme.ipynb")
    lab.run_cells(0, 0)
    page.wait_for_function("() => document.querySelector('.kvlab-plot.js-plotly-plot')?.data?.length")
    page.wait_for_selector(".kvlab-step")
    assert page.evaluate(_INK) == "rgb(34, 34, 34)"
    assert page.evaluate(_FILTER) == "none"
    page.locator(".kvlab-range").first.fill("3")
    page.locator(".kvlab-step", has_text="step 3 of").wait_for()
    page.wait_for_timeout(500)  # the step is told after a moment
    turn(page, "JupyterLab Dark", "false")
    page.wait_for_function(f"() => ({_INK})() === 'rgb(232, 232, 232)'")
    page.locator(".kvlab-step", has_text="step 3 of").wait_for()  # drawn anew where it was
    assert page.locator(".kvlab-widget").count() == 1
    assert page.evaluate(_FILTER) == "invert(0.93) hue-rotate(180deg)"
    page.wait_for_selector("#jupyterlab-splash", state="detached")
    page.locator(".kvlab-plot").scroll_into_view_if_needed()
    page.screenshot(path=artifacts / "dark.png", full_page=True)
    lab.run_cells(1, 1)
    page.locator(".jp-OutputArea-output", has_text="white").wait_for()  # the figure itself is as for print
    turn(page, "JupyterLab Light", "true")
    page.wait_for_function(f"() => ({_INK})() === 'rgb(34, 34, 34)'")
    assert page.evaluate(_FILTER) == "none"
    assert lab.tracebacks() == []
    assert page.console_log.errors == []
