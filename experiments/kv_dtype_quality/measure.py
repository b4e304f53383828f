"""What storing K and V in fewer bits costs SmolLM2: teacher-forced over real prompts, against float32 storage.

    python experiments/kv_dtype_quality/measure.py                      # writes kv_dtype_quality.csv beside this file
    python experiments/kv_dtype_quality/measure.py --prompts 4 --tokens 64 --out /tmp/quality.csv

Each text is read in chunks through the paged cache, so that later chunks attend to K and V as they were stored (a chunk's own tokens too:
attention always reads the cache). The model computes in float32; only the storage differs.

Columns: bytes_per_token of K and V over all layers; mean_kl and max_kl, KL(float32 || stored) in nats of the next token's distribution;
perplexity of the text and its change; top1_agreement, share of positions whose likeliest token is float32's.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable
from pathlib import Path

import pandas as pd
import torch

from kvlab.cache.tensors import KVTensors, Scales
from kvlab.kernels.interface import AttentionMetadata
from kvlab.kernels.quantize import FP8
from kvlab.kernels.torch_backend import TorchBackend
from kvlab.model import load_model, smollm2
from kvlab.model.loading import LoadedModel
from kvlab.types import UserError

HERE = Path(__file__).parent
BLOCK_SIZE = 16
STORED: dict[str, tuple[torch.dtype, tuple[Scales, Scales]]] = {
    "fp32": (torch.float32, (1.0, 1.0)), "fp16": (torch.float16, (1.0, 1.0)), "bf16": (torch.bfloat16, (1.0, 1.0)),
    "fp8": (FP8, (1.0, 1.0)), "int8": (torch.int8, (1.0, 1.0)),
}  # fmt: skip


def texts(loaded: LoadedModel, count: int, num_tokens: int) -> list[list[int]]:
    """Token ids of the project's own documents and module texts: English prose and code. UserError: too few that are long enough."""
    root = HERE.parents[1]
    files = [root / "README.md", *sorted((root / "experiments").glob("*/README.md")), *sorted((root / "kvlab" / "engine").glob("*.py"))]
    assert loaded.tokenizer is not None
    found = [loaded.tokenizer.encode(file.read_text(encoding="utf-8"))[:num_tokens] for file in files]
    long_enough = [ids for ids in found if len(ids) == num_tokens]
    if len(long_enough) < count:
        raise UserError(f"--prompts {count} --tokens {num_tokens} is not allowed: {len(long_enough)} texts are that long.")
    return long_enough[:count]


def log_probabilities(loaded: LoadedModel, ids: list[int], chunk: int, dtype: torch.dtype, scales: tuple[Scales, Scales],
                      backend: TorchBackend | None = None) -> torch.Tensor:  # fmt: skip
    """Log-probabilities of every next token, float64 [tokens, V]. `backend`: one that does something to K and V (None: torch's)."""
    shape, backend = loaded.config, backend or TorchBackend()
    num_blocks = -(-len(ids) // BLOCK_SIZE)
    kv = KVTensors(shape.num_layers, num_blocks, BLOCK_SIZE, shape.num_kv_heads, shape.head_dim, dtype, scales=scales)
    rows = []
    for start in range(0, len(ids), chunk):
        end = min(start + chunk, len(ids))
        positions = torch.arange(start, end)
        meta = AttentionMetadata(positions, torch.arange(num_blocks)[None], torch.tensor([end]), [end], [end - start],
                                 int(end - start == 1), BLOCK_SIZE)  # fmt: skip
        hidden = loaded.model.forward(torch.tensor(ids[start:end]), positions, kv, meta, backend)
        rows.append(loaded.model.logits(hidden).double().log_softmax(-1))
    return torch.cat(rows)


def measure(loaded: LoadedModel, prompts: list[list[int]], chunk: int) -> pd.DataFrame:
    """A row a storage dtype."""
    shape = loaded.config
    sums = {name: {"kl": 0.0, "max_kl": 0.0, "nll": 0.0, "same": 0.0} for name in STORED}
    num_positions = sum(len(ids) - 1 for ids in prompts)
    for ids in prompts:
        targets = torch.tensor(ids[1:])[:, None]
        reference = log_probabilities(loaded, ids, chunk, *STORED["fp32"])[:-1]
        for name, (dtype, scales) in STORED.items():
            found = reference if name == "fp32" else log_probabilities(loaded, ids, chunk, dtype, scales)[:-1]
            kl = (reference.exp() * (reference - found)).sum(-1)
            sums[name]["kl"] += float(kl.sum())
            sums[name]["max_kl"] = max(sums[name]["max_kl"], float(kl.max()))
            sums[name]["nll"] -= float(found.gather(1, targets).sum())
            sums[name]["same"] += float((found.argmax(-1) == reference.argmax(-1)).sum())
    base = math.exp(sums["fp32"]["nll"] / num_positions)
    out = []
    for name, (dtype, _) in STORED.items():
        perplexity = math.exp(sums[name]["nll"] / num_positions)
        out.append({
            "kv_dtype": name, "bytes_per_token": KVTensors.bytes_per_block(shape.num_layers, 1, shape.num_kv_heads, shape.head_dim, dtype),
            "mean_kl": sums[name]["kl"] / num_positions, "max_kl": sums[name]["max_kl"], "perplexity": perplexity,
            "perplexity_change": perplexity / base - 1, "top1_agreement": sums[name]["same"] / num_positions, "positions": num_positions,
        })  # fmt: skip
    return pd.DataFrame(out)


def tabulate(doc: str | None, table_of: Callable[[LoadedModel, argparse.Namespace], pd.DataFrame], out: str, **defaults: int) -> None:
    """The command line of a script here: SmolLM2 in float32, a table printed and written to `out` in this folder."""
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in {**defaults, "threads": 1}.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--out", type=Path, default=HERE / out)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    table = table_of(load_model(smollm2(), "float32", "cpu"), args)
    table.to_csv(args.out, index=False, float_format="%.6g")
    print(table.to_string(index=False, float_format=lambda value: f"{value:.6g}"))


if __name__ == "__main__":
    tabulate(__doc__, lambda loaded, a: measure(loaded, texts(loaded, a.prompts, a.tokens), a.chunk), "kv_dtype_quality.csv",
             prompts=6, tokens=256, chunk=64)  # fmt: skip
