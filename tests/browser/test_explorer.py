"""Notebook 02 in a real JupyterLab: runs, answers the keyboard, draws what the slider says, and complains of nothing."""

from __future__ import annotations

import statistics
import time

import pytest

from .notebook_page import NotebookPage

pytestmark = pytest.mark.browser
NOTEBOOK = "02_block_size_and_watermark.ipynb"


def test_notebook_02_opens_runs_and_answers_the_keyboard(page, lab_server, artifacts, capsys):
    notebook = NotebookPage(page, lab_server.url, NOTEBOOK)
    explorer_cell = 4
    began = time.monotonic()
    notebook.run_cells(0, explorer_cell)
    page.wait_for_selector(".js-plotly-plot .scatterlayer .trace path", state="attached")
    opened = time.monotonic() - began
    before = notebook.plot_data()
    assert [trace["name"] for trace in before if trace["visible"] is True][:3] == ["used", "cached (evictable)", "watermark"]
    assert len(before[0]["y"]) > 100

    notebook.await_fit()
    slider = page.locator(".widget-slider .noUi-handle").nth(2)  # block_size, num_blocks, watermark
    slider.scroll_into_view_if_needed()
    slider.focus()
    took = []
    for _ in range(5):
        began = time.monotonic()
        page.keyboard.press("ArrowRight")
        after = notebook.await_change(before)
        took.append(time.monotonic() - began)
        assert max(after[2]["y"]) < max(before[2]["y"])  # the dashed line: less may be filled at admission
        before = after
    page.locator(".jp-OutputArea-output").first.scroll_into_view_if_needed()
    page.screenshot(path=artifacts / "explorer.png")
    with capsys.disabled():
        print(f"\nfirst interactive plot {opened:.1f} s after the kernel was up; key to redrawn plot {statistics.median(took):.2f} s")
    assert notebook.tracebacks() == []
    assert page.console_log.errors == []


def test_buttons_pin_copy_and_show(page, lab_server, artifacts):
    notebook = NotebookPage(page, lab_server.url, NOTEBOOK)
    notebook.run_cells(0, 4)
    page.wait_for_selector(".js-plotly-plot .scatterlayer .trace path", state="attached")
    page.locator(".widget-button", has_text="pin").first.click()
    page.wait_for_function("() => document.querySelector('.js-plotly-plot').data.filter((t) => t.visible === true).length > 6")
    pinned = notebook.plot_data()
    page.locator(".kvlab-copy", has_text="copy as command").click()
    page.get_by_text("copied").wait_for()
    command = page.evaluate("() => navigator.clipboard.readText()")
    assert command.startswith("python -m kvlab.experiment runner=simulated ")
    assert "block_size=16 num_blocks=192 watermark=0.01 eviction=lru" in command
    page.locator(".widget-button", has_text="show frame").click()
    page.locator(".kvlab-table th", has_text="output_token_throughput_per_s").wait_for()
    slider = page.locator(".widget-slider .noUi-handle").nth(0)
    slider.focus()
    page.keyboard.press("ArrowRight")
    after = notebook.await_change(pinned)
    lines = [trace for trace in after if trace["visible"] is True and trace["name"] == "B=16 N=192 wm=1%"]
    assert len(lines) == 4  # the pinned run stays
    assert any(trace["name"] == "B=32 N=96 wm=1%" for trace in after)
    page.locator(".kvlab-copy", has_text="copy as Python").scroll_into_view_if_needed()
    page.screenshot(path=artifacts / "explorer_pinned.png")
    assert page.console_log.errors == []


def test_all_of_notebook_02_runs_and_its_block_map_plays(page, lab_server, artifacts):
    notebook = NotebookPage(page, lab_server.url, NOTEBOOK)
    notebook.run_all()
    before = notebook.plot_data()
    assert [trace["name"] for trace in before if trace["visible"] is True].count("B=16 N=192 wm=1%") == 4  # pinned by a cell
    slider = page.locator(".widget-slider .noUi-handle").nth(2)
    slider.focus()
    page.keyboard.press("ArrowLeft")
    assert max(notebook.await_change(before)[2]["y"]) > max(before[2]["y"])  # the explorer lives on beside all that was drawn
    step = page.locator(".kvlab-step").first
    step.scroll_into_view_if_needed()
    page.wait_for_function("() => document.querySelector('.kvlab-step').textContent")
    assert step.text_content().startswith("step 0 of ")
    page.locator(".kvlab-play").first.click()
    page.wait_for_function("() => parseInt(document.querySelector('.kvlab-step').textContent.slice(5)) > 20")
    page.locator(".kvlab-play").first.click()
    stopped = notebook.step()
    page.locator(".kvlab-range").first.focus()
    page.keyboard.press("ArrowRight")  # not taken by Lab's command mode
    page.wait_for_function("(was) => parseInt(document.querySelector('.kvlab-step').textContent.slice(5)) === was + 1", arg=stopped)
    colours = page.evaluate(
        """() => { const c = document.querySelector('.kvlab-canvas');
             const p = c.getContext('2d').getImageData(0, 0, c.width, c.height).data, seen = new Set();
             for (let i = 0; i < p.length; i += 4) if (p[i + 3] === 255) seen.add(`${p[i]},${p[i + 1]},${p[i + 2]}`);
             return [...seen]; }"""
    )  # fmt: skip
    assert "0,114,178" in colours  # used blocks
    page.locator(".kvlab-title").first.scroll_into_view_if_needed()
    page.screenshot(path=artifacts / "block_map_lab.png")
    assert notebook.tracebacks() == []
    assert page.console_log.errors == []
