"""All matrix products of one step of SmolLM2, with plain and with oneDNN-packed weights: why kvlab.model.linear packs them.

    OMP_WAIT_POLICY=PASSIVE python experiments/bench/bench_linear.py --threads 2

Each form is timed in turn within a round, so that a busy machine slows all alike; minimum and median over the rounds are printed.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import torch
import torch.nn.functional as F

SHAPES = {"qkv": (960, 576), "o": (576, 576), "gate_up": (3072, 576), "down": (576, 1536)}
HEAD, NUM_LAYERS = (49152, 576), 30


def main() -> None:
    """Measure and print one line a batch size."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, nargs="+", default=[1, 2, 4, 8, 16, 32, 64, 128, 256])
    parser.add_argument("--layouts", type=int, nargs="+", default=[1, 8, 32], help="batch sizes oneDNN chooses a layout for")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=9)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    weights = [torch.randn(shape) for _ in range(NUM_LAYERS) for shape in SHAPES.values()] + [torch.randn(HEAD)]
    with torch.no_grad():
        packed = {n: [torch.ops.mkldnn._reorder_linear_weight(w, n) for w in weights] for n in args.layouts}
    for num_tokens in args.tokens:
        inputs = {size: torch.randn(num_tokens, size) for size in (576, 1536)}
        xs = [inputs[weight.shape[1]] for weight in weights]

        def plain(xs: list[torch.Tensor] = xs) -> None:
            for x, weight in zip(xs, weights, strict=True):
                F.linear(x, weight)

        def with_layout(n: int, xs: list[torch.Tensor] = xs) -> Callable[[], None]:
            def run() -> None:
                for x, weight in zip(xs, packed[n], strict=True):
                    torch.ops.mkldnn._linear_pointwise(x, weight, None, "none", [], "")

            return run

        forms = {"plain": plain, **{f"packed for {n}": with_layout(n) for n in args.layouts}}
        times: dict[str, list[float]] = {name: [] for name in forms}
        with torch.inference_mode():
            for _ in range(args.rounds):
                for name, form in forms.items():
                    start = time.perf_counter()
                    form()
                    times[name].append(1e3 * (time.perf_counter() - start))
        cells = [f"{name} {min(t):.1f} / {statistics.median(t):.1f}" for name, t in times.items()]
        print(f"{num_tokens:5d} tokens, ms (min / median): " + ", ".join(cells), flush=True)


if __name__ == "__main__":
    main()
