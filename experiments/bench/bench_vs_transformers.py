"""Output tokens a second of kvlab against transformers' `generate`: SmolLM2, float32, CPU, the same threads, the same prompts.

    python experiments/bench/bench_vs_transformers.py [--repeats 3] [--threads 2]

mixed: 32 requests of 16-256 tokens in, 8-128 out; transformers pads them into static batches (8, 16 and 32 rows: its best counts) and
each batch runs to its longest output. equal: 32 requests of 128 in, 32 out. kvlab computes at most 1,024 tokens a step. Runs
alternate; ratios are of medians. Only tokens that were asked for count. Goals: at least 2x on mixed, at least 1x on equal (aim 1.3x).
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # for both sides; read when torch is imported

import numpy as np
import torch

from kvlab.engine import Engine, EngineConfig, PolicySet
from kvlab.engine.runners.torch_runner import TorchRunner
from kvlab.model.bundled import bundled_folder
from kvlab.model.loading import load_model
from kvlab.model.specs import smollm2
from kvlab.types import Request, SamplingParams

Work = list[tuple[list[int], int]]


def make_work(kind: str) -> Work:
    """(prompt ids, output tokens) of 32 requests."""
    rng = np.random.default_rng(7)
    mixed = zip(rng.integers(16, 257, 32).tolist(), rng.integers(8, 129, 32).tolist(), strict=True)
    lengths = [(128, 32)] * 32 if kind == "equal" else list(mixed)
    return [(rng.integers(100, 40_000, n).tolist(), m) for n, m in lengths]


def run_kvlab(runner: TorchRunner, work: Work) -> float:
    """Output tokens a second."""
    engine = Engine(EngineConfig(num_blocks=1024, max_num_batched_tokens=1024, max_model_len=1024), PolicySet(), runner)
    for i, (prompt, num_output) in enumerate(work):
        engine.add_request(Request(f"r{i}", prompt, SamplingParams(max_tokens=num_output, ignore_eos=True)))
    start = time.perf_counter()
    num_tokens = 0
    while engine.has_work:
        num_tokens += engine.step().stats.num_output_tokens
    assert num_tokens == sum(m for _, m in work)
    return num_tokens / (time.perf_counter() - start)


def run_transformers(model: torch.nn.Module, work: Work, batch_size: int) -> float:
    """Output tokens a second of left-padded static batches."""
    start = time.perf_counter()
    for at in range(0, len(work), batch_size):
        batch = work[at : at + batch_size]
        width = max(len(p) for p, _ in batch)
        ids = torch.tensor([[0] * (width - len(p)) + p for p, _ in batch])
        mask = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p, _ in batch])
        longest = max(m for _, m in batch)
        with torch.inference_mode():
            out = model.generate(ids, attention_mask=mask, max_new_tokens=longest, min_new_tokens=longest, do_sample=False, pad_token_id=0)
        assert out.shape[1] == width + longest
    return sum(m for _, m in work) / (time.perf_counter() - start)


def main() -> None:
    """Print one JSON line a workload."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--batches", type=int, nargs="+", default=[8, 16, 32], help="rows of transformers' batches for mixed")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    from transformers import AutoModelForCausalLM

    theirs = AutoModelForCausalLM.from_pretrained(bundled_folder(), dtype=torch.float32).eval()
    ours = TorchRunner(load_model(smollm2(), torch.float32, "cpu"))
    run_kvlab(ours, make_work("equal")[:4])  # first touches of weights and buffers, on both sides
    run_transformers(theirs, make_work("equal")[:4], 4)
    for kind in ("mixed", "equal"):
        work = make_work(kind)
        sizes = args.batches if kind == "mixed" else [32]
        rates: dict[str, list[float]] = {"kvlab": []} | {f"transformers_{b}": [] for b in sizes}
        for _ in range(args.repeats):
            rates["kvlab"].append(run_kvlab(ours, work))
            for b in sizes:
                rates[f"transformers_{b}"].append(run_transformers(theirs, work, b))
        medians = {name: round(statistics.median(values), 1) for name, values in rates.items()}
        best = max(v for name, v in medians.items() if name != "kvlab")
        ratio = round(medians["kvlab"] / best, 2)
        print(json.dumps({"workload": kind, **medians, "ratio_to_best": ratio, "threads": args.threads}), flush=True)


if __name__ == "__main__":
    main()
