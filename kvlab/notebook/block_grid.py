"""`block_map(run)`: the physical block pool of a run as a grid, step by step.

Every cell is a block, coloured by state or by owner. The browser gets the run's block events once, packed, and does the rest itself: a
saved page plays without a kernel. Static: `.figure()`, a heat map of states over steps, or the grid at chosen steps.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pandas as pd
import plotly.graph_objects as go
import traitlets
from plotly.subplots import make_subplots

from kvlab.analysis.template import BLUE, LIGHT, ORANGE, PURPLE, SKY, TEMPLATE, figure
from kvlab.notebook.block_log import FREE, RESERVED, STATES, SWAPPED, BlockLog, block_log
from kvlab.notebook.packing import Arrays, pack
from kvlab.notebook.plan_reader import PlanView, read_plan_view, sources
from kvlab.notebook.widget import StepWidget, channel_of, frame_of, is_recorded, module, run_of, why_empty
from kvlab.results import Run
from kvlab.types import UserError

COLORS = (LIGHT, BLUE, ORANGE, SKY, "#A9A9A9", PURPLE)
"""Of the states, in the order of their codes; the same in `static/shared.js`."""
MOST_ROWS, MOST_COLUMNS = 400, 800
"""Of the static heat map: no page shows more, and a notebook stays small."""


class BlockMap(StepWidget):
    """See `block_map`. `color_by`: "state" or "owner". `events`: the block events as columns."""

    _esm = module("block_map")
    color_by = traitlets.Enum(("state", "owner"), default_value="state").tag(sync=True)

    def __init__(self, log: BlockLog | None, watermark: npt.NDArray[np.uint32], channel: str = "", **traits: Any) -> None:
        self.events = log
        self.watermark = watermark
        super().__init__(channel, **traits)

    def states(self, step: int, tier: str = "gpu") -> npt.NDArray[np.uint8]:
        """State of each block after a step, [N], as codes of `kvlab.notebook.block_log.STATES`. As it is drawn: the highest free blocks are
        those kept by the watermark (which is a number; admission keeps no particular blocks).

        Raises:
            UserError: no such step or tier.
        """
        log = self._log(step, tier)
        return self._shown(log.tiers[tier].states([step])[0], step, tier)

    def _log(self, step: int, tier: str) -> BlockLog:
        if self.events is None:
            raise UserError(self.message)
        if tier not in self.events.tiers:
            raise UserError(f"This run has no tier {tier!r}; it has {', '.join(self.events.tiers)}.")
        if not 0 <= step < self.num_steps:
            raise UserError(f"There is no step {step}: this run has steps 0 to {self.num_steps - 1}.")
        return self.events

    def _shown(self, states: npt.NDArray[np.uint8], step: int, tier: str) -> npt.NDArray[np.uint8]:
        if tier != "gpu":
            return np.where(states == FREE, FREE, SWAPPED).astype(np.uint8)
        num = int(self.watermark[step]) if step < len(self.watermark) else 0
        shown = states.copy()
        shown[np.flatnonzero(states == FREE)[::-1][:num]] = RESERVED
        return shown

    def figure(self, steps: Sequence[int] | None = None) -> go.Figure:
        """A static figure: the state of every block over all steps, or with `steps` the grid of the pool after each of them.

        More than 400 blocks or 800 steps are thinned evenly; the title says so.
        """
        if self.events is None:
            return self._nothing("Block pool")
        return self._heat_map() if steps is None else self._grids(list(steps))

    def _heat_map(self) -> go.Figure:
        assert self.events is not None
        tier = self.events.tiers["gpu"]
        steps = np.unique(np.linspace(0, self.num_steps - 1, min(self.num_steps, MOST_COLUMNS)).astype(int))
        blocks = np.unique(np.linspace(0, tier.num_blocks - 1, min(tier.num_blocks, MOST_ROWS)).astype(int))
        states = np.stack([self._shown(s, int(step), "gpu")[blocks] for step, s in zip(steps, tier.states(steps.tolist()), strict=True)])
        thinned = [f"{len(some)} of {num:,} {what}" for some, num, what in
                   ((blocks, tier.num_blocks, "blocks"), (steps, self.num_steps, "steps")) if len(some) < num]  # fmt: skip
        title = "State of each block over the run" + (f" ({', '.join(thinned)})" if thinned else "")
        fig = figure(title, 420)
        fig.add_trace(_heat(states.T, steps, blocks, "step %{x}, block %{y}: %{text}<extra></extra>"))
        _legend(fig, states)
        fig.update_xaxes(title_text="step")
        return fig.update_yaxes(title_text="block id", autorange="reversed").update_layout(hovermode="closest", legend_traceorder="normal")

    def _grids(self, steps: list[int]) -> go.Figure:
        if not steps:
            raise UserError("Give at least one step to show, e.g. figure(steps=[0, 10, 20]).")
        num = self._log(min(steps), "gpu").tiers["gpu"].num_blocks
        self._log(max(steps), "gpu")
        columns = int(np.ceil(np.sqrt(num)))
        rows, across = -(-num // columns), min(4, len(steps))
        down = -(-len(steps) // across)
        titles = [f"step {s}" for s in steps]
        fig = make_subplots(rows=down, cols=across, subplot_titles=titles, horizontal_spacing=0.03, vertical_spacing=0.09)
        seen = []
        for i, step in enumerate(steps):
            states = self.states(step)
            seen.append(states)
            cells = np.full(rows * columns, np.nan)
            cells[:num] = states
            ids = np.arange(rows * columns).reshape(rows, columns)
            trace = _heat(cells.reshape(rows, columns), np.arange(columns), np.arange(rows), "block %{customdata}: %{text}<extra></extra>")
            trace.update(xgap=2 if columns <= 60 else 0, ygap=2 if columns <= 60 else 0, customdata=ids)
            fig.add_trace(trace, row=i // across + 1, col=i % across + 1)
        fig.update_layout(template=TEMPLATE, title_text="The block pool after each step", height=110 + 250 * down, hovermode="closest")
        fig.update_xaxes(visible=False).update_yaxes(visible=False, autorange="reversed", scaleanchor=None)
        _legend(fig, np.concatenate(seen))
        return fig.update_layout(legend={"y": -0.02, "yanchor": "top"})


def _heat(z: npt.NDArray[Any], x: npt.NDArray[Any], y: npt.NDArray[Any], hover: str) -> go.Heatmap:
    """States as colours, without a scale between them."""
    num = len(COLORS)
    scale = [[edge / num, color] for i, color in enumerate(COLORS) for edge in (i, i + 1)]
    words = np.array([*STATES, ""], dtype=object)[np.where(np.isnan(z.astype(float)), num, z).astype(int)]
    return go.Heatmap(z=z, x=x, y=y, text=words, zmin=-0.5, zmax=num - 0.5, colorscale=scale, showscale=False, hovertemplate=hover)


def _legend(fig: go.Figure, states: npt.NDArray[np.uint8]) -> None:
    """A square for each state that is seen."""
    for code in np.unique(states):
        fig.add_scatter(x=[None], y=[None], mode="markers", name=STATES[int(code)],
                        marker={"symbol": "square", "size": 11, "color": COLORS[int(code)]})  # fmt: skip


def block_map(run: Run | Path | str, step: int = 0, color_by: str = "state") -> BlockMap:
    """The physical block pool of a run, step by step: a widget.

    A cell is a block: free, used by one block table, shared by several, cached (held by none, its content kept), kept free by the
    watermark; swap space, where there is any, is a second grid. The scrubber plays; pointing at a block tells owner, tokens, hash,
    references, age and history. Blocks that an eviction policy has pinned show as cached. All widgets of one run move together.

    Args:
        run: a run, or a run's folder, in any state, recorded with `record.blocks=true`; with `record.plans=true` also the tokens in
            each block and where copies came from. step: shown first. color_by: "state" or "owner".

    A run without block events, or one that can't be read, shows in words what is missing.

    Raises:
        UserError: `run` is neither a run nor a path, or `color_by` is unknown.
    """
    if color_by not in ("state", "owner"):
        raise UserError(f"color_by={color_by!r} is not known. Choose 'state' or 'owner'.")
    found, why = run_of(run)
    if found is None:
        return _words(why)
    events, broken = frame_of(found, "blocks")
    if events.empty:
        return _words(broken or no_events(found))
    steps, broken_steps = frame_of(found, "steps")
    num_steps = _num_steps(events, steps)
    sizes, block_size = tier_sizes(found, events, steps), _block_size(found)
    plans = read_plan_view(found.folder, block_size) if block_size else None
    log = block_log(events, sizes, num_steps, plans)
    watermark = by_step(steps, "watermark_blocks", num_steps).astype(np.uint32)
    arrays: Arrays = _step_arrays(steps, num_steps, watermark)
    for name, tier in log.tiers.items():
        arrays |= tier.arrays(f"{name}_")
    data, layout = pack(arrays)
    notes = [*log.notes, *filter(None, (broken, broken_steps, plans.note if plans else "")), *_notes(found, events, plans)]
    meta = {
        "title": f"Block pool of {found.name}", "num_steps": num_steps, "block_size": block_size, "requests": log.requests,
        "layout": layout, "tiers": _tiers(sizes, block_size, plans), "blocked": blocked_by(steps, num_steps), "notes": notes,
    }  # fmt: skip
    shown = max(0, min(step, num_steps - 1))
    return BlockMap(log, watermark, channel_of(found), meta=meta, data=data, step=shown, color_by=color_by)


def no_events(run: Run) -> str:
    """Why a run has no block events, and which settings that are off would record them."""
    plans = not is_recorded(run, "plans")
    more, example = (" (and record.plans=true for the tokens in each block)", ', "record.plans=true"') if plans else ("", "")
    return why_empty(run, "blocks", "This run recorded no block events, so there is no block to show.\n"
                     f"Record it again with record.blocks=true{more}, e.g. "
                     f'kvlab.run(kvlab.compose("record.blocks=true"{example})).')  # fmt: skip


def _words(why: str) -> BlockMap:
    """A map that shows in words why there is none."""
    return BlockMap(None, np.zeros(0, dtype=np.uint32), meta={"message": why})


def _num_steps(events: pd.DataFrame, steps: pd.DataFrame) -> int:
    """Recorded steps; where steps were not recorded, up to the last event."""
    return int(steps["step"].max()) + 1 if len(steps) else int(events["step"].max()) + 1


def tier_sizes(run: Run, events: pd.DataFrame, steps: pd.DataFrame) -> dict[str, int]:
    """Blocks of each tier: from the recorded steps, else the configuration, and at least as many as events name. The cpu tier: if any."""
    sizes = {}
    for tier, column, key in (("gpu", "kv_blocks_total", "num_blocks"), ("cpu", "cpu_blocks_total", "num_cpu_blocks")):
        told = run.config.get(key)
        known = int(steps[column].max()) if len(steps) else told if isinstance(told, int) else 0
        ids = events.loc[events["tier"] == tier, "block_id"]
        sizes[tier] = max(known, int(ids.max()) + 1 if len(ids) else 0)
    return sizes if sizes["cpu"] else {"gpu": max(1, sizes["gpu"])}


def _block_size(run: Run) -> int:
    """Tokens per block; 0 where the run does not say."""
    size = run.config.get("block_size")
    return size if isinstance(size, int) and size > 0 else 0


def _tiers(sizes: dict[str, int], block_size: int, plans: PlanView | None) -> list[dict[str, Any]]:
    of = f" of {block_size} tokens" if block_size else ""
    titles = {"gpu": f"{sizes['gpu']:,} blocks{of}", "cpu": f"swap space (cpu): {sizes.get('cpu', 0):,} blocks{of}"}
    moved = sources(plans)
    return [{"name": n, "title": titles[n], "num_blocks": num, "sources": list(moved.get(n, []))} for n, num in sizes.items()]


def by_step(steps: pd.DataFrame, column: str, num_steps: int, fill: float = 0) -> npt.NDArray[np.float64]:
    """A column of the recorded steps at its step's place, [S]; `fill` where a step or the column is missing."""
    out = np.full(num_steps, fill, dtype=np.float64)
    if len(steps) and column in steps:
        at = steps["step"].to_numpy()
        inside = (at >= 0) & (at < num_steps)
        out[at[inside]] = pd.to_numeric(steps[column], errors="coerce").fillna(fill).to_numpy(dtype=np.float64)[inside]
    return out


def _step_arrays(steps: pd.DataFrame, num_steps: int, watermark: npt.NDArray[np.uint32]) -> Arrays:
    """What the widget tells of each step; empty where steps were not recorded."""
    counts = {"running": "num_running_reqs", "waiting": "num_waiting_reqs", "swapped": "num_swapped_reqs"}
    some = num_steps if len(steps) else 0
    out: Arrays = {name: by_step(steps, column, some).astype(np.uint32) for name, column in counts.items()}
    out["end_s"] = by_step(steps, "end_s", some, np.nan)
    out["watermark"] = watermark
    return out


def blocked_by(steps: pd.DataFrame, num_steps: int) -> dict[str, str]:
    """Step -> why the first in line is out, where somebody is."""
    if not len(steps):
        return {}
    some = steps[steps["admission_blocked_by"].fillna("") != ""]
    return {str(s): str(why) for s, why in zip(some["step"], some["admission_blocked_by"], strict=True) if s < num_steps}


def _notes(run: Run, events: pd.DataFrame, plans: PlanView | None) -> list[str]:
    """What a reader should know about this picture."""
    notes = []
    if plans is None:
        notes.append("Tokens in each block were not recorded (record.plans=true).")
    if run.state != "finished":
        notes.append(f"This run is {run.state}: what it had recorded is shown.")
    if "parent" in events and events["parent"].isna().all():
        notes.append("Recorded by an older version: references that forks share are not counted.")
    return notes
