"""Pages that need neither a kernel nor a network: one widget (`save_page`), or a whole executed notebook (`export_html`).

A notebook's usual HTML takes require.js and a widget manager from the network. Widgets whose interaction is all in their own ES module
need neither: a page carries the module's text, the widget's state and a page of JavaScript (`static/page.js`) that gives `render` a model
to talk to. Nothing has to be installed or fetched, and what runs is what ran in the notebook. Plotly figures become static divs with
plotly.js in the page once. Widgets tied to Python (sliders, menus) are shown as what they print, with a line that says so.
"""

from __future__ import annotations

import base64
import html
import inspect
import json
import re
import secrets
from collections.abc import Collection, Iterable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from kvlab.notebook.notebook_file import read_notebook, usable_kernel
from kvlab.shared import named
from kvlab.trace.store import write_text
from kvlab.types import UserError

VIEW = "application/vnd.jupyter.widget-view+json"
STATE = "application/vnd.jupyter.widget-state+json"
PLOTLY = "application/vnd.plotly.v1+json"
_CODE = ("_esm", "_css", "_anywidget_id")


@cache
def _page_script() -> str:
    return (Path(__file__).parent / "static" / "page.js").read_text(encoding="utf-8")


class Page:
    """Collects widgets; `slot` gives the place of one in the page, `scripts` what goes to its end."""

    def __init__(self) -> None:
        self._modules: dict[str, int] = {}
        self._styles: dict[str, None] = {}
        self._models: dict[str, dict[str, Any]] = {}

    def slot(self, model_id: str, state: Mapping[str, Any], buffers: Mapping[str, str]) -> str:
        """A div for a widget: `state` is JSON with `_esm`, `buffers` are base64."""
        number = self._modules.setdefault(state["_esm"], len(self._modules))
        self._styles[str(state.get("_css", ""))] = None
        kept = {k: v for k, v in state.items() if k not in _CODE and not k.startswith(("_model", "_view", "_dom")) and k not in buffers}
        self._models[model_id] = {"module": number, "state": kept, "buffers": dict(buffers)}
        return f'<div class="kvlab-slot" data-kvlab-model="{html.escape(model_id)}"></div>'

    def scripts(self) -> str:
        """Data and code of all widgets; "" when there are none."""
        if not self._models:
            return ""
        data = {"modules": list(self._modules), "styles": list(self._styles), "models": self._models}
        text = json.dumps(data, separators=(",", ":"), allow_nan=False).replace("<", "\\u003c")  # no tag can end the script early
        return f'<script type="application/json" id="kvlab-models">{text}</script>\n<script type="module">\n{_page_script()}</script>\n'


def save_page(widgets: Sequence[Any], path: Path | str, title: str) -> Path:
    """Write a page with these widgets, one under the other. Returns its path.

    Raises:
        UserError: the page can't be written.
    """
    page = Page()
    slots = [page.slot(f"widget-{i}", *_state_of(widget)) for i, widget in enumerate(widgets)]
    text = (
        f'<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n<meta name="viewport" content="width=device-width">\n'
        f"<title>{html.escape(title)}</title>\n<style>:root {{ color-scheme: light dark; }} body {{ margin: 24px; }} "
        f".kvlab-slot {{ margin-bottom: 28px; }}\n@media (prefers-color-scheme: dark) {{ body {{ background: #111; }} }}</style>\n</head>\n"
        f'<body data-kvlab-page="true">\n' + "\n".join(slots) + f"\n{page.scripts()}</body>\n</html>\n"
    )
    return _written(Path(path), text)


def _written(path: Path, text: str) -> Path:
    if not path.parent.is_dir():
        raise UserError(f"{path} can't be written: there is no folder {path.parent}. Make it, or choose another path.")
    write_text(path, text)
    return path


def _state_of(widget: Any) -> tuple[dict[str, Any], dict[str, str]]:
    """(state without its buffers, buffers as base64) of a live widget."""
    state = widget.get_state()
    buffers = {k: base64.b64encode(v).decode() for k, v in state.items() if isinstance(v, (bytes, bytearray, memoryview))}
    return {k: v for k, v in state.items() if k not in buffers and _is_json(v)}, buffers


def _is_json(value: Any) -> bool:
    try:
        json.dumps(value, allow_nan=False)
    except (TypeError, ValueError):
        return False
    return True


# ------------------------------------------------------------------------------------------------ notebooks

_TEMPLATE = """{%- extends 'lab/index.html.j2' -%}
{%- block html_head_js -%}<!--HEAD-->{%- endblock html_head_js -%}
{%- block jupyter_widgets -%}{%- endblock jupyter_widgets -%}
{%- block html_head_js_mathjax -%}{%- endblock html_head_js_mathjax -%}
{%- block html_head_js_mermaidjs -%}{%- endblock html_head_js_mermaidjs -%}
{%- block body_footer -%}<!--FOOT-->{{ super() }}{%- endblock body_footer -%}
"""


def export_html(notebook: Path | str, path: Path | str | None = None, *, execute: bool = False) -> Path:
    """Write an executed notebook as one page that works without a kernel and without network: its widgets play, its figures zoom.

    Formulas stay as they were written (their typesetter comes from the network).

    Args:
        notebook: an .ipynb with outputs and the state of its widgets (JupyterLab: Settings, "Save Widget State Automatically").
        path: where to write; beside the notebook by default. execute: run it first, in its folder; the notebook is not changed.

    Raises:
        UserError: no notebook, one without outputs, or a page that can't be written; with `execute`, the error of a cell.
    """
    named(notebook, "a notebook")
    named("x" if path is None else path, "a page")
    source = Path(notebook)
    nb = read_notebook(source)
    closed = _execute(nb, source) if execute else frozenset()
    if not any(cell.get("outputs") for cell in nb.cells):
        raise UserError(f"{source} has no outputs. Run it and save it, or pass execute=True.")
    return _written(Path(path) if path is not None else source.with_suffix(".html"), _notebook_page(nb, source.stem, closed))


def _execute(nb: Any, source: Path) -> frozenset[str]:
    """Run all cells; returns the model ids of widgets that are closed by now (progress bars)."""
    import nbformat
    from nbclient import NotebookClient
    from nbclient.exceptions import CellExecutionError

    kernel = usable_kernel(nb, source)
    last = nbformat.v4.new_code_cell(f"{inspect.getsource(_settle)}\n_settle()\ndel _settle", metadata={"tags": ["raises-exception"]})
    nb.cells.append(last)
    try:
        NotebookClient(
            nb, timeout=3600, kernel_name=kernel, resources={"metadata": {"path": str(source.resolve().parent)}}
        ).execute()
    except CellExecutionError as error:
        raise UserError(f"{source} can't be shown: a cell ended with {error.ename}: {error.evalue}") from error
    except (RuntimeError, TimeoutError, OSError) as error:  # a kernel that dies, stays silent or can't be started
        raise UserError(f"{source} can't be run: {str(error).strip() or type(error).__name__}") from error
    nb.cells.remove(last)
    told = "".join(output.get("text", "") for output in last.outputs).splitlines()
    return frozenset(_saved_models(nb)) - frozenset(json.loads(told[-1])) if told else frozenset()


def _saved_models(nb: Any) -> dict[str, Any]:
    """The widgets' models that a notebook was saved with, by their ids."""
    saved: Any = nb.metadata.get("widgets")
    for key in (STATE, "state"):
        saved = saved.get(key) if isinstance(saved, Mapping) else None
    return {name: model for name, model in saved.items() if isinstance(model, Mapping)} if isinstance(saved, Mapping) else {}


def _settle() -> None:
    """Runs in the notebook's kernel, from its source alone: without a browser a figure's state stays as it was when the figure was made,
    however it was updated since. Prints the model ids of the widgets that there are."""
    import json
    import sys
    from copy import deepcopy

    widgets = dict(getattr(sys.modules.get("ipywidgets.widgets.widget"), "_instances", {}))
    for widget in widgets.values():
        if hasattr(widget, "_widget_data") and hasattr(widget, "_layout_obj"):
            widget._widget_data = deepcopy(widget._data)
            widget._widget_layout = deepcopy(widget._layout_obj._props)
    print(json.dumps(list(widgets)))


def _notebook_page(nb: Any, name: str, closed: Collection[str] = ()) -> str:
    from jinja2 import DictLoader
    from nbconvert import HTMLExporter

    models = _saved_models(nb)
    writer = _Outputs(models, closed)
    for cell in nb.cells:
        cell["outputs"] = [writer.shown(output) for output in cell.get("outputs", [])] if cell.cell_type == "code" else []
        if cell.cell_type != "code":
            del cell["outputs"]
    nb.metadata.pop("widgets", None)
    marks = {word: f"<!--{word}-{secrets.token_hex(8)}-->" for word in ("HEAD", "FOOT")}  # which no cell holds
    template = _TEMPLATE.replace("<!--HEAD-->", marks["HEAD"]).replace("<!--FOOT-->", marks["FOOT"])
    exporter = HTMLExporter(extra_loaders=[DictLoader({"kvlab.html.j2": template})], template_file="kvlab.html.j2")
    try:
        page = str(exporter.from_notebook_node(nb, {"metadata": {"name": name}})[0])
    except Exception as error:  # of whatever its filters make of an output
        raise UserError(f"{name} can't be shown: {type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}") from error
    for word, text in (("HEAD", writer.head()), ("FOOT", writer.page.scripts())):  # afterwards: the exporter parses the page, which takes
        page = page.replace(marks[word], text)  # seconds for megabytes of code
    return page.encode("utf-8", "replace").decode("utf-8")  # half a surrogate pair in an output is no text


class _Outputs:
    """Turns outputs of cells into HTML that stands on its own."""

    def __init__(self, models: Mapping[str, Any], closed: Collection[str] = ()) -> None:
        self.page = Page()
        self._models = models
        self._closed = closed
        self._num_figures = 0

    def head(self) -> str:
        """plotly.js, where a figure needs it."""
        if not self._num_figures:
            return ""
        from plotly.offline import get_plotlyjs

        return f"<script>{get_plotlyjs()}</script>"

    def shown(self, output: Any) -> Any:
        """The output, with HTML in place of a widget or a figure."""
        data = output.get("data", {})
        if VIEW in data:
            view = data[VIEW] if isinstance(data[VIEW], Mapping) else {}
            text = _said_once(self._widget(str(view.get("model_id", "")), data))
        elif isinstance(data.get(PLOTLY), Mapping):
            text = self._figure(data[PLOTLY])
        else:
            return output
        changed = output.copy()
        changed["data"] = type(data)({"text/html": text})
        return changed

    def _widget(self, model_id: str, data: Mapping[str, Any], inside: frozenset[str] = frozenset()) -> str:
        if model_id in self._closed or model_id in inside:  # a box that holds itself has no end
            return ""
        model = self._models.get(model_id)
        if model is None:
            return self._words(data, "its state was not saved with the notebook")
        state = dict(model["state"]) if isinstance(model.get("state"), Mapping) else {}
        listed = model.get("buffers")
        buffers = [b for b in listed if isinstance(b, Mapping) and b.get("path") and "data" in b] if isinstance(listed, list) else []
        if "_widget_data" in state and "_widget_layout" in state:
            return self._figure(_figure_of(state, buffers))
        if state.get("_esm"):
            return self.page.slot(model_id, state, {b["path"][0]: b["data"] for b in buffers if len(b["path"]) == 1})
        if isinstance(state.get("children"), list):
            children = (str(child).removeprefix("IPY_MODEL_") for child in state["children"])
            return "".join(self._widget(child, {}, inside | {model_id}) for child in children)
        if model.get("model_name") == "HTMLModel":
            return f"<div>{state.get('value', '')}</div>"
        return self._words(data, "it works with a running kernel only")

    def _words(self, data: Mapping[str, Any], why: str) -> str:
        if "text/html" in data:
            return "".join(data["text/html"])
        name = "".join(data.get("text/plain") or "").split("(", 1)[0]
        return f'<p style="color:#666">{html.escape(name) or "A widget"} is not shown here: {why}.</p>'

    def _figure(self, figure: Mapping[str, Any]) -> str:
        import plotly.io

        self._num_figures += 1
        wanted = {"data": figure.get("data", []), "layout": figure.get("layout", {})}
        name = f"kvlab-figure-{self._num_figures}"
        return str(plotly.io.to_html(wanted, full_html=False, include_plotlyjs=False, div_id=name, validate=False))


def _said_once(text: str) -> str:
    """HTML in which the note on a widget that is not shown stands once for all of the same words (a row of sliders)."""
    return re.sub(r'<p style="color:#666">.*?</p>', lambda note: note[0] if text.index(note[0]) == note.start() else "", text)


def _figure_of(state: dict[str, Any], buffers: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """A FigureWidget's state as a figure: its arrays, kept as buffers, become base64 within it."""
    state = json.loads(json.dumps(state))
    for buffer in buffers:
        *way, last = buffer["path"]
        node = _at(state, way)
        if not isinstance(node, dict):
            continue  # of a message that has been delivered, or of data that was replaced: the saved state keeps buffers of old ones too
        is_array = last in ("buffer", "value")  # plotly's arrays, ipywidgets' own
        node["bdata" if is_array else last] = buffer["data"]
        if is_array and isinstance(node.get("shape"), list):
            node["shape"] = ",".join(map(str, node["shape"]))
    return {"data": state["_widget_data"], "layout": state["_widget_layout"]}


def _at(state: Any, way: Iterable[Any]) -> Any:
    """What lies in nested mappings and lists behind these keys; None where the way breaks off."""
    for key in way:
        try:
            state = state[key]
        except (KeyError, IndexError, TypeError):
            return None
    return state
