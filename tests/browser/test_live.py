"""`live` in a real JupyterLab: draws while a cell runs, and its button ends the run."""

from __future__ import annotations

import nbformat
import pytest

from .notebook_page import NotebookPage

pytestmark = pytest.mark.browser

# Minutes of decoding, were it not stopped.
CELLS = (
    "import kvlab\nfrom kvlab.notebook import live",
    """view = live()
config = kvlab.compose("model=tiny", "max_model_len=1024", "kv_cache_tokens=null", "num_blocks=512", "workload=synthetic",
                       "workload.num_requests=400", "workload.arrivals.kind=all_at_once", "workload.arrivals.rate=null",
                       "workload.prompt_len=40", "workload.output_len=900")
run = view.run(config, progress=False)""",
    "print('state:', run.state, '| steps:', len(run.steps()) > 5, '| no end of', 400 - len(run.requests()) > 0)",
)


def test_the_button_ends_a_run_while_its_cell_runs(page, lab_server, artifacts):
    kernel = {"kernelspec": {"name": "python3", "display_name": "Python 3 (ipykernel)", "language": "python"}}  # else Lab asks which
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell) for cell in CELLS], metadata=kernel)
    nbformat.write(notebook, lab_server.folder / "live.ipynb")
    lab = NotebookPage(page, lab_server.url, "live.ipynb")
    lab.start_all()
    page.locator(".kvlab-title", has_text="Live run").wait_for()
    page.wait_for_function("() => parseInt(document.querySelector('.kvlab-tiles b').textContent.replace(',', '')) > 20")
    assert lab.is_busy()
    page.screenshot(path=artifacts / "live.png")
    page.locator(".kvlab-stop").click()
    page.locator("[role=status]", has_text="stopped").wait_for()
    lab.idle()
    page.get_by_text("state: interrupted | steps: True | no end of True").wait_for()
    page.screenshot(path=artifacts / "live_stopped.png")
    assert lab.tracebacks() == []
    assert page.console_log.errors == []
