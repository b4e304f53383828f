"""Notebook files as they lie about: of other machines, of older formats, written by tools that leave out what the format asks for.

`read_notebook` gives each part that can be shown in the form that nbformat and nbconvert take for granted; `usable_kernel` finds what
can run it here.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from kvlab.types import UserError


def read_notebook(source: Path) -> Any:
    """A notebook of format 4.5 (a nbformat NotebookNode) from a file of format 2 to 4.

    Metadata, ids, counts and outputs that are missing or are no such things are filled in, or left out where nothing can be shown.

    Raises:
        UserError: no such file, or not a notebook.
    """
    import nbformat

    try:
        raw = json.loads(source.read_text(encoding="utf-8-sig"))
        if not isinstance(raw, dict) or not ({"cells", "worksheets"} & raw.keys()):
            raise ValueError("it has no cells")
        if "cells" not in raw or raw.get("nbformat") in (1, 2, 3):
            raw = nbformat.reads(json.dumps(raw), as_version=4)
        elif int(raw.get("nbformat") or 4) > 4:
            raise ValueError(f"its format {raw['nbformat']} is newer than 4")
        if not isinstance(raw["cells"], list):
            raise ValueError("its cells are no list")
        return nbformat.reads(json.dumps(_mended(raw)), as_version=4)
    except FileNotFoundError as error:
        raise UserError(f"{source} does not exist. Give a notebook (.ipynb).") from error
    except OSError as error:
        raise UserError(f"{source} can't be read: {error.strerror or error}. Give a notebook (.ipynb).") from error
    except Exception as error:  # json, nbformat and its converters have many
        raise UserError(f"{source} is not a notebook: {str(error).splitlines()[0] if str(error) else type(error).__name__}.") from error


def usable_kernel(nb: Any, source: Path) -> str:
    """The name of the kernel to run a notebook with: its own, if that is installed here and can be started; for Python else this
    Python's. UserError: another language, or this Python has no kernel."""
    from jupyter_client.kernelspec import NATIVE_KERNEL_NAME

    wanted = nb.metadata.get("kernelspec", {}).get("name", NATIVE_KERNEL_NAME)
    if _can_start(wanted):
        return str(wanted)
    about = nb.metadata.get("kernelspec", {})
    language = str(about.get("language") or nb.metadata.get("language_info", {}).get("name") or "python")
    if not language.lower().startswith(("python", "ipython")):
        raise UserError(f"{source} is for the kernel {wanted!r} ({language}), which is not installed here. Install it, or run and save the "
                        "notebook where it is, and leave execute out.")  # fmt: skip
    if not _can_start(NATIVE_KERNEL_NAME):
        raise UserError(f"{source} can't be run: this Python has no kernel (pip install ipykernel).")
    return str(NATIVE_KERNEL_NAME)


def _can_start(name: Any) -> bool:
    from jupyter_client.kernelspec import KernelSpecManager

    try:
        argv = KernelSpecManager().get_kernel_spec(name).argv
    except Exception:  # NoSuchKernel, a kernel.json that is garbled, a name that is none
        return False
    return bool(argv) and shutil.which(argv[0]) is not None


# ------------------------------------------------------------------------------------------------ parts


def _mended(raw: Mapping[str, Any]) -> dict[str, Any]:
    metadata = _mapping(raw.get("metadata"))
    kept = {key: _mapping(metadata[key]) for key in ("kernelspec", "language_info", "widgets") if _mapping(metadata.get(key))}
    for key in ("kernelspec", "language_info"):
        if key in kept and not isinstance(kept[key].get("name"), str):
            del kept[key]
    if "kernelspec" in kept:
        kept["kernelspec"] = {"display_name": kept["kernelspec"]["name"], **kept["kernelspec"]}
    if isinstance(metadata.get("title"), str):
        kept["title"] = metadata["title"]
    cells = [_cell(cell, number) for number, cell in enumerate(raw["cells"]) if isinstance(cell, Mapping)]
    return {"nbformat": 4, "nbformat_minor": 5, "metadata": kept, "cells": cells}


def _cell(cell: Mapping[str, Any], number: int) -> dict[str, Any]:
    """One with all that its type has; one of no known type is code if it has outputs, else text as it is."""
    kind = cell.get("cell_type")
    if kind not in ("code", "markdown", "raw"):
        kind = "code" if isinstance(cell.get("outputs"), list) else "raw"
    made: dict[str, Any] = {"cell_type": kind, "id": f"cell-{number}", "metadata": _mapping(cell.get("metadata")),
                            "source": _text(cell.get("source"))}  # fmt: skip
    if kind == "code":
        outputs = cell.get("outputs")
        made["execution_count"] = _count(cell)
        made["outputs"] = [o for o in map(_output, outputs if isinstance(outputs, list) else []) if o is not None]
    elif _mapping(cell.get("attachments")):
        made["attachments"] = _mapping(cell["attachments"])
    return made


def _output(output: Any) -> dict[str, Any] | None:
    """One with all that its type has; None: nothing that can be shown."""
    given = _mapping(output)
    kind = given.get("output_type")
    if kind == "stream":
        return {"output_type": kind, "name": str(given.get("name") or "stdout"), "text": _text(given.get("text"))}
    if kind == "error":
        lines = given.get("traceback")
        traceback = [str(line) for line in lines] if isinstance(lines, list) else []
        ename, evalue = str(given.get("ename", "")), str(given.get("evalue", ""))
        return {"output_type": kind, "ename": ename, "evalue": evalue, "traceback": traceback or [f"{ename}: {evalue}"]}
    if kind in ("display_data", "execute_result"):
        data = {mime: value for mime, value in _mapping(given.get("data")).items() if value is not None}
        made = {"output_type": kind, "data": data, "metadata": _mapping(given.get("metadata"))}
        return made | ({"execution_count": _count(given)} if kind == "execute_result" else {})
    return None


def _mapping(value: Any) -> dict[str, Any]:
    return dict(value) if isinstance(value, Mapping) else {}


def _text(value: Any) -> str:
    return "".join(map(str, value)) if isinstance(value, list) else "" if value is None else str(value)


def _count(value: Mapping[str, Any]) -> int | None:
    count = value.get("execution_count")
    return count if isinstance(count, int) and count >= 0 else None
