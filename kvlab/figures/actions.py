"""What the door does: draw a figure from its results, run it again, verify it, check everything."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pandas as pd

from kvlab.figures import manifest
from kvlab.figures.producing import produce
from kvlab.figures.spec import MANIFEST, PDF, README, RESULTS, SVG, FigureSpec, Folder, missing_package, read_text
from kvlab.types import UserError

MARKERS = ("<!-- table: made by python -m kvlab.figures -->", "<!-- end of table -->")
"""Lines of README.md between which the table of the results stands."""


def drawn(spec: FigureSpec, frame: pd.DataFrame) -> dict[str, bytes]:
    """The figure's files. UserError without matplotlib, or where the results lack a column that the figure shows."""
    try:
        from kvlab.figures.style import render, style
    except ModuleNotFoundError as error:
        raise missing_package(error) from error
    try:
        with style():
            return render(spec.draw(frame), spec.png)
    except KeyError as error:
        told = "They were made for another figure.py: run the figure again."
        raise UserError(f"{spec.number}: the results lack {error}. {told}") from error


def with_table(text: str, spec: FigureSpec, frame: pd.DataFrame) -> str:
    """README.md with the table of these results between its markers (as it is, if it has none)."""
    begin, end = MARKERS
    if spec.table is None or begin not in text or end not in text:
        return text
    head, rest = text.split(begin, 1)
    tail = rest.split(end, 1)[1]
    return f"{head}{begin}\n\n{markdown(spec.table(frame))}\n{end}{tail}"


def markdown(table: pd.DataFrame) -> str:
    """A frame of texts and numbers as a Markdown table; numbers as they are: whoever makes the table rounds."""
    head = [[str(c) for c in table.columns], ["---"] * len(table.columns)]
    rows = [*head, *([_cell(v) for v in row] for row in table.itertuples(index=False))]
    return "".join("| " + " | ".join(row) + " |\n" for row in rows)


def _cell(value: Any) -> str:
    if value is None or (isinstance(value, float) and value != value):
        return "-"
    return f"{value:,}" if isinstance(value, (int, float)) and not isinstance(value, bool) else str(value)


def draw(folder: Folder, out: Path | None = None) -> list[Path]:
    """Write figure.pdf and figure.svg (and README's table) from the committed results; returns what was written."""
    spec = folder.spec()
    frame = manifest.read_results(folder)
    files = drawn(spec, frame)
    readme = folder.path / README
    if out is None and readme.is_file():
        files[README] = with_table(read_text(readme), spec, frame).encode()
    target = folder.path if out is None else out / folder.name
    manifest.write_all(target, files)
    return [target / name for name in files]


def run(folder: Folder) -> pd.DataFrame:
    """Produce the results again and write them with their manifest and figure.

    Raises:
        UserError: before anything runs: a results file that was edited by hand, no matplotlib, a folder that can't be written.
    """
    spec = folder.spec()
    _refuse_edited(folder)
    _refuse_without_matplotlib()
    manifest.write_all(folder.path, {".probe": bytes(1 << 16)})
    (folder.path / ".probe").unlink()
    before = manifest.config_hash(folder, spec)
    produced = produce(folder, spec)
    if manifest.config_hash(folder, folder.spec()) != before:
        raise UserError(f"{folder.path}: the sweep or the measuring code was changed while it ran. Nothing was overwritten. Run it again.")
    results = manifest.results_bytes(produced.frame)
    made = manifest.make(folder, spec, produced, results)
    files = {RESULTS: results, MANIFEST: (json.dumps(made, indent=1) + "\n").encode()}
    manifest.write_all(folder.path, files)  # first: what took minutes is safe, even if drawing goes wrong
    draw(folder)
    return produced.frame


def _refuse_without_matplotlib() -> None:
    """UserError where drawing is not possible, before minutes are spent on runs."""
    try:
        import matplotlib  # noqa: F401
    except ModuleNotFoundError as error:
        raise missing_package(error) from error


def _refuse_edited(folder: Folder) -> None:
    """Only results that their manifest vouches for are replaced."""
    if (folder.path / RESULTS).exists():
        manifest.read_results(folder)


def verify(folder: Folder) -> list[str]:
    """Produce the results again and compare: what differs, a line each. Columns in `spec.measured` are not compared."""
    spec = folder.spec()
    committed = manifest.read_results(folder)
    return compare(committed, produce(folder, spec).frame, spec.measured)


def compare(committed: pd.DataFrame, new: pd.DataFrame, measured: tuple[str, ...] = ()) -> list[str]:
    """Differences of two results, exact; NaN equals NaN."""
    found = []
    if list(committed.columns) != list(new.columns):
        found.append(f"columns: {list(committed.columns)} committed, {list(new.columns)} now")
    if len(committed) != len(new):
        return [*found, f"rows: {len(committed)} committed, {len(new)} now"]
    for column in committed.columns:
        if column in measured or column not in new:
            continue
        old, now = committed[column], new[column]
        same = (old == now) | (old.isna() & now.isna())
        if not same.all():
            row = same.to_list().index(False)
            first = f"first row {row}: {old.iloc[row]!r} committed, {now.iloc[row]!r} now"
            found.append(f"{column}: {int((~same).sum())} of {len(same)} rows differ, {first}")
    return found


def check(folder: Folder) -> list[str]:
    """What is wrong with a figure; empty: it follows from its results, and its manifest from its configuration."""
    try:
        spec = folder.spec()
        found = manifest.differences(folder, spec)
        frame = manifest.read_results(folder)
        files = drawn(spec, frame)
    except UserError as error:
        return [str(error)]
    rows = manifest.read(folder)["results"].get("rows")
    if rows != len(frame):
        found.append(f"{RESULTS} has {len(frame)} rows, {MANIFEST} says {rows}")
    found += [line for name in (PDF, SVG) if (line := _stale(folder.path / name, files))]
    readme = folder.path / README
    if not readme.is_file():
        return [*found, f"{README} is missing: claim, source, what agrees, what does not, assumptions"]
    try:
        if with_table(text := read_text(readme), spec, frame) != text:
            found.append(f"the table in {README} does not follow from {RESULTS}. Run: python -m kvlab.figures draw {folder.name}")
    except UserError as error:
        found.append(str(error))
    return found


def _stale(path: Path, files: Mapping[str, bytes]) -> str | None:
    """Why a committed file is not what would be drawn now."""
    if not path.is_file():
        return f"{path.name} is missing. Run: python -m kvlab.figures draw {path.parent.name}"
    committed = path.read_bytes()
    if committed == files[path.name]:
        return None
    theirs, ours = _version(committed), _version(files[path.name])
    if theirs != ours:
        return f"{path.name} was drawn with matplotlib {theirs}, this is {ours}: install the version in constraints.txt to compare"
    return f"{path.name} does not follow from {RESULTS} and figure.py. Run: python -m kvlab.figures draw {path.parent.name}"


def _version(content: bytes) -> str:
    """The matplotlib that drew a PDF or SVG."""
    found = re.search(rb"Matplotlib v([0-9.]+[0-9])", content)
    return found.group(1).decode() if found else "unknown"
