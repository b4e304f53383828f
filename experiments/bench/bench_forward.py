"""Decode forward of SmolLM2 on this machine: tokens/s at several batch sizes, and where the time goes.

    OMP_WAIT_POLICY=PASSIVE python experiments/bench/bench_forward.py --threads 2 --context 256 --seqs 1 8 32

Floors printed beside: the time to read the weights once at this machine's measured copy-free read bandwidth, and the time of the
floating-point operations at its measured matrix-product rate.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import torch

from kvlab.cache.tensors import KVTensors
from kvlab.kernels.interface import AttentionMetadata
from kvlab.kernels.torch_backend import TorchBackend
from kvlab.model import LoadedModel, dummy, load_model, smollm2


def decode_batch(num_seqs: int, context: int, block_size: int, ragged: bool) -> tuple[AttentionMetadata, int]:
    """One decode step of `num_seqs` sequences over blocks in shuffled order; contexts from half to one and a half when ragged."""
    step = context // max(1, num_seqs - 1) if ragged else 0
    lens = [context // 2 + i * step if ragged else context for i in range(num_seqs)]
    width = -(-max(lens) // block_size)
    tables = torch.randperm(num_seqs * width, generator=torch.Generator().manual_seed(0)).view(num_seqs, width)
    slots = torch.tensor([int(tables[i, (n - 1) // block_size]) * block_size + (n - 1) % block_size for i, n in enumerate(lens)])
    meta = AttentionMetadata(slots, tables, torch.tensor(lens), lens, [1] * num_seqs, num_seqs, block_size)
    return meta, num_seqs * width


def median_ms(call: Callable[[], object], repeats: int) -> tuple[float, float]:
    """Median and minimum milliseconds of a call, after two calls to warm up."""
    times = []
    for i in range(repeats + 2):
        start = time.perf_counter()
        call()
        if i >= 2:
            times.append(1e3 * (time.perf_counter() - start))
    return statistics.median(times), min(times)


def floors(loaded: LoadedModel, num_seqs: int) -> tuple[float, float]:
    """(ms to read the weights once, ms for their multiply-adds) at rates measured here and now."""
    big = torch.zeros(64 * 2**20)
    read_ms = median_ms(lambda: big.sum(), 5)[1]
    a, b = torch.ones(1024, 1024), torch.ones(1024, 1024)
    flops_per_ms = 2 * 1024**3 / median_ms(lambda: a @ b, 9)[1]
    num_weights = loaded.config.num_parameters
    return 4 * num_weights / (big.nbytes / read_ms), 2 * num_weights * num_seqs / flops_per_ms


def profile(call: Callable[[], object], rows: int) -> None:
    """Print torch's own account of one call."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as result:
        call()
    print(result.key_averages().table(sort_by="self_cpu_time_total", row_limit=rows, max_name_column_width=40))


def main() -> None:
    """Measure and print one line a batch size."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seqs", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--context", type=int, default=256)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--block-size", type=int, default=16)
    parser.add_argument("--ragged", action="store_true", help="contexts from half to one and a half of --context")
    parser.add_argument("--prefill", type=int, default=0, help="also time a prompt of this many tokens")
    parser.add_argument("--dummy", action="store_true", help="random weights of SmolLM2's shape instead of the bundled model")
    parser.add_argument("--profile", type=int, default=0, help="print this many rows of torch's profile")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    loaded = load_model(dummy("smollm2") if args.dummy else smollm2(), "float32", "cpu")
    model, config, backend = loaded.model, loaded.config, TorchBackend()
    print(f"{loaded.name}, float32, {args.threads} threads, context {args.context}{' ragged' if args.ragged else ''}, B={args.block_size}")
    for num_seqs in args.seqs:
        meta, num_blocks = decode_batch(num_seqs, args.context, args.block_size, args.ragged)
        kv = KVTensors(config.num_layers, num_blocks, args.block_size, config.num_kv_heads, config.head_dim, torch.float32)
        kv.gpu.normal_()
        ids, positions = torch.arange(num_seqs) + 100, meta.context_lens_S - 1

        def step(meta: AttentionMetadata = meta, ids: torch.Tensor = ids, positions: torch.Tensor = positions,
                 kv: KVTensors = kv) -> torch.Tensor:  # fmt: skip
            meta.derived = None
            return model.logits(model.forward(ids, positions, kv, meta, backend))

        median, best = median_ms(step, args.repeats)
        read_ms, flop_ms = floors(loaded, num_seqs)
        print(f"{num_seqs:4d} seqs: median {median:7.1f} ms, best {best:7.1f} ms, {1e3 * num_seqs / median:7.1f} tokens/s (best"
              f" {1e3 * num_seqs / best:.1f}); floors: weights {read_ms:.1f} ms, flops {flop_ms:.1f} ms")  # fmt: skip
        if args.profile:
            profile(step, args.profile)
    if args.prefill:
        n, size = args.prefill, args.block_size
        kv = KVTensors(config.num_layers, -(-n // size), size, config.num_kv_heads, config.head_dim, torch.float32)
        table = torch.arange(kv.num_blocks)[None]

        def prompt() -> torch.Tensor:
            meta = AttentionMetadata(torch.arange(n), table, torch.tensor([n]), [n], [n], 0, size)
            return model.logits(model.forward(torch.arange(n) + 100, torch.arange(n), kv, meta, backend)[-1:])

        median, best = median_ms(prompt, max(3, args.repeats // 3))
        print(f"prompt of {n}: median {median:.1f} ms, best {best:.1f} ms, {1e3 * n / median:.0f} tokens/s")
        if args.profile:
            profile(prompt, args.profile)


if __name__ == "__main__":
    main()
