"""`export_html` with notebooks of other machines, other formats and other tools: shown, or refused in a sentence."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from kvlab.notebook import export_html
from kvlab.notebook.notebook_file import read_notebook, usable_kernel
from kvlab.types import UserError

STREAM = {"output_type": "stream", "name": "stdout", "text": "hello\n"}
SHOWN = {"output_type": "display_data", "data": {"text/plain": "hello"}, "metadata": {}}
VIEW, PLOTLY = "application/vnd.jupyter.widget-view+json", "application/vnd.plotly.v1+json"


def less(value: dict[str, Any], *keys: str) -> dict[str, Any]:
    return {key: item for key, item in value.items() if key not in keys}


def code(*outputs: Any, **more: Any) -> dict[str, Any]:
    return {"cell_type": "code", "metadata": {}, "source": "print(1)", "outputs": list(outputs), "execution_count": 1, "id": "a", **more}


def book(*cells: Any, **more: Any) -> dict[str, Any]:
    return {"nbformat": 4, "nbformat_minor": 5, "metadata": {}, "cells": list(cells), **more}


def write(folder: Path, content: Any) -> Path:
    path = folder / "some.ipynb"
    path.write_text(json.dumps(content), encoding="utf-8")
    return path


WHOLE = code(STREAM)
STATE = {"application/vnd.jupyter.widget-state+json": {"state": {
    "null": {"state": None, "buffers": None}, "code": {"state": {"_esm": "x"}, "buffers": [{"data": "x"}]},
    "box": {"state": {"children": ["IPY_MODEL_box"]}}}}}  # fmt: skip
ODD: dict[str, Any] = {
    "kernelspec of another machine": book(WHOLE, metadata={"kernelspec": {"name": "conda-env-x-py", "display_name": "x"}}),
    "kernelspec without a name": book(WHOLE, metadata={"kernelspec": {"display_name": "Python 3"}}),
    "kernelspec null": book(WHOLE, metadata={"kernelspec": None, "language_info": None}),
    "language without a name": book(WHOLE, metadata={"language_info": {"version": "3"}, "title": 3}),
    "no metadata": less(book(WHOLE), "metadata"),
    "metadata null": book(WHOLE, metadata=None),
    "no minor version": less(book(WHOLE), "nbformat_minor"),
    "no version": less(book(WHOLE), "nbformat"),
    "version as text": book(WHOLE, nbformat="4"),
    "byte order mark": "\ufeff",
    "display without metadata": book(code(less(SHOWN, "metadata"))),
    "display with metadata null": book(code({**SHOWN, "metadata": None})),
    "display without data": book(code(less(SHOWN, "data"), STREAM)),
    "result without count": book(code({"output_type": "execute_result", "data": {"text/plain": ["hel", "lo"]}})),
    "stream without name": book(code(less(STREAM, "name"))),
    "stream in lines": book(code({**STREAM, "text": ["hel", "lo"]})),
    "error without traceback": book(code({"output_type": "error", "ename": "hello", "evalue": "y"})),
    "outputs of no type": book(code({"output_type": "weird"}, {"data": {}}, "x", None, STREAM)),
    "cell without id": book(less(WHOLE, "id")),
    "two of one id": book(code(STREAM), code(STREAM)),
    "cell without metadata": book(less(WHOLE, "metadata"), {"cell_type": "markdown", "source": "# T"}),
    "cell without source": book(less(WHOLE, "source"), {"cell_type": "markdown", "source": None, "metadata": {}}),
    "cell without count": book(less(WHOLE, "execution_count")),
    "cell without outputs": book(less(code(), "outputs"), code(outputs=None), WHOLE),
    "cell of no type": book(less(WHOLE, "cell_type"), {"cell_type": "heading", "source": "T"}, "x"),
    "half a surrogate pair": book(code({**STREAM, "text": "hello \ud800"})),
    "the template's words": book({"cell_type": "markdown", "source": "<!--kvlab-head--> <!--kvlab-foot-->"}, WHOLE),
    "widgets null": book(WHOLE, metadata={"widgets": None}),
    "widget without an id": book(code({**SHOWN, "data": {VIEW: {}}}, {**SHOWN, "data": {VIEW: 3}}, STREAM)),
    "widgets of garbled state": book(
        code(*({**SHOWN, "data": {VIEW: {"model_id": name}}} for name in ("null", "code", "box")), STREAM), metadata={"widgets": STATE}),
    "figure null": book(code({**SHOWN, "data": {PLOTLY: None, "text/plain": "hello"}}, {**SHOWN, "data": {PLOTLY: 3}})),
    "image null": book(code({**SHOWN, "data": {"image/png": None, "text/plain": "hello"}})),
    "format 3": {"nbformat": 3, "nbformat_minor": 0, "metadata": {}, "worksheets": [{"cells": [
        {"cell_type": "code", "input": ["1"], "outputs": [{"output_type": "pyout", "text": ["hello"]}]},
        {"cell_type": "heading", "level": 1, "source": ["T"]}]}]},
}  # fmt: skip


@pytest.mark.parametrize("name", ODD)
def test_what_can_be_shown_is(tmp_path: Path, name: str) -> None:
    path = write(tmp_path, book(WHOLE) if name == "byte order mark" else ODD[name])
    if name == "byte order mark":
        path.write_text("\ufeff" + path.read_text(encoding="utf-8"), encoding="utf-8")
    page = export_html(path).read_text(encoding="utf-8")
    assert "hello" in page
    assert page.endswith("</html>\n")


@pytest.mark.parametrize(("content", "words"), [
    (b"", "is not a notebook: Expecting value"), (b"<html>", "is not a notebook"), (b"\x00\xff", "is not a notebook"),
    (b"[]", "is not a notebook: it has no cells"), (b'{"cells": null}', "is not a notebook: its cells are no list"),
    (b'{"nbformat": 5, "cells": []}', "its format 5 is newer than 4"), (b'{"cells": []}', "has no outputs. Run it"),
    (b"[" * 100_000, "is not a notebook"),
])  # fmt: skip
def test_what_is_no_notebook_is_said(tmp_path: Path, content: bytes, words: str) -> None:
    (tmp_path / "some.ipynb").write_bytes(content)
    with pytest.raises(UserError, match=words):
        export_html(tmp_path / "some.ipynb")


def test_paths_that_are_none(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="can't be read: Is a directory"):
        export_html(tmp_path)
    with pytest.raises(UserError, match="The path of a notebook is empty"):
        export_html("")
    with pytest.raises(UserError, match="The path of a page is empty"):
        export_html(write(tmp_path, book(WHOLE)), "")


def test_the_kernel_that_runs_a_notebook(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its own if it can be started; a Python notebook's else this Python's; of another language none."""
    monkeypatch.setenv("JUPYTER_PATH", str(tmp_path))
    for name, program in (("here", "python"), ("moved", "/gone/python")):
        folder = tmp_path / "kernels" / name
        folder.mkdir(parents=True)
        spec = {"argv": [program, "-m", "ipykernel_launcher", "-f", "{connection_file}"], "display_name": name, "language": "python"}
        (folder / "kernel.json").write_text(json.dumps(spec), encoding="utf-8")

    def kernel(**metadata: Any) -> str:
        return usable_kernel(read_notebook(write(tmp_path, book(WHOLE, metadata=metadata))), tmp_path / "some.ipynb")

    assert kernel(kernelspec={"name": "here"}) == "here"
    assert kernel(kernelspec={"name": "moved"}) == "python3"
    assert kernel(kernelspec={"name": "conda-env-x-py", "language": "python"}) == "python3"
    assert kernel(kernelspec={"name": "../x y"}) == "python3"
    assert kernel() == kernel(kernelspec={}) == kernel(kernelspec={"display_name": "x"}) == "python3"
    with pytest.raises(UserError, match=r"is for the kernel 'ir' \(R\), which is not installed here"):
        kernel(kernelspec={"name": "ir", "language": "R"})
    with pytest.raises(UserError, match=r"is for the kernel 'julia-1\.9' \(julia\), which is not installed here"):
        kernel(kernelspec={"name": "julia-1.9"}, language_info={"name": "julia"})


@pytest.mark.slow
def test_a_notebook_of_another_machine_runs_here(tmp_path: Path) -> None:
    cell = less(code(source="print('hel' + 'lo')"), "id", "outputs", "execution_count", "metadata")
    path = write(tmp_path, book(cell, metadata={"kernelspec": {"name": "conda-env-x-py", "display_name": "x", "language": "python"}}))
    assert "hello" in export_html(path, execute=True).read_text(encoding="utf-8")
    path = write(tmp_path, book(code(source="1/0")))
    with pytest.raises(UserError, match="can't be shown: a cell ended with ZeroDivisionError: division by zero"):
        export_html(path, execute=True)
    path = write(tmp_path, book(code(source="import os; os._exit(3)")))
    with pytest.raises(UserError, match="can't be run: Kernel died"):
        export_html(path, execute=True)
