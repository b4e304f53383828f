"""Least time of decode attention over block size by the bytes it must read: a model, not a measurement."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pandas as pd

from kvlab.figures import FigureSpec

NUM_SEQS, NUM_KV_HEADS, NUM_QUERY_HEADS, HEAD_SIZE, ITEM_BYTES = 64, 8, 32, 128, 2
"""One layer of Llama 3 8B in bfloat16, 64 sequences."""
GB_PER_S = 4800.0
"""An H200's published memory bandwidth."""


def compute(point: Mapping[str, Any]) -> dict[str, Any]:
    """Bytes: K and V of the context (whole blocks: the last one's empty slots too, on average half a block, less half a token), block
    tables of 4 bytes an entry, queries and outputs. Time: bytes over bandwidth."""
    size, context = point["block_size"], point["context"]
    slots = context + ((size - 1) / 2 if point["reads"] == "whole_blocks" else 0)
    kv = NUM_SEQS * slots * 2 * NUM_KV_HEADS * HEAD_SIZE * ITEM_BYTES
    tables = NUM_SEQS * -(-context // size) * 4
    ends = NUM_SEQS * 2 * NUM_QUERY_HEADS * HEAD_SIZE * ITEM_BYTES
    return {"bytes": kv + tables + ends, "microseconds": (kv + tables + ends) / (GB_PER_S * 1e3)}


def draw(results: pd.DataFrame) -> Any:
    """Relative to the least of each context, so that both fit one panel."""
    from kvlab.figures.style import COLUMN_CM, axes, line

    fig, (panel,) = axes(COLUMN_CM, 7.0)
    names = {"tokens": "masked: tokens only", "whole_blocks": "unmasked: whole blocks"}
    number = 0
    for context, rows in results.groupby("context"):
        least = rows["microseconds"].min()
        for reads, label in names.items():
            part = rows[rows["reads"] == reads]
            panel.plot(part["block_size"], part["microseconds"] / least, **line(number), label=f"context {context:,}, {label}")
            number += 1
    panel.set_xscale("log", base=2)
    panel.set_xticks(sorted(results["block_size"].unique()), [str(n) for n in sorted(results["block_size"].unique())])
    panel.set_xlabel("block size (tokens)")
    panel.set_ylabel("least time / least over block sizes")
    panel.set_ylim(0.97, 1.4)
    panel.legend(loc="upper left", title="MODEL of bytes read (H200), not measured", title_fontsize=7, alignment="left")
    return fig


def table(results: pd.DataFrame) -> pd.DataFrame:
    """Microseconds by context, reading and block size."""
    wide = results.pivot(index=["context", "reads"], columns="block_size", values="microseconds")
    return pd.DataFrame([
        {"context": context, "reads": str(reads).replace("_", " "), **{str(size): f"{value:.1f}" for size, value in row.items()}}
        for (context, reads), row in wide.iterrows()
    ])  # fmt: skip


FIGURE = FigureSpec(
    number="F6", title="Kernel latency over block size: what the bytes allow (model)", compute=compute, draw=draw, table=table
)
