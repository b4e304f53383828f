"""End-to-end latency over block size: a batch of a Llama-3-8B shape's requests, for the figure that vLLM's paper calls 18b.

The kernel's own latency over block size is the section `decode`. Every block size has kernels of its own (it is a constant in them); on
CUDA processes beside each other compile them first, by serving a model of one layer.
"""

from __future__ import annotations

import itertools
import multiprocessing
import statistics
from concurrent.futures import ProcessPoolExecutor

import torch

from kvlab.engine import EngineConfig, PolicySet
from kvlab.gpucheck.card import Rates
from kvlab.gpucheck.findings import Finding
from kvlab.gpucheck.serving import Served, make_runner, serve
from kvlab.gpucheck.sizes import Sizes
from kvlab.model.loading import LoadedModel, load_model
from kvlab.model.specs import dummy, tiny
from kvlab.policies.prefix_cache import NoCache

DTYPE = torch.bfloat16
PREFILL_TOKENS = 8192
NUM_WORKERS = 5
"""At a time: each holds a layer and the embeddings, and compiles on one core."""


def block_size_curve(device: torch.device, rates: Rates, sizes: Sizes) -> list[Finding]:
    """Time of the whole batch, and of its decode steps, at each block size; predicted: a step's weights, K and V over copy bandwidth."""
    if device.type == "cuda":
        with ProcessPoolExecutor(NUM_WORKERS, multiprocessing.get_context("spawn")) as pool:
            list(pool.map(compile_for, sizes.block_sizes, itertools.repeat(sizes), itertools.repeat(str(device))))
    loaded = _model(sizes, None, device)
    found = []
    for block_size in sizes.block_sizes:
        _serve(loaded, block_size, sizes, device, 2, 2)  # loads kernels, warms the allocator
        served = _serve(loaded, block_size, sizes, device, sizes.curve_seqs, sizes.curve_output)
        setting = {"block_size": block_size}
        found.append(Finding("block size", "end-to-end latency", served.seconds, "s", setting, note="of a batch that arrives at once"))
        steps = [(stats, 1e3 * (stats.end_s - before.end_s)) for before, stats in itertools.pairwise(served.steps)
                 if stats.num_decode_seqs == sizes.curve_seqs == stats.num_scheduled_seqs]  # fmt: skip
        if steps:
            read = [weight_bytes(loaded, DTYPE) + kv_token_bytes(loaded, DTYPE) * stats.num_kv_tokens_read for stats, _ in steps]
            least_ms = 1e3 * statistics.median(read) / rates.bytes_per_s
            found.append(Finding("block size", "decode step", statistics.median(ms for _, ms in steps), "ms", setting, least_ms))
    return found


def compile_for(block_size: int, sizes: Sizes, device_name: str) -> None:
    """Serve two requests on one layer, so that the kernels of this block size lie in Triton's cache on disk."""
    device = torch.device(device_name)
    _serve(_model(sizes, 1, device), block_size, sizes, device, 2, 2)


def weight_bytes(loaded: LoadedModel, dtype: torch.dtype) -> int:
    """Bytes of weights that a decode step reads: all but the input embedding, of which a row a token is looked up."""
    shape = loaded.config
    looked_up = 0 if shape.tie_word_embeddings else shape.vocab_size * shape.hidden_size
    return (shape.num_parameters - looked_up) * dtype.itemsize


def kv_token_bytes(loaded: LoadedModel, dtype: torch.dtype) -> int:
    """Bytes of K and V of one token in all layers."""
    shape = loaded.config
    return 2 * shape.num_layers * shape.num_kv_heads * shape.head_dim * dtype.itemsize


def _model(sizes: Sizes, num_layers: int | None, device: torch.device) -> LoadedModel:
    return load_model(tiny() if sizes.model == "tiny" else dummy(sizes.model, num_layers or sizes.num_layers), DTYPE, device)


def _serve(loaded: LoadedModel, block_size: int, sizes: Sizes, device: torch.device, num_seqs: int, num_output: int) -> Served:
    length = sizes.num_prompt + sizes.curve_output
    generator = torch.Generator().manual_seed(5)
    work = torch.randint(0, loaded.config.vocab_size, (num_seqs, sizes.num_prompt), generator=generator).tolist()
    config = EngineConfig(sizes.curve_seqs * -(-length // block_size) + 8, block_size, max_num_seqs=sizes.curve_seqs,
                          max_num_batched_tokens=PREFILL_TOKENS, max_model_len=length)  # fmt: skip
    runner = make_runner(loaded, device)
    try:
        return serve(runner, DTYPE, config, PolicySet(prefix_cache=NoCache()), work, num_output)
    finally:
        runner.close()
