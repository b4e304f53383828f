"""Runs for other tools: `python -m kvlab.export RUN --to perfetto|csv|latex|mlflow [--out PATH]`, and `Run.to_perfetto(path)` and so on.

perfetto: a timeline for ui.perfetto.dev or chrome://tracing (PATH: a file, default trace.json). csv: a file a table (PATH: a folder).
latex: a booktabs table, one row a point (RUN may be a folder of runs; PATH: a file, default: the terminal); runs that differ in nothing
but their seed are one row, mean and 95 % interval over n runs, or a row each with --each. mlflow: a run each in MLflow (PATH: its tracking
URI, default: what MLFLOW_TRACKING_URI says). Nothing is overwritten without --force. Exit codes: 0 done, 2 a user's error.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from kvlab.comparing import remark
from kvlab.doors import exit_code
from kvlab.exporting import latex_table, log_to_mlflow, write_csv, write_perfetto
from kvlab.interrupts import unwinding
from kvlab.results import Runs, load_runs
from kvlab.types import UserError, unknown_name

TARGETS = ("perfetto", "csv", "latex", "mlflow")


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit code."""
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(prog="python -m kvlab.export", description=__doc__, formatter_class=raw)
    parser.add_argument("run", help="a run's folder, or one that holds runs (latex, mlflow)")
    parser.add_argument("--to", required=True, help=", ".join(TARGETS))
    parser.add_argument("--out", help="where to: see above")
    parser.add_argument("--each", action="store_true", help="latex: a row a run, repeats too")
    parser.add_argument("--force", action="store_true", help="overwrite what is there")
    try:
        args = parser.parse_args(argv)
    except SystemExit as end:
        return int(end.code or 0)
    try:
        with unwinding():
            text = _export(args.run, args.to, args.out, args.force, args.each)
        print(text)
    except UserError as error:
        print(f"kvlab: {error}", file=sys.stderr)
        return 2
    return 0


def _export(folder: str, target: str, out: str | None, force: bool, each: bool) -> str:
    if target not in TARGETS:
        raise unknown_name("export", target, TARGETS)
    runs = Runs(run for run in load_runs(folder) if run.summary)  # other folders, and runs that recorded nothing, have nothing to export
    if not len(runs):
        raise UserError(f"{folder} holds no run with results.")
    for run in runs:
        if run.state != "finished":
            means = ", and left out of means" if target == "latex" and not each else ""
            print(f"kvlab: run {run.name}{remark(run)}: what was recorded is exported{means}.", file=sys.stderr)
    if target == "latex":
        text = latex_table(runs, each=each)
        return text if out is None else f"Written: {_write_text(Path(out), text, force)}"
    if target == "mlflow":
        logged = [log_to_mlflow(run, out) for run in runs]
        return f"Logged to MLflow: {', '.join(logged)}"
    if len(runs) != 1:
        raise UserError(f"{folder} holds {len(runs)} runs; {target} takes one: give a run's own folder, e.g. {runs[0].folder}.")
    if target == "csv":
        return f"Written: {', '.join(map(str, write_csv(runs[0], out or 'csv', force)))}"
    return f"Written: {write_perfetto(runs[0], out or 'trace.json', force)}. Open it at https://ui.perfetto.dev"


def _write_text(path: Path, text: str, force: bool) -> Path:
    from kvlab.exporting import free_path
    from kvlab.trace.store import write_text

    write_text(free_path(path, force), text)
    return path


if __name__ == "__main__":
    raise SystemExit(exit_code(main))
