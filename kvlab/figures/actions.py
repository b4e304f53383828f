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
from kvlab.figures.spec import MANIFEST, PDF, README, RESULTS, SVG, FigureSpec, Folder, missing_package, own_code, read_text
from kvlab.types import UserError

MARKERS = ("<!-- table: made by python -m kvlab.figures -->", "<!-- end of table -->")
"""Lines of README.md between which the table of the results stands."""
UNVOUCHED = "results.unvouched.parquet"
"""Where `run` keeps old results that no manifest vouches for, if the new ones differ."""


def drawn(spec: FigureSpec, frame: pd.DataFrame) -> dict[str, bytes]:
    """The figure's files. UserError without matplotlib, or where the figure's own code fails (the results lack a column that it shows)."""
    try:
        from kvlab.figures.style import render, style
    except ModuleNotFoundError as error:
        raise missing_package(error) from error
    with style(), own_code("draw"):
        return render(spec.draw(frame), spec.png)


def with_table(text: str, spec: FigureSpec, frame: pd.DataFrame) -> str:
    """README.md with the table of these results between its markers (as it is, where the figure has none). UserError: damaged markers."""
    if spec.table is None:
        return text
    head, tail = _around_table(text)
    with own_code("table"):
        table = markdown(spec.table(frame))
    return f"{head}{MARKERS[0]}\n\n{table}\n{MARKERS[1]}{tail}"


def _around_table(text: str) -> tuple[str, str]:
    """README.md before the first marker and after the second. UserError: not one of each, in this order, each a line of its own."""
    lines = text.splitlines(keepends=True)
    at = [[i for i, row in enumerate(lines) if row.strip() == marker] for marker in MARKERS]
    counts = [text.count(marker) for marker in MARKERS]
    if counts != [1, 1] or [len(found) for found in at] != [1, 1] or at[0] > at[1]:
        told = f"the markers of its table are missing or damaged: it needs these two lines, once each:\n{MARKERS[0]}\n{MARKERS[1]}"
        raise UserError(f"{README}: {told}")
    return text.split(MARKERS[0])[0], text.split(MARKERS[1])[1]


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
    readme = folder.path / README
    written = {README: with_table(read_text(readme), spec, frame).encode()} if out is None and readme.is_file() else {}
    files = {**drawn(spec, frame), **written}
    target = folder.path if out is None else out / folder.name
    manifest.write_all(target, files)
    return [target / name for name in files]


def run(folder: Folder) -> pd.DataFrame:
    """Produce the results again and write them with their manifest and figure.

    Raises:
        UserError: before anything runs: a results file that was edited by hand, a README without a place for the table, no matplotlib,
            a folder that can't be written.
    """
    spec = folder.spec()
    unvouched = _unvouched(folder)
    if spec.table is not None and (folder.path / README).is_file():
        _around_table(read_text(folder.path / README))
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
    if unvouched is not None and unvouched != results:
        files[UNVOUCHED] = unvouched
    manifest.write_all(folder.path, files)  # first: what took minutes is safe, even if drawing goes wrong
    draw(folder)
    return produced.frame


def _refuse_without_matplotlib() -> None:
    """UserError where drawing is not possible, before minutes are spent on runs."""
    try:
        import matplotlib  # noqa: F401
    except ModuleNotFoundError as error:
        raise missing_package(error) from error


def _unvouched(folder: Folder) -> bytes | None:
    """Results without any manifest, which are kept beside the new ones. UserError: results that their manifest doesn't vouch for."""
    if not (folder.path / RESULTS).exists():
        return None
    if (folder.path / MANIFEST).exists():
        manifest.read_results(folder)
        return None
    if (kept := folder.path / UNVOUCHED).exists():
        raise UserError(f"{kept} is there already, and no {MANIFEST} vouches for {RESULTS} either: move one of them away.")
    return (folder.path / RESULTS).read_bytes()


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
