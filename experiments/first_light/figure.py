"""One real run of SmolLM2: the pool's blocks over time above the life of each request."""

from __future__ import annotations

from typing import Any

import pandas as pd

from kvlab.figures import FigureSpec

STATES = ("queue", "prefill", "decode", "preempted", "swapped")
BANDS = ("kv_blocks_used", "kv_blocks_evictable", "kv_blocks_free")


def measure(run: Any) -> pd.DataFrame:
    """Rows of two kinds. step: the pool after a step, at its end. span: a stretch of a request's life, in order of arrival."""
    steps = run.steps()[["step", "end_s", "kv_blocks_total", "watermark_blocks", "num_preemptions", *BANDS]].assign(kind="step")
    requests = run.requests().sort_values(["arrival_s", "first_scheduled_s", "request_id"], ignore_index=True)
    spans = [
        {"kind": "span", "request_id": row.request_id, "state": state, "start_s": start, "end_s": end}
        for row in requests.itertuples(index=False)
        for state, start, end in zip(row.span_states, row.span_starts_s, row.span_ends_s, strict=True)
    ]
    return pd.concat([steps, pd.DataFrame(spans)], ignore_index=True)


def draw(results: pd.DataFrame) -> Any:
    """Bands of blocks above, requests below, on one time axis."""
    from kvlab.figures.style import BLACK, BLUE, LIGHT, ORANGE, PAGE_CM, SKY, VERMILLION, axes

    steps, spans = results[results["kind"] == "step"], results[results["kind"] == "span"]
    fig, (pool, lives) = axes(PAGE_CM, 13.0, 2, 1, sharex=True, height_ratios=(0.42, 0.58))
    bands = [steps[name].to_numpy(dtype=float) for name in BANDS]
    names = ("held by requests", "cached, evictable", "free")
    pool.stackplot(steps["end_s"], *bands, step="post", colors=(BLUE, SKY, LIGHT), labels=names, linewidth=0)
    reserve = steps["kv_blocks_total"] - steps["watermark_blocks"]
    pool.plot(steps["end_s"], reserve, color=BLACK, linestyle="--", linewidth=0.8, label="watermark: admission leaves the rest free")
    pool.set_ylabel("KV blocks")
    pool.set_ylim(0, steps["kv_blocks_total"].max())
    looks = {"queue": (LIGHT, ""), "prefill": (ORANGE, ""), "decode": (BLUE, ""), "preempted": ("white", "//////"),
             "swapped": (VERMILLION, "")}  # fmt: skip
    place = {request: number for number, request in enumerate(spans["request_id"].unique())}
    for state in STATES:
        part = spans[spans["state"] == state]
        if len(part):
            color, hatch = looks[state]
            edge = {"edgecolor": BLACK, "linewidth": 0.3, "hatch": hatch} if hatch else {"linewidth": 0}
            lives.barh(part["request_id"].map(place), part["end_s"] - part["start_s"], left=part["start_s"], height=0.8, color=color,
                       label=state, **edge)  # fmt: skip
    lives.set_ylim(len(place) - 0.5, -0.5)
    lives.set_yticks([])
    lives.set_ylabel("requests, first arrival on top")
    lives.set_xlabel("time (s, two CPU cores)")
    lives.set_xlim(0, results["end_s"].max())
    for panel, columns in ((pool, 4), (lives, 5)):
        panel.grid(visible=False)
        panel.legend(loc="lower left", bbox_to_anchor=(0.0, 1.0), borderaxespad=0.2, ncols=columns)
    return fig


FIGURE = FigureSpec(
    number="F0",
    title="First light: one real run's pool and requests over time",
    measure=measure,
    draw=draw,
    measured=("end_s", "start_s"),
    png=True,
)
