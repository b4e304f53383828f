"""Runs read back: one `Run` from a folder or from memory, and `load_runs` for many, one row a run.

Reading is tolerant: failed, killed, partial, foreign, empty and damaged folders become rows whose `status` and `notes` say so.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, overload

import pandas as pd

from kvlab.flat import flatten
from kvlab.reading import read_run, run_folders
from kvlab.shared import Copy, SharedFolder, is_url
from kvlab.trace.frames import empty_frame
from kvlab.trace.recorder import Recorder
from kvlab.trace.store import read_table, table_paths
from kvlab.trace.summary import format_summary, summarize
from kvlab.types import UserError

OWN_COLUMNS = ("run", "status", "notes", "folder")


class Run:
    """One run: what it was configured as, how it ended and what was recorded.

    Attributes:
        name: short name, unique among runs loaded together. folder: None for a run that was kept in memory.
        config: the resolved configuration. summary: figures (see `kvlab.trace.summary.FIGURES`).
        status: how it went: `state` is "finished", "failed", "interrupted", "pruned" (a search ended it early: neither a result nor a
            failure), "running", "killed" (it says running, but its process is gone), "partial" (records without a status), "empty" or
            "foreign" (not a run's folder).
        env: versions, device, git commit. notes: what was odd when it was read. source: the address it was copied from, if it was.
    """

    def __init__(
        self,
        name: str,
        *,
        folder: Path | None = None,
        config: Mapping[str, Any] | None = None,
        summary: Mapping[str, Any] | None = None,
        status: Mapping[str, Any] | None = None,
        env: Mapping[str, Any] | None = None,
        recorder: Recorder | None = None,
        notes: Iterable[str] = (),
    ) -> None:
        self.name = name
        self.folder = folder
        self.config = dict(config or {})
        self.summary = dict(summary or {})
        self.status = {"state": "finished", **(status or {})}
        self.env = dict(env or {})
        self.notes = list(notes)
        self._recorder = recorder
        self._copy: Copy | None = None
        self.source: str | None = None
        self._frames: dict[str, pd.DataFrame] = {}

    @property
    def state(self) -> str:
        """`status["state"]`."""
        return str(self.status["state"])

    @property
    def error(self) -> str | None:
        """Type and message of what ended a failed run, of a pruned one the reason, else None; `status["error"]["traceback"]` has the
        traceback's end."""
        error = self.status.get("error")
        if not isinstance(error, Mapping):
            return None
        return str(error.get("message")) if self.state == "pruned" else f"{error.get('type')}: {error.get('message')}".removesuffix(": ")

    def steps(self, columns: Sequence[str] | None = None) -> pd.DataFrame:
        """One row a step (`kvlab.trace.schema.STEPS`); empty where none was recorded. `columns`: only these are read."""
        return self._table("steps", columns)

    def requests(self, columns: Sequence[str] | None = None) -> pd.DataFrame:
        """One row a request that ended (`kvlab.trace.schema.REQUESTS`). `columns`: only these are read."""
        return self._table("requests", columns)

    def blocks(self) -> pd.DataFrame:
        """One row a block event (`kvlab.trace.schema.BLOCKS`); empty unless the run recorded them (`record.blocks=true`)."""
        return self._table("blocks")

    def _table(self, table: str, columns: Sequence[str] | None = None) -> pd.DataFrame:
        """Read once and kept (some columns of a table that isn't in memory: read and not kept); a copy each time, so that a caller's
        changes stay its own."""
        if columns is not None:
            if table not in self._frames and self.folder is not None and self._recorder is None:
                return read_table(self.folder, table, self._note, columns)
            whole = self._table(table)
            return whole[[c for c in whole if c in columns]]
        if table not in self._frames:
            if self._recorder is not None:
                self._frames[table] = getattr(self._recorder, table)()
            elif self.folder is not None:
                self._frames[table] = read_table(self.folder, table, self._note)
            else:
                self._frames[table] = empty_frame(table)
            self._note_if_missing(table)
        return self._frames[table].copy(deep=False)

    def _note_if_missing(self, table: str) -> None:
        """A table that was recorded and isn't there any more: its file, or the whole folder, has been removed since."""
        record = self.config.get("record")
        if self.folder is None or len(self._frames[table]) or not isinstance(record, Mapping) or record.get(table) is not True:
            return
        if not self.folder.is_dir():
            self._note(f"{table}.parquet is missing: {self.folder} has been removed")
        elif self.state == "finished" and not table_paths(self.folder, table):
            self._note(f"{table}.parquet is missing: it has been removed from {self.folder}")

    def copied_from(self, copy: Copy, name: str) -> None:
        """Hold on to the copy that this run's folder lies in; `name`: the run's place in it."""
        self._copy, self.source = copy, copy.url if name == "." else f"{copy.url}/{name}"

    def _note(self, note: str) -> None:
        if note not in self.notes:
            self.notes.append(note)

    def row(self) -> dict[str, Any]:
        """The run as one flat row: name, status, notes, folder, then config (dotted keys), then summary figures.

        A node of the configuration that chooses a class appears under its own name too (`eviction`: "lru"). A config key that is
        also a figure's or one of the first four is called `config.<key>`.
        """
        figures = flatten(self.summary)
        folder = self.source or (None if self.folder is None else str(self.folder))
        own = {"run": self.name, "status": self.state, "notes": "; ".join(self._all_notes()), "folder": folder}
        config = {(f"config.{k}" if k in figures or k in own else k): v for k, v in flatten(self.config).items()}
        return {**own, **config, **figures}

    def to_perfetto(self, path: str | Path, force: bool = False) -> Path:
        """Write a timeline for ui.perfetto.dev; see `kvlab.exporting.write_perfetto`."""
        from kvlab.exporting import write_perfetto

        return write_perfetto(self, path, force)

    def to_csv(self, folder: str | Path, force: bool = False) -> list[Path]:
        """Write the tables and figures as CSV files; see `kvlab.exporting.write_csv`."""
        from kvlab.exporting import write_csv

        return write_csv(self, folder, force)

    def to_mlflow(self, tracking_uri: str | None = None, experiment: str = "kvlab") -> str:
        """Log to MLflow and return its run id; see `kvlab.exporting.log_to_mlflow`."""
        from kvlab.exporting import log_to_mlflow

        return log_to_mlflow(self, tracking_uri, experiment)

    def _all_notes(self) -> list[str]:
        return [*([self.error] if self.error else []), *self.notes]

    def __repr__(self) -> str:
        lines = [f"Run {self.name!r}: {self.state}" + (f", {self.folder}" if self.folder else ""), *map(str, self._all_notes())]
        return "\n".join([*lines, format_summary(self.summary)]).rstrip()

    @classmethod
    def load(cls, folder: Path | str, name: str | None = None) -> Run:
        """Read a run's folder, whatever its state; tables when they are asked for. UserError if there is no such folder."""
        if is_url(folder):
            runs = load_runs(folder)
            if len(runs) != 1:
                raise UserError(f"{folder} holds {len(runs)} runs, one is wanted: give the address of a run.")
            return runs[0]
        folder = Path(folder)
        if not folder.is_dir():
            raise UserError(f"{folder} is not a folder. Give a run's folder, or one that holds runs.")
        run = cls(name or folder.name, folder=folder, **read_run(folder)._asdict())
        if not run.summary and run.state not in ("empty", "foreign"):
            run._summarize()
        return run

    def _summarize(self) -> None:
        """Figures for a run that never wrote its own: from what was recorded until it ended."""
        steps, requests = self.steps(), self.requests()
        if len(steps) or len(requests):
            record = self.config.get("record")
            known = record if isinstance(record, Mapping) else {}
            self.summary = summarize(steps if known.get("steps", True) else None, requests if known.get("requests", True) else None)
            self._note(f"summary made from {len(steps)} recorded steps and {len(requests)} requests")
        else:
            self._note("nothing was recorded")


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
        distribution; NaN for a group of one.

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
