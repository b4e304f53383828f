"""What SmolLM2 loses of a text when old tokens are given up: the latest 256 kept, or the first few and the latest, against all."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

import pandas as pd

from kvlab.figures import FigureSpec

TEXTS = Path(__file__).parent / "texts"
NUM_TOKENS, SECTION, NUM_SEEN, BLOCK_SIZE = 2048, 128, 256, 16
"""Tokens read of each text; tokens whose losses are one mean; tokens that a query sees, sinks and itself included; of the cache."""
TITLES = {"alice": "(a) Alice in Wonderland", "as_you_like_it": "(b) As You Like It", "paradise_lost": "(c) Paradise Lost"}
NAMES = {"window": f"window: {NUM_SEEN} latest", **{f"streaming_{n}": f"streaming: {n} first, {NUM_SEEN - n} latest" for n in (1, 4, 16)}}


@lru_cache(maxsize=1)
def model() -> Any:
    """float64: what another machine rounds otherwise is far below the digits kept."""
    from kvlab.model import load_model, smollm2

    return load_model(smollm2(), "float64", "cpu")


def policy(name: str) -> Any:
    """A compression policy of kvlab: "full", "window", "streaming_SINKS"."""
    from kvlab.policies.compression import Full, Streaming, Window

    if name == "full":
        return Full()
    num_sinks = int(name.partition("_")[2] or 0)
    return Streaming(num_sinks, NUM_SEEN - num_sinks) if num_sinks else Window(NUM_SEEN)


def compute(point: Mapping[str, Any]) -> dict[str, Any]:
    """Mean loss (nats) of the next token over each section of a text, teacher-forced, read in chunks of a section through a paged cache
    under the policy's mask. `section_128`: predictions of the tokens at positions 129 to 256."""
    import torch

    from kvlab.cache.tensors import KVTensors
    from kvlab.kernels.interface import AttentionMetadata
    from kvlab.kernels.torch_backend import TorchBackend

    loaded, compression = model(), policy(point["compression"])
    text = (TEXTS / f"{point['text']}.txt").read_text(encoding="utf-8")
    ids = loaded.tokenizer.encode(text)[: NUM_TOKENS + 1]
    shape, num_blocks = loaded.config, NUM_TOKENS // BLOCK_SIZE
    kv = KVTensors(shape.num_layers, num_blocks, BLOCK_SIZE, shape.num_kv_heads, shape.head_dim, torch.float64)
    row: dict[str, Any] = {"text_sha256": hashlib.sha256(text.encode()).hexdigest()[:16]}
    for start in range(0, NUM_TOKENS, SECTION):
        positions, end = torch.arange(start, start + SECTION), start + SECTION
        meta = AttentionMetadata(positions, torch.arange(num_blocks)[None], torch.tensor([end]), [end], [SECTION], 0, BLOCK_SIZE,
                                 compression.attention_window, compression.num_sink_tokens)  # fmt: skip
        hidden = loaded.model.forward(torch.tensor(ids[start:end]), positions, kv, meta, TorchBackend())
        logprobs = loaded.model.logits(hidden).double().log_softmax(-1)
        row[f"section_{start}"] = round(-float(logprobs.gather(1, torch.tensor(ids[start + 1 : end + 1])[:, None]).mean()), 6)
    return row


def losses(results: pd.DataFrame) -> pd.DataFrame:
    """By (text, compression): a column each section, named by its first position."""
    found = results.set_index(["text", "compression"]).filter(regex="^section_")
    return found.rename(columns=lambda name: int(name.removeprefix("section_")))


def draw(results: pd.DataFrame) -> Any:
    """A panel each text: what a policy loses, whatever passages are easy or hard."""
    from kvlab.figures.style import BLACK, PAGE_CM, axes, legend_above, line

    found = losses(results)
    fig, panels = axes(PAGE_CM, 6.5, 1, 3, sharey=True)
    for panel, (text, title) in zip(panels, TITLES.items(), strict=True):
        for number, (name, label) in enumerate(NAMES.items()):
            above = found.loc[(text, name)] - found.loc[(text, "full")]
            panel.plot(above.index + SECTION / 2, above, **line(number, linewidth=0.9), label=label)
        panel.axhline(0, color=BLACK, linewidth=0.8)
        panel.axvline(NUM_SEEN, color=BLACK, linewidth=0.6, linestyle=(0, (1, 2)))
        panel.set(title=title, xlabel="position in the text (tokens)", xticks=range(0, NUM_TOKENS + 1, 512), ylim=(-0.25, 2.0))
        panel.xaxis.set_major_formatter("{x:,.0f}")
    panels[0].set_ylabel(f"loss above that with all tokens\nkept (nats), mean over {SECTION} tokens")
    panels[0].annotate("first tokens leave\nthe window", (NUM_SEEN, 1.9), (NUM_SEEN + 60, 1.9), fontsize=6.5, va="top")
    legend_above(fig, 2, panels[0].get_legend_handles_labels()[0])
    return fig


def table(results: pd.DataFrame) -> pd.DataFrame:
    """Mean loss after the first 512 tokens, and what it is more than with all tokens kept."""
    late = losses(results).loc[:, 2 * NUM_SEEN :].mean(axis=1)
    rows = [(text, name, late[text, name]) for text in TITLES for name in ("full", *NAMES)]
    return pd.DataFrame([{"text": text.replace("_", " "), "compression": name.replace("_", ", sinks "), "loss (nats)": f"{loss:.3f}",
                          "above full": f"{loss - late[text, 'full']:+.3f}"} for text, name, loss in rows])  # fmt: skip


FIGURE = FigureSpec(number="F13", title="Loss over the position in a text: window against sinks", compute=compute, draw=draw, table=table)
