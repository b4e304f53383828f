"""A plot whose library loads late: it still hears the kernel, where a FigureWidget of plotly's own stays empty."""

from __future__ import annotations

import pytest

from .notebook_page import NotebookPage, write_notebook

pytestmark = pytest.mark.browser

# anywidget gives a module two seconds. Plotly's bundle, made to take three: as on a slow machine.
CELLS = (
    """import plotly.graph_objects as go
from kvlab.notebook import parts
LATE = "await new Promise((go) => setTimeout(go, 3000));\\n" + parts._widget_bundle()
parts._widget_bundle = lambda: LATE
class Late(go.FigureWidget):
    _esm = LATE
fig = go.Figure().add_scatter(y=[1, 2])
ours, own = parts.figure_widget(fig), Late(fig)
display(ours, own)
with ours.batch_update(): ours.data[0].y = [3, 4]""",
    "for plot in (ours, own): plot.data[0].y = [5, 6]",
)


def test_a_plot_that_loads_late_hears_the_kernel(page, lab_server):
    write_notebook(lab_server.folder / "late.ipynb", CELLS)
    lab = NotebookPage(page, lab_server.url, "late.ipynb")
    lab.run_cells(0, 0)
    page.wait_for_function("() => document.querySelectorAll('.js-plotly-plot').length === 2")
    page.wait_for_function("() => document.querySelector('.js-plotly-plot').data?.length")
    assert lab.plot_data(0)[0]["y"] == [3, 4]  # said while plotly was on its way
    lab.run_cells(1, 1)
    page.wait_for_function("() => document.querySelector('.js-plotly-plot').data[0].y[0] === 5")
    page.wait_for_timeout(500)
    assert lab.plot_data(1) == []  # anywidget gave it up, and it stays empty: once this fails, plots need no module of their own
    assert lab.tracebacks() == []
    assert page.console_log.errors == []
