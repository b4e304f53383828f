"""Tables for terminals: what happened in one run, and all runs of a sweep side by side."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from kvlab.doors import printable
from kvlab.reading import foreign, visible_names
from kvlab.results import Run, Runs, load_runs
from kvlab.types import UserError


class Row(NamedTuple):
    """One line of a run's table: label, figure, format of the figure, factor it is multiplied by first."""

    label: str
    key: str
    form: str = ",.0f"
    factor: float = 1.0


RUN_ROWS: tuple[Row | str, ...] = (
    "Requests",
    Row("finished", "num_finished"),
    Row("refused, aborted, ended otherwise", "num_not_finished"),
    Row("prompt tokens", "num_prompt_tokens"),
    Row("output tokens", "num_output_tokens"),
    "Speed",
    Row("duration (s)", "duration_s", ",.2f"),
    Row("steps", "num_steps"),
    Row("output token throughput (tokens/s)", "output_token_throughput_per_s", ",.1f"),
    Row("TTFT mean / median / P99 (ms)", "ttft", ",.0f"),
    Row("TPOT mean / median / P99 (ms)", "tpot", ",.1f"),
    Row("E2EL mean / median / P99 (ms)", "e2el", ",.0f"),
    "KV cache",
    Row("usage mean / peak (%)", "kv_cache_usage", ".1f", 100),
    Row("prefix cache hit rate (% of prompt tokens)", "prefix_cache_hit_rate_tokens", ".1f", 100),
    Row("evicted blocks", "num_evicted_blocks"),
    Row("preemptions", "num_preemptions"),
    Row("recomputed tokens", "recomputed_tokens"),
    Row("blocks swapped out / in", "swapped"),
    Row("empty slots in used blocks, mean (tokens)", "mean_internal_fragmentation_tokens", ",.1f"),
    "Memory",
    Row("peak resident memory of the process (MiB)", "peak_process_rss_bytes", ",.0f", 2**-20),
    Row("peak device memory (MiB)", "peak_device_memory_allocated_bytes", ",.0f", 2**-20),
)

SWEEP_FIGURES = (
    Row("status", "status", "s"),
    Row("finished", "num_finished"),
    Row("refused", "num_refused"),
    Row("tokens/s", "output_token_throughput_per_s", ",.1f"),
    Row("TTFT ms", "mean_ttft_ms", ",.0f"),
    Row("TPOT ms", "mean_tpot_ms", ",.1f"),
    Row("hit rate %", "prefix_cache_hit_rate_tokens", ".1f", 100),
    Row("evicted", "num_evicted_blocks"),
    Row("preempted", "num_preemptions"),
    Row("peak KV %", "peak_kv_cache_usage", ".1f", 100),
)


def run_table(run: Run) -> str:
    """A run's configuration in a line, then its figures in groups; figures that are undefined are left out."""
    lines = [_policies(run), ""]
    group = ""
    for row in RUN_ROWS:
        if isinstance(row, str):
            group = row
            continue
        shown = " / ".join(_shown(v, row) for v in _values(row.key, run.summary) if v is not None)
        if shown:
            if group:
                lines.append(group)
                group = ""
            lines.append(f"  {row.label:<46}{shown:>22}")
    lines += _answers(run)
    reasons = run.summary.get("finish_reasons") or {}
    if reasons:
        lines.append("Finish reasons: " + ", ".join(f"{name} {count}" for name, count in reasons.items()))
    return "\n".join([*lines, *run.notes])


def sweep_table(source: Path | Runs) -> tuple[str, int]:
    """(text, runs that failed): one line a run with what differs and the main figures, then why runs failed or were pruned."""
    runs = source if isinstance(source, Runs) else load_runs(source)
    rows = [run.row() for run in runs]
    varied = _varied_columns(rows, runs)
    figures = [f for f in SWEEP_FIGURES if f.key != "num_refused" or any(row.get(f.key) for row in rows)]
    header = ["run", *varied, *(f.label for f in figures)]
    cells = [[str(row["run"]), *(_plain(row.get(c)) for c in varied), *(_shown(row.get(f.key), f) for f in figures)] for row in rows]
    ended = [run for run in runs if run.state != "finished"]
    num_pruned = sum(run.state == "pruned" for run in ended)
    notes = [line for run in ended for line in _failure(run)]
    summary = f"{len(runs) - len(ended)} of {len(runs)} runs finished{f', {num_pruned} pruned' if num_pruned else ''}."
    return "\n".join([text_table(header, cells), summary, *notes]), len(ended) - num_pruned


TRACEBACK_SHOWN = 3


def _failure(run: Run) -> list[str]:
    """Why a run failed or was pruned: its error and, where that is not the user's, the end of its traceback."""
    error = run.status.get("error") or {}
    label = str(run.status.get("name") or "")
    why = run.error or ""
    if run.state == "foreign" and run.folder is not None and (names := visible_names(run.folder)):
        why = foreign(run.folder, names[0])
    lines = [f"{run.name}: {run.state}{': ' + why if why else ''}" + (f" [{label}]" if label else "")]
    kinds: list[type] = [UserError, *UserError.__subclasses__()]
    if error.get("traceback") and error.get("type") not in {kind.__name__ for kind in kinds} and run.state == "failed":
        lines += [f"    {line}" for line in str(error["traceback"]).splitlines()[:-1][-TRACEBACK_SHOWN:]]
    return lines


def text_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Aligned columns under a rule; numbers to the right, text to the left. What would drive a terminal, or end a line, is escaped."""
    header, rows = [printable(name) for name in header], [[printable(cell) for cell in row] for row in rows]
    widths = [max(len(r[i]) for r in (header, *rows)) for i in range(len(header))]
    numeric = [bool(rows) and all(r[i][:1].isdigit() or r[i][:1] in "-" for r in rows) for i in range(len(header))]

    def line(cells: Sequence[str]) -> str:
        return "  ".join(c.rjust(w) if n else c.ljust(w) for c, w, n in zip(cells, widths, numeric, strict=True)).rstrip()

    return "\n".join([line(header), "  ".join("-" * w for w in widths), *map(line, rows)])


def _varied_columns(rows: Sequence[dict[str, Any]], runs: Runs) -> list[str]:
    """Configuration columns that differ between the runs; of columns with equal values the first with the shortest name."""
    figures = {key for run in runs for key in run.summary} | {"run", "status", "notes", "folder", "finish_reasons"}
    found: dict[tuple[str, ...], str] = {}
    for column in dict.fromkeys(key for row in rows for key in row):
        if column in figures or column.split(".")[0] in ("finish_reasons", "config"):
            continue
        values = tuple(_plain(row.get(column)) for row in rows if row.get("status") == "finished" or column in row)
        if len(set(values)) > 1 and (values not in found or column.count(".") < found[values].count(".")):
            found[values] = column
    return list(found.values())


def _policies(run: Run) -> str:
    row = run.row()
    shown = (
        "model", "runner", "workload", "scheduling", "batching", "admission", "preemption", "preemption.mode", "eviction",
        "prefix_cache", "layout", "compression", "kv_dtype", "block_size", "num_blocks", "num_cpu_blocks", "watermark",
        "max_num_seqs", "max_num_batched_tokens", "max_model_len", "dtype", "device", "seed",
    )  # fmt: skip
    parts = [f"{name}={_plain(row[name])}" for name in shown if row.get(name) is not None]
    lines, line = [], ""
    for part in parts:
        if line and len(line) + len(part) > 110:
            lines.append(line.rstrip())
            line = ""
        line += part + "  "
    return "\n".join([*lines, line.rstrip()])


def _answers(run: Run, number: int = 3) -> list[str]:
    """The beginnings of the first answers, where the run has texts: that tokens are real can be read here."""
    requests = run.requests(("request_id", "output_texts"))
    lines: list[str] = []
    for request_id, texts in zip(requests["request_id"], requests["output_texts"], strict=True):
        text = " ".join(str(texts[0]).split()) if len(texts) else ""
        if text and len(lines) < number:
            lines.append(f"  {request_id}: {text[:96]}{'...' if len(text) > 96 else ''}")
    return ["Answers", *lines] if lines else []


def _values(key: str, summary: dict[str, Any]) -> list[Any]:
    if key in ("ttft", "tpot", "e2el"):
        return [summary.get(f"{s}_{key}_ms") for s in ("mean", "median", "p99")]
    if key == "kv_cache_usage":
        return [summary.get("mean_kv_cache_usage"), summary.get("peak_kv_cache_usage")]
    if key == "swapped":
        return [summary.get("swapped_out_blocks"), summary.get("swapped_in_blocks")]
    if key == "num_not_finished":
        return [summary.get(k) for k in ("num_refused", "num_aborted", "num_other")]
    return [summary.get(key)]


def _shown(value: Any, row: Row) -> str:
    if value is None or value != value:
        return "-"
    return str(value) if row.form == "s" else format(value * row.factor, row.form)


def _plain(value: Any) -> str:
    if value is None:
        return "-"
    return f"{value:g}" if isinstance(value, float) else str(value)
