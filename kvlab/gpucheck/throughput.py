"""Decoding of a Llama-3-8B shape with random bf16 weights: step time over its floor, host time, and throughput beside transformers'.

Floor of a decode step: weights and the K and V of all sequences, each read once, over the card's measured copy bandwidth.
"""

from __future__ import annotations

import gc
import itertools
import statistics
import time
from collections.abc import Sequence
from typing import Any

import torch

from kvlab.engine import EngineConfig, PolicySet
from kvlab.engine.runners.cuda_streams import streams_of
from kvlab.gpucheck.block_sizes import kv_token_bytes, weight_bytes
from kvlab.gpucheck.card import Rates
from kvlab.gpucheck.findings import Finding, at_least, at_most
from kvlab.gpucheck.replays import TimedReplays, beside_replays
from kvlab.gpucheck.serving import Served, make_runner, serve
from kvlab.gpucheck.sizes import Sizes
from kvlab.gpucheck.tokens import in_dtype
from kvlab.kernels.device_errors import is_out_of_memory
from kvlab.model.loading import LoadedModel, load_model
from kvlab.model.specs import dummy, tiny
from kvlab.policies.prefix_cache import NoCache

DTYPE = torch.bfloat16
PREFILL_TOKENS = 8192


def end_to_end(device: torch.device, rates: Rates, sizes: Sizes) -> list[Finding]:
    """Output tokens a second of a batch that arrives at once, ours and transformers' at its best batch."""
    spec = tiny() if sizes.model == "tiny" else dummy(sizes.model, sizes.num_layers)
    loaded = load_model(spec, DTYPE, device)
    shape = loaded.config
    length = sizes.num_prompt + sizes.num_output
    generator = torch.Generator().manual_seed(3)
    work = torch.randint(0, shape.vocab_size, (sizes.num_seqs, sizes.num_prompt), generator=generator).tolist()
    found = []
    replays = TimedReplays(streams_of(device))
    runner = make_runner(loaded, device, streams=replays)
    for depth in (0, 1):
        config = EngineConfig(sizes.num_seqs * (-(-length // 16)) + 8, 16, max_num_seqs=sizes.num_seqs, depth=depth,
                              max_num_batched_tokens=PREFILL_TOKENS, max_model_len=length)  # fmt: skip
        serve(runner, DTYPE, config, PolicySet(prefix_cache=NoCache()), work[:2], 2)  # compiles kernels, warms the allocator
        replays.forget()
        served = serve(runner, DTYPE, config, PolicySet(prefix_cache=NoCache()), work, sizes.num_output)
        found += _ours(served, replays.milliseconds(), loaded, rates, sizes, depth)
    runner.close()
    best = max(finding.value or 0.0 for finding in found if finding.name == "output throughput")
    del runner
    theirs = _theirs(loaded, work, sizes, device)
    return [*found, *theirs, over_theirs(best, [finding.value for finding in theirs if finding.value is not None])]


def over_theirs(best: float, theirs: Sequence[float]) -> Finding:
    """Our throughput over transformers' best; not measured where no batch of theirs fitted."""
    if not theirs:
        return Finding("end to end", "throughput over transformers'", None, "x", note="none of transformers' batches was measured")
    goal, ok = at_least(best / max(theirs), 3.0, "x transformers' best batch")
    return Finding("end to end", "throughput over transformers'", best / max(theirs), "x", {}, None, goal, ok)


def _ours(served: Served, replays_ms: list[float], loaded: LoadedModel, rates: Rates, sizes: Sizes, depth: int) -> list[Finding]:
    setting = {"depth": depth}
    decodes = [
        (stats, 1e3 * (stats.end_s - before.end_s))
        for before, stats in itertools.pairwise(served.steps)
        if stats.num_decode_seqs == sizes.num_seqs == stats.num_scheduled_seqs
    ]
    if not decodes:
        return [Finding("end to end", "decode step", None, "ms", setting, note="no step decoded all sequences")]
    step_ms = statistics.median(interval_ms for _, interval_ms in decodes)
    read = [weight_bytes(loaded, DTYPE) + kv_token_bytes(loaded, DTYPE) * stats.num_kv_tokens_read for stats, _ in decodes]
    floor_ms = 1e3 * statistics.median(read) / rates.bytes_per_s
    rate = sum(map(len, served.tokens)) / served.seconds
    goal, ok = at_most(step_ms / floor_ms, 1.3, "x the floor")
    beside = beside_replays(served.steps, replays_ms, sizes.num_seqs)
    beside_ms = statistics.median(beside) if beside else None
    beside_goal, beside_ok = at_most(beside_ms or 0.0, 1.0, "ms")
    return [
        Finding("end to end", "output throughput", rate, "tokens/s", setting),
        Finding("end to end", "decode step", step_ms, "ms", setting, floor_ms, note="from the end of a step to the end of the next"),
        Finding("end to end", "decode step over its floor", step_ms / floor_ms, "x", setting, 1.0, goal, ok),
        Finding("end to end", "decode step beside its graph", beside_ms, "ms", setting, None, beside_goal, None if beside_ms is None else
                beside_ok, "what the host takes and does not hide, its numbers' way to the device, choosing tokens"),
    ]  # fmt: skip


def _theirs(loaded: LoadedModel, work: list[list[int]], sizes: Sizes, device: torch.device) -> list[Finding]:
    """transformers' `generate` in static batches of each size, on random weights of the same shape."""
    model = _their_model(loaded, device)
    how = f"one static batch, {model.config._attn_implementation} attention, transformers' default cache"
    found = []
    for rows in sizes.their_batches:
        setting = {"batch": rows}
        try:
            _generate(model, work[:rows], 2, device)
            seconds = _generate(model, work[:rows], sizes.num_output, device)
            rate = rows * sizes.num_output / seconds
            found.append(Finding("end to end", "transformers' throughput", rate, "tokens/s", setting, note=how))
        except RuntimeError as error:
            if not is_out_of_memory(error):
                raise
            found.append(Finding("end to end", "transformers' throughput", None, "tokens/s", setting, note="out of memory"))
        gc.collect()
        torch.cuda.empty_cache() if device.type == "cuda" else None
    return found


def _their_model(loaded: LoadedModel, device: torch.device) -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(**{k: v for k, v in loaded.config.to_hf().items() if k not in ("dtype", "torch_dtype")})
    with torch.device(device):
        model: Any = LlamaForCausalLM(config)
    return in_dtype(model, DTYPE).eval()


def _generate(model: Any, work: list[list[int]], num_output: int, device: torch.device) -> float:
    """Seconds."""
    ids = torch.tensor(work, device=device)
    start = time.perf_counter()
    with torch.inference_mode():
        out = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=num_output, min_new_tokens=num_output,
                             do_sample=False, pad_token_id=0)  # fmt: skip
    out.cpu()
    return time.perf_counter() - start
