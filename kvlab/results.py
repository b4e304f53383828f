"""Many runs read back: `load_runs` and what it returns, `Runs`, one row a run.

Reading is tolerant: failed, killed, partial, foreign, empty and damaged folders become rows whose `status` and `notes` say so. A single
`Run` is in `kvlab.result`.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, overload

import pandas as pd

from kvlab.flat import flatten
from kvlab.reading import run_folders
from kvlab.result import Run as Run
from kvlab.shared import Copy, SharedFolder, is_url, named
from kvlab.trace.frames import empty_frame
from kvlab.types import UserError

OWN_COLUMNS = ("run", "status", "notes", "folder")


class Runs:
    """Several runs. `runs.frame` has one row a run, `runs[0]` is a `Run`, `runs["block_size"]` a column of the frame.

    `steps()`, `requests()` and `blocks()` are long frames of all runs, with a first column `run`. Any other name (`groupby`,
    `sort_values`, `plot` ...) is the frame's.
    """

    def __init__(self, runs: Iterable[Run]) -> None:
        self._runs = list(runs)

    @property
    def frame(self) -> pd.DataFrame:
        """One row a run: run, status, notes, folder, flat config columns, summary figures. Made anew at each call."""
        rows = [run.row() for run in self._runs]
        columns = list(dict.fromkeys(key for row in rows for key in row)) or list(OWN_COLUMNS)
        figures = set().union(*(flatten(run.summary) for run in self._runs))
        columns.sort(key=lambda c: 0 if c in OWN_COLUMNS else 2 if c in figures else 1)  # stable: a short row moves no column
        return pd.DataFrame(rows, columns=columns)

    def finished(self) -> Runs:
        """Those that ended well; pruned ones are none of them."""
        return Runs(run for run in self._runs if run.state == "finished")

    def pareto(self, *objectives: str, refusing: bool = False) -> pd.DataFrame:
        """Rows of `frame` that no other finished run beats in every objective; see `kvlab.objectives.pareto_front`.

        Runs that refused requests are left out, and counted in a warning, unless `refusing`.
        """
        from kvlab.objectives import pareto_front

        front = pareto_front(self.frame, objectives, refusing)
        if front.attrs["refusing"]:
            number = front.attrs["refusing"]
            warnings.warn(f"{number} of {len(self.finished())} finished runs refused requests and are left out of the front "
                          "(refusing=True takes them in).", stacklevel=2)  # fmt: skip
        return front

    def booktabs(self, columns: Sequence[str] | None = None, *figures: str, each: bool = False) -> str:
        """A LaTeX table, one row a point: of repeats the mean, its 95 % interval and n, or a row `each`; see
        `kvlab.exporting.latex_table`. (`to_latex` is the frame's own.)"""
        from kvlab.exporting import DEFAULT_FIGURES, latex_table

        return latex_table(self, columns, figures or DEFAULT_FIGURES, each)

    def aggregate(self, by: str | Sequence[str] | None = None, figures: Sequence[str] | None = None) -> pd.DataFrame:
        """Repeats together: one row a group of finished runs, with `n`, and each figure's mean and half of its 95 % interval.

        The interval is Student's: mean +- ci95, from the runs' standard deviation, as if repeats were independent draws of a normal
        distribution; NaN for a group of one. A warning says where all seeds of a group gave the same figures.

        Args:
            by: columns of `frame` that make a group; None: every configuration column that differs between runs, apart from seeds.
            figures: which ones, by name (`mean_ttft_ms`); None: all numbers of the summary. Each gives columns NAME and NAME_ci95.

        Raises:
            UserError: no such column.
        """
        from kvlab.aggregating import aggregate

        return aggregate(self.finished(), by, figures)

    def steps(self, *config_columns: str) -> pd.DataFrame:
        """All steps of all runs; `config_columns` of `frame` are repeated in each row, for grouping."""
        return self._long("steps", config_columns)

    def requests(self, *config_columns: str) -> pd.DataFrame:
        """All requests of all runs; `config_columns` as in `steps`."""
        return self._long("requests", config_columns)

    def blocks(self, *config_columns: str) -> pd.DataFrame:
        """All block events of all runs; `config_columns` as in `steps`."""
        return self._long("blocks", config_columns)

    def _long(self, table: str, config_columns: Sequence[str]) -> pd.DataFrame:
        frames, empty = [], empty_frame(table)
        for run in self._runs:
            frame = getattr(run, table)()
            row = run.row()
            for column in reversed(config_columns):
                frame.insert(0, column, row.get(column))
            frame.insert(0, "run", run.name)
            if len(frame):
                frames.append(frame)
        if not frames:
            return empty.reindex(columns=["run", *config_columns, *empty.columns])
        return pd.concat(frames, ignore_index=True)

    def __len__(self) -> int:
        return len(self._runs)

    def __iter__(self) -> Iterator[Run]:
        return iter(self._runs)

    @overload
    def __getitem__(self, key: int) -> Run: ...
    @overload
    def __getitem__(self, key: slice) -> Runs: ...
    @overload
    def __getitem__(self, key: str | list[str]) -> Any: ...
    def __getitem__(self, key: int | slice | str | list[str]) -> Any:
        if isinstance(key, slice):
            return Runs(self._runs[key])
        return self._runs[key] if isinstance(key, int) else self.frame[key]

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):  # also keeps copying and pickling from looping
            raise AttributeError(name)
        return getattr(self.frame, name)

    def __repr__(self) -> str:
        return repr(self.frame)

    def _repr_html_(self) -> str:
        return str(self.frame.to_html(max_rows=60, max_cols=20, show_dimensions=True, notebook=True))


def load_runs(path: Path | str | Iterable[Path | str]) -> Runs:
    """All runs in a folder, at any depth (a run's folder, a sweep's, or a folder of sweeps), or in several folders.

    A folder right under `path` (or `path` itself) that holds no run gives a row too, with status "empty" or "foreign". Hidden
    folders are passed over. A path may be an address (`s3://bucket/sweep`): its runs are copied to this machine for as long as they are
    held. Raises UserError if a given path does not exist or can't be reached; never because of what a folder holds.
    """
    found: dict[Path, str] = {}
    copies: dict[Path, Copy] = {}
    for given in [path] if isinstance(path, (str, Path)) else path:
        named(given, "runs to read")
        copy = SharedFolder(str(given)).copy() if is_url(given) else None
        root = Path(given) if copy is None else copy.root
        if copy is not None:
            copies[root] = copy
        if not root.is_dir():
            raise UserError(f"{root} is not a folder. Give a run's folder, or one that holds runs.")
        for folder in run_folders(root):
            name = folder.relative_to(root).as_posix() if folder != root else root.resolve().name
            found.setdefault(folder, name)
    names = list(found.values())
    runs = [Run.load(folder, name if names.count(name) == 1 else str(folder)) for folder, name in found.items()]
    for run in runs:
        for root, copy in copies.items():
            if run.folder is not None and run.folder.is_relative_to(root):
                run.copied_from(copy, run.folder.relative_to(root).as_posix())
    return Runs(runs)
