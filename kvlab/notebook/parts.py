"""Small parts that the widgets share: a copy button, messages in words, tables of runs."""

from __future__ import annotations

import html
import math
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import anywidget
import ipywidgets as w
import plotly.graph_objects as go
import traitlets
from plotly.basewidget import BaseFigureWidget

from kvlab.notebook.quick_start import import_nbformat
from kvlab.results import Run
from kvlab.trace.summary import FIGURES
from kvlab.types import KvlabError

STATIC = Path(__file__).parent / "static"

STYLE = """<style>
.kvlab-table {border-collapse: collapse; font-size: 12px; line-height: 1.5; font-variant-numeric: tabular-nums;
  color: var(--jp-ui-font-color1, #222); margin: 0}
.kvlab-table th, .kvlab-table td {padding: 1px 14px 1px 0; text-align: right; border: 0; white-space: nowrap; background: none}
.kvlab-table th:first-child, .kvlab-table td:first-child {text-align: left; font-weight: normal}
.kvlab-table thead th {border-bottom: 1px solid var(--jp-border-color1, #ccc); font-weight: 600}
.kvlab-table .dim {color: var(--jp-ui-font-color2, #666)}
.kvlab-say {font-size: 13px; line-height: 1.4; padding: 6px 10px; margin: 0; border-left: 3px solid; white-space: pre-wrap;
  color: var(--jp-ui-font-color1, #222); background: var(--jp-layout-color2, #f4f4f4); overflow-wrap: anywhere}
.kvlab-say.error {border-color: #D55E00} .kvlab-say.note {border-color: #0072B2} .kvlab-say.good {border-color: #009E73}
.kvlab-code {font-family: var(--jp-code-font-family, monospace); font-size: 12px; white-space: pre-wrap; overflow-wrap: anywhere;
  color: var(--jp-ui-font-color2, #555); margin: 0; line-height: 1.4}
</style>"""


class CopyButton(anywidget.AnyWidget):
    """Puts `text` on the clipboard. `num_copied` counts the presses."""

    _esm = STATIC / "copy_button.js"
    label = traitlets.Unicode("copy").tag(sync=True)
    text = traitlets.Unicode("").tag(sync=True)
    num_copied = traitlets.Int(0).tag(sync=True)


class Fit(anywidget.AnyWidget):
    """Nothing to see: keeps the plots of the box it is in (`figure_widget`) as wide as the box."""

    _esm = STATIC / "fit.js"


class Plot(go.FigureWidget):  # type: ignore[misc] # plotly has no types
    """A FigureWidget whose own module is small and loads plotly's (`static/plotly.js` says why), dark on a dark page (`plot.css`)."""

    _esm = STATIC / "plotly.js"
    _css = STATIC / "plot.css"
    _plotly = traitlets.Unicode().tag(sync=True)

    @traitlets.default("_plotly")
    def _module_of_plotly(self) -> str:
        return _widget_bundle()


@cache
def _widget_bundle() -> str:
    """Plotly's module for a FigureWidget."""
    return str(BaseFigureWidget._esm)


def figure_widget(fig: go.Figure) -> Any:
    """A plotly FigureWidget that measures its width again when told that something changed (`Fit`)."""
    import_nbformat()
    made = Plot(fig)
    made.layout.legend.bgcolor = "rgba(0,0,0,0)"  # a legend of several rows would cover half of the title
    made._config = {**made._config, "responsive": True}
    return made


class Message(w.HTML):  # type: ignore[misc] # ipywidgets has no types
    """A line or two in words: an error, a note, or nothing (then it takes no room)."""

    def __init__(self) -> None:
        super().__init__(layout={"display": "none", "margin": "4px 0"})
        self.kind, self.text = "", ""

    def say(self, text: str, kind: str = "note") -> None:
        """`kind`: error, note or good; an empty text hides it."""
        self.kind, self.text = (kind, text) if text else ("", "")
        self.value = f'{STYLE}<p class="kvlab-say {kind}">{html.escape(text)}</p>' if text else ""
        self.layout.display = "" if text else "none"


def in_words(error: BaseException) -> str:
    """An error as a user should read it: kvlab's own words, otherwise its kind too, and what was noted on it."""
    said = str(error) if isinstance(error, KvlabError) and str(error) else f"{type(error).__name__}: {error}".removesuffix(": ")
    return "\n".join([said, *getattr(error, "__notes__", ())])


def table_html(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A small table; texts are escaped, the first column is left-aligned."""
    escaped = [[html.escape(cell) for cell in row] for row in rows]
    top = "".join(f"<th>{html.escape(cell)}</th>" for cell in head)
    body = "".join("<tr>" + "".join(f"<td>{cell}</td>" for cell in row) + "</tr>" for row in escaped)
    return f'{STYLE}<table class="kvlab-table"><thead><tr>{top}</tr></thead><tbody>{body}</tbody></table>'


COMPARED = ("output_token_throughput_per_s", "mean_ttft_ms", "p99_ttft_ms", "mean_tpot_ms", "p99_itl_ms", "prefix_cache_hit_rate_tokens",
            "num_preemptions", "recomputed_tokens", "num_evicted_blocks", "mean_kv_cache_usage",
            "mean_internal_fragmentation_tokens", "num_refused")  # fmt: skip


def runs_table(runs: Sequence[Run], labels: Sequence[str], keys: Sequence[str] = COMPARED) -> str:
    """Summary figures of runs side by side; behind each but the first run's, how it differs from the first's."""
    figures = {figure.key: figure for figure in FIGURES}
    rows = []
    for key in keys:
        first = runs[0].summary.get(key)
        name = figures[key].title + (f" ({figures[key].unit})" if figures[key].unit else "")
        cells = [number(run.summary.get(key)) + difference(run.summary.get(key), first) for run in runs[1:]]
        rows.append([name, number(first), *cells])
    return table_html(["", *labels], rows)


def number(value: Any) -> str:
    """With three significant digits where it is no count; a dash for nothing."""
    if value is None or (isinstance(value, float) and not math.isfinite(value)):
        return "–"
    if isinstance(value, int) or abs(value) >= 1000:
        return f"{value:,.0f}"
    return f"{value:.3g}"


def difference(value: Any, first: Any) -> str:
    """' (+12 %)' against the first run's, where both are numbers and the first is not 0."""
    if value is None or not first or value == first:
        return ""
    percent = 100 * (value - first) / first
    return f" ({percent:+.0f} %)" if abs(percent) >= 0.5 else " (less than 1 %)"
