"""Would fp8 lose less with calibrated scales? Kinds of scales beside each other, without a kernel or a cache for them.

    python experiments/kv_dtype_quality/fp8_scales.py --prompts 4 --tokens 160 --chunk 80     # writes fp8_scales.csv

K and V are rounded to what fp8 (or int8) would hold and stored in float32. Columns as in `measure.py`; `scales`: "one", 1 everywhere;
"layer" and "head", the largest number of K (of V) of a layer, or of each of its heads, over two other texts, as 448; "head, 64", the same
as 64, which leaves room and so fewer small numbers; "token", of each token and head itself, as int8 has them (and as many bytes).
"""

from __future__ import annotations

import argparse
import math

import pandas as pd
import torch
from measure import STORED, log_probabilities, tabulate, texts

from kvlab.kernels.interface import AttentionMetadata, LayerCache
from kvlab.kernels.quantize import FP8_MAX, dequantize, quantize_fp8, quantize_int8
from kvlab.kernels.torch_backend import TorchBackend
from kvlab.model.loading import LoadedModel

NUM_CALIBRATION = 2
LARGEST = {"layer": FP8_MAX, "head": FP8_MAX, "head, 64": 64.0}
SCALES = ("one", *LARGEST, "token", "int8")


class Rounding(TorchBackend):
    """Writes K and V as 8-bit numbers would hold them. `most_LXK`: largest numbers by layer, K or V, head. `scales` "": notes them."""

    def __init__(self, scales: str, most_LXK: torch.Tensor) -> None:
        super().__init__()
        self.scales, self.most_LXK, self._layer = scales, most_LXK, 0

    def write_kv(self, k_TKD: torch.Tensor, v_TKD: torch.Tensor, cache: LayerCache, meta: AttentionMetadata) -> None:
        """Layers come in order."""
        k, v = (self._rounded(x, self.most_LXK[self._layer, which]) for which, x in enumerate((k_TKD, v_TKD)))
        self._layer = (self._layer + 1) % len(self.most_LXK)
        super().write_kv(k, v, cache, meta)

    def _rounded(self, x_TKD: torch.Tensor, most_K: torch.Tensor) -> torch.Tensor:
        if not self.scales:
            torch.maximum(most_K, x_TKD.abs().amax((0, 2)), out=most_K)
            return x_TKD
        if self.scales == "int8":
            return dequantize(*quantize_int8(x_TKD), torch.float32)
        scale = torch.ones(())
        if self.scales == "token":
            scale = x_TKD.abs().amax(-1, keepdim=True) / FP8_MAX
        elif self.scales in LARGEST:
            most = most_K.max().expand_as(most_K) if self.scales == "layer" else most_K
            scale = (most / LARGEST[self.scales])[:, None]
        return quantize_fp8(x_TKD / scale, None).float() * scale


def measure(loaded: LoadedModel, prompts: list[list[int]], calibration: list[list[int]], chunk: int) -> pd.DataFrame:
    """A row a kind of scales."""
    most_LXK = torch.zeros(loaded.config.num_layers, 2, loaded.config.num_kv_heads)
    for ids in calibration:
        log_probabilities(loaded, ids, chunk, *STORED["fp32"], Rounding("", most_LXK))
    rows = []
    for ids in prompts:
        targets = torch.tensor(ids[1:])[:, None]
        reference = log_probabilities(loaded, ids, chunk, *STORED["fp32"])[:-1]
        for scales in SCALES:
            found = log_probabilities(loaded, ids, chunk, *STORED["fp32"], Rounding(scales, most_LXK))[:-1]
            frame = pd.DataFrame({
                "kl": (reference.exp() * (reference - found)).sum(-1), "more_nll": (reference - found).gather(1, targets)[:, 0],
                "same": found.argmax(-1) == reference.argmax(-1),
            })  # fmt: skip
            rows.append(frame.assign(scales=scales))
    by = pd.concat(rows).groupby("scales", sort=False)
    return by.agg(mean_kl=("kl", "mean"), max_kl=("kl", "max"), perplexity_change=("more_nll", lambda x: math.expm1(x.mean())),
                  top1_agreement=("same", "mean"), positions=("kl", "size")).reset_index()  # fmt: skip


def _table(loaded: LoadedModel, args: argparse.Namespace) -> pd.DataFrame:
    all_texts = texts(loaded, args.prompts + NUM_CALIBRATION, args.tokens)
    return measure(loaded, all_texts[: args.prompts], all_texts[args.prompts :], args.chunk)


if __name__ == "__main__":
    tabulate(__doc__, _table, "fp8_scales.csv", prompts=4, tokens=160, chunk=80)
