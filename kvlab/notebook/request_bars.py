"""`timeline(run)`: a bar a request: queue, prefill chunks, decode, preempted, swapped; linked by step with the run's other widgets."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pandas as pd
import plotly.graph_objects as go

from kvlab.analysis import timeline as static_timeline
from kvlab.notebook.block_grid import by_step
from kvlab.notebook.packing import pack
from kvlab.notebook.plan_reader import read_plan_view
from kvlab.notebook.widget import StepWidget, channel_of, frame_of, module, run_of, why_empty
from kvlab.results import Run

SPANS = ("queue", "prefill", "decode", "preempted", "swapped")
"""States of a request in the order of their codes."""
NO_REQUESTS = "This run recorded no request that has ended, so there is no bar to show (record.requests=true, or a run that got further)."
NO_STEPS = "This run recorded no steps (record.steps=true), so its requests can't be placed on them."


class Timeline(StepWidget):
    """See `timeline`. `requests`: the frame it shows, in the order of its rows."""

    _esm = module("timeline")

    def __init__(self, requests: pd.DataFrame, channel: str = "", **traits: Any) -> None:
        self.requests = requests
        super().__init__(channel, **traits)

    def figure(self) -> go.Figure:
        """A static figure: a bar a request (`kvlab.analysis.timeline`)."""
        return self._nothing("Requests") if self.message else static_timeline(self.requests)


def timeline(run: Run | Path | str, step: int = 0) -> Timeline:
    """The life of every request of a run: a widget.

    A row is a request, first arrival on top. The line is the step; pointing at a bar tells what it is, dragging moves the step, and with
    it the block map and the prefix tree of the same run on the page. White cuts in a prefill are its chunks, where block events and
    plans were recorded (`record.blocks=true record.plans=true`).

    Args:
        run: a run, or a run's folder, in any state: requests that had ended are shown. step: shown first.

    Raises:
        UserError: `run` is neither a run nor a path.
    """
    found, why = run_of(run)
    if found is None:
        return Timeline(pd.DataFrame(), meta={"message": why})
    requests, broken = frame_of(found, "requests")
    steps, broken_steps = frame_of(found, "steps")
    if requests.empty or steps.empty:
        told, table, otherwise = (broken, "requests", NO_REQUESTS) if requests.empty else (broken_steps, "steps", NO_STEPS)
        message = told or why_empty(found, table, otherwise)
        return Timeline(requests, meta={"message": message})
    order = sorted(range(len(requests)), key=lambda i: (requests["arrival_s"].iloc[i], _natural(str(requests["request_id"].iloc[i]))))
    rows = requests.iloc[order].reset_index(drop=True)
    num_steps = int(steps["step"].max()) + 1
    end_s = np.maximum.accumulate(np.nan_to_num(by_step(steps, "end_s", num_steps)))
    spans = _spans(rows)
    chunks, chunk_note = _chunks(found, rows, num_steps, end_s)
    data, layout = pack({**spans, **chunks, "end_s": end_s, "arrival": rows["arrival_s"].to_numpy(dtype=np.float64),
                         "finish": rows["finish_s"].to_numpy(dtype=np.float64)})  # fmt: skip
    meta = {
        "title": f"Requests of {found.name}", "num_steps": num_steps, "layout": layout, "requests": rows["request_id"].astype(str).tolist(),
        "reasons": rows["finish_reason"].astype(str).tolist(), "facts": _facts(rows),
        "notes": _notes(found, broken, broken_steps, chunk_note),
    }  # fmt: skip
    return Timeline(rows, channel_of(found), meta=meta, data=data, step=max(0, min(step, num_steps - 1)))


def _natural(request_id: str) -> list[tuple[int, int, str]]:
    """Sort key under which "prompt-10" comes after "prompt-9"."""
    return [(0, int(part), "") if part.isdecimal() else (1, 0, part) for part in re.split(r"(\d+)", request_id)]


def _spans(rows: pd.DataFrame) -> dict[str, npt.NDArray[Any]]:
    """Spans of all requests as columns: row, state, start, end."""
    codes = {name: i for i, name in enumerate(SPANS)}
    parts = [
        (row, codes[state], start, end)
        for row, (states, starts, ends) in enumerate(zip(rows["span_states"], rows["span_starts_s"], rows["span_ends_s"], strict=True))
        for state, start, end in zip(states, starts, ends, strict=False)
        if state in codes
    ]
    columns = list(zip(*parts, strict=True)) if parts else [(), (), (), ()]
    kinds = {"row": np.uint32, "state": np.uint8, "start": np.float64, "stop": np.float64}
    return {name: np.array(values, dtype=kind) for (name, kind), values in zip(kinds.items(), columns, strict=True)}


def _chunks(run: Run, rows: pd.DataFrame, num_steps: int, end_s: npt.NDArray[np.float64]) -> tuple[dict[str, npt.NDArray[Any]], str]:
    """Where prefill chunks end: row and time of each. The request of a chunk is the one that took its block last."""
    nothing: dict[str, npt.NDArray[Any]] = {"chunk_row": np.zeros(0, dtype=np.uint32), "chunk_s": np.zeros(0, dtype=np.float64)}
    size = run.config.get("block_size")
    view = read_plan_view(run.folder, size) if isinstance(size, int) and size > 0 else None
    events = frame_of(run, "blocks")[0] if view is not None else pd.DataFrame()
    if view is None or events.empty:
        return nothing, "Chunks of a prefill were not recorded (record.blocks=true record.plans=true)."
    taken = events[(events["tier"] == "gpu") & events["kind"].isin(("allocate", "hit", "share"))]
    takes = list(zip(taken["step"].tolist(), taken["block_id"].tolist(), taken["request_id"].tolist(), strict=True))
    row_of = {str(name): i for i, name in enumerate(rows["request_id"])}
    holder: dict[int, str] = {}
    done, out = 0, []
    for step, block_id, _ in view.chunks:
        while done < len(takes) and takes[done][0] <= step:
            holder[takes[done][1]] = str(takes[done][2])
            done += 1
        row = row_of.get(holder.get(block_id, ""))
        if row is not None and step < num_steps:
            out.append((row, end_s[step]))
    columns = list(zip(*out, strict=True)) if out else [(), ()]
    return {"chunk_row": np.array(columns[0], dtype=np.uint32), "chunk_s": np.array(columns[1], dtype=np.float64)}, view.note


def _facts(rows: pd.DataFrame) -> list[str]:
    """A line on each request."""
    names = ("num_prompt_tokens", "num_output_tokens", "num_cached_tokens", "num_preemptions", "finish_reason")
    return [
        f"{prompt} prompt tokens ({cached} cached), {output} output tokens, {num} preemption{'' if num == 1 else 's'}, ended by {reason}"
        for prompt, output, cached, num, reason in zip(*(rows[n].tolist() for n in names), strict=True)
    ]


def _notes(run: Run, *said: str) -> list[str]:
    notes = [text for text in said if text]
    if run.state != "finished":
        notes.append(f"This run is {run.state}: requests that had not ended are not shown.")
    return notes
