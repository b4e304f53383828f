"""Block size against hit rate, fragmentation and step time, in real decoding of SmolLM2 on a CPU."""

from __future__ import annotations

from typing import Any

import pandas as pd

from kvlab.figures import FigureSpec


def measure(run: Any) -> dict[str, Any]:
    """Decisions: prompt tokens found, shareable ones lost to whole blocks, empty slots a step. Clock: median decode step."""
    steps, requests = run.steps(), run.requests()
    decoding = steps[(steps["num_prompt_tokens_computed"] == 0) & (steps["num_decode_seqs"] == steps["num_decode_seqs"].max())]
    return {
        "num_prompt_tokens": int(requests["num_prompt_tokens"].sum()), "prefix_cache_hits": int(steps["prefix_cache_hits"].sum()),
        "num_shareable_tokens_lost": int(requests["num_shareable_tokens_lost"].sum()), "num_steps": len(steps),
        "fragmentation_tokens": float(steps["internal_fragmentation_tokens"].mean()),
        "ctx_tokens": float(steps["num_ctx_tokens"].mean()), "decode_step_ms": float(decoding["execute_ms"].median()),
    }  # fmt: skip


def medians(results: pd.DataFrame) -> pd.DataFrame:
    """By block size: rates (%), and the step's time relative to that of 16 tokens in the same repetition, with its range."""
    base = results[results["block_size"] == 16].set_index("seed")["decode_step_ms"]
    rows = results.assign(
        hit=100 * results["prefix_cache_hits"] / results["num_prompt_tokens"],
        lost=100 * results["num_shareable_tokens_lost"] / results["num_prompt_tokens"],
        empty=100 * results["fragmentation_tokens"] / (results["fragmentation_tokens"] + results["ctx_tokens"]),
        step=results["decode_step_ms"] / results["seed"].map(base),
    )
    groups = rows.groupby("block_size")
    out = groups[["hit", "lost", "empty", "step", "decode_step_ms"]].median()
    return out.assign(step_low=groups["step"].min(), step_high=groups["step"].max())


def draw(results: pd.DataFrame) -> Any:
    """Three panels."""
    from kvlab.figures.style import PAGE_CM, axes, line

    found = medians(results)
    fig, panels = axes(PAGE_CM, 6.2, 1, 3)
    panels[0].plot(found.index, found["hit"], **line(0), label="found in the cache")
    panels[0].plot(found.index, found["lost"], **line(1), label="shareable, lost")
    panels[0].set_ylabel("prompt tokens (%)")
    panels[0].set_title("(a) prefix cache")
    panels[0].set_ylim(0, 100)
    panels[0].legend(loc="upper right")
    panels[1].plot(found.index, found["empty"], **line(3))
    panels[1].set_ylabel("empty slots (% of those in use)")
    panels[1].set_title("(b) internal fragmentation")
    panels[1].set_ylim(bottom=0)
    spread = [found["step"] - found["step_low"], found["step_high"] - found["step"]]
    panels[2].errorbar(found.index, found["step"], yerr=spread, **line(2))
    panels[2].set_ylabel("decode step / that of 16 tokens")
    panels[2].set_title("(c) step time, CPU (measured)")
    panels[2].set_ylim(bottom=0)
    for panel in panels:
        panel.set_xscale("log", base=2)
        panel.set_xticks(list(found.index), [str(n) for n in found.index])
        panel.set_xlabel("block size (tokens)")
    return fig


def table(results: pd.DataFrame) -> pd.DataFrame:
    """Medians of the repetitions."""
    return pd.DataFrame([
        {"block size": size, "found (% of prompt tokens)": round(row["hit"], 1), "shareable, lost (%)": round(row["lost"], 1),
         "empty slots (%)": round(row["empty"], 1), "decode step / that of 16 (range)":
         f"{row['step']:.2f} ({row['step_low']:.2f}-{row['step_high']:.2f})"}
        for size, row in medians(results).iterrows()
    ])  # fmt: skip


FIGURE = FigureSpec(
    number="F5",
    title="Block size against hit rate, fragmentation and step time, real decoding",
    measure=measure,
    draw=draw,
    table=table,
    measured=("decode_step_ms",),
)
