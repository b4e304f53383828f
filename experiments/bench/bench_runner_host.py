"""Host work of the torch runner at full batch: building a decode batch, applying table changes, a whole step at depth 1 around a model
that gives zeros, choosing tokens from logits.

    OMP_WAIT_POLICY=PASSIVE python experiments/bench/bench_runner_host.py --seqs 256 --threads 2

Prints the minimum and the median of each in milliseconds, for block sizes 16 and 1 and for the common kinds of sampling.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch

from kvlab.engine import Engine, EngineConfig, PolicySet
from kvlab.engine.runners.base import RunnerConfig
from kvlab.engine.runners.cuda_runner import CudaRunner
from kvlab.engine.runners.torch_runner import TorchRunner
from kvlab.engine.sampler import SamplingState, sample
from kvlab.kernels.torch_backend import TorchBackend
from kvlab.model import load_model, tiny
from kvlab.policies.prefix_cache import NoCache
from kvlab.types import Plan, Request, SamplingParams, ScheduledSeq, SeqStart

CONTEXT = 900
KINDS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "greedy, 5 logprobs": {"logprobs": 5},
    "temperature": {"temperature": 0.8},
    "top_k 50": {"temperature": 0.8, "top_k": 50},
    "top_p 0.9": {"temperature": 0.8, "top_p": 0.9},
    "repetition": {"repetition_penalty": 1.1},
}


def milliseconds(call: Callable[[], object], repeats: int) -> str:
    """Minimum and median of a call."""
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        call()
        times.append(1000 * (time.perf_counter() - start))
    return f"{min(times):9.2f} ms {statistics.median(times):9.2f} ms"


def bench_batch(num_seqs: int, block_size: int) -> None:
    """A decode step of `num_seqs` sequences of about 900 tokens, and the table changes of such a step."""
    runner = TorchRunner(load_model(tiny(), "float32", "cpu"))
    per_seq = -(-CONTEXT // block_size)
    runner.initialize(RunnerConfig((per_seq + 1) * num_seqs, 0, block_size, num_seqs, 2048))
    starts = tuple(SeqStart(i, i, "admit", SamplingParams(), 0, 0, 10, tuple(range(10))) for i in range(num_seqs))
    tables = {i: tuple(range(i * per_seq, (i + 1) * per_seq)) for i in range(num_seqs)}
    assert runner._kv is not None
    assert runner._config is not None
    config, kv = runner._config, runner._kv
    runner._apply(Plan(0, 0.0, starts=starts, fresh_tables=tables), kv)
    step = Plan(1, 0.0, tuple(ScheduledSeq(i, CONTEXT - 1 - i % 50, 1) for i in range(num_seqs)), ((5,),) * num_seqs)
    growth = Plan(1, 0.0, tables={i: (i,) for i in range(0, num_seqs, block_size)})
    print(f"block size {block_size:2}: decode batch     {milliseconds(lambda: runner._batch(runner._numbers(step, config), config), 50)}")
    print(f"block size {block_size:2}: tables of a step {milliseconds(lambda: runner._apply(growth, kv), 20)}")


def bench_step(num_seqs: int) -> None:
    """Whole steps at depth 1 through the GPU's runner, around a model that gives zeros: what the host does beside the device."""
    loaded = load_model(tiny(), "float32", "cpu")
    hidden, vocab = loaded.config.hidden_size, loaded.config.vocab_size
    loaded.model.forward = lambda ids, *others: torch.zeros(len(ids), hidden)  # type: ignore[method-assign]
    loaded.model.logits = lambda hidden_SE: torch.zeros(len(hidden_SE), vocab)  # type: ignore[method-assign]
    config = EngineConfig(num_seqs * 40, 16, max_num_seqs=num_seqs, max_num_batched_tokens=10**6, max_model_len=1024, depth=1)
    engine = Engine(config, PolicySet(prefix_cache=NoCache()), CudaRunner(loaded, TorchBackend(), graph_sizes=()))
    for i in range(num_seqs):
        sampling = SamplingParams(max_tokens=300, ignore_eos=True)
        engine.add_request(Request(f"r{i}", [(i + j) % 200 for j in range(200 + i % 16)], sampling))
    for _ in range(4):
        engine.step()
    print(f"depth 1: whole step              {milliseconds(engine.step, 200)}")


def main() -> None:
    """Measure and print one line a part."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seqs", type=int, default=256)
    parser.add_argument("--vocab", type=int, default=49152)
    parser.add_argument("--threads", type=int, default=2)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    for block_size in (16, 1):
        bench_batch(args.seqs, block_size)
    bench_step(args.seqs)
    # Logits as peaked as a language model's: most of the mass in some dozens of tokens.
    logits = torch.randn(args.seqs, args.vocab, generator=torch.Generator().manual_seed(0))
    logits[:, :100] += torch.linspace(14, 4, 100)
    for name, params in KINDS.items():
        starts = [SeqStart(i, i, "admit", SamplingParams(**params), i, 0, 500, tuple(range(600))) for i in range(args.seqs)]
        states = [SamplingState.of(start, ()) for start in starts]
        timing = milliseconds(lambda states=states: sample(logits, states, [600] * args.seqs, [1] * args.seqs), 5)  # type: ignore[misc]
        print(f"{name:32}{timing}")


if __name__ == "__main__":
    main()
