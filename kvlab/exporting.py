"""Runs written for other tools: Perfetto (trace event JSON), CSV, LaTeX (booktabs), MLflow."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pandas as pd

from kvlab.aggregating import aggregate, numbers_of, varied_columns
from kvlab.flat import flatten
from kvlab.trace.schema import TABLES
from kvlab.trace.store import atomic, disk_error, write_text
from kvlab.trace.summary import FIGURES
from kvlab.types import UserError, unknown_name

if TYPE_CHECKING:
    from kvlab.results import Run, Runs

STEPS_PID, REQUESTS_PID = 1, 2
COUNTERS = {
    "KV blocks": {"used": "kv_blocks_used", "evictable": "kv_blocks_evictable", "free": "kv_blocks_free"},
    "requests": {"running": "num_running_reqs", "waiting": "num_waiting_reqs", "swapped": "num_swapped_reqs"},
    "tokens in a step": {"prompt": "num_prompt_tokens_computed", "output": "num_output_tokens"},
}
STEP_ARGS = (
    "step", "num_scheduled_seqs", "num_prompt_tokens_computed", "num_output_tokens", "num_preemptions", "num_evicted_blocks",
    "admission_blocked_by", "schedule_ms", "execute_ms", "commit_ms",
)  # fmt: skip


def free_path(path: Path, force: bool) -> Path:
    """The path, its folder made. UserError: something is there already and shall not be overwritten, or the folder can't be made."""
    if path.exists() and not force:
        raise UserError(f"{path} is there already. Choose another path, or overwrite it (--force, force=True).")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise disk_error(path, error) from error
    return path


# --------------------------------------------------------------------------- Perfetto


def write_perfetto(run: Run, path: str | Path, force: bool = False) -> Path:
    """A timeline in the trace event format (JSON): steps, a track a request, counters of blocks, requests and tokens. Times in
    microseconds of the engine's clock. UserError: nothing was recorded, or the file is there."""
    target = free_path(Path(path), force)
    with atomic(target) as file:
        file.write(b'{"displayTimeUnit":"ms","traceEvents":[\n')
        for number, event in enumerate(trace_events(run)):
            file.write((",\n" if number else "").encode() + json.dumps(event, separators=(",", ":")).encode())
        file.write(b"\n]}\n")
    return target


def trace_events(run: Run) -> Iterator[dict[str, Any]]:
    """The events of a run's timeline. UserError: it recorded neither steps nor requests."""
    steps, requests = run.steps(), run.requests()
    if steps.empty and requests.empty:
        raise UserError(f"Run {run.name} recorded neither steps nor requests: there is no timeline.")
    for pid, name in ((STEPS_PID, f"engine: {run.name}"), (REQUESTS_PID, "requests")):
        yield {"ph": "M", "name": "process_name", "pid": pid, "tid": 0, "ts": 0, "args": {"name": name}}
    yield {"ph": "M", "name": "thread_name", "pid": STEPS_PID, "tid": 1, "ts": 0, "args": {"name": "steps"}}
    for row in steps.to_dict("records"):
        start_s = row["end_s"] - row["step_ms"] / 1e3
        kind = ("mixed" if row["num_decode_seqs"] else "prefill") if row["num_prompt_tokens_computed"] else "decode"
        yield _span(kind, "step", STEPS_PID, 1, start_s, row["end_s"], {name: _plain(row[name]) for name in STEP_ARGS})
        for name, series in COUNTERS.items():
            values = {label: _plain(row[column]) for label, column in series.items()}
            yield {"ph": "C", "name": name, "pid": STEPS_PID, "tid": 1, "ts": _microseconds(row["end_s"]), "args": values}
    ordered = requests.sort_values("arrival_s", kind="stable")
    for tid, row in enumerate(ordered.to_dict("records"), start=1):
        yield from _request_events(row, tid)


def _request_events(row: Mapping[Any, Any], tid: int) -> Iterator[dict[str, Any]]:
    common = {"pid": REQUESTS_PID, "tid": tid}
    yield {"ph": "M", "name": "thread_name", **common, "ts": 0, "args": {"name": str(row["request_id"])}}
    yield {"ph": "M", "name": "thread_sort_index", **common, "ts": 0, "args": {"sort_index": tid}}
    facts = {name: _plain(row[name]) for name in ("num_prompt_tokens", "num_output_tokens", "num_cached_tokens", "num_preemptions")}
    for state, start_s, end_s in zip(row["span_states"], row["span_starts_s"], row["span_ends_s"], strict=True):
        yield _span(str(state), "request", REQUESTS_PID, tid, float(start_s), float(end_s), facts)
    if len(row["token_times_s"]):
        yield {"ph": "i", "s": "t", "name": "first token", "cat": "request", **common, "ts": _microseconds(float(row["token_times_s"][0]))}
    yield {"ph": "i", "s": "t", "name": str(row["finish_reason"]), "cat": "request", **common, "ts": _microseconds(row["finish_s"])}


def _span(name: str, category: str, pid: int, tid: int, start_s: float, end_s: float, args: Mapping[str, Any]) -> dict[str, Any]:
    start, end = _microseconds(start_s), _microseconds(end_s)
    duration = max(0.0, round(end - start, 3))
    return {"ph": "X", "name": name, "cat": category, "pid": pid, "tid": tid, "ts": start, "dur": duration, "args": dict(args)}


def _microseconds(seconds: float) -> float:
    return round(seconds * 1e6, 3)


def _plain(value: Any) -> Any:
    value = value.item() if hasattr(value, "item") else value
    return None if value is pd.NA or (isinstance(value, float) and not math.isfinite(value)) else value


# -------------------------------------------------------------------------------- CSV


def write_csv(run: Run, folder: str | Path, force: bool = False) -> list[Path]:
    """`steps.csv`, `requests.csv`, `blocks.csv` (what was recorded; lists as JSON) and `summary.csv` (figure, value) in a folder."""
    root = Path(folder)
    tables = {"steps": run.steps(), "requests": run.requests(), "blocks": run.blocks()}
    frames = {name: frame for name, frame in tables.items() if len(frame)}
    summary = [(k, v) for k, v in flatten(run.summary).items()]
    frames["summary"] = pd.DataFrame(summary, columns=["figure", "value"], dtype=object)
    paths = [free_path(root / f"{name}.csv", force) for name in frames]
    for path, frame in zip(paths, frames.values(), strict=True):
        lists = {column.name for column in TABLES.get(path.stem, ()) if column.dtype.startswith("list")}
        texts = {c: [json.dumps(v, default=lambda x: x.tolist()) for v in frame[c]] for c in frame if c in lists}
        write_text(path, frame.assign(**texts).to_csv(index=False))
    return paths


# ------------------------------------------------------------------------------ LaTeX

_ESCAPED = {
    "\\": r"\textbackslash{}", "&": r"\&", "%": r"\%", "$": r"\$", "#": r"\#", "_": r"\_", "{": r"\{", "}": r"\}",
    "~": r"\textasciitilde{}", "^": r"\textasciicircum{}", "<": r"\textless{}", ">": r"\textgreater{}",
    "|": r"\textbar{}",
}  # fmt: skip
ROUNDING = 1e-7
"""An interval that is smaller than this share of its mean is rounding: repeats were the same."""
DEFAULT_FIGURES = (
    "num_finished", "output_token_throughput_per_s", "mean_ttft_ms", "p99_ttft_ms", "mean_tpot_ms", "prefix_cache_hit_rate_tokens",
    "num_preemptions",
)  # fmt: skip


def escape_latex(text: str) -> str:
    """Text with LaTeX's special characters escaped."""
    return "".join(_ESCAPED.get(character, character) for character in text)


def latex_table(
    runs: Runs, columns: Sequence[str] | None = None, figures: Sequence[str] = DEFAULT_FIGURES, each: bool = False
) -> str:
    """A booktabs table (`\\usepackage{booktabs}`), one row a point.

    Runs that differ in nothing but their seed are one row: means of those that finished, with half of their 95 % interval
    (`Runs.aggregate`), and their number n. Without repeats, and with `each` or a seed among the columns, a run is a row.

    Args:
        columns: configuration columns of `runs.frame`; None: those that differ, and the seed where it alone tells rows apart.
        figures: of the summary. each: a row a run, repeats too.

    Raises:
        UserError: no such column.
    """
    frame = runs.frame
    varied = varied_columns(runs, frame)
    keys = list(varied if columns is None else columns)
    for name in (*keys, *figures):
        if name not in frame:
            raise unknown_name("column", name, map(str, frame.columns))
    if not each and not any(key.split(".")[-1] == "seed" for key in keys):
        means = _means(runs.finished(), [*keys, *(name for name in varied if name not in keys)], figures)
        if len(means) and means["n"].max() > 1:
            return _of_means(means, keys, figures, len(runs) - len(runs.finished()))
    if columns is None and "seed" in frame and frame["seed"].nunique() > 1 and (not keys or frame[keys].astype(str).duplicated().any()):
        keys.append("seed")
    shown = [*keys, *figures]
    numeric = [pd.api.types.is_numeric_dtype(frame[name]) for name in shown]
    return _booktabs([_title(name) for name in shown], numeric, [[_cell(row[name]) for name in shown] for _, row in frame.iterrows()])


def _means(runs: Runs, groups: Sequence[str], figures: Sequence[str]) -> pd.DataFrame:
    """`aggregate`; figures that no run defines are NaN."""
    defined = set(numbers_of(runs, runs.frame)) & set(figures)
    means = aggregate(runs, groups, [name for name in figures if name in defined])
    return means.reindex(columns=[*groups, "n", *(c for name in figures for c in (name, f"{name}_ci95"))])


def _of_means(means: pd.DataFrame, keys: Sequence[str], figures: Sequence[str], num_left_out: int) -> str:
    heads = [*map(_title, keys), "$n$", *map(_title, figures)]
    numeric = [*(pd.api.types.is_numeric_dtype(means[name]) for name in keys), *[True] * (1 + len(figures))]
    cells = [
        [*(_cell(row[name]) for name in keys), str(row["n"]), *(_with_interval(row[name], row[f"{name}_ci95"]) for name in figures)]
        for row in means.to_dict("records")
    ]
    left_out = f" Runs that did not finish are left out: {num_left_out}." if num_left_out else ""
    return f"% Mean and half of its 95 % interval (Student's t) over n runs.{left_out}\n{_booktabs(heads, numeric, cells)}"


def _booktabs(heads: Sequence[str], numeric: Sequence[bool], cells: Sequence[Sequence[str]]) -> str:
    lines = [rf"\begin{{tabular}}{{{''.join('r' if n else 'l' for n in numeric)}}}", r"\toprule", rf"{' & '.join(heads)} \\", r"\midrule"]
    return "\n".join([*lines, *(" & ".join(row) + r" \\" for row in cells), r"\bottomrule", r"\end{tabular}", ""])


def _title(name: str) -> str:
    """A column's head: a figure's title with its unit, else the name."""
    titles = {f.key: f.title + (f" ({f.unit})" if f.unit not in ("", "fraction") else "") for f in FIGURES}
    return escape_latex(titles.get(name, name))


def _with_interval(mean: float, half: float) -> str:
    r"""`$12.3 \pm 1.4$`: the interval with two significant digits, the mean as far as that. Without an interval the mean alone."""
    if math.isnan(mean) or math.isnan(half):
        return _cell(int(mean) if mean == int(mean) else mean) if not math.isnan(mean) else "--"
    if half <= ROUNDING * abs(mean):
        return rf"${f'{mean:.0f}' if mean == int(mean) else _cell(float(mean))} \pm 0$"
    digits = 1 - math.floor(math.log10(float(f"{half:.1e}")))  # of the rounded one: 0.0996 is 0.10
    return rf"${round(mean, digits):.{max(digits, 0)}f} \pm {round(half, digits):.{max(digits, 0)}f}$"


def _cell(value: Any) -> str:
    if value is None or value is pd.NA or (isinstance(value, float) and math.isnan(value)):
        return "--"
    if isinstance(value, float):
        return f"{value:.0f}" if abs(value) >= 1000 else f"{value:.3g}"
    return escape_latex(str(value))


# ----------------------------------------------------------------------------- MLflow


def log_to_mlflow(run: Run, tracking_uri: str | None = None, experiment: str = "kvlab") -> str:
    """Log a run to MLflow: configuration as parameters, figures as metrics, its folder's files as artifacts. Returns MLflow's run id.

    Raises:
        UserError: MLflow is missing, or its server can't be reached.
    """
    try:
        import mlflow
    except ImportError as error:
        raise UserError("The MLflow export needs MLflow, which is not installed: pip install 'kvlab[mlflow]'.") from error
    try:
        client = mlflow.MlflowClient(tracking_uri=tracking_uri)
        known = client.get_experiment_by_name(experiment)
        experiment_id = known.experiment_id if known is not None else client.create_experiment(experiment)
        tags = {"kvlab.folder": str(run.folder), "kvlab.status": run.state, "kvlab.identity": str(run.status.get("identity"))}
        logged = client.create_run(experiment_id, run_name=run.name, tags=tags)
        run_id = str(logged.info.run_id)
        for name, value in flatten(run.config).items():
            client.log_param(run_id, name, str(value)[:6000])
        for name, value in flatten(run.summary).items():
            if isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value):
                client.log_metric(run_id, name, float(value))
        for path in sorted(run.folder.iterdir()) if run.folder is not None else ():
            if path.is_file() and not path.name.startswith("."):
                client.log_artifact(run_id, str(path))
        client.set_terminated(run_id, {"finished": "FINISHED", "pruned": "KILLED"}.get(run.state, "FAILED"))
    except mlflow.exceptions.MlflowException as error:
        raise UserError(f"MLflow at {tracking_uri or mlflow.get_tracking_uri()} refused: {str(error).splitlines()[0]}") from error
    return run_id
