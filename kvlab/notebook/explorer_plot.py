"""The explorer's picture: four panels whose traces are made once and then only change, so that nothing flickers.

Pool over time, output tokens a second, time to the first token and time between tokens as cumulative shares of requests and tokens.
The run of the moment is drawn full, pinned ones as thin lines behind it. `save_figure` writes it to a file.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
import plotly.graph_objects as go
from plotly.subplots import make_subplots

from kvlab.analysis.export import written
from kvlab.analysis.template import BLACK, BLUE, GREEN, INK, ORANGE, PURPLE, SKY, TEMPLATE, VERMILLION, YELLOW, need
from kvlab.types import UserError

MAX_PINS = 5
PIN_COLORS = (ORANGE, GREEN, PURPLE, BLACK, YELLOW)
HEIGHT = 560
NUM_POINTS = 400
NUM_BINS = 60
SHARES = np.linspace(0, 100, 101)

STEP_COLUMNS = ("now_s", "end_s", "kv_blocks_total", "kv_blocks_used", "kv_blocks_evictable", "watermark_blocks", "num_output_tokens")

_PANELS = ("KV pool", "Output tokens", "Time to first token", "Time between tokens")


class Curves(NamedTuple):
    """What is drawn of a run. Times in seconds from its first step; pool shares in percent of the blocks; latencies in milliseconds.

    `used`, `cached`, `limit` (what the watermark leaves to admission) over `time`; `rate` (tokens/s) between `edges`;
    `ttft` and `itl` at the shares `SHARES`, empty where nothing is known.
    """

    time: np.ndarray
    used: np.ndarray
    cached: np.ndarray
    limit: np.ndarray
    edges: np.ndarray
    rate: np.ndarray
    ttft: np.ndarray
    itl: np.ndarray


NOTHING = Curves._make([np.empty(0)] * 8)


def curves(steps: pd.DataFrame, requests: pd.DataFrame) -> Curves:
    """Of a run's frames. UserError: a column is missing (a run of an older version, or not a frame of steps)."""
    need(steps, STEP_COLUMNS, "a frame of steps (run.steps())")
    need(requests, ["arrival_s", "token_times_s"], "a frame of requests (run.requests())")
    return curves_of(steps[list(STEP_COLUMNS)].to_numpy(np.float64), requests["arrival_s"].tolist(), requests["token_times_s"].tolist())


def curves_of(steps: np.ndarray, arrivals_s: Sequence[float], token_times_s: Sequence[Sequence[float]]) -> Curves:
    """Of rows of `STEP_COLUMNS`, and of each request's arrival and token times."""
    if not len(steps):
        return NOTHING
    start, end, total, used, cached, kept, tokens = steps.T
    start, end = start - start[0], end - steps[0, 0]
    shown = _thinned(used)
    share = 100.0 / np.maximum(total, 1)  # no pool: nothing in it
    time = np.stack([start[shown], end[shown]], axis=1).ravel()
    edges = np.linspace(0, max(end[-1], 1e-9), min(NUM_BINS, len(steps)) + 1)
    done = np.concatenate([[0.0], np.cumsum(tokens)])
    rate = np.diff(np.interp(edges, np.concatenate([[0.0], end]), done)) / np.diff(edges)
    times = [np.asarray(t, dtype=np.float64) for t in token_times_s]
    ttft = np.array([1e3 * (t[0] - arrival) for t, arrival in zip(times, arrivals_s, strict=True) if len(t)])
    itl = 1e3 * np.concatenate([np.diff(t) for t in times]) if times else np.empty(0)
    bands = [np.repeat((part * share)[shown], 2) for part in (used, cached, total - kept)]
    return Curves(time, bands[0], bands[1], bands[2], edges, np.append(rate, rate[-1]), _quantiles(ttft), _quantiles(itl))


def _thinned(peak: np.ndarray) -> np.ndarray:
    """Places of at most NUM_POINTS steps: the fullest of each stretch, so that peaks stay."""
    if len(peak) <= NUM_POINTS:
        return np.arange(len(peak))
    edges = np.arange(NUM_POINTS) * len(peak) // NUM_POINTS
    return np.array([lo + int(np.argmax(peak[lo:hi])) for lo, hi in zip(edges, [*edges[1:], len(peak)], strict=True)])


def _quantiles(values: np.ndarray) -> np.ndarray:
    return np.percentile(values, SHARES) if len(values) else np.empty(0)


def empty_figure() -> go.Figure:
    """All traces, without data; `trace_updates` fills them."""
    fig = make_subplots(rows=2, cols=2, subplot_titles=_PANELS, horizontal_spacing=0.1, vertical_spacing=0.18)
    fig.update_layout(template=TEMPLATE, height=HEIGHT, hovermode="closest", margin={"l": 64, "r": 16, "t": 84, "b": 48},
                      legend={"y": 1.09}, uirevision="explorer", font={"size": 12})  # fmt: skip
    line = {"shape": "hv"}
    fig.add_scatter(row=1, col=1, name="used", stackgroup="pool", mode="lines", line={**line, "width": 0.5, "color": BLUE}, fillcolor=BLUE,
                    hovertemplate="%{y:.1f} % used<extra></extra>")  # fmt: skip
    fig.add_scatter(row=1, col=1, name="cached (evictable)", stackgroup="pool", mode="lines", line={**line, "width": 0.5, "color": SKY},
                    fillcolor=SKY, hovertemplate="%{y:.1f} % cached<extra></extra>")  # fmt: skip
    fig.add_scatter(row=1, col=1, name="watermark", mode="lines", line={"width": 2, "color": VERMILLION, "dash": "dash"},
                    hovertemplate="admission may fill %{y:.1f} %<extra></extra>")  # fmt: skip
    _add_lines(fig, "this run", BLUE, 2.5, first=True)
    for color in PIN_COLORS:
        _add_lines(fig, "", color, 1.5, first=False)
    fig.update_xaxes(title_text="time (s)", row=1)
    fig.update_yaxes(title_text="share of the pool (%)", range=[0, 101], row=1, col=1)
    fig.update_yaxes(title_text="tokens/s", rangemode="tozero", row=1, col=2)
    fig.update_xaxes(title_text="ms", type="log", row=2)
    fig.update_yaxes(title_text="requests (%)", range=[0, 101], row=2, col=1)
    fig.update_yaxes(title_text="tokens (%)", range=[0, 101], row=2, col=2)
    fig.update_annotations(font={"size": 13, "color": INK})
    return fig


def _add_lines(fig: go.Figure, name: str, color: str, width: float, first: bool) -> None:
    """The four lines of a run: a pinned one's pool, then rate, TTFT and ITL for all."""
    style = {"width": width, "color": color}
    group = {"legendgroup": name or color, "name": name, "mode": "lines", "visible": first}
    if not first:
        fig.add_scatter(row=1, col=1, line={"width": 1, "color": color, "shape": "hv"}, showlegend=False, **group,
                        hovertemplate="%{y:.1f} % used<extra>%{fullData.name}</extra>")  # fmt: skip
    fig.add_scatter(row=1, col=2, line={**style, "shape": "hv"}, showlegend=True, **group,
                    hovertemplate="%{y:,.0f} tokens/s<extra>%{fullData.name}</extra>")  # fmt: skip
    for col in (1, 2):
        fig.add_scatter(row=2, col=col, y=SHARES, line=style, showlegend=False, **group,
                        hovertemplate="%{y:.0f} % within %{x:,.1f} ms<extra>%{fullData.name}</extra>")  # fmt: skip


class Drawing:
    """A figure made by `empty_figure`, filled in place with one message a change."""

    def __init__(self, fig: Any) -> None:
        self.fig = fig
        self._data, self._pinned = NOTHING, list[Curves]()

    def show(self, data: Curves, label: str) -> None:
        """The run of the moment."""
        names = [trace.name for trace in self.fig.data[:3]]
        pool = [{"x": data.time, "y": y, "name": name} for y, name in zip((data.used, data.cached, data.limit), names, strict=True)]
        self._data = data
        redraw(self.fig, dict(enumerate([*pool, *_lines(data, label)])), self._ticks())

    def pin(self, runs: Sequence[tuple[str, Curves]]) -> None:
        """The runs that stay, and no others: (label, curves), at most MAX_PINS."""
        nothing = [("", NOTHING)] * (MAX_PINS - len(runs))
        edits = []
        for label, data in [*runs, *nothing]:
            used = {"x": data.time, "y": data.used, "name": label}
            edits += [{**edit, "visible": bool(label)} for edit in (used, *_lines(data, label))]
        self._pinned = [data for _, data in runs]
        redraw(self.fig, dict(enumerate(edits, start=6)), self._ticks())

    def _ticks(self) -> dict[str, Any]:
        """Labels of the two latency axes."""
        shown = [self._data, *self._pinned]
        axes = {"xaxis3": [data.ttft for data in shown], "xaxis4": [data.itl for data in shown]}
        return {f"{axis}.{key}": value for axis, values in axes.items() for key, value in log_ticks(np.concatenate(values)).items()}


def log_ticks(values: np.ndarray) -> dict[str, list[Any]]:
    """Round numbers for a logarithmic axis over these values, written out, and no more than fit beside each other."""
    known = values[values > 0]
    if not len(known):
        return {"tickvals": [1, 10, 100, 1000], "ticktext": ["1", "10", "100", "1000"]}
    low, high = np.log10(known.min()), np.log10(known.max())
    of_decade = (1, 2, 5) if high - low < 2.2 else (1, 3) if high - low < 3.5 else (1,)
    numbers = [k * 10.0**e for e in range(int(np.floor(low)), int(np.ceil(high)) + 1) for k in of_decade]
    return {"tickvals": numbers, "ticktext": [f"{number:,.12g}" for number in numbers]}


def _lines(data: Curves, label: str) -> list[dict[str, Any]]:
    """Rate, TTFT and ITL of a run."""
    shares = [{"x": x, "y": SHARES[: len(x)], "name": label} for x in (data.ttft, data.itl)]
    return [{"x": data.edges, "y": data.rate, "name": label}, *shares]


def redraw(fig: Any, edits: dict[int, dict[str, Any]], layout: dict[str, Any] | None = None) -> None:
    """Change traces (place -> properties) and layout in one message.

    Every trace is told the same properties: in plotly 7's `batch_update` a property that only some of the traces change is lost in the
    page for the others.
    """
    names = list(next(iter(edits.values())))
    if any(list(edit) != names for edit in edits.values()):
        raise ValueError(f"every trace needs a value for each of {names}")
    fig.plotly_update({name: [edit[name] for edit in edits.values()] for name in names}, layout or {}, list(edits))


def save_figure(fig: go.Figure, path: Path) -> Path:
    """Write a figure as its name's ending says; its folder is made if it isn't there.

    Raises:
        UserError: an unknown ending, no kaleido or browser for a picture, or a folder that can't be written.
    """
    kind = path.suffix.lower().lstrip(".")
    if kind == "html":
        data = fig.to_html(include_plotlyjs=True).encode()
    elif kind == "json":
        data = fig.to_json().encode()
    elif kind in ("svg", "pdf", "png"):
        try:
            data = fig.to_image(kind)
        except Exception as error:  # plotly raises ValueError without kaleido, kaleido many kinds without a browser
            first = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
            raise UserError(f"{path} can't be drawn ({first}): install kaleido and chromium, or save as .html.") from error
    else:
        raise UserError(f"{path}: figures are saved as .html, .json, .svg, .pdf or .png.")
    return written(path, data, "Give another path: save(path).")
