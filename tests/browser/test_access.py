"""Keyboard and screen reader: whatever takes the focus in a widget has a name and shows that it has it."""

from __future__ import annotations

import nbformat
import pytest

from .notebook_page import NotebookPage

pytestmark = pytest.mark.browser

CELL = """import kvlab
from kvlab.notebook import block_map, policy_lab, prefix_tree, sweep_explorer, timeline
explorer = sweep_explorer()
explorer.controls.runner.value = "real"
run = kvlab.run(kvlab.compose("runner=simulated", "model=tiny", "cost_model=cpu", "kv_cache_tokens=null", "workload=shared_prefix",
                              "workload.num_requests=8", "num_blocks=48", "record.blocks=true", "record.plans=true"), progress=False)
display(explorer, policy_lab(), block_map(run), timeline(run), prefix_tree(run))"""

# Plotly's own bar of buttons is not ours.
FOCUSABLE = ".jp-OutputArea-output :is(button, select, input, textarea, canvas[tabindex], [role=slider]):not(.js-plotly-plot *)"
NAMES = """(selector) => [...document.querySelectorAll(selector)].filter((e) => e.offsetParent && !e.disabled).map((e) => [
  e.className || e.tagName, (e.ariaLabel || e.textContent?.trim() && e.tagName === 'BUTTON' && e.textContent.trim() ||
  e.labels?.[0]?.textContent.trim() || e.title || ''), e.tagName === 'CANVAS' ? e.getAttribute('role') : ''])"""
SHOWS = """(e) => {
  const look = () => [e, e.parentElement].map((node) => { const s = getComputedStyle(node);
    return [s.outlineStyle, s.outlineColor, s.boxShadow, s.borderTopColor, s.borderTopWidth, s.backgroundColor].join(); }).join();
  document.activeElement?.blur();
  const before = look();
  e.focus({ focusVisible: true });
  return document.activeElement === e && look() !== before;
}"""


def test_every_control_is_named_and_shows_its_focus(page, lab_server):
    kernel = {"kernelspec": {"name": "python3", "display_name": "Python 3 (ipykernel)", "language": "python"}}
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(CELL)], metadata=kernel)
    nbformat.write(notebook, lab_server.folder / "access.ipynb")
    lab = NotebookPage(page, lab_server.url, "access.ipynb")
    lab.run_cells(0, 0)
    page.wait_for_function("() => document.querySelectorAll('.kvlab-canvas[tabindex]').length >= 3")
    page.wait_for_function("() => document.querySelector('.js-plotly-plot .main-svg')")
    page.wait_for_function("() => document.querySelector('.widget-dropdown select[aria-label]')")
    found = page.evaluate(NAMES, FOCUSABLE)
    assert [entry for entry in found if not entry[1]] == []
    names = {name for _, name, _ in found}
    assert {"runner", "workload", "block_size", "num_blocks", "watermark", "eviction", "scheduling", "preemption", "mode"} <= names
    assert {"template", "race on", "policy source", "step"} <= names
    assert [role for *_, role in found if role] == ["img"] * 3
    for element in page.locator(FOCUSABLE).all():
        if element.is_visible() and element.is_enabled():
            assert element.evaluate(SHOWS), element.evaluate("(e) => e.outerHTML.slice(0, 200)")
    assert lab.tracebacks() == []
    assert page.console_log.errors == []
