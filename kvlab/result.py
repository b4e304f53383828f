"""One run read back, a `Run`, from a folder or from memory.

Reading is tolerant: of a failed, killed, partial or damaged run what is there is read, and its notes say what is not.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pandas as pd

from kvlab.flat import flatten
from kvlab.reading import read_run, runs_inside, what_holds
from kvlab.shared import Copy, is_url, named
from kvlab.trace.frames import empty_frame
from kvlab.trace.recorder import Recorder
from kvlab.trace.store import read_table, table_paths
from kvlab.trace.summary import format_summary, summarize
from kvlab.types import UserError


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
        """Read a run's folder, whatever its state; tables when they are asked for.

        Raises:
            UserError: there is no such folder, or it is no run's but holds runs (a sweep's).
        """
        named(folder, "a run")
        if is_url(folder):
            from kvlab.results import load_runs

            runs = load_runs(folder)
            if len(runs) != 1:
                raise UserError(f"{folder} holds {len(runs)} runs, one is wanted: give the address of a run.")
            return runs[0]
        folder = Path(folder)
        if not folder.is_dir():
            raise UserError(f"{folder} is not a folder. Give a run's folder, or one that holds runs.")
        inner = runs_inside(folder)
        if inner:
            raise UserError(f"{what_holds(folder, inner)}, and one run is wanted: give a run's own folder, e.g. {inner[0]}. All of them: "
                            f"kvlab.load_runs({str(folder)!r}).")  # fmt: skip
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
            self.summary = summarize(steps if known.get("steps", True) else None, requests if known.get("requests", True) else None,
                                     cut_off=self.state != "finished")  # fmt: skip
            self._note(f"summary made from {len(steps)} recorded steps and {len(requests)} requests")
        else:
            self._note("nothing was recorded")
