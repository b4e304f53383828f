"""From a configuration to an engine: the model (kept loaded between runs), the runner's parts, the sizes, the policies."""

from __future__ import annotations

import json
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from kvlab.building import build
from kvlab.cache.tensors import bytes_per_slot, storage_dtype
from kvlab.config import SEAMS
from kvlab.engine.clock import Clock, VirtualClock, WallClock
from kvlab.engine.config import EngineConfig, PolicySet
from kvlab.engine.cost import CostModel, Fitted, ModelShape
from kvlab.engine.engine import Engine
from kvlab.engine.runners.backends import make_backend
from kvlab.engine.runners.base import Runner
from kvlab.engine.runners.cuda_runner import real_runner
from kvlab.engine.runners.decode_graphs import check_sizes
from kvlab.engine.runners.memory import Limits, MeasuresMemory
from kvlab.engine.runners.parallel_runner import ParallelRunner
from kvlab.engine.runners.recorded import RecordedRunner
from kvlab.engine.runners.simulated import SimulatedRunner
from kvlab.house import without_leftovers
from kvlab.identifying import deciding_differences
from kvlab.kernels.interface import Backend
from kvlab.model.config import LlamaConfig
from kvlab.model.loading import DTYPES, LoadedModel, ModelSpec, load_model, resolve_device
from kvlab.model.parallel import check_divides, rank_config
from kvlab.model.tokenizer import Tokenizer
from kvlab.policies.preemption.mode import CheaperOfBoth, Swap
from kvlab.policies.registry import by_name, made
from kvlab.results import Run
from kvlab.trace import read_outcomes
from kvlab.types import Listener, UserError

MODELS_KEPT = 2
"""Models that stay loaded in a process: points of a sweep that differ in policies only share one."""

_models: OrderedDict[str, LoadedModel] = OrderedDict()


@dataclass
class Parts:
    """What a runner brings along.

    Attributes:
        shape: sizes of the model. dtype: what it computes in. checksum: of its weights. device: in words.
        notes: what a reader of the results should know, a sentence each.
        backend: kernels of a real model; None without one.
        num_ranks: processes that share the model; each holds its part of every KV block.
    """

    runner: Runner
    clock: Clock
    shape: LlamaConfig
    tokenizer: Tokenizer | None
    eos_token_ids: tuple[int, ...]
    dtype: str
    device: str
    checksum: str
    notes: tuple[str, ...] = ()
    backend: Backend | None = None
    num_ranks: int = 1


def cached_model(config: Mapping[str, Any], spec: ModelSpec) -> LoadedModel:
    """The model of a configuration, loaded at most once while it is among the last `MODELS_KEPT` used."""
    key = json.dumps([config["model"], config["dtype"], config["device"]], sort_keys=True, default=str)
    if key not in _models:
        while len(_models) >= MODELS_KEPT:
            _models.popitem(last=False)
        _models[key] = load_model(spec, config["dtype"], config["device"])
    _models.move_to_end(key)
    return _models[key]


# ------------------------------------------------------ runners (conf/runner/*.yaml)


def torch_parts(config: Mapping[str, Any], spec: ModelSpec, graph_sizes: Sequence[int] | None = None) -> Parts:
    """runner=torch: a real model; in this process, or shared by tensor_parallel_size others."""
    check_sizes(graph_sizes or ())
    if config.get("tensor_parallel_size", 1) > 1:
        return _parallel_parts(config, spec, graph_sizes)
    return parts_of(cached_model(config, spec), config.get("backend", "auto"), graph_sizes)


def _parallel_parts(config: Mapping[str, Any], spec: ModelSpec, graph_sizes: Sequence[int] | None) -> Parts:
    shape, size = spec.shape(), config["tensor_parallel_size"]
    check_divides(shape, size)
    kind = resolve_device(config["device"]).type
    if kind == "cuda" and torch.cuda.device_count() < size:
        raise UserError(f"tensor_parallel_size = {size} is not allowed: {torch.cuda.device_count()} CUDA devices are visible. Lower it, or "
                        "use device=cpu.")  # fmt: skip
    tokenizer, eos_token_ids = spec.text()
    threads = config.get("threads") or (torch.get_num_threads() if kind == "cpu" else None)
    runner = ParallelRunner(spec, size, config["dtype"], kind, config.get("backend", "auto"), threads, graph_sizes)
    about = runner.about
    return Parts(runner, WallClock(), shape, tokenizer, eos_token_ids, about.dtype, about.device, about.checksum, num_ranks=size)


def parts_of(loaded: LoadedModel, backend: str = "auto", graph_sizes: Sequence[int] | None = None) -> Parts:
    """Parts of a model that is loaded already. `graph_sizes`: see `CudaRunner`; without effect on a CPU, which `notes` say.

    Raises:
        UserError: the backend is unknown, or can't run on the model's device.
    """
    device = loaded.model.device
    kernels = make_backend(backend, device)
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
    dtype = str(loaded.model.dtype).removeprefix("torch.")
    notes = (f"runner.graph_sizes has no effect on {device.type}.",) if graph_sizes and device.type != "cuda" else ()
    return Parts(real_runner(loaded, kernels, graph_sizes), WallClock(), loaded.config, loaded.tokenizer, loaded.eos_token_ids, dtype, name,
                 loaded.checksum, notes, kernels)  # fmt: skip


def simulated_parts(config: Mapping[str, Any], spec: ModelSpec, tokenizer: bool = False) -> Parts:
    """runner=simulated: a cost model in place of a model; texts become bytes, unless the model's `tokenizer` is wanted."""
    shape = spec.shape()
    text, eos_token_ids = spec.text() if tokenizer else (None, shape.eos_token_ids)
    dtype = _stated_dtype(config, shape)
    cost = build(config["cost_model"], config=config)
    if not isinstance(cost, CostModel):
        raise UserError(f"cost_model = {config['cost_model']!r} is no kvlab.engine.cost.CostModel.")
    notes = (cost.fit.sentence(),) if isinstance(cost, Fitted) else ()
    for key, plain in (("tensor_parallel_size", 1), ("backend", "auto")):
        if config.get(key, plain) != plain:
            notes = (*notes, f"{key} = {config[key]} has no effect with runner=simulated: its times come from the cost model.")
    return Parts(SimulatedRunner(shape.vocab_size, cost), VirtualClock(), shape, text, eos_token_ids, dtype, "simulated", "none",
                 notes=notes)  # fmt: skip


def recorded_parts(config: Mapping[str, Any], spec: ModelSpec) -> Parts:
    """runner=recorded: the outcomes of a real run, on its clock.

    UserError: no folder, or one whose configuration decides otherwise than this one.
    """
    if not config["run"]:
        raise UserError("runner=recorded needs run=FOLDER, the folder of a run that was made with record.outcomes=true.")
    steps = read_outcomes(Path(config["run"]))
    differences = deciding_differences(config, Run.load(Path(config["run"])).config)
    if differences:
        raise UserError(f"This replay is configured otherwise than {config['run']}: {'; '.join(differences)}. Replay it with the same "
                        "policies, sizes, model and workload (its config.yaml has them).")  # fmt: skip
    runner = RecordedRunner(steps, str(config["run"]))
    tokenizer, eos_token_ids = spec.text()
    shape = spec.shape()
    return Parts(runner, runner.clock(), shape, tokenizer, eos_token_ids, _stated_dtype(config, shape, "float32"), "recorded", "none")


def _stated_dtype(config: Mapping[str, Any], shape: LlamaConfig, default: str = "bfloat16") -> str:
    """The dtype of a model that isn't loaded: the configured one, else the stored one, else `default`."""
    return str(config["dtype"] if config["dtype"] != "auto" else shape.stored_dtype or default)


def _cost_shape(shape: LlamaConfig, dtype: str, kv_dtype: str, block_size: int) -> ModelShape:
    """What a cost model is told; an input embedding that isn't the output's too is looked up, not multiplied."""
    head = shape.vocab_size * shape.hidden_size
    layers = shape.num_parameters - head * (1 if shape.tie_word_embeddings else 2)
    kv_bytes = kv_bytes_per_token(shape, kv_dtype)
    return ModelShape(layers, head, itemsize(dtype), shape.num_layers, kv_bytes,
                      4 * shape.num_layers * shape.num_heads * shape.head_dim, kv_bytes * block_size)  # fmt: skip


def itemsize(dtype: str) -> int:
    """Bytes of a number."""
    return DTYPES[dtype].itemsize


def kv_bytes_per_token(shape: LlamaConfig, dtype: str) -> int:
    """Bytes of K and V of one token over all layers, stored as `dtype`."""
    return 2 * shape.num_layers * bytes_per_slot(shape.num_kv_heads, shape.head_dim, storage_dtype(dtype))


# ------------------------------------------------------------------------- policies


def policy_objects(given: Mapping[str, Any]) -> dict[str, Any]:
    """Policies a caller gave for seams: objects as they are, classes made without arguments, names from the registry."""
    out = {}
    for seam, policy in given.items():
        if seam not in SEAMS:
            raise UserError(f"{seam!r} is no seam: policies can be given for {', '.join(SEAMS)}. Other settings belong in the "
                            f'configuration, e.g. kvlab.compose("{seam}=VALUE").')  # fmt: skip
        if isinstance(policy, str):
            policy = by_name(seam, policy)
        out[seam] = made(policy) if isinstance(policy, type) else policy
    return out


def policy_set(config: Mapping[str, Any], given: Mapping[str, Any]) -> PolicySet:
    """All policies of a run: those given as objects, the others built from the configuration."""
    return PolicySet(**{seam: given[seam] if seam in given else build(without_leftovers(seam, config[seam], config)) for seam in SEAMS})


# ---------------------------------------------------------------------------- sizes


def engine_config(config: Mapping[str, Any], policies: PolicySet, parts: Parts) -> EngineConfig:
    """The engine's sizes, with what the configuration leaves open filled in.

    Raises:
        UserError: max_model_len beyond the model's, or nothing to take the number of blocks from.
    """
    limit = parts.shape.max_position_embeddings
    max_model_len = config["max_model_len"] or limit
    if max_model_len > limit:
        raise UserError(f"max_model_len = {max_model_len} is not allowed: this model has {limit} positions.")
    block_size = policies.block_sizing.block_size((), max_model_len)
    block_bytes = block_size * kv_bytes_per_token(rank_config(parts.shape, parts.num_ranks), policies.kv_dtype.storage(parts.dtype))
    return EngineConfig(
        num_blocks=_num_blocks(config, parts, block_size, block_bytes, max_model_len), block_size=block_size,
        num_cpu_blocks=config["num_cpu_blocks"], max_num_seqs=config["max_num_seqs"],
        max_num_batched_tokens=config["max_num_batched_tokens"], max_model_len=max_model_len, seed=config["seed"],
        depth=config.get("depth", 0),
    )  # fmt: skip


def no_swap_space(sizes: EngineConfig, policies: PolicySet) -> tuple[str, ...]:
    """A note if victims would be swapped out and there is nowhere to."""
    mode = policies.preemption.mode
    if sizes.num_cpu_blocks or not isinstance(mode, (Swap, CheaperOfBoth)):
        return ()
    name = "swap" if isinstance(mode, Swap) else "cheaper_of_both"
    return (f"preemption.mode={name} has no swap space (num_cpu_blocks=0): every preemption is a recompute. "
            f"Set num_cpu_blocks={sizes.num_blocks}, for example.",)  # fmt: skip


def _num_blocks(config: Mapping[str, Any], parts: Parts, block_size: int, block_bytes: int, max_model_len: int) -> int:
    """num_blocks, else kv_cache_bytes, else kv_cache_tokens, else what memory has room for."""
    if config["num_blocks"]:
        return int(config["num_blocks"])
    num_bytes = config.get("kv_cache_bytes")
    if not num_bytes and config["kv_cache_tokens"]:
        return _blocks_of(config["kv_cache_tokens"], block_size)
    if not num_bytes:
        if not isinstance(parts.runner, MeasuresMemory):
            raise UserError("There is no memory to measure in a run without a model: set num_blocks or kv_cache_tokens.")
        num_bytes = parts.runner.kv_budget(Limits(config.get("gpu_memory_utilization", 0.9), config["memory_fraction"],
                                                  config["max_num_batched_tokens"], config["max_num_seqs"], max_model_len))  # fmt: skip
    if num_bytes < block_bytes:
        raise UserError(f"{max(0, num_bytes):,} bytes for the KV pool hold no block of {block_size} tokens ({block_bytes:,} bytes): raise "
                        "kv_cache_bytes, gpu_memory_utilization (CUDA) or memory_fraction (CPU), or lower block_size or "
                        "max_num_batched_tokens.")  # fmt: skip
    return int(num_bytes // block_bytes)


def _blocks_of(kv_cache_tokens: int, block_size: int) -> int:
    """Whole blocks. UserError: not one; a pool of one would hold more tokens than it was given."""
    if kv_cache_tokens < block_size:
        raise UserError(f"kv_cache_tokens = {kv_cache_tokens} holds no block of {block_size} tokens: raise it, or lower block_size.")
    return kv_cache_tokens // block_size


def check_early(config: Mapping[str, Any], policies: PolicySet) -> None:
    """Find impossible combinations before a model is loaded, as far as the sizes are known by then."""
    block_size = policies.block_sizing.block_size((), config["max_model_len"] or 1)
    num_blocks = config["num_blocks"] or (_blocks_of(config["kv_cache_tokens"], block_size) if config["kv_cache_tokens"] else 1)
    policies.check(EngineConfig(
        num_blocks=num_blocks, block_size=block_size, num_cpu_blocks=config["num_cpu_blocks"], max_num_seqs=config["max_num_seqs"],
        max_num_batched_tokens=config["max_num_batched_tokens"], max_model_len=config["max_model_len"] or 1, seed=config["seed"],
    ))  # fmt: skip


def make_engine(sizes: EngineConfig, policies: PolicySet, parts: Parts, listeners: Sequence[Listener] = ()) -> Engine:
    """The engine of a run."""
    stored = policies.kv_dtype.storage(parts.dtype)
    if isinstance(parts.runner, SimulatedRunner):  # only now is known how K and V are stored, and in blocks of what size
        parts.runner.cost.bind(_cost_shape(parts.shape, parts.dtype, stored, sizes.block_size))
    return Engine(
        sizes, policies, parts.runner, parts.clock, parts.tokenizer, parts.eos_token_ids, listeners, parts.dtype,
        sizes.block_size * kv_bytes_per_token(parts.shape, stored), parts.shape.vocab_size,
    )  # fmt: skip
