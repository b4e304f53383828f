"""Notebook 05 in a real JupyterLab: typing in the lab's text area, a fault with its line, the race's lines."""

from __future__ import annotations

import pytest

from .notebook_page import NotebookPage

pytestmark = pytest.mark.browser


def test_a_policy_is_typed_checked_and_raced(page, lab_server, artifacts):
    notebook = NotebookPage(page, lab_server.url, "05_write_your_own_policy.ipynb")
    notebook.run_cells(0, 3)
    area = page.locator(".kvlab-code-area textarea")
    area.wait_for()
    area.focus()
    page.keyboard.press("Control+End")
    page.keyboard.type("x = (")
    page.keyboard.press("Control+Enter")
    page.get_by_text("was never closed").wait_for()
    assert page.locator(".kvlab-gutter .wrong").count() == 1
    page.screenshot(path=artifacts / "policy_lab_fault.png")
    for _ in "x = (":
        page.keyboard.press("Backspace")
    page.locator(".widget-button", has_text="Race").click()
    page.get_by_text("could be found").wait_for()
    page.wait_for_function("() => document.querySelector('.js-plotly-plot').data.filter((t) => t.visible === true).length === 8")
    data = notebook.plot_data()
    shown = [trace["name"] for trace in data if trace["visible"] is True]
    assert shown == ["Mine", "lru", "fifo", "lfu", "s3fifo", "sieve", "arc", "belady"]
    notebook.await_fit()
    page.locator(".kvlab-table").last.scroll_into_view_if_needed()
    page.screenshot(path=artifacts / "policy_lab.png")
    assert notebook.tracebacks() == []
    assert page.console_log.errors == []
