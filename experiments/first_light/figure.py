"""Draws figure.png from the run's frames, `steps.parquet` and `requests.parquet` beside this file.

    python experiments/first_light/figure.py            # from the committed frames
    python experiments/first_light/figure.py --run      # decode again first (about a minute on two cores)

Drawing needs the package kaleido and a Chromium (BROWSER_PATH names it).
"""

from __future__ import annotations

import sys
from pathlib import Path

import pandas as pd
from plotly.subplots import make_subplots

import kvlab
from kvlab.analysis import plots

HERE = Path(__file__).parent
OVERRIDES = ["+policy=lru", "workload.limit=null", "kv_cache_tokens=1152", "watermark=0.05", "workload.concurrency=12"]


def decode() -> None:
    """The real run behind the figure."""
    run = kvlab.run(kvlab.compose(*OVERRIDES))
    run.steps().to_parquet(HERE / "steps.parquet")
    run.requests().drop(columns=["outputs", "texts"], errors="ignore").to_parquet(HERE / "requests.parquet")


def draw() -> None:
    """Memory bands above the requests' timeline, on one time axis."""
    steps, requests = pd.read_parquet(HERE / "steps.parquet"), pd.read_parquet(HERE / "requests.parquet")
    upper, lower = plots.memory_bands(steps), plots.timeline(requests)
    fig = make_subplots(rows=2, cols=1, shared_xaxes=True, vertical_spacing=0.06, row_heights=[0.42, 0.58])
    for row, part in ((1, upper), (2, lower)):
        for trace in part.data:
            fig.add_trace(trace, row=row, col=1)
    fig.update_layout(template=upper.layout.template, barmode="overlay", width=1100, height=760, margin={"t": 30, "b": 60})
    fig.update_yaxes(title_text=upper.layout.yaxis.title.text, row=1, col=1)
    fig.update_yaxes(title_text="requests, first arrival on top", showticklabels=False, ticks="", autorange="reversed", row=2, col=1)
    fig.update_xaxes(title_text="time (s)", row=2, col=1)
    fig.write_image(HERE / "figure.png", scale=1.5)


if __name__ == "__main__":
    if "--run" in sys.argv:
        decode()
    draw()
